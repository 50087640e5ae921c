"""The life of a comparison: its decisions in the queue, cancel and resume, the end.

What is read stands in `db.store_comparison_reads`, what is compared in `db.store_comparison_answers`. A comparison's
decisions belong to its batch's requests but not to the batch: they have a take of their own, so that nothing of the
batch changes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import delete, exists, func, insert, select, update
from sqlalchemy.orm import Session

from db.comparison_views import NewComparison
from db.models import Comparison, ComparisonAnswer, Decision, Request
from db.store_requests import now_utc
from db.views import PRIORITY_BATCH, Batching, Side

SIDES: tuple[Side, ...] = ("left", "right", "floor")
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


def finish_comparison(
    session: Session, comparison_id: int, statistics: dict[str, Any] | None, *, num_answers: int
) -> bool:
    """Store what came out of so many answers, and each side's run.

    Returns:
        False when it is not so any more: somebody finished it before, rows wait again, or there are other answers.
    """
    stored = select(func.count()).select_from(ComparisonAnswer).where(ComparisonAnswer.comparison_id == comparison_id)
    if comparison_id not in comparisons_to_finish(session) or session.scalars(stored).one() != num_answers:
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
