"""The linear layer of an MXFP4 release, in the modes that it can run in.

| mode | in memory | per call | result |
|---|---|---|---|
| packed | 4.25 bits per weight | decodes the weight | bit-identical to Quark's linear |
| expanded | 16 (bfloat16) or 32 bits | | bit-identical to Quark's linear |
| int8 | 12.3 bits | | the exact product, rounded once |
| fp8 | 8 bits | | exact operands, sums as precise as the device's FP8 units |

Linears that read the same tensor one after another (q, k and v; gate and up) share its rounding through `Steps`.
What surprises: that rests on the identity of the tensor. One made in inference mode and changed in place between two
linears would be taken for the same.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clef_core.fp8 import Fp8Rows, Fp8Weight, Multiply, scaled_product
from clef_core.fp8 import split_rows as split_fp8_rows
from clef_core.int8 import Int8Kernel, Int8Rows, Int8Weight, float64_product, split_rows
from clef_core.kernels import PLAIN, Kernels
from clef_core.mxfp4 import BLOCK, Decoder

LinearMode = Literal["packed", "expanded", "int8", "fp8"]


class Steps:
    """What the linears of one model share: elementwise steps, memory for decoding, what became of the last input."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.decode = Decoder()
        self._last: tuple[Tensor, int, str, Any] | None = None

    def rounded(self, x: Tensor) -> Tensor:
        """x rounded to MXFP4, same shape and dtype."""
        y: Tensor = self._once("rounded", x, self.kernels.fake_quantize)
        return y

    def split(self, x: Tensor) -> Int8Rows:
        """x (..., K) as INT8 rows, leading dimensions flattened."""
        rows: Int8Rows = self._once("split", x, self._split_rows)
        return rows

    def split_fp8(self, x: Tensor, dtype: torch.dtype) -> Fp8Rows:
        """x (..., K) as FP8 rows of that format, leading dimensions flattened."""
        rows: Fp8Rows = self._once("fp8", x, lambda x: split_fp8_rows(_flat(x), dtype, self.kernels))
        return rows

    def forget(self) -> None:
        """Let go of the last input."""
        self._last = None

    def _split_rows(self, x: Tensor) -> Int8Rows:
        return split_rows(_flat(x), self.kernels)

    def _once(self, name: str, x: Tensor, make: Callable[[Tensor], Any]) -> Any:
        """make(x), or what the last call made, if that had the same tensor object in the same state."""
        last = self._last
        version = 0 if x.is_inference() else x._version
        if last is None or last[0] is not x or last[1:3] != (version, name):
            last = self._last = (x, version, name, make(x))
        return last[3]


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


class MXFP4Linear(nn.Module):
    """A bias-free linear whose weight is MXFP4 and whose input is rounded to MXFP4 in every call.

    y = linear(fake_quantize(x), dequantize(weight)), multiplied in the dtype of x.

    Holds `weight` uint8 (N, K / 2) and `weight_scale` uint8 (N, K / 32) as the release stores them; after `expand` the
    decoded `weight` (N, K) alone, after `prepare_fp8` an FP8 one.
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
        self._fp8: Fp8Weight | None = None
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

    def prepare_fp8(self, dtype: torch.dtype, multiply: Multiply = scaled_product) -> None:
        """Lay the weight out for FP8 products, in the device's format; codes and scales are not needed any more."""
        self._fp8 = Fp8Weight(self.decoded_weight(torch.bfloat16), dtype, self.steps.kernels, multiply)
        self.weight, self.weight_scale = self._fp8.rows.values, None
        self.mode = "fp8"

    def decoded_weight(self, dtype: torch.dtype) -> Tensor:
        """The weight (N, K) as the product sees it."""
        if self._fp8 is not None:
            return self._fp8.decode(dtype)
        if self.weight_scale is None:
            return self.weight.to(dtype)
        return Decoder()(self.weight, self.weight_scale, dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self._int8 is not None:
            y = self._int8_product(x, self._int8)
        elif self._fp8 is not None:
            y = self._fp8_product(x, self._fp8)
        else:
            return F.linear(self.steps.rounded(x), self._weight_of_now(x.dtype))
        return y.view(*x.shape[:-1], self.out_features)

    def _weight_of_now(self, dtype: torch.dtype) -> Tensor:
        """The weight (N, K), which may be gone when another linear runs."""
        if self.weight_scale is None:
            return self.weight.to(dtype)
        return self.steps.decode(self.weight, self.weight_scale, dtype)

    def _int8_product(self, x: Tensor, weight: Int8Weight) -> Tensor:
        y, left = weight.product(self.steps.split(x), x.dtype)
        if len(left):
            y[left] = float64_product(self._rounded_rows(x, left), self.decoded_weight(torch.bfloat16), x.dtype)
        return y

    def _fp8_product(self, x: Tensor, weight: Fp8Weight) -> Tensor:
        rows = self.steps.split_fp8(x, weight.dtype)
        y = weight.product(rows)
        if len(rows.wide_rows):
            y[rows.wide_rows] = F.linear(self._rounded_rows(x, rows.wide_rows), self.decoded_weight(x.dtype)).to(
                y.dtype
            )
        return y

    def _rounded_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        return self.steps.kernels.fake_quantize(x.reshape(-1, self.in_features)[rows])

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, mode={self.mode}"
