"""What training minimises: smoothed cross-entropy and a Brier term per question, and a term for all labels at once.

The third one costs no tokens: the head's prior compares an option's mean output embedding with the state's summary, and
that embedding is the same whatever else the prompt shows. So a record with three options of BANKING77 can be held
against all 77.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from clef_core.encoding import EncodedRequest
from clef_core.joint_head import HeadInputs, option_log_probs

SMOOTHING = 0.05
BRIER_WEIGHT = 0.5


@dataclass(frozen=True)
class PoolInputs:
    """What the label pools need of a batch.

    pools: per record the name of the label set it comes from and the place of its label there, or None.
    question_spans: of each record's first question. lengths: int64 (B,), or None where records end at that span.
    """

    pools: Sequence[tuple[str, int] | None]
    question_spans: Sequence[tuple[int, int]]
    lengths: Tensor | None


def targets_of(encoded: Sequence[EncodedRequest], labels: Sequence[Mapping[str, str]]) -> Tensor:
    """int64 (B, Q): the right options' places among the options of their record; 0 where it has fewer questions."""
    rows = []
    for one, right in zip(encoded, labels, strict=True):
        row, offset = [], 0
        for question in one.questions:
            row.append(offset + [option.id for option in question.options].index(right[question.id]))
            offset += len(question.options)
        rows.append(torch.tensor(row))
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def question_loss(logits: Tensor, inputs: HeadInputs, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Mean loss over the questions of a batch, and how many of them were answered right (a share).

    Args:
        logits: (B, O).
        targets: from `targets_of`.
    """
    log_probs = option_log_probs(logits, inputs)
    mask, member = inputs.question_mask, inputs.membership()  # (B, Q), (B, Q, O)
    per_question = log_probs.unsqueeze(1).masked_fill(~member, 0.0)
    right = log_probs.gather(1, targets)
    smooth = per_question.sum(-1) / member.sum(-1).clamp(min=1)
    cross_entropy = -(1 - SMOOTHING) * right - SMOOTHING * smooth
    is_right = F.one_hot(targets, logits.shape[1]).to(log_probs.dtype)
    brier = ((per_question.exp() - is_right).square() * member).sum(-1)
    loss = ((cross_entropy + BRIER_WEIGHT * brier) * mask).sum() / mask.sum()
    best = log_probs.unsqueeze(1).masked_fill(~member, -torch.inf).argmax(-1)
    return loss, ((best == targets) & mask).sum() / mask.sum()


class LabelPools:
    """The labels of each intent data set as the tokens of their options."""

    def __init__(self, option_ids: Mapping[str, Sequence[Sequence[int]]]) -> None:
        self._ids = {name: torch.tensor([i for ids in rows for i in ids]) for name, rows in option_ids.items()}
        self._offsets = {
            name: torch.tensor([0, *(len(ids) for ids in rows[:-1])]).cumsum(0) for name, rows in option_ids.items()
        }

    def loss(self, normed: Tensor, inputs: PoolInputs, matrix: Tensor, scale: Tensor) -> Tensor:
        """Mean cross-entropy of each record's label among all labels of its pool; 0 when no record has one.

        It is asked of the first question's span alone, which cannot see the options, and of span and last token
        together, which is what the head compares.

        Args:
            normed: (B, T, D), hidden states after the head's first norm.
            matrix: (V, D), the output embeddings.
            scale: factor of the cosines.
        """
        losses = []
        for name in self._ids:
            rows = [row for row, pool in enumerate(inputs.pools) if pool is not None and pool[0] == name]
            if not rows:
                continue
            options = F.embedding_bag(self._ids[name], matrix, self._offsets[name], mode="mean")
            question = torch.stack([normed[row, slice(*inputs.question_spans[row])].mean(0) for row in rows])
            summaries = [question]
            if inputs.lengths is not None:
                summaries.append(question + normed[rows, inputs.lengths[rows] - 1])
            places = torch.tensor([pool[1] for row in rows if (pool := inputs.pools[row]) is not None])
            for summary in summaries:
                cosine = F.normalize(summary, dim=-1) @ F.normalize(options, dim=-1).T
                weight = len(rows) / len(summaries)
                losses.append(F.cross_entropy(scale * cosine, places, label_smoothing=SMOOTHING) * weight)
        count = sum(pool is not None for pool in inputs.pools)
        return torch.stack(losses).sum() / count if losses else normed.new_zeros(())
