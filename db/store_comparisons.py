"""Comparisons: their decisions in the queue, progress, cancel and resume, and the lists that show them.

What is compared in them stands in `db.store_comparison_answers`. A comparison's decisions belong to its batch's
requests but not to the batch: they have a take of their own, so that nothing of the batch changes.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import delete, exists, func, insert, select, update
from sqlalchemy.orm import Session, aliased

from db.comparison_views import (
    ComparisonItem,
    ComparisonProgress,
    ComparisonStatus,
    ComparisonView,
    NewComparison,
)
from db.models import Comparison, ComparisonAnswer, Decision, Request, Run
from db.store_requests import now_utc, run_view
from db.views import PRIORITY_BATCH, Batching, Side

SIDES: tuple[Side, ...] = ("left", "right", "floor")
RATE_WINDOW_S = 30.0
_UNFINISHED = ("queued", "running")


def create_comparison(session: Session, new: NewComparison) -> int:
    """A comparison without decisions; they follow with `add_decisions`, the end with `close_comparison`."""
    comparison = Comparison(
        batch_id=new.batch_id,
        name=new.name,
        left_variant=new.left_variant,
        right_variant=new.right_variant,
        floor_variant=new.floor_variant,
        parameters=new.parameters,
        num_rows=0,
        created_at=now_utc(),
    )
    session.add(comparison)
    session.flush()
    return comparison.id


def answerable_requests(session: Session, batch_id: int, *, after: int, limit: int) -> list[int]:
    """The next requests of a batch that could be asked at all, by id."""
    return list(
        session.scalars(
            select(Request.id)
            .where(Request.batch_id == batch_id, Request.id > after, Request.input_error.is_(None))
            .order_by(Request.id)
            .limit(limit)
        )
    )


def add_decisions(
    session: Session,
    comparison_id: int,
    request_ids: Sequence[int],
    variants: Mapping[Side, str],
    batching: Mapping[Side, Batching],
) -> dict[Side, list[int]]:
    """Queue a decision per request and side.

    Returns:
        the decisions' ids by side, in the order of the requests; empty when the comparison was cancelled meanwhile.
    """
    now = now_utc()
    is_cancelled = session.scalar(
        select(Comparison.cancel_requested_at.is_not(None)).where(Comparison.id == comparison_id).with_for_update()
    )
    if is_cancelled or not request_ids:
        return {}
    ids: dict[Side, list[int]] = {}
    for side, variant in variants.items():
        rows = [
            {
                "request_id": request_id,
                "variant": variant,
                "take": _take(comparison_id, side),
                "batching": batching[side],
                "comparison_id": comparison_id,
                "side": side,
                "status": "queued",
                "priority": PRIORITY_BATCH,
                "attempts": 0,
                "crashes": 0,
                "created_at": now,
            }
            for request_id in request_ids
        ]
        inserted = insert(Decision).returning(Decision.id, sort_by_parameter_order=True)
        ids[side] = list(session.scalars(inserted, rows))
    session.execute(
        update(Comparison).where(Comparison.id == comparison_id).values(num_rows=Comparison.num_rows + len(request_ids))
    )
    return ids


def close_comparison(session: Session, comparison_id: int) -> None:
    """Say that every decision is queued, so that the comparison can finish."""
    session.execute(update(Comparison).where(Comparison.id == comparison_id).values(stored_at=now_utc()))


def cancel_comparison(session: Session, comparison_id: int) -> None:
    """Ask it to stop: waiting decisions are cancelled now, running ones by their worker. What is done is summarised."""
    now = now_utc()
    session.execute(
        update(Comparison)
        .where(Comparison.id == comparison_id, Comparison.finished_at.is_(None))
        .values(
            cancel_requested_at=func.coalesce(Comparison.cancel_requested_at, now),
            stored_at=func.coalesce(Comparison.stored_at, now),
        )
    )
    session.execute(
        update(Decision)
        .where(Decision.comparison_id == comparison_id, Decision.status == "queued")
        .values(status="cancelled", finished_at=now)
        .execution_options(synchronize_session=False)
    )


def resume_comparison(session: Session, comparison_id: int, *, max_crashes: int) -> list[tuple[int, str]]:
    """Queue cancelled decisions and those that failed by crashes again; what was summarised is forgotten.

    Returns:
        (decision id, variant) of each one queued. When there is none, the comparison stays as it is.
    """
    again = (Decision.status == "cancelled") | ((Decision.status == "failed") & (Decision.crashes >= max_crashes))
    queued = session.execute(
        update(Decision)
        .where(Decision.comparison_id == comparison_id, again)
        .values(status="queued", crashes=0, error=None, finished_at=None)
        .returning(Decision.id, Decision.variant)
        .execution_options(synchronize_session=False)
    ).all()
    if queued:
        session.execute(delete(ComparisonAnswer).where(ComparisonAnswer.comparison_id == comparison_id))
        session.execute(
            update(Comparison)
            .where(Comparison.id == comparison_id)
            .values(cancel_requested_at=None, finished_at=None, statistics=None)
        )
    return sorted((row.id, row.variant) for row in queued)


def get_comparison(session: Session, comparison_id: int) -> ComparisonView | None:
    left, right, floor = aliased(Run), aliased(Run), aliased(Run)
    row = session.execute(
        select(Comparison, left, right, floor)
        .outerjoin(left, Comparison.left_run_id == left.id)
        .outerjoin(right, Comparison.right_run_id == right.id)
        .outerjoin(floor, Comparison.floor_run_id == floor.id)
        .where(Comparison.id == comparison_id)
    ).one_or_none()
    if row is None:
        return None
    found = row[0]
    runs = [None if run is None else run_view(run) for run in row[1:]]
    return ComparisonView(
        id=found.id,
        batch_id=found.batch_id,
        name=found.name,
        left_variant=found.left_variant,
        right_variant=found.right_variant,
        floor_variant=found.floor_variant,
        left_run=runs[0],
        right_run=runs[1],
        floor_run=runs[2],
        parameters=found.parameters,
        statistics=found.statistics,
        num_rows=found.num_rows,
        created_at=found.created_at,
        stored_at=found.stored_at,
        cancel_requested_at=found.cancel_requested_at,
        finished_at=found.finished_at,
    )


def comparison_progress(session: Session, comparison_id: int) -> ComparisonProgress:
    """Counts by status, and a rate from the decisions that finished within the last 30 s.

    Raises:
        LookupError: there is no such comparison.
    """
    times = session.execute(
        select(
            Comparison.num_rows,
            Comparison.created_at,
            Comparison.stored_at,
            Comparison.cancel_requested_at,
            Comparison.finished_at,
        ).where(Comparison.id == comparison_id)
    ).one_or_none()
    if times is None:
        raise LookupError(f"there is no comparison {comparison_id}")
    counts: dict[str, int] = {
        status: count
        for status, count in session.execute(
            select(Decision.status, func.count())
            .where(Decision.comparison_id == comparison_id)
            .group_by(Decision.status)
        )
    }
    unfinished = sum(counts.get(status, 0) for status in _UNFINISHED)
    rate = _decisions_per_s(session, comparison_id, times.created_at) if unfinished else 0.0
    return ComparisonProgress(
        comparison_id=comparison_id,
        num_rows=times.num_rows,
        num_decisions=sum(counts.values()),
        queued=counts.get("queued", 0),
        running=counts.get("running", 0),
        done=counts.get("done", 0),
        failed=counts.get("failed", 0),
        cancelled=counts.get("cancelled", 0),
        decisions_per_s=rate,
        eta_s=unfinished / rate if rate else (0.0 if not unfinished else None),
        is_decided=times.stored_at is not None and not unfinished,
        is_finished=times.finished_at is not None,
        is_cancelled=times.cancel_requested_at is not None,
    )


def list_comparisons(session: Session, *, batch_id: int | None = None, limit: int = 50) -> list[ComparisonItem]:
    """The newest comparisons, of one batch or of all."""
    query = (
        select(
            Comparison.id,
            Comparison.name,
            Comparison.left_variant,
            Comparison.right_variant,
            Comparison.num_rows,
            Comparison.created_at,
            Comparison.cancel_requested_at,
            Comparison.finished_at,
            Comparison.statistics["overall"]["agreement"].as_float().label("agreement"),
        )
        .order_by(Comparison.created_at.desc(), Comparison.id.desc())
        .limit(limit)
    )
    if batch_id is not None:
        query = query.where(Comparison.batch_id == batch_id)
    rows = session.execute(query).all()
    undecided = _undecided(session, [row.id for row in rows if row.finished_at is None])
    return [
        ComparisonItem(
            id=row.id,
            name=row.name,
            left_variant=row.left_variant,
            right_variant=row.right_variant,
            num_rows=row.num_rows,
            created_at=row.created_at,
            status=_status_of(row, is_decided=row.id not in undecided),
            agreement=row.agreement,
        )
        for row in rows
    ]


def comparisons_to_finish(session: Session) -> list[int]:
    """Those whose decisions are all there and whose statistics are not."""
    unfinished = exists().where(Decision.comparison_id == Comparison.id, Decision.status.in_(_UNFINISHED))
    return list(
        session.scalars(
            select(Comparison.id)
            .where(Comparison.finished_at.is_(None), Comparison.stored_at.is_not(None), ~unfinished)
            .order_by(Comparison.id)
        )
    )


def finish_comparison(session: Session, comparison_id: int, statistics: dict[str, Any] | None) -> bool:
    """Store what came out, and each side's run; False when somebody did so before, or rows wait again."""
    if comparison_id not in comparisons_to_finish(session):
        return False
    session.execute(
        update(Comparison)
        .where(Comparison.id == comparison_id)
        .values(
            statistics=statistics,
            finished_at=now_utc(),
            left_run_id=_main_run(session, comparison_id, "left"),
            right_run_id=_main_run(session, comparison_id, "right"),
            floor_run_id=_main_run(session, comparison_id, "floor"),
        )
    )
    return True


def _take(comparison_id: int, side: Side) -> int:
    """Takes of different comparisons and sides differ, so that one variant can be on several sides."""
    return len(SIDES) * comparison_id + SIDES.index(side)


def _main_run(session: Session, comparison_id: int, side: Side) -> int | None:
    """The run of most of the side's decisions; a worker that was started anew may have made another one."""
    return session.scalar(
        select(Decision.run_id)
        .where(Decision.comparison_id == comparison_id, Decision.side == side, Decision.run_id.is_not(None))
        .group_by(Decision.run_id)
        .order_by(func.count().desc(), Decision.run_id)
        .limit(1)
    )


def _undecided(session: Session, comparison_ids: Collection[int]) -> set[int]:
    waiting = select(Decision.comparison_id).where(
        Decision.comparison_id.in_(comparison_ids), Decision.status.in_(_UNFINISHED)
    )
    unstored = select(Comparison.id).where(Comparison.id.in_(comparison_ids), Comparison.stored_at.is_(None))
    return {found for found in session.scalars(waiting.union(unstored)) if found is not None}


def _status_of(row: Any, *, is_decided: bool) -> ComparisonStatus:
    if row.finished_at is not None:
        return "done" if row.cancel_requested_at is None else "cancelled"
    return "summarising" if is_decided else "running"


def _decisions_per_s(session: Session, comparison_id: int, created_at: Any) -> float:
    now = now_utc()
    start = max(now - timedelta(seconds=RATE_WINDOW_S), created_at)
    finished = session.scalars(
        select(func.count())
        .select_from(Decision)
        .where(
            Decision.comparison_id == comparison_id,
            Decision.status.in_(("done", "failed")),
            Decision.finished_at >= start,
        )
    ).one()
    return float(finished / max((now - start).total_seconds(), 1e-3))
