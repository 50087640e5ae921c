"""What training minimises: smoothed cross-entropy and a Brier term per question, and a term for all labels at once.

The third one is cheap: the head's prior compares an option's mean output embedding with a summary of the state, and
that embedding is the same whatever else the prompt shows. So a record with three options of BANKING77 can be held
against all 77, and one that is cut before its options still teaches.
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
class SummaryTargets:
    """What the summaries of some records are held against: the options of their first question, or a whole label set.

    rows: places of those records in the batch, R of them. spans: of their first questions.
    bags: token ids of every distinct option. index: int64 (R, O), which bags are a record's options, -1 for none.
    places: int64 (R,), the right one among a record's options.
    lengths: int64 (R,), or None where records end with that span.
    """

    rows: Sequence[int]
    spans: Sequence[tuple[int, int]]
    bags: Sequence[tuple[int, ...]]
    index: Tensor
    places: Tensor
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


def question_summaries(normed: Tensor, targets: SummaryTargets) -> Tensor:
    """(R, D): means of `normed` (B, T, D) over the spans."""
    return torch.stack(
        [normed[row, start:end].mean(0) for row, (start, end) in zip(targets.rows, targets.spans, strict=True)]
    )


def summary_loss(normed: Tensor, targets: SummaryTargets, matrix: Tensor, scale: Tensor) -> Tensor:
    """Mean smoothed cross-entropy of the right options, told from summaries of the state alone.

    It is asked of the question's span, which cannot see the options, and of span and last token together, which is what
    the head compares.

    Args:
        normed: (B, T, D), hidden states after the head's first norm.
        matrix: (V, D), the output embeddings.
        scale: factor of the cosines.
    """
    offsets = torch.tensor([0, *(len(ids) for ids in targets.bags[:-1])]).cumsum(0)
    bags = F.embedding_bag(torch.tensor([id for ids in targets.bags for id in ids]), matrix, offsets, mode="mean")
    bags = F.normalize(bags, dim=-1)
    question = question_summaries(normed, targets)
    summaries = [question]
    if targets.lengths is not None:
        summaries.append(question + normed[targets.rows, targets.lengths - 1])
    exists = targets.index >= 0
    losses = []
    for summary in summaries:
        cosine = (F.normalize(summary, dim=-1) @ bags.T).gather(1, targets.index.clamp(min=0))
        log_probs = (scale * cosine).masked_fill(~exists, -torch.inf).log_softmax(-1)
        right = log_probs.gather(1, targets.places.unsqueeze(1)).squeeze(1)
        smooth = log_probs.masked_fill(~exists, 0.0).sum(-1) / exists.sum(-1)
        losses.append(-((1 - SMOOTHING) * right + SMOOTHING * smooth).mean())
    return torch.stack(losses).mean()
