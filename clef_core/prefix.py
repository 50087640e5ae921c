"""Computes the tokens with which all records of a micro-batch begin once instead of once per record.

Every prompt begins with the same system turn, and requests about the same state go on alike until their questions. The
backbone is causal, so what it makes of such a beginning (hidden states, keys and values, the states of DeltaNet) holds
for every record. Knows Transformers' cache and no release.

What surprises: the beginning is cut where a chunk of the delta rule ends. Cut elsewhere, DeltaNet adds in another order
and the last bits move; so cut, they nearly never do.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from clef_core.delta_rule import CHUNK

MIN_SAVED = 0.3
"""Share of the padded tokens that must be saved for the second pass over the layers to pay."""


def num_shared_tokens(input_ids: Tensor, attention_mask: Tensor) -> int:
    """How many leading tokens to compute once; 0 where that would not pay.

    Args:
        input_ids, attention_mask: int64 (B, T), padded on the right.

    Returns:
        a multiple of `CHUNK` below the shortest record's number of tokens.
    """
    num_rows, num_tokens = input_ids.shape
    num_equal = int((input_ids == input_ids[0]).all(0).long().cumprod(0).sum())
    shortest = int(attention_mask.sum(1).min())
    shared = min(num_equal, shortest - 1) // CHUNK * CHUNK
    return shared if (num_rows - 1) * shared >= MIN_SAVED * num_rows * num_tokens else 0


def run_after_prefix(model: Any, input_ids: Tensor, attention_mask: Tensor | None, num_shared: int) -> Tensor:
    """The final hidden states (B, T, D), equal but for rounding to those of `model(input_ids, attention_mask)`.

    Args:
        model: a text model of Transformers.
        input_ids: int64 (B, T), alike in the first `num_shared` tokens.
        attention_mask: int64 (B, T), or None where nothing is padded.
    """
    num_rows = len(input_ids)
    cache = DynamicCache(config=model.config)
    shared = model(input_ids=input_ids[:1, :num_shared], use_cache=True, cache=cache).last_hidden_state
    cache.reorder_cache(torch.zeros(num_rows, dtype=torch.int64, device=input_ids.device))  # the only row, repeated
    own = model(
        input_ids=input_ids[:, num_shared:], attention_mask=attention_mask, use_cache=True, cache=cache
    ).last_hidden_state
    return torch.cat([shared.expand(num_rows, -1, -1), own], 1)
