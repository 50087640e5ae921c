"""Products on FP8 units: every operand exact, whatever comes in; what does not fit takes the bfloat16 way."""

import math

import pytest
import torch
from rows import plain_rows, rows_over
from torch import Tensor

from clef_core.fp8 import MAX_BASE, OCTAVES, TOP, Fp8Weight, scaled_product, split_rows
from clef_core.kernels import PLAIN, compiled_kernels
from clef_core.mxfp4 import BLOCK, E2M1_VALUES, dequantize, fake_quantize, quantize

FORMATS = tuple(TOP)
OCP = torch.float8_e4m3fn
SUM_ERROR = 2**-10
"""Of the sum of the magnitudes: what the issue allows."""


@pytest.fixture(scope="module")
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def emulated(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor) -> Tensor:
    """FP8 units that add in float32 and do not round at the end."""
    return (x.float() @ weight.float().t()) * x_scale.unsqueeze(1) * weight_scale


def hostile_rows(generator: torch.Generator) -> Tensor:
    """A zero row, one huge block, 30 octaves, subnormals, exponents at both ends, among plain ones."""
    x = plain_rows(generator)
    x[0] = 0
    x[2, :BLOCK] *= 2.0**40
    x[4] = rows_over(30, generator, 1) * 2.0**10
    x[6] *= 2.0**100
    x[8] *= 2.0**-110
    x[10, BLOCK:] = 0
    x[12] = 2.0**-133
    x[14] *= 2.0 ** (MAX_BASE - 3)
    x[16] *= 2.0 ** (3 - MAX_BASE)
    return x


def check_sums(result: Tensor, x: Tensor, weight: Tensor) -> None:
    """Hold a product of rows (M, K) and (N, K) against float64."""
    exact = x.double() @ weight.double().t()
    allowed = SUM_ERROR * (x.double().abs() @ weight.double().abs().t())
    assert bool(((result.double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_e2m1_value_is_exact_at_every_power_and_at_none_beyond(dtype):
    values = torch.tensor(E2M1_VALUES)

    def is_exact(k: int) -> bool:
        scaled = values * 2.0**k
        return torch.equal(scaled.to(dtype).float(), scaled)

    assert [k for k in range(-20, 20) if is_exact(k)] == list(range(TOP[dtype] - OCTAVES + 1, TOP[dtype] + 1))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("down", range(OCTAVES))
@pytest.mark.parametrize("base", [-MAX_BASE, -1, 0, 9, MAX_BASE])
def test_a_row_with_every_value_at_every_depth_is_exact(dtype, down, base):
    block = torch.tensor(E2M1_VALUES * 2)
    row = torch.cat([block * 2.0**base, block * 2.0 ** (base - down)]).unsqueeze(0)
    split = split_rows(row, dtype, PLAIN)
    assert torch.equal(split.decode(torch.float32), row)
    assert len(split.wide_rows) == 0


@pytest.mark.parametrize("dtype", FORMATS)
def test_rows_that_fit_are_exact_and_the_others_are_named(dtype, generator):
    x = torch.cat([hostile_rows(generator), rows_over(OCTAVES + 3, generator)])
    split = split_rows(x, dtype, PLAIN)
    wide = set(split.wide_rows.tolist())
    assert {2, 4, 6, 8, 12} <= wide
    assert wide.isdisjoint({0, 1, 3, 5, 7, 9, 10, 14, 16})
    fitting = [row for row in range(len(x)) if row not in wide]
    assert torch.equal(split.decode(torch.float32)[fitting], fake_quantize(x)[fitting])
    assert torch.equal(split.scale, torch.exp2(split.scale.log2().round()))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_with_no_number_does_not_fit(value, generator):
    x = plain_rows(generator, 3)
    x[1, 40] = value
    assert split_rows(x, OCP, PLAIN).wide_rows.tolist() == [1]


@pytest.mark.parametrize(("octaves", "do_all_fit"), [(0, True), (OCTAVES - 4, True), (30, False)])
def test_sums_lie_within_a_thousandth_of_the_magnitudes(octaves, do_all_fit, generator):
    x, weight = fake_quantize(rows_over(octaves, generator)), fake_quantize(rows_over(octaves, generator))
    rows = split_rows(x, OCP, PLAIN)
    result = Fp8Weight(weight, OCP, PLAIN, emulated).product(rows)
    fitting = [row for row in range(len(x)) if row not in rows.wide_rows.tolist()]
    assert (len(fitting) == len(x)) == do_all_fit
    assert fitting
    # Columns that do not fit come from bfloat16 products and are rounded to it.
    columns = [n for n in range(len(weight)) if n not in split_rows(weight, OCP, PLAIN).wide_rows.tolist()]
    check_sums(result[fitting][:, columns], x[fitting], weight[columns])


def test_columns_that_do_not_fit_come_from_bfloat16_products(generator):
    x, weight = fake_quantize(plain_rows(generator, 5)), fake_quantize(hostile_rows(generator))
    prepared = Fp8Weight(weight, OCP, PLAIN)
    wide = prepared.wide_columns
    assert {2, 4, 6, 8} <= set(wide.tolist())
    result = prepared.product(split_rows(x, OCP, PLAIN))
    assert torch.equal(result[:, wide], torch.nn.functional.linear(x.bfloat16(), weight[wide].bfloat16()))
    assert torch.equal(prepared.decode(torch.float32), weight)


def test_weights_with_scale_bytes_at_both_ends_come_back_exactly(generator):
    codes, scales = quantize(plain_rows(generator, 6))
    scales[0], scales[1], scales[2, 0], scales[3, 3] = 0, 254, 254, 0
    weight = dequantize(codes, scales)
    prepared = Fp8Weight(weight, OCP, PLAIN, emulated)
    assert prepared.wide_columns.tolist() == [0, 1, 2, 3]
    assert torch.equal(prepared.decode(torch.float32), weight)


def test_a_weight_that_is_no_number_shows_in_its_output_alone(generator):
    codes, scales = quantize(plain_rows(generator, 6))
    x = fake_quantize(plain_rows(generator, 3))
    clean = Fp8Weight(dequantize(codes, scales), OCP, PLAIN).product(split_rows(x, OCP, PLAIN))
    scales[4, 1] = 255
    poisoned = Fp8Weight(dequantize(codes, scales), OCP, PLAIN).product(split_rows(x, OCP, PLAIN))
    assert poisoned[:, 4].isnan().all()
    assert torch.equal(poisoned[:, [0, 1, 2, 3, 5]], clean[:, [0, 1, 2, 3, 5]])


@pytest.mark.parametrize("num_outputs", [1, 15, 16, 17, 48])
@pytest.mark.parametrize("num_rows", [1, 7])
def test_the_librarys_product_rounds_the_right_sums(num_rows, num_outputs, generator):
    x, weight = fake_quantize(plain_rows(generator, num_rows)), fake_quantize(plain_rows(generator, num_outputs))
    prepared = Fp8Weight(weight * 2.0**20, OCP, PLAIN, scaled_product)
    assert len(prepared.rows.values) % 16 == 0
    result = prepared.product(split_rows(x * 2.0**-30, OCP, PLAIN))
    exact = (x.double() @ weight.double().t()) * 2.0**-10
    magnitudes = (x.double().abs() @ weight.double().abs().t()) * 2.0**-10
    assert result.dtype == torch.bfloat16
    # float32 sums of 256 products, then one rounding to 8 bits
    assert bool(((result.double() - exact).abs() <= exact.abs() * 2**-8 + magnitudes * 2**-16).all())


def test_the_compiled_steps_equal_the_plain_ones(generator):
    kernels = compiled_kernels(torch.bfloat16, torch.device("cpu"), fp8_dtype=OCP)
    if kernels is PLAIN:
        pytest.skip("there is no C++ compiler here")
    x = torch.cat([rows_over(20, generator), hostile_rows(generator)]).bfloat16()
    with torch.inference_mode():
        compiled, plain = split_rows(x, OCP, kernels), split_rows(x, OCP, PLAIN)
    fitting = [row for row in range(len(x)) if row not in plain.wide_rows.tolist()]
    assert torch.equal(compiled.wide_rows, plain.wide_rows)
    assert torch.equal(compiled.scale, plain.scale)
    assert torch.equal(compiled.values.view(torch.uint8)[fitting], plain.values.view(torch.uint8)[fitting])
