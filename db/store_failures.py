"""The rows of a batch that failed, for those who watch it."""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from db.models import Decision, Request


@dataclass(frozen=True)
class Failure:
    """One failed decision of a batch; `error` is a list of problems as they were stored."""

    request_id: int
    row_number: int | None
    variant: str
    error: list[dict[str, Any]] | None


def first_failures(session: Session, batch_id: int, limit: int) -> list[Failure]:
    """The first failed decisions of a batch; ids grow with the rows, so these are the first rows."""
    rows = session.execute(
        select(Decision.request_id, Request.row_number, Decision.variant, Decision.error)
        .join(Request, Decision.request_id == Request.id)
        .where(Decision.batch_id == batch_id, Decision.status == "failed", Decision.take == 0)
        .order_by(Decision.id)
        .limit(limit)
    )
    return [Failure(request_id, number, variant, error) for request_id, number, variant, error in rows]
