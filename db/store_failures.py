"""The rows of a batch that failed, for those who watch it."""

from sqlalchemy import select
from sqlalchemy.orm import Session

from db.models import Decision, Request
from db.views import Failure


def first_failures(session: Session, batch_id: int, limit: int) -> list[Failure]:
    """The first failed decisions of a batch in row order."""
    rows = session.execute(
        select(Request.id, Request.row_number, Decision.variant, Decision.error)
        .join(Decision, Decision.request_id == Request.id)
        .where(Decision.batch_id == batch_id, Decision.status == "failed", Decision.take == 0)
        .order_by(Request.row_number, Decision.id)
        .limit(limit)
    )
    return [Failure(*row) for row in rows]
