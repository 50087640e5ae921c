"""The encoder of weights against the arithmetic that is held beside the standard, over every bfloat16 value."""

import pytest
import torch
from test_mxfp4 import hostile

from clef_core.mxfp4 import BLOCK, dequantize, pack_codes, quantize, unpack_codes
from clef_core.weight_encoder import decode_weight, encode_weight


def every_finite_value() -> torch.Tensor:
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return values[values.abs() < 1.75 * 2.0**127]


def expected(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = quantize(weight)
    codes[codes == 8] = 0  # Quark writes no negative zero
    return pack_codes(codes), scales.clamp(min=1)  # and no scale below 2**-126


def test_hostile_rows_are_rounded_like_everything_else():
    weight = hostile(torch.bfloat16)
    weight[weight.abs() > 2.9e38] = 2.9e38
    codes, scales = encode_weight(weight)
    assert torch.equal(codes, expected(weight)[0])
    assert torch.equal(scales, expected(weight)[1])


@pytest.mark.parametrize("seed", range(4))
def test_every_bfloat16_value_is_rounded_alike_in_the_company_of_others(seed):
    """In order, so that blocks have values of one size, and shuffled, so that the largest decides over all."""
    values = every_finite_value()
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))
    for row in (values.sort().values, values[order]):
        weight = row[: len(row) // BLOCK * BLOCK].view(-1, BLOCK)
        codes, scales = encode_weight(weight)
        assert torch.equal(codes, expected(weight)[0])
        assert torch.equal(scales, expected(weight)[1])


def test_a_negative_weight_that_rounds_to_zero_gets_code_zero():
    weight = torch.zeros(1, BLOCK, dtype=torch.bfloat16)
    weight[0, :3] = torch.tensor([4.0, -0.01, -0.0])
    assert unpack_codes(encode_weight(weight)[0])[0, :3].tolist() == [6, 0, 0]


def test_decoding_gives_the_rounded_values():
    weight = torch.randn(5, 4 * BLOCK, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(decode_weight(*encode_weight(weight)), dequantize(*quantize(weight)))


def test_encoding_what_was_decoded_changes_nothing():
    weight = torch.randn(5, 4 * BLOCK, generator=torch.Generator().manual_seed(1)).bfloat16()
    codes, scales = encode_weight(weight)
    again = encode_weight(decode_weight(codes, scales).bfloat16())
    assert torch.equal(again[0], codes)
    assert torch.equal(again[1], scales)


def test_a_block_of_zeros_decodes_to_zeros_and_has_the_smallest_scale_that_quark_writes():
    codes, scales = encode_weight(torch.zeros(1, BLOCK, dtype=torch.bfloat16))
    assert scales.tolist() == [[1]]
    assert not decode_weight(codes, scales).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 1.75 * 2.0**127, -3.3e38])
def test_what_is_not_finite_or_would_not_be_is_refused(bad):
    weight = torch.zeros(2, BLOCK, dtype=torch.bfloat16)
    weight[1, 3] = bad
    with pytest.raises(ValueError, match=r"finite|infinity"):
        encode_weight(weight)


def test_other_dtypes_and_odd_widths_are_refused():
    with pytest.raises(ValueError, match="bfloat16"):
        encode_weight(torch.zeros(2, BLOCK))
    with pytest.raises(ValueError, match="divisible by 32"):
        encode_weight(torch.zeros(2, BLOCK + 1, dtype=torch.bfloat16))
