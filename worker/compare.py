"""A comparison as a person meets it: start it for the requests of a batch, watch it, cancel it, go on, read its report.

Stores decisions and rings for them, as `worker.submit` does; workers do the rest. Imports no torch, so the page uses
it too. Left and right run each record alone in its forward (`single`), so that nothing but the variant can move a
number; the floor runs the left variant again in another shape (`padded`).

What surprises: nobody has to wait for a comparison. When its last decision is there, whoever looks first summarises it
(a waiting command, the page, or the sweeper of a worker or of the app), and it does not matter if two do.
"""

import time
from collections.abc import Callable, Iterator, Mapping

from clef_core.comparison_report import Report
from clef_core.errors import ClefError
from db import store
from db.comparison_views import ComparisonProgress, ComparisonView, NewComparison
from db.session import Database
from db.store_comparison_reads import comparison_progress, get_comparison
from db.store_comparisons import (
    add_decisions,
    answerable_requests,
    cancel_comparison,
    close_comparison,
    create_comparison,
    resume_comparison,
)
from db.views import Batching, Json, Side
from worker.bell import Bell
from worker.submit import Submitter

REQUESTS_PER_TRANSACTION = 500
POLL_S = 0.25
BATCHING: Mapping[Side, Batching] = {"left": "single", "right": "single", "floor": "padded"}


class ComparisonError(ClefError):
    """A comparison that cannot be started or shown."""


def start_comparison(
    submitter: Submitter,
    batch_id: int,
    *,
    left: str = "bf16",
    right: str = "mxfp4",
    floor: str | None = "",
    name: str = "",
    parameters: Mapping[str, Json] | None = None,
    on_created: Callable[[int], object] | None = None,
) -> int:
    """Queue every answerable request of a batch in both variants, and for the floor; returns the comparison's id.

    Args:
        floor: the variant that is run again; empty for the left one, None for no floor.
        name: the batch's if empty.
        parameters: how it was asked for, kept with it.
        on_created: called with the comparison's id as soon as there is one, before its requests are queued.

    Raises:
        ComparisonError: there is no such batch, or it has no request that could be asked.
    """
    with submitter.database.write() as session:
        batch = store.get_batch(session, batch_id)
        if batch is None:
            raise ComparisonError(f"there is no batch {batch_id}")
        if not answerable_requests(session, batch_id, after=0, limit=1):
            raise ComparisonError(f"batch {batch_id} has no row that could be asked")
        new = NewComparison(
            batch_id, name or batch.name, left, right, left if floor == "" else floor, dict(parameters or {})
        )
        comparison_id = create_comparison(session, new)
    if on_created is not None:
        on_created(comparison_id)
    after = 0
    while True:
        with submitter.database.write() as session:
            request_ids = answerable_requests(session, batch_id, after=after, limit=REQUESTS_PER_TRANSACTION)
            queued = add_decisions(session, comparison_id, request_ids, new.variants, BATCHING)
            if not queued:
                close_comparison(session, comparison_id)
                return comparison_id
        for side, decision_ids in queued.items():
            Bell(submitter.redis).ring(new.variants[side], decision_ids, at_front=False)
        after = request_ids[-1]


def stop_comparison(database: Database, comparison_id: int) -> None:
    """Cancel what waits; what is done by then is summarised."""
    with database.write() as session:
        cancel_comparison(session, comparison_id)


def continue_comparison(submitter: Submitter, comparison_id: int) -> int:
    """Queue what was cancelled or failed by crashes again; returns how many decisions. Done ones stay as they are."""
    with submitter.database.write() as session:
        queued = resume_comparison(session, comparison_id, max_crashes=store.MAX_CRASHES)
    for variant in dict.fromkeys(variant for _, variant in queued):
        Bell(submitter.redis).ring(variant, [row for row, of in queued if of == variant], at_front=False)
    return len(queued)


def watch_comparison(database: Database, comparison_id: int, poll_s: float = POLL_S) -> Iterator[ComparisonProgress]:
    """Yield the progress now and again; summarise when all is decided. The last one yielded is finished.

    Raises:
        ComparisonError: there is no such comparison.
    """
    from worker.comparison_summary import summarise_comparison  # loads scipy

    while True:
        progress = look_at_progress(database, comparison_id)
        yield progress
        if progress.is_finished:
            return
        if progress.is_decided:
            summarise_comparison(database, comparison_id)
        else:
            time.sleep(poll_s)


def look_at_progress(database: Database, comparison_id: int) -> ComparisonProgress:
    """How far it is.

    Raises:
        ComparisonError: there is no such comparison.
    """
    with database.read() as session:
        try:
            return comparison_progress(session, comparison_id)
        except LookupError as error:
            raise ComparisonError(str(error)) from None


def open_comparison(database: Database, comparison_id: int) -> tuple[ComparisonView, Report | None]:
    """A comparison with its report; None while it runs, or when nothing could be compared.

    Raises:
        ComparisonError: there is no such comparison.
    """
    with database.read() as session:
        view = get_comparison(session, comparison_id)
    if view is None:
        raise ComparisonError(f"there is no comparison {comparison_id}")
    return view, None if view.statistics is None else Report.model_validate(view.statistics)
