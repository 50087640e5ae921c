"""Looking at comparisons: one of them, how far it is, and the list of them."""

from collections.abc import Collection
from datetime import timedelta
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session, aliased

from db.comparison_views import ComparisonItem, ComparisonProgress, ComparisonStatus, ComparisonView
from db.models import Comparison, Decision, Run
from db.store_requests import now_utc, run_view

RATE_WINDOW_S = 30.0
_UNFINISHED = ("queued", "running")


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
