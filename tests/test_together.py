"""Questions alone and together: the real engine on a small release, real SQLite, real Redis."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copy

import pytest
import torch
from lab import QUESTIONS, settings_of, submission_of, submit_batch
from test_cli import Cli

from clef_core.encoding import Record
from clef_core.engine import Decision, Engine
from clef_core.errors import RequestError
from clef_core.model import load_release
from db import store
from worker.bell import Bell
from worker.jobs import RowJobs
from worker.settings import PROJECT_DIR
from worker.submit import Submitter
from worker.together import TogetherError, decision_ids_of, read_together, start_together
from worker.watchdog import Watchdog

NAME = "worker-under-test"
STATE = "Our checkout started returning errors and orders are blocked."


@pytest.fixture(scope="module")
def engine() -> Engine:
    release = load_release(PROJECT_DIR / "checkpoints" / "random-bf16", dtype=torch.bfloat16)
    return Engine(release, max_tokens=1024, variant="bf16")


@pytest.fixture
def submitter(tmp_path: Path, migrated_sqlite: Path) -> Iterator[Submitter]:
    settings = settings_of(tmp_path)
    settings.data_dir.mkdir()
    copy(migrated_sqlite, settings.data_dir / "clef.sqlite3")
    with Submitter.connect(settings) as submitter:
        with submitter.database.write() as session:
            store.register_worker(session, NAME, ["bf16"], host="h", pid=1, device="cpu")
        yield submitter


@pytest.fixture
def work(submitter: Submitter, engine: Engine) -> Callable[[int], None]:
    watchdog = Watchdog(600, parent_pid=None, on_orphan=lambda: None)
    bell = Bell(submitter.redis)
    stop = threading.Event()
    jobs = RowJobs(NAME, {"bf16": engine}, submitter.database, submitter.images, bell, stop=stop, watchdog=watchdog)
    return lambda batch_id: jobs.decide_rows(decision_ids_of(submitter.database, batch_id))


def log_probs(engine: Engine, questions: dict[str, object]) -> dict[str, dict[str, float]]:
    submission = submission_of(STATE, questions=questions)
    (decision,) = engine.decide([Record(submission.request)], "single")
    assert isinstance(decision, Decision)
    return decision.log_probs


def test_each_question_is_asked_alone_and_with_the_others(
    submitter: Submitter, work: Callable[[int], None], engine: Engine
) -> None:
    batch_id = start_together(submitter, submission_of(STATE), ["bf16"])
    before = read_together(submitter.database, batch_id)
    assert (before.is_finished, before.num_questions, before.moved) == (False, 2, {"bf16": ()})
    work(batch_id)
    found = read_together(submitter.database, batch_id)
    assert (found.is_finished, found.variants, found.failures) == (True, ("bf16",), {"bf16": ()})
    together = log_probs(engine, QUESTIONS)
    for one, (question_id, question) in zip(found.moved["bf16"], QUESTIONS.items(), strict=True):
        assert one.question_id == question_id
        assert one.together == together[question_id]
        assert one.alone == log_probs(engine, {question_id: question})[question_id]
        assert one.compared.max_abs_dp > 0  # the neighbour is in the prompt


def test_it_waits_before_batches_and_leaves_no_trace_in_the_history(submitter: Submitter) -> None:
    submit_batch(submitter, ["a row"], ["bf16"])
    batch_id = start_together(submitter, submission_of(STATE), ["bf16"])
    with submitter.database.read() as session:
        assert [store.queue_position(session, one) for one in decision_ids_of(submitter.database, batch_id)] == [
            0,
            1,
            2,
        ]
        assert [item.id for item in store.list_history(session)] == [batch_id - 1]


def test_a_question_that_fails_is_named(submitter: Submitter, work: Callable[[int], None]) -> None:
    long = {"type": "noul", "instructions": "word " * 2000}
    batch_id = start_together(submitter, submission_of(STATE, questions=QUESTIONS | {"long": long}), ["bf16"])
    work(batch_id)
    found = read_together(submitter.database, batch_id)
    assert found.is_finished
    assert found.moved == {"bf16": ()}  # together it is too long for all
    assert [reason.split(":")[0] for reason in found.failures["bf16"]] == ["urgent, team, long", "long"]


def test_one_question_cannot_be_asked_together(submitter: Submitter) -> None:
    with pytest.raises(RequestError, match="at least two questions"):
        start_together(submitter, submission_of("x", questions={"a": {"type": "noul"}}), ["bf16"])
    with pytest.raises(TogetherError, match="number 1"):
        read_together(submitter.database, submit_batch(submitter, ["x"], ["bf16"]))


def test_the_command_prints_what_moves(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "data", OMP_NUM_THREADS="1")
    request = {"model": "clef", "state": STATE, "questions": QUESTIONS}
    outcome = cli("together", "-", "--variant", "bf16", given=json.dumps(request))
    assert outcome.code == 0, outcome.stderr
    found = outcome.json["bf16"]
    assert list(found) == list(QUESTIONS)
    for one in found.values():
        assert sum(one["probabilities_alone"].values()) == pytest.approx(1, abs=1e-5)
        assert sum(one["probabilities_together"].values()) == pytest.approx(1, abs=1e-5)
        assert one["max_abs_dp"] > 0
    single = json.dumps(request | {"questions": {"urgent": QUESTIONS["urgent"]}})
    cli("together", "-", given=single).assert_bad_input("at least two questions")
