"""What a worker does with rows, in this process: the real engine on the small release, real SQLite, real Redis."""

import base64
import io
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from shutil import copy
from typing import Any

import pytest
from lab import QUESTIONS, rows_of, settings_of, submission_of, submit_batch, wait_until
from PIL import Image
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from clef_core.encoding import Record
from clef_core.engine import Engine
from clef_core.model import Release, load_release
from clef_core.schema import Submission
from db import store
from db.views import DecisionView
from worker.bell import Bell
from worker.jobs import ForwardCrash, RowJobs
from worker.settings import PROJECT_DIR
from worker.submit import BatchRow, Submitter
from worker.watchdog import Watchdog

NAME = "worker-under-test"
SAVED_S = 20


class WatchedEngine(Engine):
    """The real engine; `after_step` is called between micro-batches, `before_step` may raise as a forward would."""

    before_step: Callable[[Sequence[Record]], None] = staticmethod(lambda records: None)
    after_step: Callable[[], None] = staticmethod(lambda: None)
    num_records = 0

    def run(self, records: Sequence[Record], *args: Any) -> Iterator[Any]:
        self.num_records += len(records)
        self.before_step(records)
        for step in super().run(records, *args):
            self.after_step()
            yield step


@pytest.fixture(scope="module")
def release() -> Release:
    import torch

    return load_release(PROJECT_DIR / "checkpoints" / "random-bf16", dtype=torch.float32)


@pytest.fixture
def engine(release: Release) -> WatchedEngine:
    return WatchedEngine(release, max_tokens=1024, max_batch_tokens=1, variant="bf16")  # each row a micro-batch


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
def stop() -> threading.Event:
    return threading.Event()


def jobs_of(submitter: Submitter, engine: WatchedEngine, stop: threading.Event, **times: float) -> RowJobs:
    return RowJobs(
        NAME, {"bf16": engine}, submitter.database, submitter.images, Bell(submitter.redis), stop=stop,
        watchdog=Watchdog(600, parent_pid=None, on_orphan=lambda: None), **times,
    )  # fmt: skip


@pytest.fixture
def jobs(submitter: Submitter, engine: WatchedEngine, stop: threading.Event) -> RowJobs:
    return jobs_of(submitter, engine, stop, look_up_every_s=0.0)


def decisions(submitter: Submitter, batch_id: int) -> list[DecisionView]:
    with submitter.database.read() as session:
        return [row.decisions["bf16"] for row in store.iter_results(session, batch_id)]


def ids_of(submitter: Submitter, batch_id: int) -> list[int]:
    return [decision.id for decision in decisions(submitter, batch_id)]


def statuses(submitter: Submitter, batch_id: int) -> list[str]:
    return [decision.status for decision in decisions(submitter, batch_id)]


def ask(submitter: Submitter, state: str) -> int:
    return submitter.submit(submission_of(state), ["bf16"], source="page").decision_ids["bf16"]


def see(submitter: Submitter, decision_id: int) -> DecisionView:
    with submitter.database.read() as session:
        view = store.get_decision(session, decision_id)
    assert view is not None
    return view


def with_image(colour: str) -> Submission:
    buffer = io.BytesIO()
    Image.new("RGB", (40, 40), colour).save(buffer, "PNG")
    return submission_of("seen", images=[base64.b64encode(buffer.getvalue()).decode()])


def test_a_decision_is_stored_as_the_engine_made_it(submitter: Submitter, jobs: RowJobs, engine: WatchedEngine) -> None:
    decision_id = ask(submitter, "Our checkout is down.")
    jobs.decide_rows([decision_id])
    (expected,) = engine.decide([Record(submission_of("Our checkout is down.").request)])
    view = see(submitter, decision_id)
    assert view.status == "done"
    assert view.log_probs == expected.log_probs
    assert view.answers == expected.response["answers"]
    assert list(view.answers) == list(QUESTIONS)
    assert (view.input_tokens, view.truncated_tokens, view.error) == (expected.input_tokens, 0, None)
    assert view.latency_ms is not None
    assert view.latency_ms > 0
    assert view.run is not None
    assert (view.run.variant, view.run.dtype) == ("bf16", "float32")
    assert view.run.release_checksum == engine.release.checksum


def test_an_image_reaches_the_model(submitter: Submitter, jobs: RowJobs, engine: WatchedEngine) -> None:
    submission = with_image("red")
    decision_id = submitter.submit(submission, ["bf16"], source="page").decision_ids["bf16"]
    jobs.decide_rows([decision_id])
    (expected,) = engine.decide([Record(submission.request, [Image.new("RGB", (40, 40), "red")])])
    assert see(submitter, decision_id).log_probs == expected.log_probs


def test_a_second_bell_for_the_same_rows_changes_nothing(
    submitter: Submitter, jobs: RowJobs, engine: WatchedEngine
) -> None:
    decision_id = ask(submitter, "once")
    jobs.decide_rows([decision_id])
    first = see(submitter, decision_id)
    jobs.decide_rows([decision_id])
    assert see(submitter, decision_id) == first
    assert engine.num_records == 1


def test_a_row_that_is_too_long_fails_alone_with_its_problems(submitter: Submitter, jobs: RowJobs) -> None:
    batch_id = submit_batch(submitter, ["short", "long " * 2000, "short too"], ["bf16"])
    jobs.decide_rows(ids_of(submitter, batch_id))
    first, second, third = decisions(submitter, batch_id)
    assert [first.status, second.status, third.status] == ["done", "failed", "done"]
    assert second.error is not None
    assert second.error[0]["loc"] == ["state"]
    assert "the limit is 1,024" in second.error[0]["msg"]
    assert second.answers is None


def test_a_row_whose_image_is_gone_fails_alone(submitter: Submitter, jobs: RowJobs) -> None:
    lost, kept = with_image("red"), with_image("blue")
    rows = [BatchRow(0, None, lost), BatchRow(1, None, kept)]
    batch_id = submitter.submit_batch("b", QUESTIONS, rows, ["bf16"], source="t", columns=[], mapping={})
    sha256 = lost.images[0].sha256
    (submitter.settings.data_dir / "images" / sha256[:2] / sha256).unlink()
    jobs.decide_rows(ids_of(submitter, batch_id))
    first, second = decisions(submitter, batch_id)
    assert (first.status, second.status) == ("failed", "done")
    assert first.error is not None
    assert first.error[0]["loc"] == ["images", 0]


def test_identical_rows_are_computed_once_and_all_answered(
    submitter: Submitter, jobs: RowJobs, engine: WatchedEngine
) -> None:
    batch_id = submit_batch(submitter, ["same", "other", "same", "same"], ["bf16"])
    ids = ids_of(submitter, batch_id)
    jobs.decide_rows(ids[:3])
    jobs.decide_rows(ids[3:])
    assert engine.num_records == 2
    first, other, *rest = decisions(submitter, batch_id)
    assert {view.status for view in (first, other, *rest)} == {"done"}
    for twin in rest:
        assert (twin.log_probs, twin.answers, twin.input_tokens) == (first.log_probs, first.answers, first.input_tokens)
        assert twin.latency_ms is None
    assert other.log_probs != first.log_probs
    with submitter.database.read() as session:
        copied = session.scalars(text("SELECT copied_from_id FROM decisions ORDER BY id")).all()
    assert copied == [None, None, ids[0], ids[0]]


def test_identical_rows_that_fail_fail_all(submitter: Submitter, jobs: RowJobs) -> None:
    batch_id = submit_batch(submitter, ["long " * 2000] * 2, ["bf16"])
    jobs.decide_rows(ids_of(submitter, batch_id))
    assert statuses(submitter, batch_id) == ["failed", "failed"]


def test_rows_of_another_batch_are_computed_anew(submitter: Submitter, jobs: RowJobs, engine: WatchedEngine) -> None:
    for _ in range(2):
        jobs.decide_rows(ids_of(submitter, submit_batch(submitter, ["same"], ["bf16"])))
    assert engine.num_records == 2


def test_a_single_request_takes_other_waiting_ones_along(submitter: Submitter, jobs: RowJobs) -> None:
    first, second = ask(submitter, "one"), ask(submitter, "two")
    jobs.decide_rows([first])
    assert [see(submitter, one).status for one in (first, second)] == ["done", "done"]


@pytest.mark.parametrize(("seconds_per_claim", "done"), [(600.0, 4), (0.01, 2)], ids=["fast", "slow"])
def test_a_job_of_a_batch_takes_waiting_rows_along_where_rows_are_fast(
    submitter: Submitter, engine: WatchedEngine, stop: threading.Event, seconds_per_claim: float, done: int
) -> None:
    jobs = jobs_of(submitter, engine, stop, seconds_per_claim=seconds_per_claim)
    engine.after_step = lambda: time.sleep(0.02)  # a row takes this long at least
    ids = ids_of(submitter, submit_batch(submitter, ["one", "two"], ["bf16"]))
    other = submit_batch(submitter, ["three", "four"], ["bf16"])
    jobs.decide_rows(ids[:1])  # how long rows take is not known yet
    assert [see(submitter, one).status for one in ids] == ["done", "queued"]
    jobs.decide_rows(ids[1:])
    assert [see(submitter, one).status for one in [*ids, *ids_of(submitter, other)]].count("done") == done


def test_every_micro_batch_is_saved_while_the_next_one_runs(
    submitter: Submitter, jobs: RowJobs, engine: WatchedEngine
) -> None:
    batch_id = submit_batch(submitter, ["one", "two", "three"], ["bf16"])
    started: list[int] = []

    def wait_for_the_one_before() -> None:
        wait_until(lambda: statuses(submitter, batch_id).count("done") == len(started), SAVED_S)
        started.append(len(started))

    engine.after_step = wait_for_the_one_before
    jobs.decide_rows(ids_of(submitter, batch_id))
    assert started == [0, 1, 2]
    assert statuses(submitter, batch_id) == ["done"] * 3


def test_what_was_computed_before_a_crash_is_saved(
    submitter: Submitter, jobs: RowJobs, engine: WatchedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = submit_batch(submitter, ["one", "two"], ["bf16"])
    steps: list[int] = []
    save_results = store.save_results

    def save_slowly(*args: Any) -> list[int]:
        time.sleep(0.2)
        return save_results(*args)

    def fail_at_the_second() -> None:
        steps.append(len(steps))
        if len(steps) == 2:
            raise RuntimeError("no")

    monkeypatch.setattr("worker.jobs.store.save_results", save_slowly)
    engine.after_step = fail_at_the_second
    with pytest.raises(ForwardCrash):
        jobs.decide_rows(ids_of(submitter, batch_id))
    assert sorted(statuses(submitter, batch_id)) == ["done", "queued"]


def test_a_save_that_fails_is_an_error_and_its_rows_wait_again(
    submitter: Submitter, jobs: RowJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = submit_batch(submitter, ["one", "two"], ["bf16"])

    def fail(*args: Any) -> list[int]:
        raise OperationalError("UPDATE", None, Exception("disk full"))

    monkeypatch.setattr("worker.jobs.store.save_results", fail)
    with pytest.raises(OperationalError):
        jobs.decide_rows(ids_of(submitter, batch_id))
    assert statuses(submitter, batch_id) == ["queued", "queued"]


def test_a_single_request_does_not_wait_behind_a_batch(
    submitter: Submitter, jobs: RowJobs, engine: WatchedEngine
) -> None:
    batch_id = submit_batch(submitter, ["one", "two", "three"], ["bf16"])
    asked: list[int] = []
    seen: list[tuple[str, int]] = []

    def after_step() -> None:
        if not asked:
            asked.append(ask(submitter, "a person waits"))
        before = (0, 1, 1, 2)[len(seen)]  # rows of the batch computed before this step; the last is still being saved
        wait_until(lambda: statuses(submitter, batch_id).count("done") == before, SAVED_S)
        seen.append((see(submitter, asked[0]).status, before))

    engine.after_step = after_step
    jobs.decide_rows(ids_of(submitter, batch_id))
    # After the first row: asked. Then its own forward, before the second row's, and done by then.
    assert seen == [("queued", 0), ("running", 1), ("done", 1), ("done", 2)]


def test_a_cancelled_batch_stops_between_micro_batches(
    submitter: Submitter, jobs: RowJobs, engine: WatchedEngine
) -> None:
    batch_id = submit_batch(submitter, ["one", "two", "three"], ["bf16"])
    engine.after_step = lambda: submitter.cancel_batch(batch_id)
    jobs.decide_rows(ids_of(submitter, batch_id))
    assert sorted(statuses(submitter, batch_id)) == ["cancelled", "cancelled", "done"]
    with submitter.database.read() as session:
        assert store.batch_progress(session, batch_id).is_finished
    assert submitter.resume_batch(batch_id) == 2
    engine.after_step = lambda: None
    jobs.decide_rows(ids_of(submitter, batch_id))
    assert statuses(submitter, batch_id) == ["done"] * 3
    assert engine.num_records == 5


def test_fast_micro_batches_do_not_look_up_each_time(
    submitter: Submitter, engine: WatchedEngine, stop: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = jobs_of(submitter, engine, stop, look_up_every_s=60.0)
    batch_id = submit_batch(submitter, ["one", "two", "three"], ["bf16"])
    looked: list[int] = []
    interruptions = store.interruptions

    def look(*args: Any) -> list[str] | None:
        looked.append(1)
        return interruptions(*args)

    monkeypatch.setattr("worker.jobs.store.interruptions", look)
    jobs.decide_rows(ids_of(submitter, batch_id))
    assert len(looked) == 1
    assert statuses(submitter, batch_id) == ["done"] * 3


def test_rows_of_another_batch_in_the_same_job_wait_again_and_are_rung_for(
    submitter: Submitter, jobs: RowJobs, engine: WatchedEngine
) -> None:
    stopped = submit_batch(submitter, ["one", "two"], ["bf16"])
    other = submit_batch(submitter, ["three"], ["bf16"])
    submitter.redis.flushall()
    engine.after_step = lambda: submitter.cancel_batch(stopped)
    jobs.decide_rows([*ids_of(submitter, stopped), *ids_of(submitter, other)])
    left = [row for row in ids_of(submitter, other) if see(submitter, row).status == "queued"]
    assert Bell(submitter.redis).rung_rows("bf16") == set(left)
    assert set(statuses(submitter, other)) <= {"queued", "done"}


def test_a_stop_saves_the_micro_batch_and_gives_the_rest_back_without_a_crash(
    submitter: Submitter, jobs: RowJobs, engine: WatchedEngine, stop: threading.Event
) -> None:
    batch_id = submit_batch(submitter, ["one", "two", "three"], ["bf16"])
    submitter.redis.flushall()
    engine.after_step = stop.set
    jobs.decide_rows(ids_of(submitter, batch_id))
    assert sorted(statuses(submitter, batch_id)) == ["done", "queued", "queued"]
    with submitter.database.read() as session:
        waiting = store.waiting_rows(session, "bf16", limit=10)
    assert [row.crashes for row in waiting] == [0, 0]
    assert Bell(submitter.redis).rung_rows("bf16") == {row.decision_id for row in waiting}


def test_results_of_rows_that_were_taken_away_are_dropped(
    submitter: Submitter, jobs: RowJobs, engine: WatchedEngine
) -> None:
    decision_id = ask(submitter, "taken")

    def take_away() -> None:
        with submitter.database.write() as session:
            session.execute(text("UPDATE decisions SET claim_token = 'of another worker'"))

    engine.after_step = take_away
    jobs.decide_rows([decision_id])
    view = see(submitter, decision_id)
    assert (view.status, view.answers) == ("running", None)


def test_a_forward_that_raises_counts_as_a_crash_and_breaks_the_worker(
    submitter: Submitter, jobs: RowJobs, engine: WatchedEngine
) -> None:
    batch_id = submit_batch(submitter, ["fine", "poison"], ["bf16"])

    def fail(records: Sequence[Record]) -> None:
        if any(record.request.state == "poison" for record in records):
            raise RuntimeError("illegal memory access")

    engine.before_step = fail
    with pytest.raises(ForwardCrash):
        jobs.decide_rows(ids_of(submitter, batch_id))
    assert jobs.broken is not None
    with submitter.database.read() as session:
        assert [row.crashes for row in store.waiting_rows(session, "bf16", limit=10)] == [1, 1]
    fine, poison = ids_of(submitter, batch_id)
    jobs.decide_rows([fine, poison])  # named together they are left alone
    assert statuses(submitter, batch_id) == ["queued", "queued"]
    jobs.decide_rows([fine])
    for _ in range(2):
        with pytest.raises(ForwardCrash):
            jobs.decide_rows([poison])
    first, second = decisions(submitter, batch_id)
    assert (first.status, second.status) == ("done", "failed")
    assert second.error is not None
    assert second.error[0]["msg"] == "Tried 3 times, the last time RuntimeError: illegal memory access."


def test_a_crash_in_a_single_request_does_not_blame_the_batch_around_it(
    submitter: Submitter, jobs: RowJobs, engine: WatchedEngine
) -> None:
    batch_id = submit_batch(submitter, ["one", "two"], ["bf16"])
    asked: list[int] = []

    def fail(records: Sequence[Record]) -> None:
        if records[0].request.state == "poison":
            raise RuntimeError("no")

    engine.before_step = fail
    engine.after_step = lambda: asked.append(ask(submitter, "poison")) if not asked else None
    with pytest.raises(ForwardCrash):
        jobs.decide_rows(ids_of(submitter, batch_id))
    with submitter.database.read() as session:
        waiting = {row.decision_id: row.crashes for row in store.waiting_rows(session, "bf16", limit=10)}
    assert waiting.pop(asked[0]) == 1
    assert list(waiting.values()) == [0]


def test_many_images_are_opened_a_few_at_a_time(
    submitter: Submitter, jobs: RowJobs, engine: WatchedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.jobs.MAX_OPEN_PIXELS", 40 * 40)
    rows = [BatchRow(n, None, with_image(colour)) for n, colour in enumerate(("red", "green", "blue"))]
    batch_id = submitter.submit_batch("b", QUESTIONS, rows, ["bf16"], source="t", columns=[], mapping={})
    sizes: list[int] = []
    engine.before_step = lambda records: sizes.append(len(records))
    jobs.decide_rows(ids_of(submitter, batch_id))
    assert statuses(submitter, batch_id) == ["done"] * 3
    assert sizes == [1, 1, 1]


def test_the_order_of_rows_is_kept_whatever_the_order_of_forwards(
    submitter: Submitter, jobs: RowJobs, engine: WatchedEngine
) -> None:
    states = ["a " * 60, "b", "c " * 30]  # the engine sorts by length
    batch_id = submit_batch(submitter, states, ["bf16"])
    jobs.decide_rows(ids_of(submitter, batch_id))
    expected = engine.decide([Record(row.submission.request) for row in rows_of(states) if row.submission])
    assert [view.log_probs for view in decisions(submitter, batch_id)] == [one.log_probs for one in expected]


def test_the_worker_is_seen_as_busy(submitter: Submitter, jobs: RowJobs, engine: WatchedEngine) -> None:
    seen: list[tuple[bool, str]] = []

    def look() -> None:
        with submitter.database.read() as session:
            seen.append((jobs.is_busy, store.live_workers(session)[0].state))

    engine.after_step = look
    jobs.decide_rows([ask(submitter, "x")])
    assert (seen, jobs.is_busy) == ([(True, "busy")], False)
