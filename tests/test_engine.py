"""The engine's laws: every record gets its own outcome, and neighbours, order and batching change no decision."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from paths import PROJECT
from PIL import Image
from safetensors.torch import load_file, save_file

from clef_core.encoding import Record
from clef_core.engine import Decision, Engine, Outcome
from clef_core.errors import EngineError, RequestError, TooLongError
from clef_core.joint_head import load_joint_head
from clef_core.model import Release, load_release
from clef_core.schema import parse_request

SMALL = PROJECT / "checkpoints" / "random-bf16"


@pytest.fixture(scope="module")
def release() -> Release:
    return load_release(SMALL, dtype=torch.float32)


@pytest.fixture
def engine(release) -> Engine:
    return Engine(release, max_batch_tokens=2_048, variant="bf16")


def record(state="s", images=(), questions=None, **more) -> Record:
    questions = questions or {
        "team": {"type": "choice", "criteria": {"b": None, "a": "x"}},
        "hot": {"type": "score", "criteria": ["low", "mid", "high"]},
        "is it": {"type": "noul"},
    }
    return Record(parse_request({"model": "clef", "state": state, "questions": questions, **more}).request, images)


def probabilities(outcome: Outcome) -> list[float]:
    assert isinstance(outcome, Decision), outcome
    return [math.exp(value) for options in outcome.log_probs.values() for value in options.values()]


def test_a_decision_has_every_question_and_option_in_the_order_of_the_request(engine):
    (decision,) = engine.decide([record()])
    assert {question: list(options) for question, options in decision.log_probs.items()} == {
        "team": ["b", "a"], "hot": ["0", "1", "2"], "is it": ["true", "false"],
    }  # fmt: skip
    assert sum(probabilities(decision)) == pytest.approx(3, abs=1e-5)
    assert decision.response["x_variant"] == "bf16"
    assert decision.response["usage"] == {"input_tokens": decision.input_tokens, "output_tokens": 0}


def test_nothing_in_nothing_out(engine):
    assert engine.decide([]) == []
    assert list(engine.run([])) == []


def test_batched_equals_single_whatever_the_order(engine):
    """Within 1e-5: padding and batching change the order of float32 sums."""
    image = Image.new("RGB", (80, 60), "green")
    records = [record("word " * n, (image,) if n % 3 == 0 else ()) for n in (1, 40, 3, 90, 12, 6, 2)]
    alone = [probabilities(engine.decide([one])[0]) for one in records]
    together = [probabilities(outcome) for outcome in engine.decide(records)]
    backwards = [probabilities(outcome) for outcome in engine.decide(records[::-1])][::-1]
    for one, two, three in zip(alone, together, backwards, strict=True):
        assert one == pytest.approx(two, abs=1e-5)
        assert one == pytest.approx(three, abs=1e-5)


def test_the_order_of_a_choices_options_changes_no_probability(engine):
    orders = [["a", "b", "c"], ["c", "a", "b"]]
    found = []
    for order in orders:
        questions = {"q": {"type": "choice", "criteria": dict.fromkeys(order)}}
        (decision,) = engine.decide([record(questions=questions)])
        assert list(decision.log_probs["q"]) == order
        found.append({name: decision.log_probs["q"][name] for name in "abc"})
    assert found[0] == found[1]


def test_a_bad_record_fails_alone(engine):
    strip = Image.new("RGB", (5_000, 10))
    limited = Engine(engine.release, max_tokens=500)
    outcomes = limited.decide([record(), record("long " * 600), record("x", (strip,)), record("last")])
    assert [type(outcome) for outcome in outcomes] == [Decision, TooLongError, RequestError, Decision]


def test_truncation_is_told(release):
    engine = Engine(release, max_tokens=700)
    (decision,) = engine.decide([record("word " * 500, x_truncate="end")])
    assert decision.input_tokens == 700
    assert decision.truncated_tokens > 0
    assert decision.response["x_truncated_tokens"] == decision.truncated_tokens


def test_no_micro_batch_is_wider_than_allowed_unless_one_record_is(release):
    engine = Engine(release, max_batch_tokens=2_500)
    records = [record("word " * n) for n in (5, 5, 5, 5, 300, 2_000, 40, 40)]
    shapes = set()
    for finished in engine.run(records):
        shapes |= {(one.batch_rows, one.padded_tokens) for _, one in finished}
    assert all(tokens <= 2_500 or rows == 1 for rows, tokens in shapes)
    assert any(tokens > 2_500 for _, tokens in shapes)
    assert max(rows for rows, _ in shapes) >= 4


def test_every_record_comes_back_once(engine):
    records = [record("word " * n) for n in range(20)]
    indices = [index for finished in engine.run(records) for index, _ in finished]
    assert sorted(indices) == list(range(20))


class _NarrowEngine(Engine):
    """Runs out of memory above two rows, as a small GPU would."""

    def _log_probs(self, encoded, multiple):
        if len(encoded) > 2:
            raise torch.OutOfMemoryError("no room")
        return super()._log_probs(encoded, multiple)


def test_out_of_memory_halves_the_batch(engine):
    records = [record("word " * n) for n in range(7)]
    outcomes = _NarrowEngine(engine.release, max_batch_tokens=8_192).decide(records)
    assert max(outcome.batch_rows for outcome in outcomes) <= 2
    for ours, wanted in zip(outcomes, engine.decide(records), strict=True):
        assert probabilities(ours) == pytest.approx(probabilities(wanted), abs=1e-5)


def test_a_model_that_gives_nan_is_an_error_and_no_answer(tmp_path, release):
    """A head whose weights hold a NaN must not answer."""
    path = Path(shutil.copytree(SMALL, tmp_path / "release"))
    tensors = load_file(path / "joint_head.safetensors")
    tensors["field_norm.bias"][0] = math.nan
    save_file(tensors, path / "joint_head.safetensors")
    broken = Release(**{**vars(release), "head": load_joint_head(path, "cpu")})
    (outcome,) = Engine(broken).decide([record()])
    assert isinstance(outcome, EngineError)


def test_provenance_says_how_decisions_were_made(engine):
    provenance = engine.provenance()
    assert provenance["release_checksum"] == engine.release.checksum
    assert provenance["linear_mode"] == "bf16"
    assert provenance["dtype"] == "float32"
    assert provenance["batching"] == {"mode": "fast", "max_tokens": 16_384, "max_batch_tokens": 2_048}
    assert engine.provenance("single")["batching"] == {"mode": "single", "max_tokens": 16_384}
    assert provenance["versions"]["torch"] == torch.__version__.partition("+")[0]


def test_single_batching_gives_the_same_bits_whatever_else_is_asked(engine):
    """In bfloat16, where another shape does move numbers."""
    coarse = Engine(load_release(SMALL), max_batch_tokens=4_096)
    records = [record("word " * n) for n in (3, 50, 9)]
    alone = [coarse.decide([one], "single")[0].log_probs for one in records]
    together = [one.log_probs for one in coarse.decide(records[::-1], "single")][::-1]
    assert alone == together
    padded = coarse.decide(records, "padded")
    assert max(one.batch_rows for one in padded) > 1
    assert all(one.padded_tokens % 128 == 0 for one in padded)
    for one, other in zip(alone, padded, strict=True):
        assert one != other.log_probs
        assert [math.exp(v) for v in one["team"].values()] == pytest.approx(
            [math.exp(v) for v in other.log_probs["team"].values()], abs=0.03
        )
