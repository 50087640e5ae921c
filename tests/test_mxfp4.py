"""MXFP4 arithmetic against the standard's table, hand-made bit patterns, and AMD Quark as the oracle."""

import warnings

import pytest
import torch
from paths import GOLDEN
from torch import Tensor

from clef_core.mxfp4 import (
    BLOCK,
    E2M1_VALUES,
    Decoder,
    dequantize,
    fake_quantize,
    pack_codes,
    quantize,
    round_to_e2m1,
    scale_values,
    unpack_codes,
)
from clef_core.mxfp4_linear import MXFP4Linear


def block(*values: float) -> Tensor:
    """One block: these values, then zeros."""
    return torch.tensor([*values] + [0.0] * (BLOCK - len(values)))


def test_codes_decode_to_the_table_of_the_standard():
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    decoded = dequantize(codes, torch.tensor([127], dtype=torch.uint8))
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert decoded.tolist() == table + table


def test_even_elements_are_in_the_low_nibble():
    assert unpack_codes(torch.tensor([0x21, 0xF7], dtype=torch.uint8)).tolist() == [1, 2, 7, 15]


def test_packing_is_the_inverse_of_unpacking():
    packed = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(pack_codes(unpack_codes(packed)), packed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fast_decoder_equals_the_plain_one_for_every_byte_and_scale(dtype):
    packed = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8).unsqueeze(1).expand(-1, 16)
    plain = dequantize(unpack_codes(packed), scales).to(dtype)
    decoded = Decoder()(packed, scales, dtype)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(decoded[:255].view(bits), plain[:255].view(bits))
    assert decoded[255].isnan().all()


def test_a_decoder_writes_into_memory_that_it_keeps_inside_inference_mode_and_outside():
    decode = Decoder()
    packed, scales = torch.full((4, 32), 0x21, dtype=torch.uint8), torch.full((4, 2), 127, dtype=torch.uint8)
    with torch.inference_mode():
        first = decode(packed, scales, torch.bfloat16)
    second = decode(packed[:2], scales[:2] + 1, torch.bfloat16)
    assert second.tolist() == [[1.0, 2.0] * 32] * 2
    assert (first.data_ptr(), first.shape) == (second.data_ptr(), (4, 64))
    assert decode(packed, scales, torch.float32).tolist() == [[0.5, 1.0] * 32] * 4


def test_scale_bytes_are_powers_of_two_and_255_is_nan():
    values = scale_values(torch.tensor([0, 1, 127, 128, 254, 255], dtype=torch.uint8))
    assert values[:5].tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0, 2.0**127]
    assert values[5].isnan()


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0),
        (0.2500001, 0.5), (5.0000005, 6.0), (7.9, 6.0), (1e30, 6.0),
    ],
)  # fmt: skip
def test_ties_round_to_the_even_code_and_large_values_saturate(value, rounded):
    assert round_to_e2m1(torch.tensor([value, -value])).tolist() == [rounded, -rounded]


@pytest.mark.parametrize(
    ("largest", "scale_exponent"),
    [(6.0, 0), (6.999, 0), (7.0, 1), (8.0, 1), (4.0, 0), (3.5, 0), (3.4999, -1), (1.0, -2), (1.75 * 2**100, 99)],
)
def test_scale_is_the_next_power_of_two_from_a_mantissa_of_1_75(largest, scale_exponent):
    _, scales = quantize(block(largest))
    assert int(scales) - 127 == scale_exponent


def test_zero_and_subnormal_blocks_get_the_smallest_scale():
    for values in (block(), block(2.0**-140), block(2.0**-127)):
        codes, scales = quantize(values)
        assert int(scales) == 0
        assert torch.isfinite(dequantize(codes, scales)).all()
    assert quantize(block())[0].unique().tolist() == [0]


def test_negative_zero_keeps_its_sign():
    codes, scales = quantize(block(-0.0, 1.0))
    assert codes[0] == 8
    assert torch.signbit(dequantize(codes, scales)[0])


def test_nan_poisons_its_block_and_no_other():
    x = torch.ones(2, 2 * BLOCK)
    x[0, 3] = torch.nan
    rounded = fake_quantize(x)
    assert rounded[0, :BLOCK].isnan().any()
    assert torch.equal(rounded[0, BLOCK:], torch.ones(BLOCK))
    assert torch.equal(rounded[1], torch.ones(2 * BLOCK))


def test_only_finite_values_can_be_encoded():
    with pytest.raises(ValueError, match="finite"):
        quantize(block(torch.inf))


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="divisible by 32"):
        fake_quantize(torch.zeros(2, 33))
    with pytest.raises(ValueError, match="one scale per 32"):
        dequantize(torch.zeros(2, 64, dtype=torch.uint8), torch.zeros(2, 3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="divisible by 32"):
        MXFP4Linear(48, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_twice_is_rounding_once(dtype):
    once = fake_quantize(hostile(dtype))
    assert torch.equal(fake_quantize(once), once)


def test_encoding_and_decoding_equal_the_round_trip():
    x = hostile(torch.float32)
    assert torch.equal(dequantize(*quantize(x)), fake_quantize(x))


def test_every_rounded_value_is_exact_in_bfloat16():
    rounded = fake_quantize(hostile(torch.float32))
    assert torch.equal(rounded.bfloat16().float(), rounded)


def hostile(dtype: torch.dtype) -> Tensor:
    """Rows with exponents over 60 octaves, zero blocks, subnormals, values at every tie, one huge block."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 8 * BLOCK, generator=generator)
    x *= torch.exp2(torch.randint(-30, 31, (64, 8, 1), generator=generator)).expand(64, 8, BLOCK).reshape(64, -1)
    x[3] = 0
    x[4, :BLOCK] = 2.0**-133
    x[5, BLOCK : 2 * BLOCK] = 3e38
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(BLOCK)
    x[6] = ties
    x[7] = -ties * 2.0**-20
    return x.to(dtype)


@pytest.fixture(scope="module")
def quark_linears() -> dict[str, torch.nn.Module]:
    """The linears of the golden MXFP4 release as Transformers and Quark load them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Quark and its compiler warn; their warnings are not ours
        from transformers import Qwen3_5ForConditionalGeneration

        model = Qwen3_5ForConditionalGeneration.from_pretrained(GOLDEN / "release-mxfp4", dtype=torch.bfloat16)
    return {name: module for name, module in model.named_modules() if type(module).__name__ == "QParamsLinear"}


@pytest.fixture(scope="module")
def our_linears() -> dict[str, MXFP4Linear]:
    from clef_core.model import load_release

    backbone = load_release(GOLDEN / "release-mxfp4", linear_mode="packed").backbone
    return {name: module for name, module in backbone.named_modules() if isinstance(module, MXFP4Linear)}


@pytest.mark.filterwarnings("ignore")
def test_every_linear_equals_quark_bit_for_bit(quark_linears, our_linears):
    assert len(our_linears) == 31
    assert our_linears.keys() == quark_linears.keys()
    for name, ours in our_linears.items():
        generator = torch.Generator().manual_seed(len(name))
        spread = torch.exp(3 * torch.randn(ours.in_features, generator=generator))
        x = (torch.randn(2, 33, ours.in_features, generator=generator) * spread).bfloat16()
        x[0, 0] = 0
        wanted = quark_linears[name](x)
        assert torch.equal(ours(x), wanted), name
        expanded = MXFP4Linear(ours.in_features, ours.out_features)
        expanded.load_state_dict(ours.state_dict())
        expanded.expand(torch.bfloat16)
        assert torch.equal(expanded(x), wanted), name


@pytest.mark.filterwarnings("ignore")
def test_activations_are_rounded_as_quark_rounds_them(quark_linears):
    quantizer = next(iter(quark_linears.values())).input_quantizer
    for dtype in (torch.bfloat16, torch.float32):
        x = hostile(dtype)
        assert torch.equal(fake_quantize(x), quantizer(x))


@pytest.mark.filterwarnings("ignore")
def test_decoded_weights_equal_those_quark_multiplies_with(quark_linears, our_linears):
    """The identity is exact in MXFP4, so Quark's linear gives its decoded weight back."""
    for name, ours in our_linears.items():
        identity = torch.eye(ours.in_features, dtype=torch.bfloat16).unsqueeze(0)
        assert torch.equal(ours.decoded_weight(torch.bfloat16), quark_linears[name](identity)[0].T), name


def test_values_and_codes_agree():
    for code, value in enumerate(E2M1_VALUES):
        x = block(value, 4.0)
        assert quantize(x)[0][0] == code
