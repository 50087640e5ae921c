"""The queue's truth: who holds which row.

A worker claims rows in one statement, saves with the token of its claim, and gives the rest back. A worker that falls
silent loses its claims to the sweeper, which counts the crash. Rows that were in a crash are only ever claimed alone.
"""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import ColumnElement, Row, Select, exists, func, select, update
from sqlalchemy.orm import Session

from db.models import Batch, Decision, QuestionSet, Request, Worker
from db.store_batches import finish_batches
from db.store_requests import now_utc, request_view
from db.views import PRIORITY_SINGLE, ClaimedRow, FreedRow, NewResult

SILENT_S = 15.0
MAX_CRASHES = 3
CRASH_ERROR = {
    "loc": [],
    "msg": f"The worker process ended {MAX_CRASHES} times while it computed this row, so it is not tried again.",
    "type": "worker_crash",
}


def claim_rows(session: Session, decision_ids: Sequence[int], *, owner: str, token: str) -> list[ClaimedRow]:
    """Claim those of the rows that are still queued. A row that was in a crash is claimed only when named alone."""
    wanted: list[ColumnElement[bool]] = [Decision.id.in_(decision_ids)]
    if len(decision_ids) > 1:
        wanted.append(Decision.crashes == 0)
    return _claim(session, wanted, limit=len(decision_ids), owner=owner, token=token)


def claim_waiting_singles(session: Session, variant: str, *, limit: int, owner: str, token: str) -> list[ClaimedRow]:
    """Claim waiting single requests, oldest first, except those that were in a crash."""
    wanted = [Decision.variant == variant, Decision.priority == PRIORITY_SINGLE, Decision.crashes == 0]
    return _claim(session, wanted, limit=limit, owner=owner, token=token)


def has_waiting_singles(session: Session, variant: str) -> bool:
    """Whether `claim_waiting_singles` would find one; needs no write lock."""
    waiting = exists().where(
        Decision.variant == variant,
        Decision.status == "queued",
        Decision.priority == PRIORITY_SINGLE,
        Decision.crashes == 0,
    )
    return bool(session.scalar(select(waiting)))


def save_results(session: Session, token: str, run_id: int | None, results: Sequence[NewResult]) -> list[int]:
    """Save what was computed, for the rows that are still held with this token.

    Returns:
        the ids that were saved. A row missing here was taken from this worker, and its result is dropped.
    """
    now = now_utc()
    saved = []
    batch_ids = set()
    for result in results:
        row = session.execute(
            update(Decision)
            .where(Decision.id == result.decision_id, Decision.claim_token == token, Decision.status == "running")
            .values(
                status="failed" if result.error else "done",
                run_id=run_id,
                log_probs=result.log_probs,
                answers=result.answers,
                input_tokens=result.input_tokens,
                truncated_tokens=result.truncated_tokens,
                latency_ms=result.latency_ms,
                copied_from_id=result.copied_from_id,
                error=list(result.error) or None,
                finished_at=now,
                claim_owner=None,
                claim_token=None,
            )
            .returning(Decision.id, Decision.batch_id)
        ).one_or_none()
        if row is not None:
            saved.append(row.id)
            if row.batch_id is not None:
                batch_ids.add(row.batch_id)
    finish_batches(session, batch_ids)
    return saved


def release_claims(session: Session, token: str) -> int:
    """Give back every row still held with this token, without counting a crash; returns how many."""
    return len(_give_back(session, Decision.claim_token == token, crashes=0))


def cancelled_claims(session: Session, token: str) -> set[int]:
    """Which rows held with this token belong to a batch that was asked to stop."""
    return set(
        session.scalars(
            select(Decision.id)
            .join(Batch, Decision.batch_id == Batch.id)
            .where(Decision.claim_token == token, Decision.status == "running", Batch.cancel_requested_at.is_not(None))
        )
    )


def find_twins(session: Session, batch_id: int, run_id: int, digests: Sequence[str]) -> dict[str, NewResult]:
    """Decisions of this batch and run that are done already, by request digest; `decision_id` is the one found."""
    rows = session.execute(
        select(Request.digest, Decision)
        .join(Request, Decision.request_id == Request.id)
        .where(
            Request.batch_id == batch_id,
            Request.digest.in_(digests),
            Decision.run_id == run_id,
            Decision.status == "done",
            Decision.copied_from_id.is_(None),
        )
    )
    return {
        digest: NewResult(
            decision_id=decision.id,
            log_probs=decision.log_probs,
            answers=decision.answers,
            input_tokens=decision.input_tokens,
            truncated_tokens=decision.truncated_tokens,
        )
        for digest, decision in rows
    }


def has_silent_claims(session: Session, *, silent_s: float = SILENT_S) -> bool:
    """Whether `free_silent_claims` would free one; needs no write lock."""
    return bool(session.scalar(select(exists().where(_is_silent(silent_s)))))


def free_silent_claims(session: Session, *, silent_s: float = SILENT_S) -> list[FreedRow]:
    """Take back the rows of workers that said nothing for `silent_s`, and count a crash for each.

    At the third crash a row fails; a row of a cancelled batch is cancelled; the others are queued again.
    """
    is_silent = _is_silent(silent_s)
    failed = session.execute(
        update(Decision)
        .where(is_silent, Decision.crashes + 1 >= MAX_CRASHES)
        .values(
            status="failed",
            error=[CRASH_ERROR],
            crashes=Decision.crashes + 1,
            finished_at=now_utc(),
            claim_owner=None,
            claim_token=None,
        )
        .returning(Decision.id, Decision.variant, Decision.batch_id, Decision.status)
        .execution_options(synchronize_session=False)
    ).all()
    freed = [_freed_row(row) for row in failed]
    finish_batches(session, _batch_ids(freed))
    return freed + _give_back(session, is_silent, crashes=1)


def queue_depth(session: Session, variant: str) -> int:
    """How many single requests wait for the variant. Batch rows wait too, but never in front of them."""
    return session.scalars(
        select(func.count())
        .select_from(Decision)
        .where(Decision.variant == variant, Decision.status == "queued", Decision.priority == PRIORITY_SINGLE)
    ).one()


def queue_position(session: Session, decision_id: int) -> int | None:
    """How many queued rows of the variant come before this one; None when it does not wait any more."""
    own = session.execute(
        select(Decision.variant, Decision.priority, Decision.status).where(Decision.id == decision_id)
    ).one_or_none()
    if own is None or own.status != "queued":
        return None
    is_before = (Decision.priority > own.priority) | ((Decision.priority == own.priority) & (Decision.id < decision_id))
    return session.scalars(
        select(func.count())
        .select_from(Decision)
        .where(Decision.variant == own.variant, Decision.status == "queued", is_before)
    ).one()


def claimable_ids(session: Session, variant: str, *, limit: int) -> list[tuple[int, int, int]]:
    """The rows that wait, in the order they should be taken: (decision id, priority, crashes)."""
    rows = session.execute(
        select(Decision.id, Decision.priority, Decision.crashes)
        .where(Decision.variant == variant, Decision.status == "queued")
        .order_by(Decision.priority.desc(), Decision.id)
        .limit(limit)
    )
    return [(row.id, row.priority, row.crashes) for row in rows]


def _claim(
    session: Session, wanted: Sequence[ColumnElement[bool]], *, limit: int, owner: str, token: str
) -> list[ClaimedRow]:
    """One UPDATE ... RETURNING. PostgreSQL skips rows that another worker is claiming; SQLite has one writer."""
    picked: Select[Any] = (
        select(Decision.id)
        .where(*wanted, Decision.status == "queued")
        .order_by(Decision.priority.desc(), Decision.id)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    claimed = session.scalars(
        update(Decision)
        .where(Decision.id.in_(select(picked.cte("picked").c.id)))
        .values(
            status="running",
            claim_owner=owner,
            claim_token=token,
            claimed_at=now_utc(),
            attempts=Decision.attempts + 1,
        )
        .returning(Decision.id)
        .execution_options(synchronize_session=False)
    ).all()
    rows = session.execute(
        select(Decision, Request, QuestionSet.questions)
        .join(Request, Decision.request_id == Request.id)
        .join(QuestionSet, Request.question_set_id == QuestionSet.id)
        .where(Decision.id.in_(claimed))
        .order_by(Decision.id)
    )
    return [
        ClaimedRow(
            decision_id=decision.id,
            variant=decision.variant,
            priority=decision.priority,
            attempts=decision.attempts,
            crashes=decision.crashes,
            digest=request.digest,
            request=request_view(request, questions),
        )
        for decision, request, questions in rows
    ]


def _is_silent(silent_s: float) -> ColumnElement[bool]:
    alive = select(Worker.name).where(
        Worker.heartbeat_at >= now_utc() - timedelta(seconds=silent_s), Worker.state != "failed"
    )
    return (Decision.status == "running") & Decision.claim_owner.not_in(alive)


def _give_back(session: Session, held: ColumnElement[bool], *, crashes: int) -> list[FreedRow]:
    """Queue held rows again; those of a cancelled batch become cancelled instead."""
    is_cancelled = exists().where(Batch.id == Decision.batch_id, Batch.cancel_requested_at.is_not(None))
    freed: list[FreedRow] = []
    for status, of_batch in (("cancelled", is_cancelled), ("queued", ~is_cancelled)):
        rows = session.execute(
            update(Decision)
            .where(held, Decision.status == "running", of_batch)
            .values(
                status=status,
                crashes=Decision.crashes + crashes,
                finished_at=now_utc() if status == "cancelled" else None,
                claim_owner=None,
                claim_token=None,
            )
            .returning(Decision.id, Decision.variant, Decision.batch_id, Decision.status)
            .execution_options(synchronize_session=False)
        ).all()
        freed += [_freed_row(row) for row in rows]
    finish_batches(session, _batch_ids(row for row in freed if row.status == "cancelled"))
    return freed


def _freed_row(row: Row[int, str, int | None, str]) -> FreedRow:
    decision_id, variant, batch_id, status = row
    return FreedRow(decision_id, variant, batch_id, status)  # type: ignore[arg-type]  # only this package writes it


def _batch_ids(rows: Iterable[FreedRow]) -> set[int]:
    return {row.batch_id for row in rows if row.batch_id is not None}
