"""From the decisions of a comparison to its answers and its report, in pieces.

Each piece of requests is compared without holding a lock and stored in a short transaction, and only if nobody stored
it meanwhile; so any number of processes may do this at once, and one that stops half-way loses nothing. Memory holds a
piece's log-probabilities and, for the report, a few numbers per answer.
"""

import logging
import time
from collections.abc import Iterator
from dataclasses import fields

from clef_core.comparison import Compared, Pair, compare_pair
from clef_core.comparison_build import build_report
from clef_core.comparison_report import Report
from db.comparison_views import ComparedAnswer, ComparisonView, PairedRow
from db.session import Database
from db.store_comparison_answers import (
    add_answers,
    compared_up_to,
    iter_answers,
    paired_rows,
    question_order,
    side_runs,
)
from db.store_comparison_reads import get_comparison
from db.store_comparisons import comparisons_to_finish, finish_comparison

logger = logging.getLogger(__name__)

REQUESTS_PER_PIECE = 250
_FIELDS = tuple(field.name for field in fields(Compared))


def summarise_waiting(database: Database, budget_s: float) -> None:
    """Summarise every comparison whose decisions are all there, for as long as the budget lasts."""
    deadline = time.monotonic() + budget_s
    with database.read() as session:
        comparison_ids = comparisons_to_finish(session)
    for comparison_id in comparison_ids:
        if not summarise_comparison(database, comparison_id, deadline=deadline):
            return


def summarise_comparison(database: Database, comparison_id: int, *, deadline: float | None = None) -> bool:
    """Compare the answers of a decided comparison and store its report.

    Args:
        deadline: stop here, in the seconds of `time.monotonic()`; the next call goes on.

    Returns:
        False when the deadline came first.
    """
    with database.read() as session:
        stored = cursor = compared_up_to(session, comparison_id)
    while True:
        if deadline is not None and time.monotonic() >= deadline:
            return False
        with database.read() as session:
            rows = paired_rows(session, comparison_id, after=cursor, limit=REQUESTS_PER_PIECE)
        if not rows:
            break
        cursor = rows[-1].request_id
        answers = [answer for row in rows for answer in compare_row(row)]
        if answers:
            with database.write() as session:
                if comparison_id not in comparisons_to_finish(session):
                    return True  # somebody finished it meanwhile, or made it go on
                is_ours = add_answers(session, comparison_id, stored, answers)
                stored = compared_up_to(session, comparison_id)
            cursor = cursor if is_ours else stored
    with database.read() as session:
        view = get_comparison(session, comparison_id)
        assert view is not None, f"comparison {comparison_id} has answers and no row"
        order = question_order(session, comparison_id)
        compared = [_from_stored(answer) for answer in iter_answers(session, comparison_id)]
        runs = side_runs(session, comparison_id)
    report = _report(view, compared, order) if compared else None
    for side, of_side in runs.items():
        if len(of_side) > 1:
            logger.warning("comparison %d: %s was made in %d different runs", comparison_id, side, len(of_side))
    with database.write() as session:
        statistics = None if report is None else report.model_dump(mode="json")
        finish_comparison(session, comparison_id, statistics, num_answers=len(compared))
    return True


def compare_row(row: PairedRow) -> Iterator[ComparedAnswer]:
    """The compared answers of a row; none unless both runs have answered it. A label that is no option is no label."""
    left, right, floor = (row.log_probs.get(side) for side in ("left", "right", "floor"))
    if left is None or right is None:
        return
    for question_id, options in left.items():
        label = row.labels.get(question_id)
        pair = Pair(
            request_id=row.request_id,
            question_id=question_id,
            options=tuple(options),
            left=tuple(options.values()),
            right=tuple(right[question_id][option] for option in options),
            floor=None if floor is None else tuple(floor[question_id][option] for option in options),
            label=label if label in options else None,
        )
        found = compare_pair(pair)
        yield ComparedAnswer(**vars(found), is_flip=found.is_flip, effect=found.effect)


def _from_stored(answer: ComparedAnswer) -> Compared:
    return Compared(**{name: getattr(answer, name) for name in _FIELDS})


def _report(view: ComparisonView, compared: list[Compared], order: list[str]) -> Report:
    num_compared = len({answer.request_id for answer in compared})
    return build_report(
        compared,
        (view.left_variant, view.right_variant),
        order,
        num_skipped=view.num_rows - num_compared,
        floor_shape="in another batch shape" if view.floor_variant == view.left_variant else f"as {view.floor_variant}",
    )
