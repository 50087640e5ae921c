"""DeltaNet's convolution against Transformers' own: the same bits, however long the sequence."""

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import causal_conv1d_fn

from clef_core.convolution import PIECE, causal_convolution


@pytest.mark.parametrize("num_tokens", [1, 2, 3, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 2])
@pytest.mark.parametrize(("num_rows", "is_turned"), [(1, True), (3, True), (2, False)])
def test_every_bit_is_transformers_own(num_tokens: int, num_rows: int, is_turned: bool) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_rows, num_tokens, 96, generator=generator).bfloat16().transpose(1, 2)
    x = x if is_turned else x.contiguous()
    weight = torch.randn(96, 4, generator=generator).bfloat16()
    with torch.inference_mode():
        ours, theirs = (convolve(x, weight, None, "silu") for convolve in (causal_convolution, causal_conv1d_fn))
    assert (ours.shape, ours.dtype) == (x.shape, x.dtype)
    assert torch.equal(ours, theirs)


def test_a_bias_no_activation_and_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((2, 32, 90), (32, 4), (32,)))
    expected = causal_conv1d_fn(x, weight, bias)
    torch.testing.assert_close(causal_convolution(x, weight, bias), expected, rtol=1e-6, atol=1e-6)
