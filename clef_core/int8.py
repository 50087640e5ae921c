"""Exact products of MXFP4 matrices on INT8 units.

Twice an E2M1 value is an integer of at most 12, and 12 * 2**3 = 96 still fits INT8. So the blocks of a row whose
exponents lie within four octaves of the row's largest become one INT8 row with one power of two (`near`), the blocks of
the four octaves below become another (`far`), and those of the next four a third (`deep`). Rows that reach deeper, hold
extreme exponents or NaN (`wide`) are multiplied in float64. A product is then a sum of INT8 products with INT32 sums,
rounded once. Knows no file and no model.

What surprises: weights have so few far blocks that a whole second product would be a waste; the outputs that need one
(columns of the result) are computed apart. oneDNN hands its INT32 sums over as float32, exact below 2**24 only: rows
that reach it are multiplied in float64 too. And its inputs are made unsigned, with an offset that it takes back in
INT32: only AMX multiplies signed ones fast.

Source: OCP Microscaling Formats (MX) v1.0, 5.3.3 (E2M1). Rounding to odd: Boldo and Melquiond 2008, "Emulation of a FMA
and Correctly Rounded Sums: Proved Algorithms Using Rounding to Odd".
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from clef_core.mxfp4 import BLOCK, lifted_elements, octaves_in_rows, power_of_two

if TYPE_CHECKING:
    from clef_core.kernels import Kernels

OCTAVES = 4
"""Octaves that one INT8 matrix holds: 12 * 2**3 = 96."""

WIDE = 3
"""The kind of rows that reach down 12 octaves or more."""

MAX_BASE = 58
"""Largest magnitude of a row's exponent: two scales of 2**(-58 - 4) still multiply to a normal float32."""

EXACT_FLOAT32 = 2**24
"""Integers below it are exact in float32."""

MAX_INT8 = 96
"""Largest magnitude in a near or far matrix."""

CHUNK_ROWS = 1024
"""Rows per product: bounds the memory of the INT32 sums."""

WIDE_COLUMNS = 1024
"""Weight rows decoded to float64 at a time."""

Int8Kernel = Literal["onednn", "int_mm"]
"""`onednn` multiplies with weights laid out once, fast on AMX and AVX-512; `int_mm` is torch's, for other CPUs."""

OFFSET = 128
"""What is added to an INT8 value to make it unsigned."""


@dataclass(frozen=True)
class Int8Rows:
    """Rows of an MXFP4 matrix: value = scale * (near + far / 16 + deep / 256).

    near: int8 (R, K).
    scale: float32 (R,), powers of two.
    far_rows, far: int64 (F,) and int8 (F, K), the rows that have far blocks, the deep ones last.
    deep: int8 (D, K), what the last D of `far_rows` have besides.
    wide_rows: int64, the rows that do not fit; what stands for them in the others means nothing.
    """

    near: Tensor
    scale: Tensor
    far_rows: Tensor
    far: Tensor
    deep: Tensor
    wide_rows: Tensor

    @property
    def num_two(self) -> int:
        """How many of `far_rows` need two matrices; the others need three."""
        return len(self.far_rows) - len(self.deep)


def place_blocks(largest: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where the blocks of rows lie, from the bits of their largest magnitudes.

    Args:
        largest: int32 (R, K / 32), of `largest_bits`.

    Returns:
        exponents and down as `octaves_in_rows`; scale float32 (R,) as in `Int8Rows`; kind int32 (R,): how many matrices
        the row needs beside the near one, 0 to 2; 3 for a wide row.
    """
    exponents, base, down, deepest = octaves_in_rows(largest)
    kind = (deepest // OCTAVES).clamp(max=WIDE)
    scale = power_of_two(base.clamp(-MAX_BASE, MAX_BASE) - OCTAVES)
    return exponents, down, scale, torch.where(base.abs() > MAX_BASE, WIDE, kind)


def scaled_codes(blocks: Tensor, exponents: Tensor, down: Tensor) -> Tensor:
    """Twice the E2M1 values, times 2**(3 - down) where `down` is 0 to 3, and 0 elsewhere.

    Args:
        blocks: float32 or bfloat16 (R, K / 32, 32).
        exponents, down: int32 (R, K / 32), of `place_blocks`.

    Returns:
        int8 (R, K / 32, 32); what stands for NaN is anything.
    """
    return lifted_elements(blocks, exponents, down, OCTAVES, OCTAVES).to(torch.int8)


def round_once(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float64 to float32 or bfloat16, to nearest even.

    torch rounds to bfloat16 by way of float32, which rounds twice; here the way is rounded to odd, and then the second
    rounding is right.
    """
    nearest = exact.float()
    if dtype == torch.float32:
        return nearest
    bits = nearest.view(torch.int32)
    is_exact = (nearest.double() == exact) | ~torch.isfinite(nearest)
    toward_zero = bits - (nearest.double().abs() > exact.abs()).int()
    return torch.where(is_exact, bits, toward_zero | 1).view(torch.float32).to(dtype)


def finish(sums: Tensor, row_scale: Tensor, column_scale: Tensor, out: Tensor) -> None:
    """Scale sums (M, N), int32 or float32 below 2**24, and round them into `out` (M, N)."""
    out.copy_(sums.float() * row_scale.unsqueeze(1) * column_scale)


def finish_checked(sums: Tensor, row_scale: Tensor, column_scale: Tensor, out: Tensor) -> Tensor:
    """As `finish`; returns the largest |sum| of each row (M,), for sums that may reach 2**24."""
    finish(sums, row_scale, column_scale, out)
    return sums.abs().amax(1).float()


def finish_far(near: Tensor, far: Tensor, row_scale: Tensor, column_scale: Tensor, out: Tensor) -> Tensor:
    """As `finish_checked`, for the sums of rows with far blocks: near + far / 16, rounded once."""
    sums = near.to(torch.int32) * 2**OCTAVES + far.to(torch.int32)
    if out.dtype == torch.bfloat16:  # from 2**24 on float32 would round first: to odd, on 8 bits fewer
        is_odd = ((sums & 0xFF) != 0).to(torch.int32)
        exact = torch.where(sums.abs() < EXACT_FLOAT32, sums.float(), ((sums >> 8) | is_odd).float() * 2**8)
    else:
        exact = sums.float()
    finish(exact, row_scale / 2**OCTAVES, column_scale, out)
    return torch.maximum(near.abs().amax(1), far.abs().amax(1)).float()


def split_rows(x: Tensor, kernels: "Kernels") -> Int8Rows:
    """Round to MXFP4 and split into INT8 matrices.

    Args:
        x: float32 or bfloat16 (R, K), K divisible by 32, contiguous.
    """
    blocks = x.view(len(x), -1, BLOCK)
    exponents, down, scale, kind = kernels.place_blocks(kernels.largest_bits(blocks))
    near = kernels.scaled_codes(blocks, exponents, down).view(x.shape)
    lower = torch.nonzero(kind).squeeze(-1)
    two, three, wide = (lower[kind[lower] == number] for number in (1, 2, WIDE))
    far_rows = torch.cat([two, three])

    def codes(rows: Tensor, below: int) -> Tensor:
        if not len(rows):  # as mostly
            return near[:0]
        return kernels.scaled_codes(blocks[rows], exponents[rows], down[rows] - below).view(-1, x.shape[1])

    return Int8Rows(near, scale, far_rows, codes(far_rows, OCTAVES), codes(three, 2 * OCTAVES), wide)


class Int8Weight:
    """A weight laid out for exact products.

    Args:
        weight: (N, K), exact MXFP4 values in float32 or bfloat16.
        kernel: how near matrices are multiplied.
        kernels: the steps around the product.
    """

    def __init__(self, weight: Tensor, kernel: Int8Kernel, kernels: "Kernels") -> None:
        rows = split_rows(weight, kernels)
        self.kernel = kernel
        self.kernels = kernels
        self.scale = rows.scale
        self.may_overflow = weight.shape[1] * MAX_INT8**2 >= EXACT_FLOAT32
        self.near = torch.ops.onednn.qlinear_prepack(rows.near, None) if kernel == "onednn" else rows.near
        self.far_columns = rows.far_rows[: rows.num_two]
        self.far_near, self.far = rows.near[self.far_columns], rows.far[: rows.num_two]
        self.wide_columns = torch.cat([rows.far_rows[rows.num_two :], rows.wide_rows])  # too few for a third matrix
        self.wide = weight[self.wide_columns].double()
        self._no_scale, self._no_offset = torch.ones(len(weight)), torch.zeros(len(weight), dtype=torch.int64)

    def product(self, x: Int8Rows, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """x (M, K) times this weight (N, K) transposed, exact and rounded once to `dtype`.

        Returns:
            (M, N), and int64 indices of the rows that are left to be multiplied in float64: the wide ones, and those
            whose sums reach 2**24.
        """
        largest = torch.zeros(len(x.near))
        is_fused = self.kernel == "onednn" and dtype == torch.bfloat16 and not self.may_overflow
        if is_fused:
            out = self._onednn(x.near, self.scale, dtype).mul_(x.scale.to(dtype).unsqueeze(1))
        else:
            out = torch.empty(len(x.near), len(self.scale), dtype=dtype)
        for part in _parts(len(x.near)):
            # One product for all matrices of these rows: torch's lays the weight out anew in each call.
            places = torch.nonzero((x.far_rows >= part.start) & (x.far_rows < part.stop)).squeeze(-1)
            deep_places = places[places >= x.num_two] - x.num_two
            if is_fused and not len(places):
                continue
            rows = x.far_rows[places]
            near = x.near[rows] if is_fused else x.near[part]
            num_near = len(near)
            if len(places):
                near = torch.cat([near, x.far[places], x.deep[deep_places]])
            sums = self._sums(near)
            if not is_fused:
                self._finish_near(x, part, sums[:num_near], out, largest)
            lower = sums[num_near:]
            near_of_rows = sums[:num_near] if is_fused else sums[rows - part.start]
            self._finish_lower(x, rows, [near_of_rows, lower[: len(rows)], lower[len(rows) :]], out, largest)
        if len(self.far_columns):
            out[:, self.far_columns] = self._far_columns(x, dtype)
        if len(self.wide_columns):
            out[:, self.wide_columns] = round_once(_values(x) @ self.wide.t(), dtype)
        largest[x.wide_rows] = torch.inf
        return out, torch.nonzero(largest >= EXACT_FLOAT32).squeeze(-1)

    def _finish_near(self, x: Int8Rows, part: slice, sums: Tensor, out: Tensor, largest: Tensor) -> None:
        step = self.kernels.finish_checked if self.may_overflow else self.kernels.finish
        checked = step(sums, x.scale[part], self.scale, out[part])
        if checked is not None:
            largest[part] = checked

    def _finish_lower(self, x: Int8Rows, rows: Tensor, sums: list[Tensor], out: Tensor, largest: Tensor) -> None:
        """Finish rows that need more than one matrix, from the sums of each; those that need three come last."""
        near, far, deep = sums
        num_two = len(rows) - len(deep)
        two, three = rows[:num_two], rows[num_two:]
        if len(two):
            finished = torch.empty(num_two, len(self.scale), dtype=out.dtype)
            sums_of_two = near[:num_two], far[:num_two]
            largest[two] = self.kernels.finish_far(*sums_of_two, x.scale[two], self.scale, finished)
            out[two] = finished
        if len(three):
            of_three = (near[num_two:], far[num_two:], deep)
            largest[three] = torch.stack([one.abs().amax(1).float() for one in of_three]).amax(0)
            first, second, third = (one.double() for one in of_three)
            exact = first + second / 2**OCTAVES + third / 4**OCTAVES
            out[three] = round_once(exact * x.scale[three].unsqueeze(1) * self.scale, out.dtype)

    def _sums(self, x: Tensor) -> Tensor:
        """x int8 (M, K) times the near weight: (M, N), int32, or float32 that is exact below 2**24."""
        if self.kernel == "int_mm":
            return torch._int_mm(x, self.near.t())
        return self._onednn(x, self._no_scale, torch.float32)

    def _onednn(self, x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        unsigned = x.view(torch.uint8) ^ OFFSET
        product: Tensor = torch.ops.onednn.qlinear_pointwise(
            unsigned, 1.0, OFFSET, self.near, scale, self._no_offset, None, 1.0, 0, dtype, "none", [], ""
        )
        return product

    def _far_columns(self, x: Int8Rows, dtype: torch.dtype) -> Tensor:
        """The outputs (M, number of far columns) whose weights have far blocks."""
        exact = _int_product(x.near, self.far_near) + _int_product(x.near, self.far) / 2**OCTAVES
        for rows, values, octaves in ((x.far_rows, x.far, OCTAVES), (x.far_rows[x.num_two :], x.deep, 2 * OCTAVES)):
            if len(rows):
                lower = _int_product(values, self.far_near) + _int_product(values, self.far) / 2**OCTAVES
                exact[rows] += lower / 2**octaves
        return round_once(exact * x.scale.double().unsqueeze(1) * self.scale[self.far_columns].double(), dtype)


def float64_product(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """x (M, K) times weight (N, K) transposed in float64, `WIDE_COLUMNS` outputs at a time, rounded once."""
    columns = [x.double() @ part.double().t() for part in torch.split(weight, WIDE_COLUMNS)]
    return round_once(torch.cat(columns, 1), dtype)


def _parts(num_rows: int) -> list[slice]:
    """Slices of equal length, at most `CHUNK_ROWS`."""
    size = math.ceil(num_rows / max(1, math.ceil(num_rows / CHUNK_ROWS)))
    return [slice(start, start + size) for start in range(0, num_rows, size)] if size else []


def _int_product(x: Tensor, weight: Tensor) -> Tensor:
    return torch._int_mm(x, weight.t()).double()


def _values(x: Int8Rows) -> Tensor:
    """Decode to float64 (R, K); rows that are wide come out wrong."""
    values = x.near.double()
    values[x.far_rows] += x.far.double() / 2**OCTAVES
    values[x.far_rows[x.num_two :]] += x.deep.double() / 4**OCTAVES
    return values * x.scale.double().unsqueeze(1)
