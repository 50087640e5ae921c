"""The exact INT8 product: equal to the float64 product of the same MXFP4 operands, rounded once, whatever comes in."""

import math

import pytest
import torch
from rows import plain_rows, rows_over
from torch import Tensor

from clef_core.int8 import MAX_INT8, OCTAVES, Int8Kernel, Int8Weight, float64_product, round_once, split_rows
from clef_core.kernels import PLAIN, Kernels, compiled_kernels
from clef_core.mxfp4 import BLOCK, dequantize, fake_quantize, quantize

KERNELS: tuple[Int8Kernel, ...] = ("int_mm", "onednn")


@pytest.fixture(scope="module")
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def hostile_rows(generator: torch.Generator) -> Tensor:
    """Zero rows, one huge block, 60 octaves, extreme exponents, subnormals, and plain rows between them."""
    x = plain_rows(generator, 24)
    x[0] = 0
    x[2, :BLOCK] *= 2.0**20
    x[4] = rows_over(60, generator, 1) * 2.0**30
    x[6] *= 2.0**100
    x[8] *= 2.0**-110
    x[10, BLOCK:] = 0
    x[12, BLOCK:] *= 2.0**-130
    x[14] = 2.0**-133
    x[16] *= 2.0**-57
    x[18] *= 2.0**57
    return x


def exact(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The right answer, by exact sums of Python floats."""
    return torch.tensor(
        [[round_to(math.fsum(a * b for a, b in zip(row, column, strict=True)), dtype) for column in weight.tolist()]
         for row in x.tolist()],
    ).to(dtype)  # fmt: skip


def round_to(value: float, dtype: torch.dtype) -> float:
    """To nearest even with 8 or 24 bits of mantissa; the smallest normal number bounds the step from below."""
    if value == 0 or not math.isfinite(value):
        return value
    bits = 8 if dtype == torch.bfloat16 else 24
    step = math.ldexp(1.0, max(math.frexp(value)[1] - bits, -126 - bits + 1))
    return round(value / step) * step


def product(x: Tensor, weight: Tensor, kernel: Int8Kernel, kernels: Kernels = PLAIN) -> Tensor:
    """What an INT8 linear computes from these, its float64 rows included."""
    rounded, values = fake_quantize(x), dequantize(*quantize(weight))
    out, left = Int8Weight(values, kernel, kernels).product(split_rows(x, kernels), x.dtype)
    out[left] = float64_product(rounded[left], values, x.dtype)
    return out


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("octaves", [0, OCTAVES - 1, 2 * OCTAVES - 2, 3 * OCTAVES - 2, 16])
def test_products_are_exact_however_far_apart_the_blocks_lie(kernel, dtype, octaves, generator):
    x, weight = rows_over(octaves, generator).to(dtype), rows_over(octaves, generator)
    expected = exact(fake_quantize(x), fake_quantize(weight), dtype)
    assert torch.equal(product(x, weight, kernel), expected)


@pytest.mark.parametrize("kernel", KERNELS)
def test_products_of_hostile_rows_are_exact(kernel, generator):
    x, weight = hostile_rows(generator).bfloat16(), hostile_rows(generator)
    expected = exact(fake_quantize(x), fake_quantize(weight), torch.bfloat16)
    result = product(x, weight, kernel)
    assert torch.equal(result, expected)
    assert result.isfinite().float().mean() > 0.9


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_no_number_shows_in_its_row_alone(kernel, value, generator):
    x, weight = plain_rows(generator, 4).bfloat16(), plain_rows(generator, 6)
    clean = product(x, weight, kernel)
    x[2, 5] = value
    poisoned = product(x, weight, kernel)
    assert not poisoned[2].isfinite().any()
    assert torch.equal(poisoned[[0, 1, 3]], clean[[0, 1, 3]])


@pytest.mark.parametrize("kernel", KERNELS)
def test_sums_beyond_24_bits_are_exact(kernel):
    features = 64 * BLOCK
    x = torch.full((3, features), 6.0)
    x[1, ::3] = -1.5
    x[2, 0] = 0.5
    weight = torch.full((5, features), 6.0)
    weight[1, 1] = 0.5
    weight[2, ::2] = -6.0
    assert features * MAX_INT8**2 > 2**24
    expected = exact(x, weight, torch.bfloat16)
    assert torch.equal(product(x.bfloat16(), weight, kernel), expected)


@pytest.mark.parametrize("num_rows", [1, 2, 1023, 1025, 2049])
def test_every_number_of_rows_is_multiplied(num_rows, generator):
    x, weight = plain_rows(generator, num_rows, BLOCK).bfloat16(), plain_rows(generator, 3, BLOCK)
    weight[1] = 1.0
    expected = float64_product(fake_quantize(x), fake_quantize(weight), torch.bfloat16)
    assert torch.equal(product(x, weight, "int_mm"), expected)


def test_most_rows_need_one_group_far_ones_two_and_deep_ones_three(generator):
    assert len(split_rows(plain_rows(generator, 24), PLAIN).far_rows) == 0
    far = split_rows(rows_over(2 * OCTAVES - 2, generator), PLAIN)
    assert far.num_two > 12
    deep = split_rows(rows_over(3 * OCTAVES - 2, generator), PLAIN)
    assert len(deep.deep) > 12
    assert len(deep.wide_rows) == 0
    for split in (far, deep):
        assert all(len(matrix) == 0 or matrix.abs().max() <= MAX_INT8 for matrix in (split.near, split.far, split.deep))


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (1 + 2**-8, 1.0),  # a tie goes to the even neighbour
        (1 + 2**-8 + 2**-40, 1 + 2**-7),  # just above the tie: through float32 it would be the tie
        (1 + 3 * 2**-8 - 2**-40, 1 + 2**-7),
        (-1 - 2**-8 - 2**-40, -1 - 2**-7),
        (0.0, 0.0),
        (math.inf, math.inf),
    ],
)
def test_rounding_to_bfloat16_rounds_once(value, rounded):
    assert round_once(torch.tensor([value], dtype=torch.float64), torch.bfloat16).item() == rounded


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_compiled_steps_equal_the_plain_ones(kernel, generator):
    kernels = compiled_kernels(torch.bfloat16, torch.device("cpu"), kernel)
    if kernels is PLAIN:
        pytest.skip("there is no C++ compiler here")
    x = torch.cat([rows_over(6, generator), hostile_rows(generator)]).bfloat16()
    weight = rows_over(6, generator)
    with torch.inference_mode():
        assert torch.equal(kernels.fake_quantize(x).view(torch.int16), fake_quantize(x).view(torch.int16))
        assert torch.equal(product(x, weight, kernel, kernels), product(x, weight, kernel))
