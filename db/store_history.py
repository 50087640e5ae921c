"""What was asked before, newest first: single decisions and batches in one list."""

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from db.models import Batch, Decision, Request
from db.views import INNER_SOURCES, HistoryItem, HistoryKind


def list_history(
    session: Session,
    *,
    kind: HistoryKind | None = None,
    text: str = "",
    limit: int = 200,
    before: datetime | None = None,
) -> list[HistoryItem]:
    """The newest `limit` items older than `before` whose title contains the text (case does not matter)."""
    items = []
    if kind in (None, "decision"):
        items += _decisions(session, text, limit, before)
    if kind in (None, "batch"):
        items += _batches(session, text, limit, before)
    items.sort(key=lambda item: (item.created_at, item.id), reverse=True)
    return items[:limit]


def _decisions(session: Session, text: str, limit: int, before: datetime | None) -> list[HistoryItem]:
    wanted: list[ColumnElement[bool]] = [Request.batch_id.is_(None)]
    if text:
        wanted.append(Request.title.icontains(text, autoescape=True))
    if before is not None:
        wanted.append(Request.created_at < before)
    requests = session.execute(
        select(Request.id, Request.created_at, Request.title)
        .where(*wanted)
        .order_by(Request.created_at.desc(), Request.id.desc())
        .limit(limit)
    ).all()
    found: dict[int, list[Any]] = {request.id: [] for request in requests}
    for row in session.execute(
        select(Decision.request_id, Decision.variant, Decision.status, Decision.answers)
        .where(Decision.request_id.in_(found), Decision.take == 0)
        .order_by(Decision.id)
    ):
        found[row.request_id].append(row)
    return [
        HistoryItem(
            kind="decision",
            id=request.id,
            created_at=request.created_at,
            title=request.title,
            variants=tuple(row.variant for row in found[request.id]),
            status=_status_of([row.status for row in found[request.id]]),
            summary=_summarise(row.answers for row in found[request.id]),
        )
        for request in requests
    ]


def _batches(session: Session, text: str, limit: int, before: datetime | None) -> list[HistoryItem]:
    wanted: list[ColumnElement[bool]] = [Batch.source.not_in(INNER_SOURCES)]
    if text:
        wanted.append(Batch.name.icontains(text, autoescape=True))
    if before is not None:
        wanted.append(Batch.created_at < before)
    batches = session.scalars(
        select(Batch).where(*wanted).order_by(Batch.created_at.desc(), Batch.id.desc()).limit(limit)
    ).all()
    counts: dict[int, Counter[str]] = {batch.id: Counter() for batch in batches}
    for batch_id, status, count in session.execute(
        select(Batch.id, Decision.status, func.count())
        .join(Decision, Decision.batch_id == Batch.id)
        .where(Batch.id.in_(counts))
        .group_by(Batch.id, Decision.status)
    ):
        counts[batch_id][status] = count
    return [
        HistoryItem(
            kind="batch",
            id=batch.id,
            created_at=batch.created_at,
            title=batch.name,
            variants=tuple(batch.variants),
            status=_batch_status(batch),
            summary=f"{batch.num_rows} rows"
            + "".join(f", {count} {status}" for status, count in sorted(counts[batch.id].items())),
        )
        for batch in batches
    ]


def _batch_status(batch: Batch) -> str:
    if batch.cancel_requested_at is not None:
        return "cancelled"
    return "running" if batch.finished_at is None else "done"


def _status_of(statuses: Sequence[str]) -> str:
    """The one status that says most about several decisions."""
    for status in ("failed", "running", "queued", "cancelled"):
        if status in statuses:
            return status
    return "done"


def _summarise(answers: Iterable[dict[str, Any] | None]) -> str:
    """`question=value` of the first decision that has answers; an answer's value stands under its type's name."""
    first = next((value for value in answers if value), {})
    return ", ".join(f"{question}={answer[answer['type']]}" for question, answer in first.items())
