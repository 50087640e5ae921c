"""Comparisons in the database: their own decisions, progress, cancel, resume, the answers and how quickly they open."""

import math
import random
import time
import tracemalloc
from collections.abc import Iterator

import pytest
from comparison_lab import decide, logs, random_logs, request_ids_of, store_batch, store_comparison
from sqlalchemy import select

from clef_core.comparison_build import MAX_SCATTER_POINTS
from clef_core.comparison_report import Report
from db import store
from db.comparison_views import AnswerFilter
from db.models import Decision
from db.session import Database
from db.store_comparison_answers import iter_compared_results, list_answers, paired_rows, side_decisions, side_runs
from db.store_comparison_reads import comparison_progress, get_comparison, list_comparisons
from db.store_comparisons import cancel_comparison, comparisons_to_finish, finish_comparison, resume_comparison
from worker.compare import open_comparison, stop_comparison, watch_comparison
from worker.comparison_summary import summarise_comparison, summarise_waiting

SURE = logs((0.8, 0.1, 0.1), (0.9, 0.1))
CLOSE = logs((0.36, 0.34, 0.30), (0.9, 0.1))
FLIPPED = logs((0.30, 0.40, 0.30), (0.9, 0.1))
LABELS = [{"team": "billing"}, {"team": "billing"}, {"team": "technical"}, None]


@pytest.fixture
def batch_id(database: Database) -> int:
    return store_batch(database, LABELS)


@pytest.fixture
def finished(database: Database, batch_id: int) -> int:
    """Four rows: the same, broke (a near tie), fixed (no near tie), a flip without a label."""
    comparison_id = store_comparison(database, batch_id)
    ids = request_ids_of(database, batch_id)
    left = [SURE, CLOSE, logs((0.6, 0.3, 0.1), (0.9, 0.1)), SURE]
    right = [SURE, FLIPPED, FLIPPED, FLIPPED]
    for side, answers in (("left", left), ("right", right), ("floor", left)):
        decide(database, comparison_id, side, dict(zip(ids, answers, strict=True)))
    summarise_waiting(database, 60)
    return comparison_id


def test_a_comparison_computes_anew_and_leaves_the_batch_alone(database: Database, batch_id: int) -> None:
    first = store_comparison(database, batch_id, right="bf16")
    second = store_comparison(database, batch_id, right="bf16")
    with database.read() as session:
        rows = session.execute(
            select(Decision.comparison_id, Decision.side, Decision.take, Decision.batching, Decision.batch_id)
        ).all()
        progress = store.batch_progress(session, batch_id)
        results = list(store.iter_results(session, batch_id))
    assert len({(row.take) for row in rows}) == 6  # three sides of two comparisons
    assert {row.comparison_id for row in rows} == {first, second}
    assert {(row.side, row.batching) for row in rows} == {
        ("left", "single"), ("right", "single"), ("floor", "padded"),
    }  # fmt: skip
    assert {row.batch_id for row in rows} == {None}
    assert (progress.num_rows, progress.num_decisions, progress.is_finished) == (4, 0, True)
    assert [row.decisions for row in results] == [{}, {}, {}, {}]


def test_progress_is_seen_and_the_end_comes_after_the_summary(database: Database, batch_id: int) -> None:
    comparison_id = store_comparison(database, batch_id)
    ids = request_ids_of(database, batch_id)

    def progress():
        with database.read() as session:
            return comparison_progress(session, comparison_id)

    assert (progress().num_rows, progress().num_decisions, progress().status) == (4, 12, "running")
    for side in ("left", "right"):
        decide(database, comparison_id, side, dict.fromkeys(ids, SURE))
    assert (progress().done, progress().queued) == (8, 4)
    assert progress().eta_s > 0
    decide(database, comparison_id, "floor", dict.fromkeys(ids, SURE))
    assert (progress().status, progress().eta_s) == ("summarising", 0.0)
    assert [found.status for found in watch_comparison(database, comparison_id)] == ["summarising", "done"]
    view, report = open_comparison(database, comparison_id)
    assert (view.left_run.variant, view.right_run.variant, view.floor_run.variant) == ("left", "right", "floor")
    assert (report.overall.agreement, report.overall.kl_mean, report.num_records) == (1.0, 0.0, 4)


def test_answers_are_filtered_and_paged(database: Database, finished: int) -> None:
    def found(**wanted) -> list[str]:
        with database.read() as session:
            return [row.title for row in list_answers(session, finished, AnswerFilter(**wanted), order="row").rows]

    assert found(is_flip=True) == ["state 1", "state 2", "state 3"]
    assert found(effect="broke") == ["state 1"]
    assert found(effect="fixed") == ["state 2"]
    assert found(is_flip=True, max_margin=0.05) == ["state 1"]
    assert found(is_flip=True, question_id="urgent") == []
    assert len(found()) == 8
    with database.read() as session:
        page = list_answers(session, finished, AnswerFilter(is_flip=True), offset=1, limit=1)
        widest = list_answers(session, finished, AnswerFilter(is_flip=True), order="divergence", limit=1)
    assert (page.total, [row.title for row in page.rows]) == (3, ["state 2"])  # by margin: 0.02, 0.3, 0.7
    assert [row.row_number for row in widest.rows] == [3]


def test_both_sides_of_a_flip_can_be_looked_at(database: Database, finished: int) -> None:
    with database.read() as session:
        (flip,) = list_answers(session, finished, AnswerFilter(effect="broke")).rows
        sides = side_decisions(session, finished, flip.answer.request_id).decisions
        results = list(iter_compared_results(session, finished))
        runs = side_runs(session, finished)
    assert {side: view.log_probs for side, view in sides.items()} == {"left": CLOSE, "right": FLIPPED, "floor": CLOSE}
    assert [row.request.row_number for row in results] == [0, 1, 2, 3]
    assert set(results[0].decisions) == {"left", "right", "floor"}
    assert [(run.batching["mode"], count) for run, count in runs["floor"]] == [("padded", 4)]


def test_the_report_by_hand(database: Database, finished: int) -> None:
    _, report = open_comparison(database, finished)
    assert list(report.questions) == ["team", "urgent"]
    team = report.questions["team"]
    assert (team.n, team.num_agree, team.num_flips, team.num_near_ties) == (4, 1, 3, 1)
    assert (team.labelled.broke, team.labelled.fixed, team.labelled.left.n) == (1, 1, 3)
    assert (team.floor.agreement, team.floor.kl_mean) == (1.0, 0.0)
    assert report.questions["urgent"].agreement == 1.0
    assert [(one.left_option, one.right_option, one.count) for one in report.confusions] == [
        ("billing", "technical", 3)
    ]
    assert sum(report.histogram.pair) == sum(report.histogram.floor) == 8
    at_070 = report.coverage.thresholds.index(0.7)
    assert (report.coverage.n, report.coverage.is_labelled) == (3, True)
    assert (report.coverage.left_coverage[at_070], report.coverage.left_accuracy[at_070]) == (0.33333, 1.0)
    assert report.coverage.right_coverage[at_070] == 0.33333
    assert report.headline.startswith("mxfp4 picked the same option as bf16 for 5 of 8 answers (62.5%")


def test_a_record_that_a_run_cannot_answer_is_left_out_and_counted(database: Database, batch_id: int) -> None:
    comparison_id = store_comparison(database, batch_id, floor=None)
    ids = request_ids_of(database, batch_id)
    decide(database, comparison_id, "left", dict.fromkeys(ids, SURE))
    decide(database, comparison_id, "right", {ids[0]: None} | dict.fromkeys(ids[1:], SURE))
    summarise_waiting(database, 60)
    _, report = open_comparison(database, comparison_id)
    assert (report.num_records, report.num_skipped, report.overall.floor) == (3, 1, None)
    assert report.headline.endswith("; no noise floor was measured.")


def test_a_comparison_without_any_answer_ends_without_a_report(database: Database, batch_id: int) -> None:
    comparison_id = store_comparison(database, batch_id, floor=None)
    ids = request_ids_of(database, batch_id)
    for side in ("left", "right"):
        decide(database, comparison_id, side, dict.fromkeys(ids))
    assert [found.status for found in watch_comparison(database, comparison_id)] == ["summarising", "done"]
    view, report = open_comparison(database, comparison_id)
    assert (report, view.statistics, view.finished_at is not None) == (None, None, True)


def test_a_cancelled_comparison_keeps_what_it_has_and_can_go_on(database: Database, batch_id: int) -> None:
    comparison_id = store_comparison(database, batch_id, floor=None)
    ids = request_ids_of(database, batch_id)
    for side in ("left", "right"):
        decide(database, comparison_id, side, dict.fromkeys(ids[:3], SURE))
    stop_comparison(database, comparison_id)
    assert [found.status for found in watch_comparison(database, comparison_id)] == ["summarising", "cancelled"]
    _, report = open_comparison(database, comparison_id)
    assert (report.num_records, report.num_skipped) == (3, 1)

    with database.write() as session:
        queued = resume_comparison(session, comparison_id, max_crashes=3)
    assert [variant for _, variant in queued] == ["bf16", "mxfp4"]
    for side in ("left", "right"):
        decide(database, comparison_id, side, {ids[3]: SURE})
    summarise_waiting(database, 60)
    view, report = open_comparison(database, comparison_id)
    assert (report.num_records, view.cancel_requested_at) == (4, None)


def test_a_comparison_that_goes_on_while_it_is_summarised_is_summarised_whole(
    database: Database, batch_id: int
) -> None:
    comparison_id = store_comparison(database, batch_id, floor=None)
    ids = request_ids_of(database, batch_id)
    for side in ("left", "right"):
        decide(database, comparison_id, side, dict.fromkeys(ids[1:], SURE))
    stop_comparison(database, comparison_id)
    with database.write() as session:  # what a slow process may do after somebody else made it go on
        resume_comparison(session, comparison_id, max_crashes=3)
    assert summarise_comparison(database, comparison_id)
    with database.write() as session:
        assert not finish_comparison(session, comparison_id, None, num_answers=0)
        assert list_answers(session, comparison_id, AnswerFilter()).total == 0
    for side in ("left", "right"):
        decide(database, comparison_id, side, {ids[0]: SURE})
    with database.write() as session:
        assert not finish_comparison(session, comparison_id, None, num_answers=6)
    summarise_waiting(database, 60)
    assert open_comparison(database, comparison_id)[1].num_records == 4


def test_cancelling_reaches_rows_in_the_work_of_a_worker(database: Database, batch_id: int) -> None:
    comparison_id = store_comparison(database, batch_id, floor=None)
    with database.write() as session:
        of_left = (Decision.comparison_id == comparison_id) & (Decision.side == "left")
        ids = list(session.scalars(select(Decision.id).where(of_left)))
        claimed = store.claim_rows(session, ids[:2], owner="w", token="t")
        assert store.interruptions(session, "t", []) == []
        cancel_comparison(session, comparison_id)
        assert store.interruptions(session, "t", []) is None
        assert store.release_claims(session, "t") == []
        assert comparisons_to_finish(session) == [comparison_id]
    assert {(row.comparison_id, row.side, row.batching) for row in claimed} == {(comparison_id, "left", "single")}


def test_summarising_twice_or_in_small_steps_changes_nothing(database: Database, batch_id: int, monkeypatch) -> None:
    monkeypatch.setattr("worker.comparison_summary.REQUESTS_PER_PIECE", 1)
    comparison_id = store_comparison(database, batch_id, floor=None)
    ids = request_ids_of(database, batch_id)
    for side in ("left", "right"):
        decide(database, comparison_id, side, dict.fromkeys(ids, SURE))
    assert not summarise_comparison(database, comparison_id, deadline=time.monotonic())
    steps = Steps(3)
    monkeypatch.setattr("worker.comparison_summary.time", steps)
    assert not summarise_comparison(database, comparison_id, deadline=0.5)  # two of four rows, then the time is over
    with database.read() as session:
        assert list_answers(session, comparison_id, AnswerFilter()).total == 4
    monkeypatch.undo()
    assert summarise_comparison(database, comparison_id)
    first = open_comparison(database, comparison_id)
    assert summarise_comparison(database, comparison_id)
    assert open_comparison(database, comparison_id) == first
    assert first[1].num_records == 4


class Steps:
    """A clock that says 0 some times and then 1."""

    def __init__(self, zeros: int) -> None:
        self._times: Iterator[float] = iter([0.0] * (zeros - 1) + [1.0] * 99)

    def monotonic(self) -> float:
        return next(self._times)


def test_comparisons_are_listed_newest_first_and_stay_out_of_the_history(database: Database, finished: int) -> None:
    with database.read() as session:
        batch_id = get_comparison(session, finished).batch_id
    newer = store_comparison(database, batch_id, floor=None)
    with database.read() as session:
        items = list_comparisons(session)
        assert list_comparisons(session, batch_id=batch_id + 1) == []
        assert store.list_history(session) == []
    assert [(item.id, item.status, item.agreement) for item in items] == [
        (newer, "running", None),
        (finished, "done", pytest.approx(5 / 8)),
    ]


def test_memory_holds_a_piece_of_the_log_probabilities_at_a_time(database: Database, monkeypatch) -> None:
    monkeypatch.setattr("worker.comparison_summary.REQUESTS_PER_PIECE", 20)
    wide = {"wide": {f"option {n}": math.log(1 / 151) for n in range(151)}}
    batch_id = store_batch(database, [None] * 600)
    comparison_id = store_comparison(database, batch_id, floor=None)
    for side in ("left", "right"):
        decide(database, comparison_id, side, dict.fromkeys(request_ids_of(database, batch_id), wide))
    tracemalloc.start()
    with database.read() as session:
        assert len(paired_rows(session, comparison_id, after=0, limit=600)) == 600
    all_at_once = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    assert summarise_comparison(database, comparison_id)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < all_at_once / 3


@pytest.mark.slow
def test_ten_thousand_records_open_quickly(database: Database) -> None:
    num_rows = 10_000
    generator = random.Random(0)
    batch_id = store_batch(database, [{"team": generator.choice(("billing", "sales"))} for _ in range(num_rows)])
    comparison_id = store_comparison(database, batch_id)
    ids = request_ids_of(database, batch_id)
    left = {request_id: random_logs(generator) for request_id in ids}
    right = {request_id: random_logs(generator, left[request_id], noise=0.5) for request_id in ids}
    for side, answers in (("left", left), ("right", right), ("floor", left)):
        decide(database, comparison_id, side, answers)
    del left, right

    assert summarise_comparison(database, comparison_id)

    started = time.perf_counter()
    view, report = open_comparison(database, comparison_id)
    with database.read() as session:
        page = list_answers(session, comparison_id, AnswerFilter(is_flip=True), limit=50)
        list_answers(session, comparison_id, AnswerFilter(effect="broke", max_margin=0.05), limit=50)
        list_answers(session, comparison_id, AnswerFilter(question_id="team", is_flip=True), order="divergence")
        side_decisions(session, comparison_id, page.rows[0].answer.request_id)
        comparison_progress(session, comparison_id)
        list_comparisons(session)
    assert time.perf_counter() - started < 0.5
    assert (report.num_records, report.overall.n, view.num_rows) == (num_rows, 2 * num_rows, num_rows)
    assert len(page.rows) == 50
    assert page.total == report.overall.num_flips > 500
    assert len(report.scatter.left) == MAX_SCATTER_POINTS < report.scatter.num_answers
    assert len(report.model_dump_json()) < 300_000
    assert Report.model_validate_json(report.model_dump_json()) == report
