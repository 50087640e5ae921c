"""A comparison as HTML: the figures that stand in the database, every text escaped, the list paged by the database."""

import random
import re
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from comparison_lab import decide, logs, random_logs, request_ids_of, store_batch, store_comparison
from web_app import small_settings

from clef_core.comparison import Compared, compare_pair
from clef_core.comparison import Pair as AnswerPair
from clef_core.comparison_build import build_report
from clef_core.comparison_report import CoverageCurve, Report
from db.comparison_views import (
    AnswerFilter,
    AnswerPage,
    ComparedAnswer,
    ComparisonProgress,
    ComparisonView,
    ListedAnswer,
)
from db.session import Database
from db.store_comparison_answers import add_answers, list_answers
from db.store_comparison_reads import comparison_progress, list_comparisons
from db.store_comparisons import cancel_comparison, finish_comparison
from db.store_sensitivity import SensitivityRunView
from web.compare_flips import FILTERS, PAGE_ANSWERS, answers_list_html, filter_of, load_unfolded
from web.compare_report import report_html, threshold_html
from web.compare_view import comparison_head_html, comparison_progress_html, comparisons_html, run_names
from web.plots import Names
from web.sensitivity import sensitivity_html, sensitivity_list_html
from web.together import together_html
from worker.compare import open_comparison
from worker.comparison_summary import summarise_waiting
from worker.together import Moved, Together

NAMES = Names("BF16", "MXFP4")
MARKUP = '<img src=x onerror="x">'
SURE = logs((0.8, 0.1, 0.1), (0.9, 0.1))
CLOSE = logs((0.36, 0.34, 0.30), (0.9, 0.1))
FLIPPED = logs((0.30, 0.40, 0.30), (0.9, 0.1))
CLEAR = logs((0.6, 0.3, 0.1), (0.9, 0.1))
LABELS = [{"team": "billing"}, {"team": "billing"}, {"team": "technical"}, None]


def finished(database: Database, *, labels: bool = True, floor: str | None = "bf16") -> tuple[ComparisonView, Report]:
    """Four rows: the same, broke (a near tie), fixed, a flip without a label."""
    batch_id = store_batch(database, LABELS if labels else [None] * 4)
    comparison_id = store_comparison(database, batch_id, floor=floor)
    ids = request_ids_of(database, batch_id)
    left, right = [SURE, CLOSE, CLEAR, SURE], [SURE, FLIPPED, FLIPPED, FLIPPED]
    for side, answers in (("left", left), ("right", right), *([("floor", left)] if floor else [])):
        decide(database, comparison_id, side, dict(zip(ids, answers, strict=True)))  # type: ignore[arg-type]
    summarise_waiting(database, 60)
    view, report = open_comparison(database, comparison_id)
    assert report is not None
    return view, report


def text_of(markup: str) -> str:
    """Markup as a person reads it: no tags, single spaces."""
    return " ".join(re.sub(r"<[^>]+>", " ", markup).split())


def table_rows(markup: str, title: str) -> list[str]:
    """The body rows of the table under a title, as text."""
    section = markup.split(f">{title}</h3>")[1].split("</tbody>")[0].split("<tbody>")[1]
    return [text_of(row) for row in section.split("</tr>") if row]


# ---- report --------------------------------------------------------------------------------------------------------


def test_the_headline_names_the_variants_as_the_page_does(database: Database) -> None:
    markup = report_html(*finished(database))
    assert text_of(markup).startswith("MXFP4 picked the same option as BF16 for 5 of 8 answers (62.5%")


def test_the_figures_per_question_are_those_of_the_report_with_the_floor_beside(database: Database) -> None:
    rows = table_rows(report_html(*finished(database)), "How far apart")
    assert [row.split()[0] for row in rows] == ["all", "team", "urgent"]
    assert rows[1].startswith("team 4 25.0 % 4.6–69.9")
    assert "3 (1) 100.0 % 0 0 outside the floor" in rows[1]
    assert rows[2].startswith("urgent 4 100.0 %")
    assert rows[2].endswith("within the floor")


def test_accuracy_stands_beside_what_broke_and_what_was_fixed(database: Database) -> None:
    rows = table_rows(report_html(*finished(database)), "Against the right answers")
    assert rows[1].startswith("team 3 66.7 % (20.8–93.9) 66.7 % (20.8–93.9) 1 1 1 ")


def test_without_labels_there_is_no_accuracy_and_no_reliability(database: Database) -> None:
    markup = report_html(*finished(database, labels=False))
    assert "No right answers are known" in markup
    assert "Reliability" not in markup
    assert markup.count("<svg") == 2


def test_without_a_floor_nothing_is_said_to_be_inside_it(database: Database) -> None:
    markup = report_html(*finished(database, floor=None))
    assert "no noise floor was measured" in markup
    assert "the floor" not in text_of(markup).split("How it was made")[0]


def test_what_became_what_counts_the_flips(database: Database) -> None:
    rows = table_rows(report_html(*finished(database)), "What became what")
    assert rows == ["team billing technical 3"]


def test_random_weights_are_said_in_the_report_itself(database: Database) -> None:
    view, report = finished(database)
    assert "nothing about Clef" not in report_html(view, report)
    assert "nothing about Clef" in report_html(replace(view, parameters={"random_releases": ["bf16"]}), report)


def test_a_variant_against_itself_has_two_names(database: Database) -> None:
    view, _ = finished(database)
    assert run_names(replace(view, right_variant="bf16")) == Names("BF16", "BF16 again")


def test_every_name_is_shown_as_text(database: Database) -> None:
    view, _ = finished(database)
    view = replace(view, name=MARKUP, left_variant=MARKUP, right_variant="b")
    options = (MARKUP, f"{MARKUP}2")
    pairs = [
        AnswerPair(number, MARKUP, options, (-0.1, -2.3), (-2.3, -0.1), None, MARKUP) for number in range(30)
    ]  # fmt: skip
    report = build_report([compare_pair(pair) for pair in pairs], (MARKUP, "b"), [MARKUP])
    parts = (
        report_html(view, report),
        comparison_head_html(view),
        threshold_html(report.coverage, run_names(view), 0.5),
    )
    for markup in parts:
        assert "<img" not in markup.casefold()
        assert "&lt;img" in markup.casefold()


# ---- acting above a confidence -------------------------------------------------------------------------------------


def test_the_threshold_says_how_many_are_acted_on_and_how_many_of_these_are_right() -> None:
    curve = CoverageCurve(
        n=10,
        is_labelled=True,
        thresholds=(0.0, 0.5, 1.0),
        left_coverage=(1.0, 0.4, 0.0),
        right_coverage=(1.0, 0.6, 0.0),
        left_accuracy=(0.5, 0.75, None),
        right_accuracy=(0.5, 0.5, None),
    )
    assert "BF16 40.0 % 4 of 10 75.0 % MXFP4 60.0 % 6 of 10 50.0 %" in text_of(threshold_html(curve, NAMES, 0.52))
    assert "BF16 0.0 % 0 of 10 – MXFP4" in text_of(threshold_html(curve, NAMES, 1.0))


# ---- list, head, progress ------------------------------------------------------------------------------------------


def progress(**changes: object) -> ComparisonProgress:
    known = {
        "comparison_id": 1,
        "num_rows": 10,
        "num_decisions": 30,
        "queued": 20,
        "running": 1,
        "done": 9,
        "failed": 0,
        "cancelled": 0,
        "decisions_per_s": 2.0,
        "eta_s": 10.0,
        "is_decided": False,
        "is_finished": False,
        "is_cancelled": False,
    }
    return ComparisonProgress(**{**known, **changes})  # type: ignore[arg-type]


def test_a_running_comparison_shows_how_far_it_is(database: Database) -> None:
    view, _ = finished(database)
    markup = comparison_progress_html(view, progress())
    assert 'aria-valuenow="9"' in markup
    assert "30 %" in text_of(markup)
    assert "of 30: 3 runs of 4 records" in text_of(markup)
    assert "Adding up" in comparison_progress_html(view, progress(is_decided=True))
    assert "Stopping" in comparison_progress_html(view, progress(is_cancelled=True))


def test_a_finished_comparison_says_only_what_is_missing(database: Database) -> None:
    view, _ = finished(database)
    assert comparison_progress_html(view, progress(is_finished=True)) == ""
    missing = comparison_progress_html(view, progress(is_finished=True, cancelled=3, failed=1))
    assert (
        text_of(missing)
        == "3 decisions not made and 1 decision failed: this covers the records that both runs answered."
    )


def test_the_list_has_the_running_ones_with_their_progress(database: Database) -> None:
    done, _ = finished(database)
    running = store_comparison(database, done.batch_id)
    with database.read() as session:
        items = list_comparisons(session)
        found = {running: comparison_progress(session, running)}
    markup = comparisons_html(items, found)
    first, second = markup.split("</li>")[:2]
    assert f'href="/compare?comparison={running}"' in first
    assert "h-bar" in first
    assert "62.5 % the same" in second
    assert "h-bar" not in second


def test_a_stopped_comparison_is_listed_as_stopped_early(database: Database) -> None:
    done, _ = finished(database)
    stopped = store_comparison(database, done.batch_id)
    with database.write() as session:
        cancel_comparison(session, stopped)
    summarise_waiting(database, 60)
    with database.read() as session:
        markup = comparisons_html(list_comparisons(session), {})
    assert "stopped early" in markup.split("</li>")[0]


def test_an_empty_list_says_what_to_do() -> None:
    assert "Run a batch first" in comparisons_html([], {})


# ---- flips ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "rows"), [("all", [1, 3, 2]), ("near", [1]), ("broke", [1]), ("fixed", [2])])
def test_a_filter_keeps_what_it_says_closest_calls_first(database: Database, kind: str, rows: list[int]) -> None:
    view, _ = finished(database)
    with database.read() as session:
        found = list_answers(session, view.id, filter_of(kind, ""))
    assert sorted(listed.row_number or 0 for listed in found.rows) == sorted(rows)
    assert found.rows[0].row_number == rows[0]


def test_a_filter_and_a_question_go_together() -> None:
    assert filter_of("broke", "team") == AnswerFilter("team", True, "broke", None)
    assert filter_of("same", "") == AnswerFilter(None, False, None, None)
    assert set(FILTERS) == {"all", "near", "broke", "fixed", "same"}


def test_an_unfolded_flip_shows_state_and_both_decisions_bars(database: Database, tmp_path: Path) -> None:
    view, _ = finished(database)
    settings = small_settings(tmp_path)
    with database.read() as session:
        found = list_answers(session, view.id, filter_of("broke", ""))
    answer = found.rows[0].answer
    unfolded = load_unfolded(database, view.id, answer.request_id, "team")
    markup = answers_list_html(found, 0, NAMES, unfolded, settings)
    assert 'aria-expanded="true"' in markup
    assert '<pre class="f-prompt">state 1</pre>' in markup
    assert "MXFP4 technical" in text_of(markup)
    assert "BF16 billing" in text_of(markup)
    assert "0.360" in markup
    assert "0.400" in markup


def test_only_an_answer_of_this_comparison_unfolds(database: Database) -> None:
    view, _ = finished(database)
    foreign = store_batch(database, [None])
    (request_id,) = request_ids_of(database, foreign)
    assert load_unfolded(database, view.id, request_id, "team") is None
    own = request_ids_of(database, view.batch_id)[0]
    assert load_unfolded(database, view.id, own, "no such question") is None
    assert load_unfolded(database, view.id, 10**15, "team") is None
    assert load_unfolded(database, view.id, own, "team") is not None


def test_texts_of_a_listed_answer_are_escaped(database: Database, tmp_path: Path) -> None:
    view, _ = finished(database)
    with database.read() as session:
        listed = list_answers(session, view.id, filter_of("broke", "")).rows[0]
    answer = replace(listed.answer, question_id=MARKUP, left_option=MARKUP, right_option=MARKUP, label=MARKUP)
    page = AnswerPage(1, (ListedAnswer(answer, 1, MARKUP, MARKUP),))
    markup = answers_list_html(page, 0, Names(MARKUP, MARKUP), None, small_settings(tmp_path))
    assert "<img" not in markup
    assert 'data-question="&lt;img src=x onerror=&quot;x&quot;&gt;"' in markup


def test_ten_thousand_records_open_in_a_moment(database: Database, tmp_path: Path) -> None:
    view, report = _large(database, 10_000)
    start = time.perf_counter()
    view, report = open_comparison(database, view.id)  # type: ignore[assignment]
    markup = report_html(view, report) + threshold_html(report.coverage, run_names(view), 0.8)
    with database.read() as session:
        found = list_answers(session, view.id, filter_of("all", ""), limit=PAGE_ANSWERS)
    markup += answers_list_html(found, 0, NAMES, None, small_settings(tmp_path))
    assert time.perf_counter() - start < 1.0
    assert report.num_records == 10_000
    assert len(markup) < 300_000


def _large(database: Database, num_records: int) -> tuple[ComparisonView, Report]:
    """A finished comparison of many records, without its decisions."""
    generator = random.Random(0)
    batch_id = store_batch(database, [None] * num_records)
    comparison_id = store_comparison(database, store_batch(database, [None]))
    compared: list[Compared] = []
    for request_id in request_ids_of(database, batch_id):
        left = random_logs(generator)["team"]
        right = random_logs(generator, {"team": left, "urgent": {"true": 0.0, "false": 0.0}}, 0.3)["team"]
        pair = AnswerPair(request_id, "team", tuple(left), tuple(left.values()), tuple(right.values()), None, None)
        compared.append(compare_pair(pair))
    with database.write() as session:
        answers = [ComparedAnswer(**vars(one), is_flip=one.is_flip, effect=one.effect) for one in compared]
        add_answers(session, comparison_id, 0, answers)
        cancel_comparison(session, comparison_id)
        report = build_report(compared, ("bf16", "mxfp4"), ["team"])
        finish_comparison(session, comparison_id, report.model_dump(mode="json"), num_answers=len(compared))
    return open_comparison(database, comparison_id)  # type: ignore[return-value]


# ---- sensitivity, alone or together --------------------------------------------------------------------------------


def test_a_stored_sensitivity_run_is_shown_with_its_plot(stored_run: SensitivityRunView) -> None:
    assert f"/compare?sensitivity={stored_run.id}" in sensitivity_list_html([stored_run])
    markup = sensitivity_html(stored_run)
    assert "<svg" in markup
    assert "layer 7" in markup
    assert "<img" not in markup


def test_without_a_sensitivity_run_the_command_is_named() -> None:
    assert "python -m worker sensitivity" in sensitivity_list_html([])


@pytest.fixture
def stored_run() -> SensitivityRunView:
    def effect(part: str, kl: float) -> dict[str, object]:
        return {
            "part": part,
            "num_linears": 7,
            "num_weights": 100,
            "num_answers": 40,
            "num_agreeing": 38,
            "agreement": [0.95, 0.84, 0.99],
            "kl": kl,
            "kl_standard_error": None,
            "max_abs_dp": 0.1,
        }

    results = {
        "num_requests": 40,
        "num_refused": 0,
        "noise_floor": effect("noise floor", 0.001),
        "everything": effect("everything", 0.1),
        "effects": [effect("layer 7", 0.05)],
    }
    return SensitivityRunView(
        MARKUP, "abc" * 10, MARKUP, "0" * 64, "layer", results, {"device": "cpu"}, 3, datetime.now(UTC)
    )


def test_alone_or_together_says_what_moves_and_escapes_it() -> None:
    questions = {MARKUP: {"type": "choice", "criteria": {MARKUP: None, "b": None}}, "late": {"type": "noul"}}
    flip = _moved(MARKUP, {MARKUP: -0.1, "b": -2.3}, {MARKUP: -2.3, "b": -0.1})
    same = _moved("late", {"true": -0.1, "false": -2.3}, {"true": -0.2, "false": -1.7})
    found = Together(1, ("bf16",), 2, is_finished=True, moved={"bf16": (flip, same)}, failures={"bf16": (MARKUP,)})
    markup = together_html(found, questions)
    assert "BF16: 1 of 2 questions gets another answer alone." in text_of(markup)
    assert "<img" not in markup
    pending = replace(found, is_finished=False)
    assert "2 of 2 questions asked both ways" in together_html(pending, questions)


def _moved(question_id: str, together: dict[str, float], alone: dict[str, float]) -> Moved:
    pair = AnswerPair(1, question_id, tuple(together), tuple(together.values()), tuple(alone.values()))
    return Moved(question_id, together, alone, compare_pair(pair))
