"""The linear layer of an MXFP4 release, in the modes that it can run in.

| mode | in memory | per call | result |
|---|---|---|---|
| packed | 4.25 bits per weight | decodes the weight | bit-identical to Quark's linear |
| expanded | 16 (bfloat16) or 32 bits | | bit-identical to Quark's linear |
| int8 | 12.3 bits | | the exact product, rounded once |

Linears that read the same tensor one after another (q, k and v; gate and up) share its rounding through `Steps`.
What surprises: that rests on the identity of the tensor. One made in inference mode and changed in place between two
linears would be taken for the same.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clef_core.int8 import Int8Kernel, Int8Rows, Int8Weight, float64_product, split_rows
from clef_core.kernels import PLAIN, Kernels
from clef_core.mxfp4 import BLOCK, dequantize, unpack_codes

LinearMode = Literal["packed", "expanded", "int8"]


class Steps:
    """What the linears of one model share: the elementwise steps, and what they made of the last input."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self._last: tuple[Tensor, int, str, Any] | None = None

    def rounded(self, x: Tensor) -> Tensor:
        """x rounded to MXFP4, same shape and dtype."""
        y: Tensor = self._once("rounded", x, self.kernels.fake_quantize)
        return y

    def split(self, x: Tensor) -> Int8Rows:
        """x (..., K) as INT8 rows, leading dimensions flattened."""
        rows: Int8Rows = self._once("split", x, self._split_rows)
        return rows

    def forget(self) -> None:
        """Let go of the last input."""
        self._last = None

    def _split_rows(self, x: Tensor) -> Int8Rows:
        return split_rows(x.reshape(-1, x.shape[-1]).contiguous(), self.kernels)

    def _once(self, name: str, x: Tensor, make: Callable[[Tensor], Any]) -> Any:
        """make(x), or what the last call made, if that had the same tensor object in the same state."""
        last = self._last
        version = 0 if x.is_inference() else x._version
        if last is None or last[0] is not x or last[1:3] != (version, name):
            last = self._last = (x, version, name, make(x))
        return last[3]


class MXFP4Linear(nn.Module):
    """A bias-free linear whose weight is MXFP4 and whose input is rounded to MXFP4 in every call.

    y = linear(fake_quantize(x), dequantize(weight)), multiplied in the dtype of x.

    Holds `weight` uint8 (N, K / 2) and `weight_scale` uint8 (N, K / 32) as the release stores them, or after `expand`
    the decoded `weight` (N, K) alone.
    """

    weight: Tensor
    weight_scale: Tensor | None

    def __init__(self, in_features: int, out_features: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        if in_features % BLOCK:
            raise ValueError(f"in_features must be divisible by {BLOCK}, got {in_features}")
        self.in_features = in_features
        self.out_features = out_features
        self.mode: LinearMode = "packed"
        self.steps = Steps(PLAIN)
        self._int8: Int8Weight | None = None
        packed = torch.empty(out_features, in_features // 2, dtype=torch.uint8, device=device)
        scales = torch.empty(out_features, in_features // BLOCK, dtype=torch.uint8, device=device)
        self.register_buffer("weight", packed)
        self.register_buffer("weight_scale", scales)

    def expand(self, dtype: torch.dtype) -> None:
        """Decode the weight once, to `dtype` (float32 or bfloat16: both hold MXFP4 values exactly)."""
        self.weight = self.decoded_weight(dtype)
        self.weight_scale = None
        self.mode = "expanded"

    def prepare_int8(self, kernel: Int8Kernel) -> None:
        """Lay the weight out for exact INT8 products; codes and scales stay for the rare rows that need float64."""
        self._int8 = Int8Weight(self.decoded_weight(torch.bfloat16), kernel, self.steps.kernels)
        self.mode = "int8"

    def decoded_weight(self, dtype: torch.dtype) -> Tensor:
        """The weight (N, K) as the product sees it."""
        if self.weight_scale is None:
            return self.weight.to(dtype)
        return dequantize(unpack_codes(self.weight), self.weight_scale).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self._int8 is None:
            return F.linear(self.steps.rounded(x), self.decoded_weight(x.dtype))
        y, left = self._int8.product(self.steps.split(x), x.dtype)
        if len(left):
            rows = self.steps.kernels.fake_quantize(x.reshape(-1, self.in_features)[left])
            y[left] = float64_product(rows, self.decoded_weight(torch.bfloat16), x.dtype)
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, mode={self.mode}"
