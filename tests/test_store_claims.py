"""Claims: who holds a row, and what happens to it when its holder falls silent."""

import multiprocessing
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta

import pytest
from sqlalchemy import text, update
from sqlalchemy.orm import Session
from test_store import RUN, new_batch, new_request

from db import store
from db.models import Decision, Worker
from db.session import Database
from db.store_requests import now_utc
from db.views import PRIORITY_SINGLE, NewResult

ERROR = {"loc": [], "msg": "no", "type": "engine_error"}


@pytest.fixture
def session(database: Database) -> Iterator[Session]:
    with database.write() as session:
        yield session


def batch_rows(session: Session, num_rows: int) -> list[int]:
    batch_id = new_batch(session, [new_request(f"s{n}", row_number=n) for n in range(num_rows)], ("bf16",))
    return [row.decisions["bf16"].id for row in store.iter_results(session, batch_id)]


def single(session: Session, state: str = "single") -> int:
    (stored,) = store.store_requests(session, [new_request(state)], ["bf16"], source="page")
    return stored.decision_ids["bf16"]


def start_worker(session: Session, name: str, silent_for_s: float = 0.0, state: str = "busy") -> None:
    store.register_worker(session, name, ["bf16"], host="h", pid=1, device="cpu")
    store.set_worker_state(session, name, state)  # type: ignore[arg-type]
    heard = now_utc() - timedelta(seconds=silent_for_s)
    session.execute(update(Worker).where(Worker.name == name).values(heartbeat_at=heard))


def status_of(session: Session, decision_id: int) -> str:
    session.expire_all()
    view = store.get_decision(session, decision_id)
    assert view is not None
    return view.status


def test_a_claimed_row_cannot_be_claimed_again(session: Session) -> None:
    ids = batch_rows(session, 3)
    first = store.claim_rows(session, ids[:2], owner="w1", token="t1")
    second = store.claim_rows(session, ids, owner="w2", token="t2")
    assert [row.decision_id for row in first] == ids[:2]
    assert [row.decision_id for row in second] == ids[2:]
    assert first[0].request.state == "s0"
    assert (first[0].attempts, first[0].crashes) == (1, 0)


def claim_everything(url: str, owner: str, ids: list[int], claimed: "multiprocessing.Queue[list[int]]") -> None:
    database = Database(url)
    for at in range(0, len(ids), 5):
        with database.write() as session:
            rows = store.claim_rows(session, ids[at : at + 8], owner=owner, token=f"{owner}-{at}")
        claimed.put([row.decision_id for row in rows])
    database.close()


def test_four_processes_claim_no_row_twice_and_leave_none(database: Database, database_url: str) -> None:
    with database.write() as session:
        ids = batch_rows(session, 200)
    context = multiprocessing.get_context("spawn")
    claimed: multiprocessing.Queue[list[int]] = context.Queue()
    workers = [context.Process(target=claim_everything, args=(database_url, f"w{n}", ids, claimed)) for n in range(4)]
    for worker in workers:
        worker.start()
    counts = Counter(decision_id for _ in range(4 * 40) for decision_id in claimed.get(timeout=60))
    for worker in workers:
        worker.join()
    claimed.close()
    claimed.join_thread()
    assert counts == dict.fromkeys(ids, 1)


def test_a_save_counts_only_with_the_token_of_the_claim(session: Session) -> None:
    (decision_id,) = batch_rows(session, 1)
    run_id = store.ensure_run(session, RUN)
    store.claim_rows(session, [decision_id], owner="w1", token="t1")
    store.free_silent_claims(session)  # w1 has no row among the workers
    store.claim_rows(session, [decision_id], owner="w2", token="t2")
    assert store.save_results(session, "t1", run_id, [NewResult(decision_id, answers={"from": "w1"})]) == []
    assert store.save_results(session, "t2", run_id, [NewResult(decision_id, answers={"from": "w2"})]) == [decision_id]
    assert store.save_results(session, "t2", run_id, [NewResult(decision_id, answers={"from": "again"})]) == []
    view = store.get_decision(session, decision_id)
    assert view is not None
    assert (view.status, view.answers, view.run and view.run.dtype) == ("done", {"from": "w2"}, "bfloat16")


def test_a_saved_error_is_a_failed_row_and_the_last_row_finishes_the_batch(session: Session) -> None:
    ids = batch_rows(session, 2)
    run_id = store.ensure_run(session, RUN)
    rows = store.claim_rows(session, ids, owner="w", token="t")
    batch_id = rows[0].request.batch_id
    assert batch_id is not None
    store.save_results(session, "t", run_id, [NewResult(ids[0], error=(ERROR,))])
    assert not store.batch_progress(session, batch_id).is_finished
    store.save_results(session, "t", run_id, [NewResult(ids[1], answers={})])
    session.expire_all()
    progress = store.batch_progress(session, batch_id)
    assert (progress.done, progress.failed, progress.is_finished, progress.eta_s) == (1, 1, True, 0.0)


def test_two_workers_that_save_the_last_two_rows_at_once_finish_the_batch(database: Database) -> None:
    with database.write() as session:
        ids = batch_rows(session, 2)
        for decision_id in ids:
            rows = store.claim_rows(session, [decision_id], owner="w", token=f"t{decision_id}")
        run_id = store.ensure_run(session, RUN)

    def save_second() -> None:
        with database.write() as session:
            store.save_results(session, f"t{ids[1]}", run_id, [NewResult(ids[1], answers={})])

    other = threading.Thread(target=save_second)
    with database.write() as session:
        store.save_results(session, f"t{ids[0]}", run_id, [NewResult(ids[0], answers={})])
        other.start()
        other.join(0.3)
        assert other.is_alive()  # it waits for this transaction, or it would not see this row as done
    other.join()
    with database.read() as session:
        assert store.batch_progress(session, rows[0].request.batch_id or 0).is_finished


def test_released_rows_wait_again_without_a_crash(session: Session) -> None:
    ids = batch_rows(session, 2)
    store.claim_rows(session, ids, owner="w", token="t")
    waiting = store.release_claims(session, "t")
    assert [(row.decision_id, row.crashes) for row in waiting] == [(ids[0], 0), (ids[1], 0)]
    assert [row.decision_id for row in store.claim_rows(session, ids, owner="w2", token="t2")] == ids


def test_the_claims_of_a_silent_worker_are_freed_and_those_of_a_live_one_kept(session: Session) -> None:
    ids = batch_rows(session, 4)
    start_worker(session, "live", silent_for_s=14)
    start_worker(session, "silent", silent_for_s=16)
    start_worker(session, "failed", state="failed")
    for owner, decision_id in zip(("live", "silent", "failed", "unknown"), ids, strict=True):
        store.claim_rows(session, [decision_id], owner=owner, token=owner)
    assert store.has_silent_claims(session)
    freed = store.free_silent_claims(session)
    assert sorted((row.decision_id, row.crashes) for row in freed) == [(decision_id, 1) for decision_id in ids[1:]]
    assert [status_of(session, decision_id) for decision_id in ids] == ["running", "queued", "queued", "queued"]
    assert not store.has_silent_claims(session)


def test_a_row_that_was_in_a_crash_is_claimed_only_alone(session: Session) -> None:
    ids = batch_rows(session, 2)
    session.execute(update(Decision).where(Decision.id == ids[0]).values(crashes=1))
    assert [row.decision_id for row in store.claim_rows(session, ids, owner="w", token="t")] == [ids[1]]
    assert [row.decision_id for row in store.claim_rows(session, ids[:1], owner="w", token="t")] == [ids[0]]


def test_waiting_singles_are_claimed_oldest_first_without_crashed_ones(session: Session) -> None:
    batch_rows(session, 3)
    singles = [single(session, f"single {n}") for n in range(4)]
    session.execute(update(Decision).where(Decision.id == singles[1]).values(crashes=1))
    assert store.interruptions(session, "t", ["mxfp4", "bf16"]) == ["bf16"]
    rows = store.claim_waiting(session, "bf16", PRIORITY_SINGLE, limit=2, owner="w", token="t")
    assert [row.decision_id for row in rows] == [singles[0], singles[2]]


def test_the_third_crash_fails_the_row_with_a_clear_message(session: Session) -> None:
    (decision_id,) = batch_rows(session, 1)
    for attempt in range(3):
        (row,) = store.claim_rows(session, [decision_id], owner="gone", token=f"t{attempt}")
        assert (row.attempts, row.crashes) == (attempt + 1, attempt)
        freed = store.free_silent_claims(session)
        assert [waiting.decision_id for waiting in freed] == ([decision_id] if attempt < 2 else [])
    view = store.get_decision(session, decision_id)
    assert view is not None
    assert view.status == "failed"
    assert view.error == [
        {"loc": [], "msg": "Tried 3 times, the last time the worker process ended.", "type": "worker_crash"}
    ]


def test_a_crash_that_the_worker_saw_is_counted_with_its_reason(session: Session) -> None:
    (decision_id,) = batch_rows(session, 1)
    session.execute(update(Decision).values(crashes=2))
    store.claim_rows(session, [decision_id], owner="w", token="t")
    assert store.release_claims(session, "t", crash="RuntimeError: illegal memory access") == []
    view = store.get_decision(session, decision_id)
    assert view is not None
    assert view.error is not None
    assert view.error[0]["msg"] == "Tried 3 times, the last time RuntimeError: illegal memory access."


def test_rows_of_a_cancelled_batch_are_cancelled_when_they_come_back(session: Session) -> None:
    ids = batch_rows(session, 2)
    rows = store.claim_rows(session, ids, owner="gone", token="t")
    assert rows[0].request.batch_id is not None
    store.cancel_batch(session, rows[0].request.batch_id)
    assert store.interruptions(session, "t", ["bf16"]) is None
    assert store.interruptions(session, "of others", ["bf16"]) == []
    assert store.free_silent_claims(session) == []
    assert [status_of(session, decision_id) for decision_id in ids] == ["cancelled", "cancelled"]
    assert store.batch_progress(session, rows[0].request.batch_id).is_finished


def test_waiting_rows_come_singles_first_and_within_the_limit(session: Session) -> None:
    ids = batch_rows(session, 3)
    alone = single(session)
    rows = store.waiting_rows(session, "bf16", limit=3)
    assert [row.decision_id for row in rows] == [alone, ids[0], ids[1]]


def test_a_twin_is_a_done_row_of_the_same_batch_and_run(session: Session) -> None:
    batch_id = new_batch(session, [new_request("same", row_number=n) for n in range(2)], ("bf16",))
    first = next(store.iter_results(session, batch_id)).decisions["bf16"].id
    run_id = store.ensure_run(session, RUN)
    (row,) = store.claim_rows(session, [first], owner="w", token="t")
    assert store.find_twins(session, batch_id, run_id, [row.digest]) == {}
    log_probs = {"b": {"true": -0.1, "false": -2.0}}
    store.save_results(session, "t", run_id, [NewResult(first, log_probs=log_probs, answers={"b": 1}, input_tokens=7)])
    twins = store.find_twins(session, batch_id, run_id, [row.digest])
    assert twins[row.digest] == NewResult(first, log_probs=log_probs, answers={"b": 1}, input_tokens=7)
    assert store.find_twins(session, batch_id, run_id + 1, [row.digest]) == {}
    assert store.find_twins(session, batch_id + 1, run_id, [row.digest]) == {}


def test_the_queries_of_every_micro_batch_use_an_index(database: Database) -> None:
    if database.url.get_backend_name() != "sqlite":
        pytest.skip("asks SQLite for its plan; PostgreSQL plans by its own statistics")
    queries = {
        "claims of a token": "SELECT id FROM decisions WHERE status = 'running' AND claim_token = 't'",
        "silent claims": "SELECT id FROM decisions WHERE status = 'running' AND claim_owner NOT IN ('a')",
        "waiting singles": "SELECT id FROM decisions WHERE variant = 'v' AND status = 'queued' AND priority = 1",
        "counts of a batch": "SELECT status, count(*) FROM decisions WHERE batch_id = 1 GROUP BY status",
        "rate of a batch": "SELECT id FROM decisions WHERE batch_id = 1 AND finished_at >= '2026'",
        "twins": "SELECT id FROM requests WHERE batch_id = 1 AND digest IN ('a', 'b')",
        "rows of a batch": "SELECT id FROM requests WHERE batch_id = 1 AND row_number > 3 ORDER BY row_number",
        "history": "SELECT id FROM requests WHERE batch_id IS NULL ORDER BY created_at DESC",
    }
    with database.read() as session:
        plans = {
            name: " ".join(row.detail for row in session.execute(text(f"EXPLAIN QUERY PLAN {query}")))
            for name, query in queries.items()
        }
    assert {name: plan for name, plan in plans.items() if "USING" not in plan or "TEMP B-TREE" in plan} == {}
