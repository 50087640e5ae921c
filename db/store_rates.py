"""What waits for each variant, and how fast it answered lately."""

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from db.models import Decision
from db.views import PRIORITY_BATCH

RATE_SAMPLE = 512


def count_waiting(session: Session) -> dict[str, int]:
    """How many decisions wait, single ones and those of batches, by variant; a variant with none is absent."""
    rows = session.execute(
        select(Decision.variant, func.count()).where(Decision.status == "queued").group_by(Decision.variant)
    )
    return {variant: number for variant, number in rows}


def recent_tokens_per_s(session: Session, variant: str) -> float | None:
    """Tokens per second of busy time over the newest rows of batches; None if there are none.

    Every decision of a micro-batch carries the time of the whole micro-batch and is saved at the same moment, so each
    (moment, time) counts once. Rows copied from an identical row cost nothing and are left out.
    """
    rows = session.execute(
        select(Decision.input_tokens, Decision.latency_ms, Decision.finished_at)
        .where(
            Decision.variant == variant,
            Decision.status == "done",
            Decision.priority == PRIORITY_BATCH,
            Decision.batching == "fast",
            Decision.copied_from_id.is_(None),
            Decision.latency_ms > 0,
        )
        .order_by(Decision.id.desc())
        .limit(RATE_SAMPLE)
    ).all()
    busy_ms = sum(latency_ms for _, latency_ms in {(row.finished_at, row.latency_ms) for row in rows})
    tokens = sum(row.input_tokens or 0 for row in rows)
    return 1e3 * tokens / busy_ms if busy_ms else None
