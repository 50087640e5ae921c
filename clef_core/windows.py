"""Windows of a text and the perplexity over them; where the log-probabilities come from is for others to know.

The windows are those of the model card's WikiText-2 figure: 64 windows of 1,024 tokens from the start of the text, no
overlap, every token but the first of a window predicted. Knows no torch. What surprises: a tokenised copy of WikiText-2
with `<unk>` gives other values than the raw text, so values compare on the same file, not with published ones.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from clef_core.errors import RequestError
from clef_core.stats import Mean, mean
from clef_core.tokens import PromptTokenizer

NUM_WINDOWS = 64
WINDOW_TOKENS = 1_024


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean negative log-likelihood per token in nats; the standard error is taken over windows.

    losses: the mean loss of each window in nats.
    """

    value: float
    standard_error: float
    num_windows: int
    window_tokens: int
    losses: tuple[float, ...]


def windows_of(
    tokenizer: PromptTokenizer, text: str, num_windows: int = NUM_WINDOWS, window_tokens: int = WINDOW_TOKENS
) -> list[tuple[int, ...]]:
    """The first windows of a text as token ids.

    Raises:
        RequestError: the text is too short.
    """
    ids = tokenizer.encode_text(text)
    if len(ids) < num_windows * window_tokens:
        raise RequestError.at(
            (), f"the text has {len(ids):,} tokens; {num_windows} windows of {window_tokens:,} need more", "too_short"
        )
    return [tuple(ids[start : start + window_tokens]) for start in range(0, num_windows * window_tokens, window_tokens)]


def summarise_losses(losses: Sequence[float], window_tokens: int) -> Perplexity:
    """From the mean loss of each window in nats; the error of the exponential is the value times the mean's error."""
    found = mean(losses)
    value = math.exp(found.value)
    return Perplexity(value, value * found.standard_error, len(losses), window_tokens, tuple(losses))


def perplexity_ratio(left: Perplexity, right: Perplexity) -> Mean:
    """right ÷ left with its standard error, window by window: much narrower than the errors of both values.

    Raises:
        ValueError: they are not over the same number of windows.
    """
    found = mean([b - a for a, b in zip(left.losses, right.losses, strict=True)])
    value = math.exp(found.value)
    return Mean(value, value * found.standard_error, found.n)
