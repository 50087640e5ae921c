"""Requests, batches, history and workers, as stored and read back."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select, text, update
from sqlalchemy.orm import Session

from db import store
from db.models import Batch, Decision, Request, Worker
from db.session import Database
from db.store_requests import now_utc
from db.views import NewImage, NewRequest, NewResult, NewRun

QUESTIONS = {"b": {"type": "noul"}, "a": {"type": "choice", "criteria": {"z": None, "y": "why"}}}
RUN = NewRun("bf16", "c" * 64, "bf16", "bfloat16", "float32", "cpu", 2, {"max_batch_tokens": 4096}, {"torch": "2"})


@pytest.fixture
def session(database: Database) -> Iterator[Session]:
    with database.write() as session:
        yield session


def new_request(state: Any = "hello", **fields: Any) -> NewRequest:
    return NewRequest(asked_model="clef", state=state, questions=QUESTIONS, title=str(state), **fields)


def new_batch(session: Session, requests: list[NewRequest], variants: tuple[str, ...] = ("bf16", "mxfp4")) -> int:
    batch_id = store.create_batch(
        session, "rows.csv", QUESTIONS, variants, source="test", columns=["state"], mapping={"state": ["state"]}
    )
    store.store_requests(session, requests, variants, source="test", batch_id=batch_id)
    store.count_rows(session, batch_id, len(requests))
    store.close_batch(session, batch_id)
    return batch_id


def finish(session: Session, batch_id: int, status: str, row_numbers: list[int], ago_s: float = 0.0) -> None:
    requests = select(Request.id).where(Request.batch_id == batch_id, Request.row_number.in_(row_numbers))
    session.execute(
        update(Decision)
        .where(Decision.request_id.in_(requests))
        .values(status=status, attempts=1, finished_at=now_utc() - timedelta(seconds=ago_s))
        .execution_options(synchronize_session=False)
    )


@pytest.mark.parametrize("state", ["é\n\t😀", {"b": 1, "a": 1250.0}, [1, [2, {"k": None}], 10**30]])
def test_a_request_comes_back_as_it_was_stored(session: Session, state: Any) -> None:
    images = ("a" * 64, "b" * 64)
    (stored,) = store.store_requests(
        session, [new_request(state, images=images, truncate="end", labels={"a": "z"})], ["bf16"], source="page"
    )
    session.expire_all()
    view = store.get_request(session, stored.request_id)
    assert view is not None
    assert (view.state, view.questions, view.images, view.truncate) == (state, QUESTIONS, images, "end")
    assert repr(view.state) == repr(state)  # 1250.0 stays a float, keys keep their order
    assert list(view.questions) == ["b", "a"]
    assert list(view.questions["a"]["criteria"]) == ["z", "y"]
    assert view.created_at.tzinfo is not None
    assert (view.labels, view.source, view.batch_id) == ({"a": "z"}, "page", None)


def test_a_request_has_one_queued_decision_per_variant(session: Session) -> None:
    (stored,) = store.store_requests(session, [new_request()], ["bf16", "mxfp4"], source="page")
    views = store.list_decisions(session, stored.request_id)
    assert [(view.variant, view.status, view.id) for view in views] == [
        ("bf16", "queued", stored.decision_ids["bf16"]),
        ("mxfp4", "queued", stored.decision_ids["mxfp4"]),
    ]


def test_what_does_not_exist_is_none(session: Session) -> None:
    assert store.get_request(session, 1) is None
    assert store.get_decision(session, 1) is None
    assert store.get_batch(session, 1) is None
    assert store.queue_position(session, 1) is None
    with pytest.raises(LookupError, match="no batch 1"):
        store.batch_progress(session, 1)


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        (new_request({"x": 1, "y": 2}), True),
        (new_request({"y": 2, "x": 1}), True),
        (new_request({"x": 1.0, "y": 2}), False),
        (new_request('{"x":1,"y":2}'), False),
        (new_request({"x": 1, "y": 2}, truncate="end"), False),
        (new_request({"x": 1, "y": 2}, images=("a" * 64,)), False),
        (new_request({"x": 1, "y": 2}, external_id="other", row_number=7), True),
        (NewRequest("clef", {"x": 1, "y": 2}, dict(reversed(QUESTIONS.items()))), False),
    ],
)
def test_the_digest_covers_what_decides_the_answer(other: NewRequest, is_same: bool) -> None:
    assert (store.request_digest(new_request({"x": 1, "y": 2})) == store.request_digest(other)) is is_same


def test_ten_thousand_rows_share_one_question_set(session: Session) -> None:
    new_batch(session, [new_request(f"s{n}", row_number=n) for n in range(1000)])
    assert session.scalar(text("SELECT count(*) FROM question_sets")) == 1


def test_an_image_is_stored_once(session: Session) -> None:
    image = NewImage("a" * 64, "image/png", 3, 4, 99)
    store.store_images(session, [image, image])
    store.store_images(session, [image])
    assert session.scalar(text("SELECT count(*) FROM images")) == 1


def test_equal_runs_are_one_row_and_another_mode_is_another_run(session: Session) -> None:
    assert store.ensure_run(session, RUN) == store.ensure_run(session, RUN)
    other = NewRun(**(vars(RUN) | {"linear_mode": "packed"}))
    assert store.ensure_run(session, other) != store.ensure_run(session, RUN)


def test_a_bad_row_is_stored_as_failed_with_its_problems(session: Session) -> None:
    problem = {"loc": ["state"], "msg": "is missing", "type": "value_error"}
    batch_id = new_batch(
        session, [new_request("ok", row_number=0), new_request(None, row_number=1, problems=(problem,))]
    )
    good, bad = store.iter_results(session, batch_id)
    assert {view.status for view in good.decisions.values()} == {"queued"}
    assert [(view.status, view.error) for view in bad.decisions.values()] == [("failed", [problem])] * 2
    assert bad.request.input_error == [problem]


def test_results_come_in_row_order_with_bounded_chunks(session: Session) -> None:
    batch_id = new_batch(session, [new_request(f"s{n}", row_number=n) for n in (5, 3, 4, 0, 2, 1, 6)])
    rows = list(store.iter_results(session, batch_id, chunk=2))
    assert [row.request.row_number for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    assert all(set(row.decisions) == {"bf16", "mxfp4"} for row in rows)
    assert [row.request.state for row in rows] == [f"s{n}" for n in range(7)]


def test_progress_counts_decisions_and_estimates_from_the_last_half_minute(session: Session) -> None:
    batch_id = new_batch(session, [new_request(f"s{n}", row_number=n) for n in range(20)])
    session.execute(update(Batch).values(created_at=now_utc() - timedelta(hours=1)))
    finish(session, batch_id, "done", [0, 1, 2], ago_s=10)
    finish(session, batch_id, "failed", [3], ago_s=0)
    finish(session, batch_id, "done", [4, 5, 6, 7, 8, 9], ago_s=600)
    progress = store.batch_progress(session, batch_id)
    assert (progress.num_rows, progress.num_decisions) == (20, 40)
    assert (progress.queued, progress.running, progress.done, progress.failed) == (20, 0, 18, 2)
    assert progress.rows_per_s == pytest.approx(4 / 30, rel=0.05)  # 8 decisions of 2 variants within 30 s
    assert progress.eta_s == pytest.approx(20 / (8 / 30), rel=0.05)
    assert not progress.is_finished


def test_a_batch_without_recent_rows_has_no_estimate(session: Session) -> None:
    progress = store.batch_progress(session, new_batch(session, [new_request(row_number=0)]))
    assert (progress.rows_per_s, progress.eta_s) == (0.0, None)


def test_cancel_takes_waiting_rows_and_resume_brings_them_back_but_never_done_ones(session: Session) -> None:
    batch_id = new_batch(session, [new_request(f"s{n}", row_number=n) for n in range(4)], ("bf16",))
    finish(session, batch_id, "done", [0])
    assert store.cancel_batch(session, batch_id) == 3
    progress = store.batch_progress(session, batch_id)
    assert (progress.done, progress.cancelled, progress.is_cancelled, progress.is_finished) == (1, 3, True, True)
    queued = store.resume_batch(session, batch_id, max_crashes=store.MAX_CRASHES)
    assert len(queued) == 3
    progress = store.batch_progress(session, batch_id)
    assert (progress.done, progress.queued, progress.is_cancelled, progress.is_finished) == (1, 3, False, False)


def test_rows_that_arrive_after_the_cancel_are_cancelled_too(session: Session) -> None:
    batch_id = store.create_batch(session, "n", QUESTIONS, ["bf16"], source="t", columns=[], mapping={})
    store.cancel_batch(session, batch_id)
    (stored,) = store.store_requests(session, [new_request(row_number=0)], ["bf16"], source="t", batch_id=batch_id)
    assert store.list_decisions(session, stored.request_id)[0].status == "cancelled"


def test_resume_queues_crashed_rows_and_leaves_other_failures(session: Session) -> None:
    batch_id = new_batch(session, [new_request(f"s{n}", row_number=n) for n in range(2)], ("bf16",))
    finish(session, batch_id, "failed", [0, 1])
    first = next(store.iter_results(session, batch_id)).decisions["bf16"].id
    session.execute(update(Decision).where(Decision.id == first).values(crashes=store.MAX_CRASHES))
    assert store.resume_batch(session, batch_id, max_crashes=store.MAX_CRASHES) == [(first, "bf16")]


def test_a_batch_is_not_finished_while_rows_still_stream_in(session: Session) -> None:
    batch_id = store.create_batch(session, "n", QUESTIONS, ["bf16"], source="t", columns=[], mapping={})
    store.finish_batches(session, [batch_id])
    assert not store.batch_progress(session, batch_id).is_finished
    store.close_batch(session, batch_id)
    assert store.batch_progress(session, batch_id).is_finished


def test_history_mixes_decisions_and_batches_newest_first(session: Session) -> None:
    store.store_requests(session, [new_request("First 100% note")], ["bf16"], source="page")
    batch_id = new_batch(session, [new_request("row", row_number=0)])
    (last,) = store.store_requests(session, [new_request("second note")], ["bf16", "mxfp4"], source="page")
    items = store.list_history(session)
    assert [(item.kind, item.title) for item in items] == [
        ("decision", "second note"),
        ("batch", "rows.csv"),
        ("decision", "First 100% note"),
    ]
    assert items[0].id == last.request_id
    assert items[0].variants == ("bf16", "mxfp4")
    assert (items[1].id, items[1].status, items[1].summary) == (batch_id, "running", "1 rows, 2 queued")


def test_history_filters_by_kind_text_and_time(session: Session) -> None:
    for title in ("Alpha 100%", "beta", "gamma"):
        store.store_requests(session, [new_request(title)], ["bf16"], source="page")
    new_batch(session, [new_request("row", row_number=0)])
    newest = store.list_history(session, limit=1)[0]
    assert newest.kind == "batch"
    assert [item.title for item in store.list_history(session, text="ALPHA")] == ["Alpha 100%"]
    assert [item.title for item in store.list_history(session, text="100%")] == ["Alpha 100%"]
    assert store.list_history(session, text="1000") == []
    assert {item.kind for item in store.list_history(session, kind="batch")} == {"batch"}
    older = store.list_history(session, before=newest.created_at)
    assert [item.title for item in older] == ["gamma", "beta", "Alpha 100%"]


def test_history_summarises_the_answers(session: Session) -> None:
    (stored,) = store.store_requests(session, [new_request()], ["bf16"], source="page")
    rows = store.claim_rows(session, list(stored.decision_ids.values()), owner="w", token="t")
    answers = {"b": {"type": "noul", "noul": 0.25}, "a": {"type": "choice", "choice": "z", "confidence": 0.9}}
    store.save_results(session, "t", store.ensure_run(session, RUN), [NewResult(rows[0].decision_id, answers=answers)])
    item = store.list_history(session)[0]
    assert (item.status, item.summary) == ("done", "b=0.25, a=z")


def test_the_queue_counts_single_requests_and_puts_them_before_batches(session: Session) -> None:
    batch_id = new_batch(session, [new_request(f"s{n}", row_number=n) for n in range(3)], ("bf16",))
    singles = store.store_requests(session, [new_request("one"), new_request("two")], ["bf16"], source="page")
    row = [result.decisions["bf16"].id for result in store.iter_results(session, batch_id)]
    assert store.queue_depth(session, "bf16") == 2
    assert store.queue_depth(session, "mxfp4") == 0
    positions = [store.queue_position(session, single.decision_ids["bf16"]) for single in singles]
    assert positions == [0, 1]
    assert [store.queue_position(session, decision_id) for decision_id in row] == [2, 3, 4]


def register(session: Session, name: str, state: str = "idle", variant: str = "bf16") -> None:
    store.register_worker(session, name, [variant], host="h", pid=len(name), device="cpu")
    store.set_worker_state(session, name, state)  # type: ignore[arg-type]


def test_a_worker_is_live_while_it_is_heard_of(session: Session) -> None:
    register(session, "w1")
    register(session, "w22")
    session.execute(update(Worker).where(Worker.name == "w1").values(heartbeat_at=now_utc() - timedelta(seconds=16)))
    assert [worker.name for worker in store.live_workers(session)] == ["w22"]
    assert store.has_live_worker(session, "bf16")
    assert not store.has_live_worker(session, "mxfp4")
    store.remove_worker(session, "w22")
    assert not store.has_live_worker(session, "bf16")


def test_a_failed_worker_says_why_until_its_successor_starts(session: Session) -> None:
    register(session, "w1")
    store.mark_worker_failed(session, "h", 2, ["bf16"], "ended (signal 9)")
    (failed,) = store.live_workers(session)
    assert (failed.state, failed.message, failed.is_ready) == ("failed", "ended (signal 9)", False)
    assert not store.has_live_worker(session, "bf16")
    register(session, "w22")
    assert [worker.name for worker in store.live_workers(session)] == ["w22"]


def test_a_worker_that_ended_before_it_had_a_row_is_seen_as_failed(session: Session) -> None:
    store.mark_worker_failed(session, "h", 99, ["mxfp4"], "exit code 1")
    (failed,) = store.live_workers(session)
    assert (failed.variants, failed.state, failed.message) == (("mxfp4",), "failed", "exit code 1")


def test_a_failed_worker_keeps_its_own_words(session: Session) -> None:
    register(session, "w1")
    store.set_worker_state(session, "w1", "failed", message="no such release")
    store.mark_worker_failed(session, "h", 2, ["bf16"], "exit code 2")
    assert store.live_workers(session)[0].message == "no such release"


def test_a_removed_worker_is_told_so(session: Session) -> None:
    assert not store.set_worker_state(session, "never registered", "idle")
