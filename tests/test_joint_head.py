"""The vectorised head against a plain loop written from the description, and its laws."""

import json
import math
import shutil

import pytest
import torch
import torch.nn.functional as F
from paths import GOLDEN
from safetensors.torch import load_file, save_file
from torch import Tensor

from clef_core.encoding import EncodedOption, EncodedQuestion, EncodedRequest
from clef_core.errors import ReleaseError
from clef_core.joint_head import HeadInputs, JointHead, JointHeadConfig, load_joint_head, option_log_probs

RELEASE = GOLDEN / "release-bf16"


@pytest.fixture(scope="module")
def head() -> JointHead:
    return load_joint_head(RELEASE, "cpu")


def encoded(num_tokens: int, *questions: tuple[str, tuple[int, int], list[tuple[int, int]]]) -> EncodedRequest:
    made = tuple(
        EncodedQuestion(f"q{n}", kind, span, tuple(EncodedOption(str(k), s) for k, s in enumerate(spans)))
        for n, (kind, span, spans) in enumerate(questions)
    )
    return EncodedRequest(tuple(range(num_tokens)), made, None, 0, 0)


def records() -> list[EncodedRequest]:
    return [
        encoded(40, ("noul", (5, 8), [(10, 14), (15, 16)]), ("score", (20, 26), [(27, 29), (30, 33), (34, 35)])),
        encoded(17, ("choice", (2, 3), [(4, 6), (7, 9), (10, 11), (12, 16)])),
        encoded(
            64, ("choice", (3, 9), [(10, 12), (13, 15)]), ("noul", (20, 21), [(22, 25), (26, 30)]),
            ("choice", (31, 40), [(41, 42), (43, 44), (45, 46), (47, 48), (49, 50)]),
        ),
    ]  # fmt: skip


def tensors(batch: list[EncodedRequest], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Hidden states and embeddings (B, T, D); the padding holds noise, which must not matter."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(len(one.input_ids) for one in batch)
    return (
        torch.randn(len(batch), longest, 128, generator=generator),
        torch.randn(len(batch), longest, 128, generator=generator),
    )


def loop_logits(head: JointHead, hidden_states: Tensor, embeddings: Tensor, one: EncodedRequest) -> list[list[float]]:
    """The description of the head, one record, question and option at a time.

    hidden_states and embeddings are (T, D) of that record.
    """
    h = head.hidden_norm(hidden_states)
    memory = head.memory_projection(h)
    last = h[-1]
    q = [h[slice(*question.span)].mean(0) for question in one.questions]
    lexical, routed = [], []
    for number, question in enumerate(one.questions):
        for option in question.options:
            lexical.append(embeddings[slice(*option.span)].mean(0))
            routed.append(
                head.option_context_projection(h[slice(*option.span)].mean(0))
                + head.option_lexical_projection(lexical[-1])
                + head.option_question_projection(q[number])
            )
    r = torch.stack(routed)
    for layer in head.evidence_layers:
        evidence = layer.memory_norm(memory).unsqueeze(0)
        r = r + layer.attention(layer.query_norm(r).unsqueeze(0), evidence, evidence)[0][0]
        r = r + layer.feedforward(layer.feedforward_norm(r))
    fields, start = [], 0
    types = {"noul": 0, "choice": 1, "score": 2}
    for number, question in enumerate(one.questions):
        mine = r[start : start + len(question.options)]
        start += len(question.options)
        base = head.question_projection(q[number])
        weights = ((mine @ base) / math.sqrt(head.config.width)).softmax(0)
        summary = (weights.unsqueeze(1) * mine).sum(0)
        fields.append(
            base
            + head.option_summary_norm(summary)
            + head.global_projection(last)
            + head.type_embedding.weight[types[question.type]]
        )
    f = torch.stack(fields).unsqueeze(0)
    for layer in head.layers:
        f = layer(f, memory.unsqueeze(0))
    f = head.field_norm(f)[0]
    o = head.option_norm(r)
    found, index = [], 0
    for number, question in enumerate(one.questions):
        logits = []
        for _ in question.options:
            pair = torch.cat([f[number], o[index], f[number] * o[index], (f[number] - o[index]).abs()])
            prior = head.prior_logit_scale.clamp(max=math.log(100)).exp() * F.cosine_similarity(
                lexical[index], q[number] + last, dim=0
            )
            joint = head.joint_logit_scale.clamp(max=math.log(100)).exp() * F.cosine_similarity(
                f[number], o[index], dim=0
            )
            logits.append((prior + head.residual_gate.sigmoid() * (joint + head.residual_scorer(pair)[0])).item())
            index += 1
        found.append(logits)
    return found


@torch.inference_mode()
def test_batch_equals_the_loop_over_records_questions_and_options(head):
    batch = records()
    hidden, embeddings = tensors(batch)
    inputs = HeadInputs.from_encoded(batch, "cpu")
    logits = head(hidden, embeddings, inputs)
    for row, one in enumerate(batch):
        length = len(one.input_ids)
        wanted = loop_logits(head, hidden[row, :length], embeddings[row, :length], one)
        flat = [value for question in wanted for value in question]
        assert logits[row, : len(flat)].tolist() == pytest.approx(flat, abs=2e-5)  # float32 sums in another order


@torch.inference_mode()
def test_padding_and_neighbours_change_nothing(head):
    batch = records()
    hidden, embeddings = tensors(batch)
    together = head(hidden, embeddings, HeadInputs.from_encoded(batch, "cpu"))
    for row, one in enumerate(batch):
        length = len(one.input_ids)
        alone = head(
            hidden[row : row + 1, :length], embeddings[row : row + 1, :length], HeadInputs.from_encoded([one], "cpu")
        )
        assert torch.allclose(together[row, : alone.shape[1]], alone[0], atol=1e-5)


@torch.inference_mode()
def test_probabilities_of_a_question_sum_to_one(head):
    batch = records()
    inputs = HeadInputs.from_encoded(batch, "cpu")
    log_probs = option_log_probs(head(*tensors(batch), inputs), inputs)
    sums = (inputs.membership() * log_probs.exp().unsqueeze(1)).sum(-1)
    assert torch.allclose(sums[inputs.question_mask], torch.ones(6), atol=1e-6)


@torch.inference_mode()
def test_logit_scales_stop_at_100(head):
    batch = records()[1:2]
    inputs = HeadInputs.from_encoded(batch, "cpu")
    hidden, embeddings = tensors(batch)
    changed = JointHead(head.config).eval()
    changed.load_state_dict(head.state_dict())
    for scale in (changed.prior_logit_scale, changed.joint_logit_scale):
        scale.fill_(math.log(100))
    at_limit = changed(hidden, embeddings, inputs)
    for scale in (changed.prior_logit_scale, changed.joint_logit_scale):
        scale.fill_(50.0)
    assert torch.equal(changed(hidden, embeddings, inputs), at_limit)


def copy_head(path, **changes):
    for name in ("joint_head.safetensors", "joint_head_config.json"):
        shutil.copy(RELEASE / name, path / name)
    loaded = load_file(path / "joint_head.safetensors")
    loaded.update(changes)
    save_file({name: tensor for name, tensor in loaded.items() if tensor is not None}, path / "joint_head.safetensors")
    return path


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"residual_gate": None}, "residual_gate"),
        ({"surplus": torch.zeros(1)}, "surplus"),
        ({"field_norm.weight": torch.zeros(63)}, "field_norm.weight"),
    ],
)
def test_loading_is_strict(tmp_path, changes, named):
    with pytest.raises(ReleaseError, match=named):
        load_joint_head(copy_head(tmp_path, **changes), "cpu")


def test_a_wrong_configuration_is_named(tmp_path):
    copy_head(tmp_path)
    (tmp_path / "joint_head_config.json").write_text(json.dumps({"hidden_size": 128}))
    with pytest.raises(ReleaseError, match=r"joint_head_config\.json"):
        JointHeadConfig.from_release(tmp_path)
