"""Progress in words, and how fast a variant was lately."""

import time
from datetime import timedelta
from pathlib import Path

import pytest

import db
from db.models import Decision
from db.session import Database
from db.store import store_requests
from db.store_rates import count_waiting, recent_tokens_per_s
from db.store_requests import now_utc
from db.views import BatchProgress, NewRequest
from worker.progress import describe_duration, describe_progress, rows_done, tokens_per_s, watch


def progress(**changes: object) -> BatchProgress:
    facts = {
        "batch_id": 1, "num_rows": 300, "num_decisions": 600, "queued": 359, "running": 1, "done": 238, "failed": 2,
        "cancelled": 0, "rows_per_s": 4.2345, "eta_s": 42.6, "is_finished": False, "is_cancelled": False,
    }  # fmt: skip
    return BatchProgress(**(facts | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (42.4, "42 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"), (3_900, "1 h 05 min"), (-1, "0 s")],
)
def test_a_duration_in_words(seconds, text):
    assert describe_duration(seconds) == text


def test_rows_are_decisions_divided_by_variants():
    assert rows_done(progress()) == 120
    assert rows_done(progress(num_rows=0, num_decisions=0)) == 0


def test_progress_in_words():
    assert describe_progress(progress()) == "120 of 300 rows, 2 failed, 4.23 rows per s, about 43 s left"
    assert describe_progress(progress(rows_per_s=0.0, eta_s=None, failed=0)) == "119 of 300 rows"
    stopped = progress(cancelled=360, queued=0, running=0, is_finished=True, is_cancelled=True)
    assert describe_progress(stopped) == "120 of 300 rows, 2 failed, cancelled"


def test_a_batch_that_takes_long_to_count_is_asked_about_less_often(database, monkeypatch):
    answers = iter([progress(), progress(is_finished=True)])
    slept = []

    def count_slowly(session, batch_id):
        before = time.monotonic()
        while time.monotonic() < before + 0.05:
            pass
        return next(answers)

    monkeypatch.setattr("worker.progress.batch_progress", count_slowly)
    monkeypatch.setattr("worker.progress.time.sleep", slept.append)
    assert [one.is_finished for one in watch(database, 1, poll_s=0.1)] == [False, True]
    assert len(slept) == 1
    assert slept[0] >= 0.5
    database.close()


@pytest.fixture
def database(tmp_path: Path) -> Database:
    url = f"sqlite:///{tmp_path}/test.sqlite3"
    db.migrate(url)
    return Database(url)


def test_the_rate_counts_the_time_of_a_micro_batch_once_and_copied_rows_not_at_all(database):
    first = now_utc()
    second = first + timedelta(seconds=1)
    saved = [(100, 500.0, first, None), (100, 500.0, first, None), (300, 500.0, second, None), (300, 0.1, second, 1)]
    with database.write() as session:
        requests = [NewRequest(asked_model="clef", state=str(n), questions={}) for n in range(len(saved) + 1)]
        store_requests(session, requests, ["mxfp4"], source="cli")
        decisions = session.query(Decision).order_by(Decision.id).all()
        for decision, (tokens, latency_ms, moment, copied) in zip(decisions, saved, strict=False):
            decision.status, decision.priority = "done", 0
            decision.input_tokens, decision.latency_ms = tokens, latency_ms
            decision.finished_at, decision.copied_from_id = moment, copied
    with database.read() as session:
        assert recent_tokens_per_s(session, "mxfp4") == pytest.approx(500)  # 100 + 100 + 300 tokens in 0.5 + 0.5 s
        assert recent_tokens_per_s(session, "bf16") is None
        assert count_waiting(session) == {"mxfp4": 1}
    assert tokens_per_s(database, ["mxfp4"]) == pytest.approx(500)
    assert tokens_per_s(database, ["mxfp4", "bf16"]) is None
    database.close()
