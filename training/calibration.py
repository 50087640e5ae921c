"""One temperature for all answers, found on held-out records and folded into the head, which has none of its own."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from clef_core.joint_head import HeadInputs, JointHead, option_log_probs

TEMPERATURES = tuple(1.05**power for power in range(-16, 17))


@torch.no_grad()
def best_temperature(scored: Sequence[tuple[Tensor, HeadInputs, Tensor]]) -> float:
    """The temperature of least mean negative log-likelihood per question.

    Args:
        scored: logits (B, O), inputs and targets of each batch.
    """

    def loss(temperature: float) -> float:
        total, count = 0.0, 0
        for logits, inputs, targets in scored:
            right = option_log_probs(logits / temperature, inputs).gather(1, targets)
            total -= float(right[inputs.question_mask].sum())
            count += int(inputs.question_mask.sum())
        return total / count

    return min(TEMPERATURES, key=loss)


@torch.no_grad()
def fold_temperature(head: JointHead, temperature: float) -> None:
    """Divide every logit that the head gives by `temperature`: all three of its terms are linear in what changes."""
    shift = torch.tensor(temperature).log()
    head.prior_logit_scale.sub_(shift)
    head.joint_logit_scale.sub_(shift)
    last = head.residual_scorer[3]
    assert isinstance(last, nn.Linear)
    last.weight.div_(temperature)
    last.bias.div_(temperature)
