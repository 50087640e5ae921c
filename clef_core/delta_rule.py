"""The gated delta rule over a whole sequence, laid out for CPUs: Transformers' results in well under half the time.

Each DeltaNet layer keeps one state S (K x V) per value head. A token lets it decay, replaces a share beta of what S
holds for its key by its value, and reads S with its query. The updates of a chunk of 64 tokens follow from one unit
lower triangular system. Here what depends on key heads alone is computed once for the value heads that share one,
chunks lie one behind the other in memory, and the systems are inverted in blocks instead of being solved one by one.
All of it in float32, without gradients.

What surprises: the order of sums differs from Transformers', so the last bits do; where a release must equal another
implementation bit for bit, Transformers' function is used.

Source: Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (the systems);
Yang et al. 2025, "Gated Delta Networks: Improving Mamba2 with Delta Rule".
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5

from clef_core.convolution import Convolution, causal_convolution

CHUNK = 64
"""Tokens whose updates are condensed into one triangular system."""

SMALL_BLOCK = 16
"""Systems of this size are inverted row by row, larger ones from their halves."""

NORM_EPSILON = 1e-6

NOTHING_LEFT = -46.0
"""Logarithm of a decay, about 1e-20, that leaves nothing which float32 would keep beside newer values."""

DeltaRule = Callable[..., tuple[Tensor, Tensor | None]]
"""Has the signature of Transformers' function; see `chunk_gated_delta_rule`."""


def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **unused: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run the gated delta rule; the signature is that of Transformers' function.

    Args:
        query, key: (B, T, key heads, key head dim).
        value: (B, T, value heads, value head dim); each key head serves value heads / key heads of them in a row.
        g: (B, T, value heads), logarithms of the decay, at most 0.
        beta: (B, T, value heads), how much of a new value is written, 0 to 1.
        initial_state: (B, value heads, key head dim, value head dim), or None for zeros.
        use_qk_l2norm_in_kernel: normalise queries and keys to length 1.
        unused: what only GPU kernels read.

    Returns:
        (B, T, value heads, value head dim) in the dtype of `query`, and the last state if it was asked for.
    """
    num_rows, num_tokens, _, key_dim = key.shape
    value_heads, value_dim = value.shape[-2:]
    group = value_heads // key.shape[-2]  # P = B * key heads; value heads are (P, group)
    q, k = (_chunked(x) for x in (query, key))
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON) for x in (q, k))
    v = _grouped(_chunked(value), group)
    strength, decay = (_grouped(_chunked(x.unsqueeze(-1)), group) for x in (beta, g))
    decay = decay.cumsum(-2)
    growth, to_end = _exp(decay.clone()), _exp(decay[..., -1:, :] - decay)

    q_and_k = torch.cat([q * key_dim**-0.5, k], -2)  # (chunks, P, 2 CHUNK, K)
    products = q_and_k @ k.transpose(-1, -2)
    pairwise = _exp((decay - decay.transpose(-1, -2)).tril_()).tril_()
    within = (products[..., :CHUNK, :].unsqueeze(2) * pairwise).flatten(1, 2)
    system = pairwise.mul_(products[..., CHUNK:, :].unsqueeze(2)).mul_(strength).flatten(1, 2)
    update = _inverse_of_unit_lower(system).mul_(strength.flatten(1, 2).transpose(-1, -2))

    state = value.new_zeros(q.shape[1], key_dim, group, value_dim, dtype=torch.float32)
    if initial_state is not None:
        state.copy_(initial_state.view(-1, group, key_dim, value_dim).transpose(1, 2))
    out = torch.empty_like(v)
    for i in range(len(out)):
        read = (q_and_k[i] @ state.flatten(2)).view(-1, 2 * CHUNK, group, value_dim)
        old = read.transpose(1, 2)  # (P, group, 2 CHUNK, V)
        surprise = torch.addcmul(v[i], growth[i], old[..., CHUNK:, :], value=-1)
        written = torch.bmm(update[i], surprise.flatten(0, 1))
        torch.mul(growth[i], old[..., :CHUNK, :], out=out[i])
        out[i].flatten(0, 1).baddbmm_(within[i], written)
        kept = (written.view_as(surprise) * to_end[i]).transpose(1, 2).flatten(2)
        state.mul_(growth[i, :, :, -1:].transpose(1, 2))
        state.flatten(2).baddbmm_(k[i].transpose(-1, -2), kept)
    y = out.view(-1, num_rows, value_heads, CHUNK, value_dim).permute(1, 0, 3, 2, 4)
    y = y.reshape(num_rows, -1, value_heads, value_dim)[:, :num_tokens].to(query.dtype)
    last = state.transpose(1, 2).reshape(num_rows, value_heads, key_dim, value_dim) if output_final_state else None
    return y, last


def _chunked(x: Tensor) -> Tensor:
    """(B, T, heads, D) to float32 (chunks, B * heads, CHUNK, D), the end filled with zeros."""
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % CHUNK))
    chunks = x.reshape(len(x), -1, CHUNK, *x.shape[2:]).permute(1, 0, 3, 2, 4)
    return chunks.to(torch.float32, memory_format=torch.contiguous_format).flatten(1, 2)


def _exp(decay: Tensor) -> Tensor:
    """exp in place, 0 where nothing is left: products with numbers near float32's smallest are many times slower."""
    return decay.masked_fill_(decay < NOTHING_LEFT, -torch.inf).exp_()


def _grouped(x: Tensor, group: int) -> Tensor:
    """(chunks, B * value heads, CHUNK, D) to (chunks, P, group, CHUNK, D)."""
    return x.view(len(x), -1, group, *x.shape[2:])


def _inverse_of_unit_lower(a: Tensor) -> Tensor:
    """Invert unit lower triangular matrices; a (..., CHUNK, CHUNK), whose diagonal and upper half are not read."""
    lead = a.shape[:-2]
    inverse = torch.zeros_like(a)
    blocks = CHUNK // SMALL_BLOCK
    diagonal = range(blocks)
    small = torch.stack([_block(a, i, i, SMALL_BLOCK) for i in diagonal], -3)
    solved = torch.zeros_like(small)
    solved.diagonal(dim1=-1, dim2=-2).fill_(1.0)
    for row in range(1, SMALL_BLOCK):
        solved[..., row, :row] = -(small[..., row : row + 1, :row] @ solved[..., :row, :row]).squeeze(-2)
    for i in diagonal:
        _block(inverse, i, i, SMALL_BLOCK).copy_(solved[..., i, :, :])
    size = SMALL_BLOCK
    while size < CHUNK:
        for i in range(0, CHUNK // size, 2):
            upper, lower = _block(inverse, i, i, size), _block(inverse, i + 1, i + 1, size)
            _block(inverse, i + 1, i, size).copy_(-(lower @ (_block(a, i + 1, i, size) @ upper)))
        size *= 2
    return inverse.view(*lead, CHUNK, CHUNK)


def _block(a: Tensor, row: int, column: int, size: int) -> Tensor:
    return a[..., row * size : (row + 1) * size, column * size : (column + 1) * size]


@contextmanager
def installed(
    rule: DeltaRule = chunk_gated_delta_rule, convolution: Convolution = causal_convolution
) -> Iterator[None]:
    """Let Transformers' DeltaNet layers call other functions than their own; in one thread at a time."""
    theirs = modeling_qwen3_5.torch_chunk_gated_delta_rule, modeling_qwen3_5.causal_conv1d_fn
    modeling_qwen3_5.torch_chunk_gated_delta_rule, modeling_qwen3_5.causal_conv1d_fn = rule, convolution
    try:
        yield
    finally:
        modeling_qwen3_5.torch_chunk_gated_delta_rule, modeling_qwen3_5.causal_conv1d_fn = theirs
