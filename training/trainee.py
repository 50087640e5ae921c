"""The model in training: forward with losses, optimizer, learning rate, saving and restoring."""

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForConditionalGeneration

from clef_core.encoding import collate
from clef_core.joint_head import MAX_LOGIT_SCALE, HeadInputs, JointHead
from training.batches import Stream, SummaryBatch, TrainingBatch
from training.losses import SummaryTargets, question_loss, question_summaries, summary_loss

LEARNING_RATE = 1.5e-3
EMBEDDING_RATE = 0.3
"""Share of the learning rate for embeddings, so that words seen and words never seen stay comparable."""

WARM_UP_STEPS = 60
LAST_SHARE = 0.02
WEIGHT_DECAY = 0.01
SUMMARY_WEIGHT = 0.7
MEANING_WEIGHT = 3.0


@dataclass(frozen=True)
class StepResult:
    """Of one step: loss of the questions, loss of the summaries, share of questions answered right (NaN if none)."""

    loss: float
    summary_loss: float
    accuracy: float


@dataclass
class Trainee:
    """Backbone and head with what changes them; every group of the optimizers has its `share` of the learning rate."""

    backbone: Qwen3_5ForConditionalGeneration
    head: JointHead
    optimizers: Sequence[torch.optim.Optimizer]

    def parameters(self) -> Iterator[nn.Parameter]:
        yield from self.backbone.parameters()
        yield from self.head.parameters()

    def logits(self, batch: TrainingBatch) -> tuple[Tensor, Tensor, HeadInputs]:
        """Hidden states (B, T, D), logits (B, O) in float32, and where questions and options lie."""
        inputs = HeadInputs.from_encoded(batch.encoded, "cpu")
        collated = collate(batch.encoded, int(self.backbone.config.text_config.pad_token_id))
        mask = collated.attention_mask if bool((collated.attention_mask == 0).any()) else None
        with torch.autocast("cpu", torch.bfloat16):
            if collated.mm_token_type_ids is None:
                model = self.backbone.model.language_model
                output = model(input_ids=collated.input_ids, attention_mask=mask, use_cache=False)
            else:
                output = self.backbone.model(
                    input_ids=collated.input_ids,
                    attention_mask=mask,
                    mm_token_type_ids=collated.mm_token_type_ids,
                    use_cache=False,
                    **collated.pixels,
                )
            hidden = output.last_hidden_state
            logits = self.head(hidden, F.embedding(collated.input_ids, self.backbone.lm_head.weight), inputs)
        return hidden, logits.float(), inputs

    def step(self, batch: TrainingBatch | SummaryBatch, rate: float) -> StepResult:
        result = self._summary_losses(batch) if isinstance(batch, SummaryBatch) else self._losses(batch)
        loss, from_summary, accuracy = result
        torch.autograd.backward(loss + SUMMARY_WEIGHT * from_summary)
        change(self.parameters(), self.optimizers, rate)
        return StepResult(loss.item(), from_summary.item(), accuracy.item())

    def _losses(self, batch: TrainingBatch) -> tuple[Tensor, Tensor, Tensor]:
        hidden, logits, inputs = self.logits(batch)
        loss, accuracy = question_loss(logits, inputs, batch.targets)
        if batch.summary_targets is None:
            return loss, torch.zeros(()), accuracy
        return loss, self._summary_loss(hidden, batch.summary_targets), accuracy

    def _summary_losses(self, batch: SummaryBatch) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            model = self.backbone.model.language_model
            output = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
        hidden, targets = output.last_hidden_state, batch.summary_targets
        loss = self._summary_loss(hidden, targets)
        if batch.meanings is not None:
            normed = self.head.hidden_norm(hidden.float())
            distance = 1 - F.cosine_similarity(question_summaries(normed, targets), batch.meanings, dim=-1)
            loss = loss + MEANING_WEIGHT * distance.mean()
        return torch.zeros(()), loss, torch.tensor(torch.nan)

    def _summary_loss(self, hidden: Tensor, targets: SummaryTargets) -> Tensor:
        normed = self.head.hidden_norm(hidden.float())
        scale = self.head.prior_logit_scale.clamp(max=MAX_LOGIT_SCALE).exp()
        return summary_loss(normed, targets, self.backbone.lm_head.weight, scale)

    def save(self, path: Path, batches: Stream, step: int) -> None:
        """Write weights, optimizer, random states and the number of finished steps, all or nothing."""
        partial = path.with_suffix(".partial")
        modules = {"backbone": self.backbone.state_dict(), "head": self.head.state_dict()}
        optimizers = [one.state_dict() for one in self.optimizers]
        random_states = [rng.getstate() for rng in batches.random_streams()]
        torch.save({**modules, "optimizers": optimizers, "random": random_states, "step": step}, partial)
        os.replace(partial, path)

    def restore(self, path: Path, batches: Stream) -> int:
        """Load what `save` wrote and return the number of finished steps."""
        state = torch.load(path, weights_only=True)
        self.backbone.load_state_dict(state["backbone"])
        self.head.load_state_dict(state["head"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for rng, (version, words, gauss) in zip(batches.random_streams(), state["random"], strict=True):
            rng.setstate((version, tuple(words), gauss))
        return int(state["step"])


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to a small share."""
    if step < WARM_UP_STEPS:
        return LEARNING_RATE * (step + 1) / WARM_UP_STEPS
    done = min(1.0, (step - WARM_UP_STEPS) / max(1, steps - WARM_UP_STEPS))
    return LEARNING_RATE * (LAST_SHARE + (1 - LAST_SHARE) * 0.5 * (1 + math.cos(math.pi * done)))


def change(parameters: Iterable[nn.Parameter], optimizers: Sequence[torch.optim.Optimizer], rate: float) -> None:
    """Clip the gradients, let every optimizer step at its groups' shares of `rate`, and forget the gradients."""
    nn.utils.clip_grad_norm_(list(parameters), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate * group["share"]
        optimizer.step()
        optimizer.zero_grad()


def text_optimizer(parameters: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """AdamW, weight decay on matrices alone, embeddings slower."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in parameters:
        is_embedding = "embed_tokens" in name or "lm_head" in name
        decay = WEIGHT_DECAY if parameter.dim() >= 2 and not is_embedding else 0.0
        groups.setdefault((EMBEDDING_RATE if is_embedding else 1.0, decay), []).append(parameter)
    return adamw([(group, share, decay) for (share, decay), group in groups.items()])


def adamw(groups: Iterable[tuple[Sequence[nn.Parameter], float, float]]) -> torch.optim.Optimizer:
    """AdamW of parameters, each group with its share of the learning rate and its weight decay."""
    listed = [{"params": [*group], "weight_decay": decay, "share": share} for group, share, decay in groups]
    return torch.optim.AdamW(listed, lr=LEARNING_RATE, betas=(0.9, 0.98), fused=True)
