"""Decisions for requests that are stored already, in a batching of one's choice."""

from collections.abc import Sequence

from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from db.models import Decision, Request
from db.store_requests import now_utc
from db.views import Batching


def queue_decisions(
    session: Session, batch_id: int, variants: Sequence[str], *, batching: Batching, priority: int
) -> dict[str, list[int]]:
    """Queue a decision per variant for every answerable request of a batch that was stored without any.

    Returns:
        the decisions' ids by variant, in the order of the requests.
    """
    now = now_utc()
    request_ids = session.scalars(
        select(Request.id).where(Request.batch_id == batch_id, Request.input_error.is_(None)).order_by(Request.id)
    ).all()
    inserted = insert(Decision).returning(Decision.id, sort_by_parameter_order=True)
    ids: dict[str, list[int]] = {}
    for variant in variants if request_ids else ():
        rows = [
            {
                "request_id": request_id,
                "batch_id": batch_id,
                "variant": variant,
                "take": 0,
                "batching": batching,
                "status": "queued",
                "priority": priority,
                "attempts": 0,
                "crashes": 0,
                "created_at": now,
            }
            for request_id in request_ids
        ]
        ids[variant] = list(session.scalars(inserted, rows))
    return ids
