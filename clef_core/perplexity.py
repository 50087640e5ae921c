"""Perplexity of a release's backbone on a text, through our own engine. The windows are `clef_core.windows`."""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from clef_core.encoding import Batch
from clef_core.model import Release
from clef_core.windows import Perplexity, summarise_losses

_LOGIT_ROWS = 256  # rows of logits held at a time: with 248,320 words, 1,024 of them would be a gigabyte


@torch.inference_mode()
def token_log_probs(release: Release, window: Sequence[int]) -> Tensor:
    """Log-probability of each token of a window but the first, given those before it.

    Returns:
        float32 (T - 1,).
    """
    input_ids = torch.tensor([window])
    batch = Batch(input_ids, torch.ones_like(input_ids), None, {}, torch.tensor([len(window)]))
    hidden = release.hidden_states(batch)[0, :-1]
    targets = input_ids[0, 1:].to(release.device)
    found = []
    for start in range(0, len(hidden), _LOGIT_ROWS):
        logits = release.backbone.lm_head(hidden[start : start + _LOGIT_ROWS]).float()
        found.append(-F.cross_entropy(logits, targets[start : start + _LOGIT_ROWS], reduction="none"))
    return torch.cat(found)


def perplexity(
    release: Release, windows: Sequence[Sequence[int]], progress: Callable[[int], None] = lambda done: None
) -> Perplexity:
    """Perplexity of the backbone over windows of token ids, all of one length.

    Args:
        progress: hears how many windows are done.
    """

    def losses() -> Iterator[float]:
        for done, window in enumerate(windows, start=1):
            yield -float(token_log_probs(release, window).double().mean())
            progress(done)

    return summarise_losses(list(losses()), len(windows[0]))
