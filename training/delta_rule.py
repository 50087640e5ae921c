"""The gated delta rule with gradients, which the engine's own (`clef_core.delta_rule`) does without.

In short chunks, as most records of training are short, with one solve per chunk for values and keys together.
`tests/test_training.py` compares it with Transformers'.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clef_core.delta_rule import installed

CHUNK = 32
"""Tokens per chunk. Shorter than Transformers' 64: most records of training are short, and less of them is padding."""


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any
) -> tuple[Tensor, Tensor | None]:
    """Run the rule over whole sequences from an empty state.

    Args:
        query, key: (B, T, key heads, K). value: (B, T, value heads, V).
        g: (B, T, value heads), logarithm of the decay. beta: (B, T, value heads), strength of the update.

    Returns:
        (B, T, value heads, V), and None in place of the state, which training does not keep.
    """
    length, groups = query.shape[1], value.shape[2] // query.shape[2]
    query = _normalised(query).repeat_interleave(groups, dim=2) * query.shape[-1] ** -0.5
    key = _normalised(key).repeat_interleave(groups, dim=2)
    padding = -length % CHUNK
    query, key, value = (_chunks(F.pad(x.float(), (0, 0, 0, 0, 0, padding))) for x in (query, key, value))
    beta, decay = (_chunks(F.pad(x.float(), (0, 0, 0, padding)).unsqueeze(-1)).squeeze(-1) for x in (beta, g))

    decay = decay.cumsum(-1)  # (B, H, chunks, C)
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    pairwise = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(~causal, -torch.inf).exp()
    weighted_key = key * beta.unsqueeze(-1)
    system = (weighted_key @ key.transpose(-1, -2) * pairwise).tril(-1) + torch.eye(CHUNK)
    right = torch.cat((value * beta.unsqueeze(-1), weighted_key * decay.exp().unsqueeze(-1)), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new_values, key_decayed = solved.split((value.shape[-1], key.shape[-1]), dim=-1)
    within = query @ key.transpose(-1, -2) * pairwise
    query = query * decay.exp().unsqueeze(-1)
    key = key * (decay[..., -1:] - decay).exp().unsqueeze(-1)
    carried = decay[..., -1].exp()

    state = query.new_zeros(*query.shape[:2], key.shape[-1], value.shape[-1])
    outputs = []
    for chunk in range(query.shape[2]):
        updated = new_values[:, :, chunk] - key_decayed[:, :, chunk] @ state
        outputs.append(query[:, :, chunk] @ state + within[:, :, chunk] @ updated)
        state = state * carried[:, :, chunk, None, None] + key[:, :, chunk].transpose(-1, -2) @ updated
    return torch.cat(outputs, dim=2)[:, :, :length].transpose(1, 2), None


def _normalised(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _chunks(x: Tensor) -> Tensor:
    """(B, T, H, F) to (B, H, chunks, C, F)."""
    batch, length, heads, features = x.shape
    return x.transpose(1, 2).reshape(batch, heads, length // CHUNK, CHUNK, features)


def causal_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    """Each channel convolved with its own short kernel, as shifted products: their gradients are cheap on a CPU.

    Args:
        x: (B, channels, T). weight: (channels, K). bias: None, as these layers have none. activation: "silu".

    Returns:
        (B, channels, T).
    """
    assert bias is None
    assert activation == "silu"
    length, width = x.shape[-1], weight.shape[-1]
    padded = F.pad(x, (width - 1, 0))
    kernel = weight.to(x.dtype)
    total = padded[..., :length] * kernel[:, :1]
    for place in range(1, width):
        total = total + padded[..., place : place + length] * kernel[:, place : place + 1]
    return F.silu(total)


@contextmanager
def trainable_layers() -> Iterator[None]:
    """Let Transformers' DeltaNet layers call both functions of this module."""
    with installed(delta_rule, causal_convolution):
        yield
