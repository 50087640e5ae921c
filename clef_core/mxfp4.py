"""MXFP4 arithmetic in plain torch: E2M1 elements, one E8M0 scale per block of 32 along the input dimension.

Bit-identical to AMD Quark 0.13 (`even` scale rounding, half-to-even elements); the tests hold Quark beside it. Knows no
model and no file. What surprises: the scale of a block whose largest magnitude has a mantissa of 1.75 or more
is the next power of two, so that the largest element is rounded down to 4 instead of saturating at 6.

Source: OCP Microscaling Formats (MX) Specification v1.0, 5.3.3 (E2M1), 5.4.1 (E8M0), 6.3 (conversion).
"""

from functools import cache

import torch
from torch import Tensor

BLOCK = 32
"""Consecutive values along the input dimension that share one scale."""

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Value of each 4-bit code; bit 3 is the sign."""

E2M1_MAX = 6.0
E2M1_MAX_EXPONENT = 2  # 6 = 1.5 * 2**2
E8M0_BIAS = 127
E8M0_NAN = 255


def unpack_codes(packed: Tensor) -> Tensor:
    """Split bytes into E2M1 codes.

    Args:
        packed: uint8 (..., K / 2). Element 2i is the low nibble of byte i, element 2i + 1 the high one.

    Returns:
        uint8 (..., K), each 0 to 15.
    """
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def pack_codes(codes: Tensor) -> Tensor:
    """Join two E2M1 codes per byte, the inverse of `unpack_codes`.

    Args:
        codes: uint8 (..., K), each 0 to 15, K even.

    Returns:
        uint8 (..., K / 2).
    """
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def scale_values(scales: Tensor) -> Tensor:
    """Decode E8M0 bytes to float32 powers of two.

    Args:
        scales: uint8, any shape. s means 2**(s - 127); 255 means NaN.

    Returns:
        float32 of the same shape. 2**-127 (s = 0) is a float32 subnormal and is exact.
    """
    table = torch.exp2(torch.arange(256, dtype=torch.float64) - E8M0_BIAS).float()
    table[E8M0_NAN] = torch.nan
    return table.to(scales.device)[scales.long()]


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """Decode MXFP4 to float32.

    Args:
        codes: uint8 (..., K). One E2M1 code, 0 to 15, per element (unpacked).
        scales: uint8 (..., K // 32). E8M0: s means 2**(s - 127), 255 means NaN.

    Returns:
        float32 (..., K).

    Raises:
        ValueError: the shapes do not belong together.

    Source: OCP Microscaling Formats (MX) v1.0, 5.3.3 (E2M1) and 5.4.1 (E8M0).
    """
    if codes.shape[-1] != scales.shape[-1] * BLOCK or codes.shape[:-1] != scales.shape[:-1]:
        raise ValueError(f"codes {tuple(codes.shape)} need one scale per {BLOCK} elements, got {tuple(scales.shape)}")
    elements = torch.tensor(E2M1_VALUES, device=codes.device)[codes.long()]
    blocks = elements.view(*scales.shape, BLOCK) * scale_values(scales).unsqueeze(-1)
    return blocks.flatten(-2)


class Decoder:
    """Decodes packed MXFP4 into memory that it keeps: the result of one call is gone with the next.

    Fresh memory costs a CPU more than the decoding.
    """

    def __init__(self) -> None:
        self._index = self._pairs = torch.empty(0)

    def __call__(self, packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Equal to `dequantize(unpack_codes(packed), scales)`, ten times faster: a byte's two elements are one entry.

        Args:
            packed: uint8 (N, K / 2), two codes per byte.
            scales: uint8 (N, K / 32).
            dtype: float32 or bfloat16; both hold MXFP4 values exactly.

        Returns:
            `dtype` (N, K).
        """
        pair_of_byte, value_of_scale = _decoding_tables(dtype, packed.device)
        self._keep_room(packed.numel(), pair_of_byte)
        index, pairs = self._index[: packed.numel()], self._pairs[: packed.numel()]
        index.copy_(packed.flatten())
        torch.index_select(pair_of_byte, 0, index, out=pairs)
        blocks = pairs.view(dtype).view(*scales.shape, BLOCK)
        return blocks.mul_(value_of_scale[scales.int()].unsqueeze(-1)).flatten(-2)

    def _keep_room(self, num_bytes: int, like: Tensor) -> None:
        kept = self._pairs
        if len(kept) < num_bytes or (kept.dtype, kept.device) != (like.dtype, like.device):
            self._index = self._pairs = torch.empty(0)
            with torch.inference_mode(False):  # what is made inside it cannot be written outside
                self._index = torch.empty(num_bytes, dtype=torch.int32, device=like.device)
                self._pairs = torch.empty(num_bytes, dtype=like.dtype, device=like.device)


@cache
def _decoding_tables(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """The two elements of each byte as one integer of their size together; each scale byte's value in `dtype`."""
    codes = unpack_codes(torch.arange(256, dtype=torch.uint8).unsqueeze(-1))
    pairs = torch.tensor(E2M1_VALUES, dtype=dtype)[codes.long()]
    integer = torch.int32 if dtype == torch.bfloat16 else torch.int64
    scales = scale_values(torch.arange(256, dtype=torch.uint8)).to(dtype)
    return pairs.view(integer).flatten().to(device), scales.to(device)


def power_of_two(exponents: Tensor) -> Tensor:
    """2**e in float32 for int32 e from -127 to 127, made from its bits: many times faster than `torch.ldexp`."""
    return torch.where(exponents == -127, 1 << 22, (exponents + 127) << 23).view(torch.float32)


def largest_bits(blocks: Tensor) -> Tensor:
    """The largest magnitude of each block, float32 or bfloat16 (..., 32): int32 (...), the bits of a float32."""
    return blocks.float().abs().amax(-1).view(torch.int32)


def exponents_of(largest: Tensor) -> Tensor:
    """Choose each block's power of two by `even` rounding, from the bits of its largest magnitude.

    Returns:
        int32 of the same shape, -127 to 127. An all-zero or subnormal block gets -127, one with infinity or NaN 127.
    """
    biased = (largest.clamp(max=0x7F800000) + (1 << 21)) >> 23  # a carry raises the exponent: 1.75 and up round to 2
    exponents = biased - E8M0_BIAS - E2M1_MAX_EXPONENT
    return torch.where(biased == 255, 127, exponents).clamp(min=-127)


def round_to_e2m1(v: Tensor) -> Tensor:
    """Round to the nearest E2M1 value, ties to even, magnitudes above 6 saturating.

    Args:
        v: float32, any shape.

    Returns:
        float32 of the same shape, each one of `E2M1_VALUES`, the sign of zero kept.
    """
    magnitude = v.abs().clamp(max=E2M1_MAX)
    # A float32 has no finer step than 0.5 from 2**22 on, 1 from 2**23, 2 from 2**24: adding such a number rounds.
    rounder = torch.where(magnitude < 2, 1.5 * 2**22, torch.where(magnitude < 4, 1.5 * 2**23, 1.5 * 2**24))
    return torch.copysign((magnitude + rounder) - rounder, v)


def octaves_in_rows(largest: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """How far the blocks of each row lie apart.

    Args:
        largest: int32 (R, K / 32), of `largest_bits`.

    Returns:
        exponents int32 (R, K / 32); base int32 (R,), the largest exponent of the row's blocks that are not zero, 0 for
        a row of zeros; down int32 (R, K / 32), octaves below the base; deepest int32 (R,), the largest of them among
        blocks that are not zero.
    """
    exponents = exponents_of(largest)
    base = torch.where(largest > 0, exponents, -1000).amax(-1)
    base = torch.where(base == -1000, 0, base)
    down = base.unsqueeze(-1) - exponents
    return exponents, base, down, torch.where(largest > 0, down, 0).amax(-1)


def lifted_elements(blocks: Tensor, exponents: Tensor, down: Tensor, top: int, octaves: int) -> Tensor:
    """E2M1 values times 2**(top - down) where `down` is 0 to octaves - 1, and 0 elsewhere.

    Args:
        blocks: float32 or bfloat16 (R, K / 32, 32).
        exponents, down: int32 (R, K / 32), of `octaves_in_rows`.

    Returns:
        float32 (R, K / 32, 32).
    """
    is_near = (down >= 0) & (down < octaves)
    factor = torch.where(is_near, power_of_two(top - down.clamp(0, octaves)), 0.0)
    return round_to_e2m1(blocks.float() * power_of_two(-exponents).unsqueeze(-1)) * factor.unsqueeze(-1)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Encode to MXFP4.

    Args:
        x: float32 or bfloat16 (..., K), K divisible by 32, finite.

    Returns:
        codes uint8 (..., K) (unpacked) and scales uint8 (..., K // 32).

    Raises:
        ValueError: K is not divisible by 32, or x holds NaN or infinity.
    """
    if not torch.isfinite(x).all():
        raise ValueError("only finite values can be quantised to MXFP4")
    blocks = _blocks(x)
    exponents = exponents_of(largest_bits(blocks))
    rounded = round_to_e2m1(blocks.float() * power_of_two(-exponents).unsqueeze(-1))
    twice = (rounded.abs() * 2).to(torch.int64)  # 0, 1, 2, 3, 4, 6, 8 or 12
    code_of_twice = torch.zeros(13, dtype=torch.uint8, device=x.device)
    code_of_twice[[int(2 * value) for value in E2M1_VALUES[:8]]] = torch.arange(8, dtype=torch.uint8, device=x.device)
    codes = code_of_twice[twice] | (torch.signbit(rounded).to(torch.uint8) << 3)
    return codes.flatten(-2), (exponents + E8M0_BIAS).to(torch.uint8)


def fake_quantize(x: Tensor) -> Tensor:
    """Round to MXFP4 and back: what the weights of a 4-bit linear meet at run time.

    Args:
        x: float32 or bfloat16 (..., K), K divisible by 32. NaN stays NaN (its whole block becomes NaN).

    Returns:
        the same shape and dtype; every value is exact in bfloat16.

    Raises:
        ValueError: K is not divisible by 32.
    """
    blocks = _blocks(x)
    return round_blocks(blocks, exponents_of(largest_bits(blocks))).view(x.shape)


def round_blocks(blocks: Tensor, exponents: Tensor) -> Tensor:
    """Round (..., 32) to E2M1 values times 2**exponents (...,), same shape and dtype."""
    scaled = round_to_e2m1(blocks.float() * power_of_two(-exponents).unsqueeze(-1))
    return (scaled * power_of_two(exponents).unsqueeze(-1)).to(blocks.dtype)


def _blocks(x: Tensor) -> Tensor:
    if x.shape[-1] % BLOCK:
        raise ValueError(f"the last dimension must be divisible by {BLOCK}, got shape {tuple(x.shape)}")
    return x.reshape(*x.shape[:-1], -1, BLOCK)
