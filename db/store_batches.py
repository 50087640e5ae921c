"""Batches: rows that came from one table and run together, their progress, cancel and resume."""

from collections.abc import Collection, Iterator, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

from sqlalchemy import Select, Update, bindparam, exists, func, select, update
from sqlalchemy.orm import Session

from db.models import Batch, Decision, QuestionSet, Request, Run
from db.store_requests import decision_view, now_utc, request_view, store_question_set
from db.views import BatchProgress, BatchView, DecisionView, ResultRow

RATE_WINDOW_S = 30.0
_UNFINISHED = ("queued", "running")


def create_batch(
    session: Session,
    name: str,
    questions: dict[str, Any],
    variants: Sequence[str],
    *,
    source: str,
    columns: Sequence[str],
    mapping: dict[str, Any],
) -> int:
    """An empty batch; rows follow with `store_requests`, the end with `close_batch`."""
    batch = Batch(
        name=name,
        source=source,
        variants=list(variants),
        question_set_id=store_question_set(session, questions),
        columns=list(columns),
        mapping=mapping,
        num_rows=0,
        created_at=now_utc(),
    )
    session.add(batch)
    session.flush()
    return batch.id


def count_rows(session: Session, batch_id: int, num_rows: int) -> None:
    """Add rows that were just stored to the batch's count."""
    session.execute(update(Batch).where(Batch.id == batch_id).values(num_rows=Batch.num_rows + num_rows))


def close_batch(session: Session, batch_id: int) -> None:
    """Say that every row is stored, so that the batch can finish."""
    session.execute(update(Batch).where(Batch.id == batch_id).values(stored_at=now_utc()))
    finish_batches(session, {batch_id})


def finish_batches(session: Session, batch_ids: Collection[int]) -> None:
    """Mark those of the batches as finished that are stored whole and have no row left to do."""
    if not batch_ids:
        return
    # Two workers may save the last two rows at once, each blind to the other's; the lock lets the second one see.
    session.execute(_lock_batches(), {"ids": list(batch_ids)})
    session.execute(_finish_batches(), {"ids": list(batch_ids), "now": now_utc()})


@cache
def _lock_batches() -> Select[int]:
    """Built once, as the next: both are asked for every micro-batch, and building takes longer than asking."""
    return select(Batch.id).where(Batch.id.in_(bindparam("ids", expanding=True))).order_by(Batch.id).with_for_update()


@cache
def _finish_batches() -> Update:
    unfinished = exists().where(Decision.batch_id == Batch.id, Decision.status.in_(_UNFINISHED))
    is_wanted = Batch.id.in_(bindparam("ids", expanding=True))
    return (
        update(Batch)
        .where(is_wanted, Batch.finished_at.is_(None), Batch.stored_at.is_not(None), ~unfinished)
        .values(finished_at=bindparam("now"))
        .execution_options(synchronize_session=False)
    )


def cancel_batch(session: Session, batch_id: int) -> int:
    """Ask the batch to stop: waiting rows are cancelled now, running ones by their worker. Returns how many now."""
    now = now_utc()
    session.execute(
        update(Batch)
        .where(Batch.id == batch_id, Batch.cancel_requested_at.is_(None), Batch.finished_at.is_(None))
        .values(cancel_requested_at=now)
    )
    cancelled = session.scalars(
        update(Decision)
        .where(Decision.batch_id == batch_id, Decision.status == "queued")
        .values(status="cancelled", finished_at=now)
        .returning(Decision.id)
        .execution_options(synchronize_session=False)
    ).all()
    finish_batches(session, {batch_id})
    return len(cancelled)


def resume_batch(session: Session, batch_id: int, *, max_crashes: int) -> list[tuple[int, str]]:
    """Queue the cancelled rows and those that failed by crashes again, clear the cancel flag; done rows stay.

    A batch whose storing was broken off counts as stored from here on, with the rows it has.

    Returns:
        (decision id, variant) of each row queued.
    """
    queued = session.execute(
        update(Decision)
        .where(
            Decision.batch_id == batch_id,
            (Decision.status == "cancelled") | ((Decision.status == "failed") & (Decision.crashes >= max_crashes)),
        )
        .values(status="queued", crashes=0, error=None, finished_at=None)
        .returning(Decision.id, Decision.variant)
        .execution_options(synchronize_session=False)
    ).all()
    session.execute(
        update(Batch)
        .where(Batch.id == batch_id)
        .values(cancel_requested_at=None, finished_at=None, stored_at=func.coalesce(Batch.stored_at, now_utc()))
    )
    finish_batches(session, {batch_id})
    return sorted((row.id, row.variant) for row in queued)


def get_batch(session: Session, batch_id: int) -> BatchView | None:
    row = session.execute(
        select(Batch, QuestionSet.questions)
        .join(QuestionSet, Batch.question_set_id == QuestionSet.id)
        .where(Batch.id == batch_id)
    ).one_or_none()
    if row is None:
        return None
    batch, questions = row
    return BatchView(
        id=batch.id,
        name=batch.name,
        source=batch.source,
        variants=tuple(batch.variants),
        questions=questions,
        columns=tuple(batch.columns),
        mapping=batch.mapping,
        num_rows=batch.num_rows,
        created_at=batch.created_at,
        stored_at=batch.stored_at,
        cancel_requested_at=batch.cancel_requested_at,
        finished_at=batch.finished_at,
    )


def batch_progress(session: Session, batch_id: int) -> BatchProgress:
    """Counts by status, and a rate from the rows that finished within the last 30 s.

    Raises:
        LookupError: there is no such batch.
    """
    batch = session.get(Batch, batch_id)
    if batch is None:
        raise LookupError(f"there is no batch {batch_id}")
    counts: dict[str, int] = {
        status: count
        for status, count in session.execute(
            select(Decision.status, func.count()).where(Decision.batch_id == batch_id).group_by(Decision.status)
        )
    }
    unfinished = sum(counts.get(status, 0) for status in _UNFINISHED)
    decisions_per_s = _decisions_per_s(session, batch) if unfinished else 0.0
    return BatchProgress(
        batch_id=batch_id,
        num_rows=batch.num_rows,
        num_decisions=sum(counts.values()),
        queued=counts.get("queued", 0),
        running=counts.get("running", 0),
        done=counts.get("done", 0),
        failed=counts.get("failed", 0),
        cancelled=counts.get("cancelled", 0),
        rows_per_s=decisions_per_s / max(len(batch.variants), 1),
        eta_s=unfinished / decisions_per_s if decisions_per_s else (0.0 if not unfinished else None),
        is_finished=batch.finished_at is not None,
        is_cancelled=batch.cancel_requested_at is not None,
    )


def iter_results(session: Session, batch_id: int, chunk: int = 500) -> Iterator[ResultRow]:
    """Every row of a batch with its decisions, in row order, reading `chunk` rows at a time."""
    last_row, last_id = -1, -1
    while True:
        rows = session.execute(
            select(Request, QuestionSet.questions)
            .join(QuestionSet, Request.question_set_id == QuestionSet.id)
            .where(Request.batch_id == batch_id)
            .where((Request.row_number > last_row) | ((Request.row_number == last_row) & (Request.id > last_id)))
            .order_by(Request.row_number, Request.id)
            .limit(chunk)
        ).all()
        if not rows:
            return
        decisions: dict[int, dict[str, DecisionView]] = {request.id: {} for request, _ in rows}
        for decision, run in session.execute(
            select(Decision, Run)
            .outerjoin(Run, Decision.run_id == Run.id)
            .where(Decision.request_id.in_(decisions), Decision.take == 0)
            .order_by(Decision.id)
        ):
            decisions[decision.request_id][decision.variant] = decision_view(decision, run)
        results = [ResultRow(request_view(request, value), decisions[request.id]) for request, value in rows]
        last_row, last_id = rows[-1][0].row_number, rows[-1][0].id
        session.expunge_all()
        yield from results


def _decisions_per_s(session: Session, batch: Batch) -> float:
    now = now_utc()
    start = now - timedelta(seconds=RATE_WINDOW_S)
    finished = session.scalars(
        select(func.count())
        .select_from(Decision)
        .where(
            Decision.batch_id == batch.id,
            Decision.finished_at >= start,
            Decision.status.in_(("done", "failed")),
            Decision.attempts > 0,
        )
    ).one()
    if not finished:
        return 0.0
    begin = max(start, batch.created_at)
    seconds = max((now - begin).total_seconds(), 1e-3)
    return float(finished / seconds)
