"""Weights to MXFP4 as a release stores them: packed codes and scale bytes, a few rows at a time.

The same rounding as `mxfp4.quantize`, two to three times as fast on a CPU, and equal to AMD Quark 0.13 bit for bit.
What surprises, because Quark does so when it writes weights (not when it rounds activations): a negative weight that
rounds to zero gets code 0, and no scale byte is below 1. That changes no value, except that a block whose largest
magnitude is below 1.75 * 2**-125 comes out twice as large, which no weight of a trained model is.
"""

import torch
from torch import Tensor

from clef_core.mxfp4 import (
    BLOCK,
    E2M1_MAX,
    E8M0_BIAS,
    dequantize,
    exponents_of,
    largest_bits,
    scale_values,
    unpack_codes,
)

PIECE_ELEMENTS = 1 << 20
"""Elements encoded at a time: enough to keep several cores busy, and temporaries of some 30 MB."""

MIN_SCALE = 1
"""The smallest scale byte that Quark writes."""

_OVERFLOW_SCALE = 254  # 2 * 2**127 is infinity
_E2M1_SHIFT = 22  # float32 has 23 bits of mantissa, E2M1 has one
_TO_E2M1_EXPONENT = 2.0**-126  # the bias of E2M1 is 1, that of float32 127


def encode_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round to MXFP4 and pack.

    Args:
        weight: bfloat16 (N, K), K divisible by 32, contiguous.

    Returns:
        codes uint8 (N, K / 2), two per byte, and scales uint8 (N, K / 32).

    Raises:
        ValueError: the weight is not bfloat16, K is not divisible by 32, or it holds NaN, infinity, or a value from
            1.75 * 2**127 on, which would round to infinity.
    """
    if weight.dtype != torch.bfloat16 or weight.shape[-1] % BLOCK:
        raise ValueError(f"a bfloat16 weight with K divisible by {BLOCK} is needed, got {weight.dtype} {weight.shape}")
    if not torch.isfinite(weight).all():
        raise ValueError("only finite values can be quantised to MXFP4")
    blocks = weight.float().view(weight.shape[0], -1, BLOCK)
    scales = (exponents_of(largest_bits(blocks)) + E8M0_BIAS).to(torch.uint8).unsqueeze(-1)
    if (scales == _OVERFLOW_SCALE).any():
        raise ValueError("values from 1.75 * 2**127 on would round to infinity")
    magnitude = (blocks * scale_values(2 * E8M0_BIAS - scales)).abs_().clamp_(max=E2M1_MAX)
    # An E2M1 value times 2**-126 has its code in the top bits of a float32, subnormals included. Half to even on the
    # bits below. Exact, because a bfloat16 magnitude that matters (0.25 and up) has all its bits within reach.
    bits = magnitude.mul_(_TO_E2M1_EXPONENT).view(torch.int32)
    codes = bits.add((bits >> _E2M1_SHIFT) & 1).add_((1 << (_E2M1_SHIFT - 1)) - 1) >> _E2M1_SHIFT
    is_negative = (blocks < 0).logical_and_(codes > 0)
    signed = codes.to(torch.uint8).add_(is_negative.to(torch.uint8) << 3)
    pairs = signed.view(weight.shape[0], -1).view(torch.int16)  # the even element is the low byte
    return (pairs | (pairs >> 4)).to(torch.uint8), scales.squeeze(-1).clamp_(min=MIN_SCALE)


def decode_weight(codes: Tensor, scales: Tensor) -> Tensor:
    """Decode what `encode_weight` returns to float32 (N, K)."""
    return dequantize(unpack_codes(codes), scales)
