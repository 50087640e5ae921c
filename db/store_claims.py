"""The queue's truth: who holds which row.

A worker claims rows in one statement, saves with the token of its claim, and gives the rest back. A worker that falls
silent loses its claims to the sweeper, which counts the crash. Rows that were in a crash are only ever claimed alone.
"""

from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import Any

from sqlalchemy import ColumnElement, Select, bindparam, exists, func, select, update
from sqlalchemy.orm import Session

from db.models import Base, Batch, Comparison, Decision, QuestionSet, Request, Worker
from db.store_batches import finish_batches
from db.store_requests import now_utc, request_view
from db.views import PRIORITY_SINGLE, ClaimedRow, NewResult, WaitingRow

SILENT_S = 15.0
MAX_CRASHES = 3
_DECISIONS = Base.metadata.tables[Decision.__tablename__]
_SAVE = update(_DECISIONS).where(_DECISIONS.c.id == bindparam("of_id"))


def claim_rows(session: Session, decision_ids: Sequence[int], *, owner: str, token: str) -> list[ClaimedRow]:
    """Claim those of the rows that are still queued. A row that was in a crash is claimed only when named alone."""
    wanted: list[ColumnElement[bool]] = [Decision.id.in_(decision_ids)]
    if len(decision_ids) > 1:
        wanted.append(Decision.crashes == 0)
    return _claim(session, wanted, limit=len(decision_ids), owner=owner, token=token)


def claim_waiting(
    session: Session, variant: str, priority: int, *, limit: int, owner: str, token: str
) -> list[ClaimedRow]:
    """Claim rows of one priority that wait, oldest first, except those that were in a crash."""
    wanted = [Decision.variant == variant, Decision.priority == priority, Decision.crashes == 0]
    return _claim(session, wanted, limit=limit, owner=owner, token=token)


def interruptions(session: Session, token: str, variants: Sequence[str]) -> list[str] | None:
    """Those of the variants for which single requests wait that `claim_waiting` would find.

    None: rows held with this token belong to a batch or a comparison that was asked to stop.
    """
    is_cancelled, *is_waiting = session.execute(_interruptions(tuple(variants)), {"token": token}).one()
    return None if is_cancelled else [variant for variant, yes in zip(variants, is_waiting, strict=True) if yes]


def save_results(session: Session, token: str, run_id: int | None, results: Sequence[NewResult]) -> list[int]:
    """Save what was computed, for the rows that are still held with this token.

    Returns:
        the ids that were saved. A row missing here was taken from this worker, and its result is dropped.
    """
    now = now_utc()
    mine = session.execute(_held_rows(), {"token": token, "ids": [result.decision_id for result in results]})
    held = {decision_id: batch_id for decision_id, batch_id in mine}
    values = [
        {
            "of_id": result.decision_id,
            "status": "failed" if result.error else "done",
            "run_id": run_id,
            "log_probs": result.log_probs,
            "answers": result.answers,
            "input_tokens": result.input_tokens,
            "truncated_tokens": result.truncated_tokens,
            "latency_ms": result.latency_ms,
            "copied_from_id": result.copied_from_id,
            "error": list(result.error) or None,
            "finished_at": now,
            "claim_owner": None,
            "claim_token": None,
        }
        for result in results
        if result.decision_id in held
    ]
    if values:
        # One statement for all of them, without the ORM: an UPDATE per row took four times as long.
        session.connection().execute(_SAVE, values)
    finish_batches(session, {batch_id for batch_id in held.values() if batch_id is not None})
    return [result.decision_id for result in results if result.decision_id in held]


def release_claims(session: Session, token: str, *, crash: str | None = None) -> list[WaitingRow]:
    """Give back every row still held with this token; returns those that wait again.

    `crash` says what went wrong while the rows were computed, and counts as a crash; without it none is counted.
    """
    if not session.scalar(select(exists().where(_is_held(token)))):
        return []  # as after every job that was done to its end
    return _give_back(session, Decision.claim_token == token, crash)


def find_twins(session: Session, batch_id: int, run_id: int, digests: Sequence[str]) -> dict[str, NewResult]:
    """Decisions of this batch and run that are done already, by request digest; `decision_id` is the one found."""
    rows = session.execute(
        select(Request.digest, Decision)
        .join(Request, Decision.request_id == Request.id)
        .where(
            Request.batch_id == batch_id,
            Request.digest.in_(digests),
            Decision.run_id == run_id,
            Decision.take == 0,
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


def free_silent_claims(session: Session, *, silent_s: float = SILENT_S) -> list[WaitingRow]:
    """Take back the rows of workers that said nothing for `silent_s`, and count a crash for each.

    At the third crash a row fails; a row of a cancelled batch is cancelled; the others wait again and are returned.
    """
    return _give_back(session, _is_silent(silent_s), "the worker process ended")


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


def waiting_rows(session: Session, variant: str, *, limit: int) -> list[WaitingRow]:
    """The rows that wait, in the order in which they should be taken."""
    rows = session.execute(
        select(Decision.id, Decision.variant, Decision.priority, Decision.crashes)
        .where(Decision.variant == variant, Decision.status == "queued")
        .order_by(Decision.priority.desc(), Decision.id)
        .limit(limit)
    )
    return [WaitingRow(*row) for row in rows]


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
    if not claimed:
        return []
    facts = (Decision.id, Decision.variant, Decision.batching, Decision.comparison_id, Decision.side)
    rows = session.execute(
        select(*facts, Decision.priority, Decision.attempts, Decision.crashes, Request)
        .join(Request, Decision.request_id == Request.id)
        .where(Decision.id.in_(claimed))
        .order_by(Decision.id)
    ).all()
    # Read once, not with every row: a batch has many rows and few question sets.
    set_ids = {row.Request.question_set_id for row in rows}
    asked = session.execute(select(QuestionSet.id, QuestionSet.questions).where(QuestionSet.id.in_(set_ids)))
    questions = {set_id: value for set_id, value in asked}
    return [
        ClaimedRow(
            decision_id=row.id,
            variant=row.variant,
            batching=row.batching,
            comparison_id=row.comparison_id,
            side=row.side,
            priority=row.priority,
            attempts=row.attempts,
            crashes=row.crashes,
            digest=row.Request.digest,
            request=request_view(row.Request, questions[row.Request.question_set_id]),
        )
        for row in rows
    ]


@cache
def _held_rows() -> Select[int, int | None]:
    """Built once, as the next: they are asked for every micro-batch, and building takes longer than asking."""
    is_wanted = Decision.id.in_(bindparam("ids", expanding=True))
    wanted = select(Decision.id, Decision.batch_id).where(_is_held(bindparam("token")), is_wanted)
    return wanted.order_by(Decision.id).with_for_update()


@cache
def _interruptions(variants: tuple[str, ...]) -> Select[*tuple[bool, ...]]:
    """Whether rows held with `token` were cancelled, then for each variant whether single requests wait."""
    waiting = (
        exists().where(
            Decision.variant == variant,
            Decision.status == "queued",
            Decision.priority == PRIORITY_SINGLE,
            Decision.crashes == 0,
        )
        for variant in variants
    )
    return select(exists().where(_is_held(bindparam("token")), _is_cancelled()), *waiting)


def _is_held(token: str | ColumnElement[str]) -> ColumnElement[bool]:
    return (Decision.claim_token == token) & (Decision.status == "running")


def _is_cancelled() -> ColumnElement[bool]:
    of_batch = exists().where(Batch.id == Decision.batch_id, Batch.cancel_requested_at.is_not(None))
    of_comparison = exists().where(Comparison.id == Decision.comparison_id, Comparison.cancel_requested_at.is_not(None))
    return of_batch | of_comparison


def _is_silent(silent_s: float) -> ColumnElement[bool]:
    alive = select(Worker.name).where(
        Worker.heartbeat_at >= now_utc() - timedelta(seconds=silent_s), Worker.state != "failed"
    )
    return (Decision.status == "running") & Decision.claim_owner.not_in(alive)


def _give_back(session: Session, held: ColumnElement[bool], crash: str | None) -> list[WaitingRow]:
    """End claims: rows of what was cancelled become cancelled, rows at their last crash fail, the others wait again."""
    now = now_utc()
    crashes = Decision.crashes + (0 if crash is None else 1)
    error = [{"loc": [], "msg": f"Tried {MAX_CRASHES} times, the last time {crash}.", "type": "worker_crash"}]
    outcomes: list[tuple[list[ColumnElement[bool]], dict[str, Any]]] = [
        ([_is_cancelled()], {"status": "cancelled", "finished_at": now}),
        ([crashes >= MAX_CRASHES], {"status": "failed", "finished_at": now, "error": error}),
        ([], {"status": "queued"}),
    ]
    waiting: list[WaitingRow] = []
    finished_batches: set[int] = set()
    for conditions, values in outcomes:
        rows = session.execute(
            update(Decision)
            .where(held, Decision.status == "running", *conditions)
            .values(**values, crashes=crashes, claim_owner=None, claim_token=None)
            .returning(Decision.id, Decision.variant, Decision.priority, Decision.crashes, Decision.batch_id)
            .execution_options(synchronize_session=False)
        ).all()
        if values["status"] == "queued":
            waiting = [WaitingRow(row.id, row.variant, row.priority, row.crashes) for row in rows]
        else:
            finished_batches |= {row.batch_id for row in rows if row.batch_id is not None}
    finish_batches(session, finished_batches)
    return waiting
