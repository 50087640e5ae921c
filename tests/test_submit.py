"""Submitting: what is stored, what is refused before it is stored, and the bells that ring for it."""

import io
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from shutil import copy

import pytest
from lab import QUESTIONS, rows_of, settings_of, submission_of, submit_batch, wait_until
from PIL import Image
from rq.job import JobStatus
from sqlalchemy import text

from clef_core.errors import Problem, RequestError
from clef_core.schema import Submission
from db import store
from worker.bell import ROWS_PER_JOB, Bell, BellJob, queue_of
from worker.submit import BatchRow, QueueFullError, Submitter

BOTH = ["bf16", "mxfp4"]


@pytest.fixture
def submitter(tmp_path: Path, migrated_sqlite: Path) -> Iterator[Submitter]:
    settings = settings_of(tmp_path, max_queue=3)
    settings.data_dir.mkdir()
    copy(migrated_sqlite, settings.data_dir / "clef.sqlite3")
    with Submitter.connect(settings) as submitter:
        yield submitter


def bells(submitter: Submitter, variant: str) -> list[list[int]]:
    return [job.args[0] for job in queue_of(submitter.redis, variant).jobs]


def count(submitter: Submitter, table: str) -> int:
    with submitter.database.read() as session:
        return int(session.scalar(text(f"SELECT count(*) FROM {table}")) or 0)


def picture(colour: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (20, 10), colour).save(buffer, "PNG")
    return buffer.getvalue()


def with_images(*colours: str) -> Submission:
    import base64

    return submission_of("seen", images=[base64.b64encode(picture(colour)).decode() for colour in colours])


def test_a_request_is_stored_and_rung_for_once_per_variant(submitter: Submitter) -> None:
    submitted = submitter.submit(submission_of("hello"), BOTH, source="page")
    with submitter.database.read() as session:
        request = store.get_request(session, submitted.request_id)
    assert request is not None
    assert (request.state, request.questions, request.source) == ("hello", QUESTIONS, "page")
    assert submitted.is_new
    assert {variant: bells(submitter, variant) for variant in BOTH} == {
        variant: [[decision_id]] for variant, decision_id in submitted.decision_ids.items()
    }


def test_a_single_request_rings_in_front_of_a_batch(submitter: Submitter) -> None:
    submit_batch(submitter, ["a", "b"], ["bf16"])
    single = submitter.submit(submission_of("hello"), ["bf16"], source="page").decision_ids["bf16"]
    assert bells(submitter, "bf16")[0] == [single]


def test_a_batch_rings_once_for_64_rows(submitter: Submitter) -> None:
    submit_batch(submitter, [f"s{n}" for n in range(150)], BOTH)
    for variant in BOTH:
        rung = bells(submitter, variant)
        assert [len(rows) for rows in rung] == [ROWS_PER_JOB, ROWS_PER_JOB, 150 - 2 * ROWS_PER_JOB]
        assert len({row for rows in rung for row in rows}) == 150


def test_a_full_queue_is_refused_before_anything_is_stored(submitter: Submitter) -> None:
    for n in range(3):
        submitter.submit(submission_of(f"s{n}"), ["bf16"], source="http")
    with pytest.raises(QueueFullError) as caught:
        submitter.submit(with_images("red"), BOTH, source="http")
    assert caught.value.retry_after_s > 0
    assert (count(submitter, "requests"), count(submitter, "images")) == (3, 0)
    submitter.submit(submission_of("other variant"), ["mxfp4"], source="http")


def test_batch_rows_do_not_fill_the_queue_of_single_requests(submitter: Submitter) -> None:
    submit_batch(submitter, [f"s{n}" for n in range(10)], ["bf16"])
    submitter.submit(submission_of("single"), ["bf16"], source="http")


def test_a_repeated_key_is_the_same_request(submitter: Submitter) -> None:
    first = submitter.submit(submission_of("hello"), BOTH, source="http", idempotency_key="k")
    again = submitter.submit(submission_of("hello"), BOTH, source="http", idempotency_key="k")
    other = submitter.submit(submission_of("hello"), BOTH, source="http", idempotency_key="k2")
    assert (again.request_id, again.decision_ids, again.is_new) == (first.request_id, first.decision_ids, False)
    assert other.request_id != first.request_id
    assert len(bells(submitter, "bf16")) == 2


def test_a_repeated_key_is_answered_though_the_queue_is_full(submitter: Submitter) -> None:
    first = submitter.submit(submission_of("s0"), ["bf16"], source="http", idempotency_key="k")
    for n in range(2):
        submitter.submit(submission_of(f"s{n}"), ["bf16"], source="http")
    again = submitter.submit(submission_of("s0"), ["bf16"], source="http", idempotency_key="k")
    assert again.request_id == first.request_id


@pytest.mark.parametrize(
    ("submission", "variants"),
    [
        (submission_of("other"), BOTH),
        (submission_of("hello"), ["bf16"]),
        (submission_of("hello", model="clef-bf16"), BOTH),
        (submission_of("hello", x_truncate="end"), BOTH),
        (with_images("red"), BOTH),
    ],
)
def test_a_key_with_other_content_is_refused(submitter: Submitter, submission: Submission, variants: list[str]) -> None:
    submitter.submit(submission_of("hello"), BOTH, source="http", idempotency_key="k")
    with pytest.raises(RequestError, match="used for another request"):
        submitter.submit(submission, variants, source="http", idempotency_key="k")
    assert count(submitter, "requests") == 1


@pytest.mark.parametrize("key", ["", "k" * 201])
def test_a_key_has_1_to_200_characters(submitter: Submitter, key: str) -> None:
    with pytest.raises(RequestError, match="1 to 200"):
        submitter.submit(submission_of("hello"), BOTH, source="http", idempotency_key=key)


def test_one_key_posted_by_eight_threads_at_once_is_one_request(submitter: Submitter) -> None:
    results = []

    def post() -> None:
        results.append(submitter.submit(submission_of("x"), ["bf16"], source="http", idempotency_key="k"))

    threads = [threading.Thread(target=post) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({result.request_id for result in results}) == 1
    assert [result.is_new for result in results].count(True) == 1


def test_images_are_kept_by_their_checksum_in_the_order_given(submitter: Submitter) -> None:
    submission = with_images("red", "blue", "red")
    submitted = submitter.submit(submission, ["bf16"], source="page")
    with submitter.database.read() as session:
        request = store.get_request(session, submitted.request_id)
    assert request is not None
    assert request.images == tuple(image.sha256 for image in submission.images)
    assert [submitter.images.get(sha256) for sha256 in request.images] == [image.data for image in submission.images]
    assert count(submitter, "images") == 2
    files = [path for path in (submitter.settings.data_dir / "images").rglob("*") if path.is_file()]
    assert sorted(path.name for path in files) == sorted({image.sha256 for image in submission.images})


def test_a_damaged_or_missing_image_is_an_error(submitter: Submitter) -> None:
    submission = with_images("red")
    submitter.submit(submission, ["bf16"], source="page")
    sha256 = submission.images[0].sha256
    (submitter.settings.data_dir / "images" / sha256[:2] / sha256).write_bytes(b"other")
    with pytest.raises(OSError, match="damaged"):
        submitter.images.get(sha256)
    with pytest.raises(FileNotFoundError):
        submitter.images.get("0" * 64)


def test_a_batch_keeps_bad_rows_cells_and_ids(submitter: Submitter) -> None:
    good = BatchRow(0, "first", submission_of("ok"), cells={"id": "first", "state": "ok"}, labels={"urgent": "true"})
    bad = BatchRow(1, None, None, (Problem(("state",), "is missing"),), cells={"id": "", "state": ""})
    batch_id = submitter.submit_batch(
        "two.csv", QUESTIONS, [good, bad], BOTH, source="page", columns=["id", "state"], mapping={"id": "id"}
    )
    with submitter.database.read() as session:
        batch = store.get_batch(session, batch_id)
        first, second = store.iter_results(session, batch_id)
        progress = store.batch_progress(session, batch_id)
    assert batch is not None
    assert (batch.name, batch.columns, batch.mapping, batch.num_rows) == ("two.csv", ("id", "state"), {"id": "id"}, 2)
    assert (first.request.external_id, first.request.cells, first.request.labels) == (
        "first",
        {"id": "first", "state": "ok"},
        {"urgent": "true"},
    )
    assert second.decisions["bf16"].error == [{"loc": ["state"], "msg": "is missing", "type": "value_error"}]
    assert (progress.queued, progress.failed) == (2, 2)
    assert len(bells(submitter, "bf16")) == 1


def test_a_batch_of_bad_rows_alone_is_finished_and_rings_for_nothing(submitter: Submitter) -> None:
    bad = BatchRow(0, None, None, (Problem((), "empty"),))
    batch_id = submitter.submit_batch("b", QUESTIONS, [bad], BOTH, source="page", columns=[], mapping={})
    with submitter.database.read() as session:
        assert store.batch_progress(session, batch_id).is_finished
    assert bells(submitter, "bf16") == []


def test_rows_are_visible_while_others_still_come(submitter: Submitter) -> None:
    seen: list[int] = []

    def rows() -> Iterator[BatchRow]:
        for row in rows_of(f"s{n}" for n in range(1200)):
            if row.number in (500, 1000):
                seen.append(count(submitter, "requests"))
            yield row

    submitter.submit_batch("b", QUESTIONS, rows(), ["bf16"], source="cli", columns=[], mapping={})
    assert seen == [500, 1000]


def test_rows_that_break_off_leave_a_cancelled_batch(submitter: Submitter) -> None:
    def rows() -> Iterator[BatchRow]:
        yield from rows_of(f"s{n}" for n in range(501))
        raise ValueError("line 502 is ragged")

    with pytest.raises(ValueError, match="ragged"):
        submitter.submit_batch("b", QUESTIONS, rows(), ["bf16"], source="cli", columns=[], mapping={})
    with submitter.database.read() as session:
        progress = store.batch_progress(session, 1)
    assert (progress.num_rows, progress.cancelled, progress.is_finished) == (500, 500, True)


def test_cancel_and_resume_ring_again_for_what_is_left(submitter: Submitter) -> None:
    batch_id = submit_batch(submitter, [f"s{n}" for n in range(70)], ["bf16"])
    submitter.cancel_batch(batch_id)
    queue_of(submitter.redis, "bf16").empty()
    assert submitter.resume_batch(batch_id) == 70
    assert [len(rows) for rows in bells(submitter, "bf16")] == [64, 6]
    assert submitter.resume_batch(batch_id) == 0


def test_a_lost_redis_does_not_lose_the_request(submitter: Submitter) -> None:
    pid = int(submitter.redis.info("server")["process_id"])
    os.kill(pid, signal.SIGKILL)
    submitted = submitter.submit(submission_of("hello"), ["bf16"], source="http")
    with submitter.database.read() as session:
        decision = store.get_decision(session, submitted.decision_ids["bf16"])
    assert decision is not None
    assert decision.status == "queued"


def test_wait_returns_the_state_when_the_time_is_over(submitter: Submitter) -> None:
    submitted = submitter.submit(submission_of("hello"), BOTH, source="http")
    views = submitter.wait(list(submitted.decision_ids.values()), timeout_s=0.1)
    assert [(view.variant, view.status) for view in views] == [("bf16", "queued"), ("mxfp4", "queued")]


def test_the_bell_knows_which_rows_it_was_rung_for(submitter: Submitter) -> None:
    bell = Bell(submitter.redis)
    assert bell.rung_rows("bf16") == set()
    bell.ring("bf16", range(100), at_front=False)
    bell.ring("bf16", [200, 201], at_front=True, alone=True)
    assert bell.rung_rows("bf16") == {*range(100), 200, 201}
    assert bell.rung_rows("bf16", among={70, 200, 300}) == {70, 200}
    assert bells(submitter, "bf16")[0] in ([200], [201])
    queue = queue_of(submitter.redis, "bf16")
    queue.remove(queue.job_ids[-1])
    assert bell.rung_rows("bf16") == {*range(64), 200, 201}
    submitter.redis.flushall()
    queue.enqueue("os.system", "echo")
    queue.enqueue("decide_rows")
    assert bell.rung_rows("bf16") == set()


@pytest.mark.parametrize("function", ["os.system", "worker.bell.Bell", "builtins.exec"])
def test_a_job_can_call_nothing_but_the_handler(submitter: Submitter, function: str) -> None:
    queue = queue_of(submitter.redis, "bf16")
    job = queue.enqueue(function, "echo hello")
    fetched = BellJob.fetch(job.id, connection=submitter.redis, serializer=queue.serializer)
    assert fetched.get_status() == JobStatus.QUEUED
    with pytest.raises(PermissionError, match=function):
        fetched.perform()
    assert (fetched.success_callback, fetched.failure_callback, fetched.stopped_callback) == (None, None, None)


def test_job_ids_are_random_so_a_second_bell_for_the_same_rows_is_another_job(submitter: Submitter) -> None:
    bell = Bell(submitter.redis)
    bell.ring("bf16", [1], at_front=False)
    bell.ring("bf16", [1], at_front=False)
    assert len(set(queue_of(submitter.redis, "bf16").job_ids)) == 2


def test_close_lets_go_of_redis(submitter: Submitter) -> None:
    pid = int(submitter.redis.info("server")["process_id"])
    submitter.close()
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2], 5)
