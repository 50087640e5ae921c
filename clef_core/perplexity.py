"""Perplexity of a release's backbone on a text: fixed windows, every token but the first of a window predicted.

The windows and the formula are those of the model card's WikiText-2 figure: 64 windows of 1,024 tokens from the start
of the text, no overlap. What surprises: a tokenised copy of WikiText-2 with `<unk>` gives other values than the raw
text, so values compare between variants on the same file, not with published ones.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from clef_core.errors import RequestError
from clef_core.model import Release
from clef_core.stats import mean

NUM_WINDOWS = 64
WINDOW_TOKENS = 1_024
_LOGIT_ROWS = 256  # rows of logits held at a time: with 248,320 words, 1,024 of them would be a gigabyte


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean negative log-likelihood per token in nats; the standard error is taken over windows."""

    value: float
    standard_error: float
    num_windows: int
    window_tokens: int


def windows_of(release: Release, text: str, num_windows: int, window_tokens: int) -> list[tuple[int, ...]]:
    """The first windows of a text as token ids.

    Raises:
        RequestError: the text is too short.
    """
    ids = release.tokenizer.encode_text(text)
    if len(ids) < num_windows * window_tokens:
        raise RequestError.at(
            (), f"the text has {len(ids):,} tokens; {num_windows} windows of {window_tokens:,} need more", "too_short"
        )
    return [tuple(ids[start : start + window_tokens]) for start in range(0, num_windows * window_tokens, window_tokens)]


@torch.inference_mode()
def token_log_probs(release: Release, window: Sequence[int]) -> Tensor:
    """Log-probability of each token of a window but the first, given those before it.

    Returns:
        float32 (T - 1,).
    """
    input_ids = torch.tensor([window], device=release.device)
    hidden = release.backbone.model.language_model(input_ids=input_ids, use_cache=False).last_hidden_state[0, :-1]
    targets = input_ids[0, 1:]
    found = []
    for start in range(0, len(hidden), _LOGIT_ROWS):
        logits = release.backbone.lm_head(hidden[start : start + _LOGIT_ROWS]).float()
        found.append(-F.cross_entropy(logits, targets[start : start + _LOGIT_ROWS], reduction="none"))
    return torch.cat(found)


def perplexity(
    release: Release,
    text: str,
    num_windows: int = NUM_WINDOWS,
    window_tokens: int = WINDOW_TOKENS,
    progress: Callable[[int], None] = lambda done: None,
) -> Perplexity:
    """Perplexity of the backbone through our own engine.

    Args:
        progress: hears how many windows are done.

    Raises:
        RequestError: the text is too short.
    """

    def losses() -> Iterator[float]:
        for done, window in enumerate(windows_of(release, text, num_windows, window_tokens), start=1):
            yield -float(token_log_probs(release, window).double().mean())
            progress(done)

    return summarise_losses(list(losses()), window_tokens)


def summarise_losses(losses: Sequence[float], window_tokens: int) -> Perplexity:
    """From the mean loss of each window in nats; the error of the exponential is the value times the mean's error."""
    found = mean(losses)
    value = math.exp(found.value)
    return Perplexity(value, value * found.standard_error, len(losses), window_tokens)
