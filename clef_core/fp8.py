"""Products of MXFP4 matrices on FP8 units, with exact operands.

An E2M1 value times 2**k is an E4M3 value for 15 consecutive k. So with one power of two taken out of a row, every row
whose blocks lie within 15 octaves is a row of E4M3 values, exactly, and two such matrices are multiplied by the
library's row-wise scaled product. Rows that reach deeper, hold extreme exponents or NaN (`wide`) are multiplied in
bfloat16 instead, which holds every MXFP4 value. Knows no file and no model.

What surprises: operands are exact, sums are not. How many bits a GPU keeps while it adds is its own affair
(`clef_core.linear_modes` measures it before this is used). And AMD's MI300 has an E4M3 of its own, one octave lower.

Source: OCP 8-bit Floating Point Specification (OFP8) v1.0, table 1 (E4M3); OCP Microscaling Formats (MX) v1.0, 5.3.3
(E2M1).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from clef_core.mxfp4 import BLOCK, lifted_elements, octaves_in_rows, power_of_two

if TYPE_CHECKING:
    from clef_core.kernels import Kernels

TOP = {
    torch.float8_e4m3fn: 6,  # 6 * 2**6 = 384 of 448; 0.5 * 2**-8 = 2**-9 is the smallest number
    torch.float8_e4m3fnuz: 5,  # 6 * 2**5 = 192 of 240; 0.5 * 2**-9 = 2**-10 is the smallest number
}
"""The largest k for which every E2M1 value times 2**k is a number of the format."""

OCTAVES = 15
"""How many k there are, in both formats."""

MAX_BASE = 57
"""Largest magnitude of a row's exponent: two scales of 2**(-57 - 6) still multiply to a normal float32."""

ALIGNMENT = 16
"""The scaled product wants this many outputs, or a multiple."""

Multiply = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""x FP8 (M, K), weight FP8 (N, K), x_scale and weight_scale float32 (M,) and (N,): their product (M, N)."""


def scaled_product(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor) -> Tensor:
    """(x * x_scale) times (weight * weight_scale) transposed, by torch's row-wise scaled product.

    Args:
        x, weight: FP8 (M, K) and (N, K), contiguous, K and N divisible by 16.
        x_scale, weight_scale: float32 (M,) and (N,).

    Returns:
        bfloat16 (M, N), summed as precisely as the device's FP8 units can.

    Raises:
        RuntimeError, ValueError or NotImplementedError: the device has no such product.
    """
    rowwise = ScalingType.RowWise
    return F.scaled_mm(
        x, weight.t(), x_scale.unsqueeze(1), rowwise, weight_scale.unsqueeze(0), rowwise,
        output_dtype=torch.bfloat16, use_fast_accum=False,
    )  # fmt: skip


@dataclass(frozen=True)
class Fp8Rows:
    """Rows of an MXFP4 matrix: value = scale * values.

    values: FP8 (R, K).
    scale: float32 (R,), powers of two.
    wide_rows: int64, the rows that do not fit; what stands for them in the others means nothing.
    """

    values: Tensor
    scale: Tensor
    wide_rows: Tensor

    def decode(self, dtype: torch.dtype) -> Tensor:
        """(R, K) in float32 or bfloat16, exact but for the wide rows."""
        return (self.values.float() * self.scale.unsqueeze(1)).to(dtype)


def place_rows(largest: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where the blocks of rows lie, from the bits of their largest magnitudes.

    Args:
        largest: int32 (R, K / 32), of `mxfp4.largest_bits`.

    Returns:
        exponents, base and down as `octaves_in_rows`; is_wide bool (R,).
    """
    exponents, base, down, deepest = octaves_in_rows(largest)
    return exponents, base, down, (deepest >= OCTAVES) | (base.abs() > MAX_BASE)


def fp8_values(blocks: Tensor, exponents: Tensor, down: Tensor, dtype: torch.dtype) -> Tensor:
    """E2M1 values times 2**(top - down) where `down` is 0 to 14, and 0 elsewhere.

    Args:
        blocks: float32 or bfloat16 (R, K / 32, 32).
        exponents, down: int32 (R, K / 32), of `place_rows`.
        dtype: an FP8 format of `TOP`.

    Returns:
        `dtype` (R, K / 32, 32); what stands for NaN is anything.
    """
    return lifted_elements(blocks, exponents, down, TOP[dtype], OCTAVES).to(dtype)


def split_rows(x: Tensor, dtype: torch.dtype, kernels: "Kernels") -> Fp8Rows:
    """Round to MXFP4 and take one power of two out of every row.

    Counting the wide rows makes the caller wait for a GPU, once per call.

    Args:
        x: float32 or bfloat16 (R, K), K divisible by 32, contiguous.
        dtype: an FP8 format of `TOP`.
    """
    blocks = x.view(len(x), -1, BLOCK)
    exponents, base, down, is_wide = kernels.place_rows(kernels.largest_bits(blocks))
    values = kernels.fp8_values(blocks, exponents, down, dtype).view(x.shape)
    scale = power_of_two(base.clamp(-MAX_BASE, MAX_BASE) - TOP[dtype])
    return Fp8Rows(values, scale, torch.nonzero(is_wide).squeeze(-1))


class Fp8Weight:
    """A weight laid out for FP8 products, 8 bits per value; the wide rows stand apart in bfloat16.

    Args:
        weight: (N, K), exact MXFP4 values in float32 or bfloat16, contiguous.
        dtype: the device's FP8 format.
        kernels: the steps around the product.
        multiply: the product itself.
    """

    def __init__(
        self, weight: Tensor, dtype: torch.dtype, kernels: "Kernels", multiply: Multiply = scaled_product
    ) -> None:
        rows = split_rows(weight, dtype, kernels)
        self.dtype = dtype
        self.num_outputs = len(weight)
        self.wide_columns, self.wide = rows.wide_rows, weight[rows.wide_rows].bfloat16()
        values, scale = rows.values.float(), rows.scale
        values[rows.wide_rows] = 0
        missing = -len(weight) % ALIGNMENT
        self.rows = Fp8Rows(F.pad(values, (0, 0, 0, missing)).to(dtype), F.pad(scale, (0, missing)), rows.wide_rows)
        self._multiply = multiply

    def product(self, x: Fp8Rows) -> Tensor:
        """x (M, K) times this weight (N, K) transposed: (M, N); x's wide rows come out wrong."""
        out = self._multiply(x.values, self.rows.values, x.scale, self.rows.scale)[:, : self.num_outputs]
        if len(self.wide_columns):
            out[:, self.wide_columns] = F.linear(x.decode(self.wide.dtype), self.wide).to(out.dtype)
        return out

    def decode(self, dtype: torch.dtype) -> Tensor:
        """The weight (N, K) in float32 or bfloat16, exact."""
        values = self.rows.decode(dtype)[: self.num_outputs]
        values[self.wide_columns] = self.wide.to(dtype)
        return values
