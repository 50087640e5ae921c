"""The joint schema head: from the backbone's hidden states to one logit per allowed option.

All options of a question, all questions of a record and all records of a micro-batch are computed together: spans
become rows of averaging matrices, the options of a record one padded sequence, and membership a mask. There is no
Python loop over records, questions or options in `forward`. Parameter names are those of `joint_head.safetensors`.

Runs in float32 by default, whatever the backbone's dtype: it is small, and near ties then do not hang on its rounding.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from clef_core.encoding import EncodedRequest
from clef_core.errors import ReleaseError

TYPE_NUMBERS = {"noul": 0, "choice": 1, "score": 2}
"""Row of `type_embedding` for each question type."""

MAX_LOGIT_SCALE = math.log(100.0)


@dataclass(frozen=True)
class JointHeadConfig:
    """`joint_head_config.json`: D, W and the numbers of layers, heads and feed-forward features."""

    hidden_size: int
    width: int
    routing_layers: int
    layers: int
    heads: int
    feedforward: int

    @classmethod
    def from_release(cls, path: Path) -> "JointHeadConfig":
        file = path / "joint_head_config.json"
        try:
            loaded = json.loads(file.read_text(encoding="utf-8"))
            return cls(**{name: int(loaded[name]) for name in cls.__dataclass_fields__})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ReleaseError(f"{file}: not a joint head configuration: {error!r}") from error


@dataclass(frozen=True)
class HeadInputs:
    """Where the questions and options of a micro-batch lie. Padding has empty spans (0, 0) and a false mask.

    lengths: int64 (B,), tokens of each record.
    question_spans: int64 (B, Q, 2); question_types: int64 (B, Q); question_mask: bool (B, Q).
    option_spans: int64 (B, O, 2); option_question: int64 (B, O), index of its question; option_mask: bool (B, O).
    """

    lengths: Tensor
    question_spans: Tensor
    question_types: Tensor
    question_mask: Tensor
    option_spans: Tensor
    option_question: Tensor
    option_mask: Tensor

    @classmethod
    def from_encoded(cls, encoded: Sequence[EncodedRequest], device: torch.device | str) -> "HeadInputs":
        """Gather the spans of encoded requests, options of a record one after the other in question order."""
        questions = [[(*q.span, TYPE_NUMBERS[q.type]) for q in one.questions] for one in encoded]
        options = [[(*o.span, n) for n, q in enumerate(one.questions) for o in q.options] for one in encoded]
        question_rows, question_mask = _pad(questions, device)
        option_rows, option_mask = _pad(options, device)
        return cls(
            lengths=torch.tensor([len(one.input_ids) for one in encoded], device=device),
            question_spans=question_rows[..., :2],
            question_types=question_rows[..., 2],
            question_mask=question_mask,
            option_spans=option_rows[..., :2],
            option_question=option_rows[..., 2],
            option_mask=option_mask,
        )

    def membership(self) -> Tensor:
        """bool (B, Q, O): which options belong to which question."""
        numbers = torch.arange(self.question_mask.shape[1], device=self.question_mask.device).view(1, -1, 1)
        return (self.option_question.unsqueeze(1) == numbers) & self.option_mask.unsqueeze(1)


def _pad(rows: Sequence[Sequence[tuple[int, int, int]]], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Pad lists of triples to int64 (B, longest, 3) and say which are real in bool (B, longest)."""
    padded = nn.utils.rnn.pad_sequence([torch.tensor(one) for one in rows], batch_first=True)
    counts = torch.tensor([len(one) for one in rows])
    mask = torch.arange(padded.shape[1]) < counts.unsqueeze(1)
    return padded.to(device), mask.to(device)


class EvidenceLayer(nn.Module):
    """Options look up their evidence in the record's tokens."""

    def __init__(self, width: int, heads: int, feedforward: int) -> None:
        super().__init__()
        self.query_norm = nn.LayerNorm(width)
        self.memory_norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.feedforward_norm = nn.LayerNorm(width)
        self.feedforward = nn.Sequential(
            nn.Linear(width, feedforward), nn.GELU(), nn.Identity(), nn.Linear(feedforward, width), nn.Identity()
        )

    def forward(self, routed: Tensor, memory: Tensor, memory_padding: Tensor) -> Tensor:
        evidence = self.memory_norm(memory)
        attended, _ = self.attention(
            self.query_norm(routed), evidence, evidence, key_padding_mask=memory_padding, need_weights=False
        )
        routed = routed + attended
        fed: Tensor = self.feedforward(self.feedforward_norm(routed))
        return routed + fed


class JointHead(nn.Module):
    """Scores every option of every question of a record jointly."""

    def __init__(self, config: JointHeadConfig) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.width
        self.config = config
        self.hidden_norm = nn.LayerNorm(hidden)
        self.memory_projection = nn.Linear(hidden, width, bias=False)
        self.question_projection = nn.Linear(hidden, width, bias=False)
        self.option_question_projection = nn.Linear(hidden, width, bias=False)
        self.global_projection = nn.Linear(hidden, width, bias=False)
        self.option_context_projection = nn.Linear(hidden, width, bias=False)
        self.option_lexical_projection = nn.Linear(hidden, width, bias=False)
        self.type_embedding = nn.Embedding(len(TYPE_NUMBERS), width)
        self.evidence_layers = nn.ModuleList(
            EvidenceLayer(width, config.heads, config.feedforward) for _ in range(config.routing_layers)
        )
        self.option_summary_norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(
            nn.TransformerDecoderLayer(
                width, config.heads, config.feedforward, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(config.layers)
        )
        self.field_norm = nn.LayerNorm(width)
        self.option_norm = nn.LayerNorm(width)
        self.residual_scorer = nn.Sequential(nn.Linear(4 * width, width), nn.GELU(), nn.Identity(), nn.Linear(width, 1))
        self.prior_logit_scale = nn.Parameter(torch.zeros(()))
        self.joint_logit_scale = nn.Parameter(torch.zeros(()))
        self.residual_gate = nn.Parameter(torch.zeros(()))

    def forward(self, hidden_states: Tensor, embeddings: Tensor, inputs: HeadInputs) -> Tensor:
        """Score the options of a micro-batch.

        Args:
            hidden_states: (B, T, D), the backbone's output after its last norm; padding may hold anything finite.
            embeddings: (B, T, D), row of the output embedding (lm_head) for each input token.
            inputs: where questions and options lie.

        Returns:
            float logits (B, O); values at padding options mean nothing.
        """
        dtype = self.hidden_norm.weight.dtype
        hidden = self.hidden_norm(hidden_states.to(dtype))
        embeddings = embeddings.to(dtype)
        num_tokens = hidden.shape[1]
        padding = torch.arange(num_tokens, device=hidden.device) >= inputs.lengths.unsqueeze(1)

        memory = self.memory_projection(hidden)
        last = hidden[torch.arange(len(hidden), device=hidden.device), inputs.lengths - 1].unsqueeze(1)  # (B, 1, D)
        question = _span_means(inputs.question_spans, num_tokens, dtype) @ hidden  # (B, Q, D)
        option_means = _span_means(inputs.option_spans, num_tokens, dtype)
        context = option_means @ hidden  # (B, O, D)
        lexical = option_means @ embeddings

        def of_question(per_question: Tensor) -> Tensor:
            """Spread (B, Q, …) over the options (B, O, …)."""
            index = inputs.option_question.unsqueeze(-1).expand(-1, -1, per_question.shape[-1])
            return per_question.gather(1, index)

        routed = (
            self.option_context_projection(context)
            + self.option_lexical_projection(lexical)
            + of_question(self.option_question_projection(question))
        )
        for layer in self.evidence_layers:
            routed = layer(routed, memory, padding)

        base = self.question_projection(question)  # (B, Q, W)
        is_member = inputs.membership()
        scores = base @ routed.transpose(1, 2) / math.sqrt(self.config.width)
        weights = scores.masked_fill(~is_member, -torch.inf).softmax(-1).masked_fill(~is_member, 0.0)
        field = (
            base
            + self.option_summary_norm(weights @ routed)
            + self.global_projection(last)
            + self.type_embedding(inputs.question_types)
        )
        for layer in self.layers:
            field = layer(field, memory, tgt_key_padding_mask=~inputs.question_mask, memory_key_padding_mask=padding)
        field = of_question(self.field_norm(field))  # (B, O, W)
        option = self.option_norm(routed)

        prior = F.cosine_similarity(lexical, of_question(question) + last, dim=-1)
        joint = F.cosine_similarity(field, option, dim=-1)
        features = torch.cat((field, option, field * option, (field - option).abs()), dim=-1)
        residual = self.residual_scorer(features).squeeze(-1)
        prior_scale = self.prior_logit_scale.clamp(max=MAX_LOGIT_SCALE).exp()
        joint_scale = self.joint_logit_scale.clamp(max=MAX_LOGIT_SCALE).exp()
        logits: Tensor = prior_scale * prior + self.residual_gate.sigmoid() * (joint_scale * joint + residual)
        return logits


def _span_means(spans: Tensor, num_tokens: int, dtype: torch.dtype) -> Tensor:
    """Averaging matrices (B, S, T) for half-open spans (B, S, 2): each row sums to 1, an empty span's row to 0."""
    positions = torch.arange(num_tokens, device=spans.device)
    start, end = spans[..., :1], spans[..., 1:]
    inside = (positions >= start) & (positions < end)
    return inside.to(dtype) / (end - start).clamp(min=1)


def option_log_probs(logits: Tensor, inputs: HeadInputs) -> Tensor:
    """Log-softmax of each option within its question, in float32.

    Args:
        logits: (B, O).

    Returns:
        float32 (B, O); values at padding options mean nothing.
    """
    logits = logits.float()
    totals = logits.unsqueeze(1).masked_fill(~inputs.membership(), -torch.inf).logsumexp(-1)  # (B, Q)
    return logits - totals.gather(1, inputs.option_question)


def load_joint_head(path: Path, device: torch.device | str, dtype: torch.dtype = torch.float32) -> JointHead:
    """Load `joint_head.safetensors` of a release strictly: every tensor, no other, every shape right.

    Raises:
        ReleaseError: a file is missing, damaged, or does not fit its configuration.
    """
    config = JointHeadConfig.from_release(path)
    file = path / "joint_head.safetensors"
    with torch.device("meta"):
        head = JointHead(config)
    try:
        tensors = load_file(file, device=str(device))
        head.load_state_dict({name: tensor.to(dtype) for name, tensor in tensors.items()}, strict=True, assign=True)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ReleaseError(f"{file}: the joint head cannot be loaded: {error}") from error
    return head.eval().requires_grad_(False)
