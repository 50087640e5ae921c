"""Storing requests with their decisions, and reading them back.

The digest of a request covers what decides its answer: the state (object keys in any order), the questions and options
(order kept, because the order of questions is in the prompt), the images and the truncation.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import func, insert, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from db.models import MAX_TITLE_CHARS, Base, Batch, Decision, Image, QuestionSet, Request, Run
from db.views import (
    PRIORITY_BATCH,
    PRIORITY_SINGLE,
    DecisionView,
    KnownRequest,
    NewImage,
    NewRequest,
    NewRun,
    RequestView,
    RunView,
    StoredRequest,
)

_INSERT_CHUNK = 200


def now_utc() -> datetime:
    return datetime.now(UTC)


def digest_of(value: Any, *, sort_keys: bool) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=sort_keys)
    return hashlib.sha256(text.encode()).hexdigest()


def question_set_id(questions: dict[str, Any]) -> str:
    return digest_of(questions, sort_keys=False)


def request_digest(request: NewRequest) -> str:
    state = digest_of(request.state, sort_keys=True)
    return digest_of(
        [state, question_set_id(request.questions), list(request.images), request.truncate], sort_keys=True
    )


def store_images(session: Session, images: Iterable[NewImage]) -> None:
    """Remember the images; one that is known already stays as it is."""
    now = now_utc()
    rows = {image.sha256: vars(image) | {"created_at": now} for image in images}
    _insert_missing(session, Image, list(rows.values()))


def store_question_set(session: Session, questions: dict[str, Any]) -> str:
    """Store the questions unless they are there; returns their id."""
    set_id = question_set_id(questions)
    _insert_missing(session, QuestionSet, [{"id": set_id, "questions": questions}])
    return set_id


def store_requests(
    session: Session,
    requests: Sequence[NewRequest],
    variants: Sequence[str],
    *,
    source: str,
    batch_id: int | None = None,
) -> list[StoredRequest]:
    """Store requests and a decision per variant (there may be none); returns their ids in the order of the requests.

    A request with problems gets failed decisions; in a batch whose cancel flag is set the others are cancelled.
    """
    now = now_utc()
    set_ids = _store_question_sets(session, requests)
    request_ids = session.scalars(
        insert(Request).returning(Request.id, sort_by_parameter_order=True),
        [
            {
                "batch_id": batch_id,
                "row_number": request.row_number,
                "external_id": request.external_id,
                "asked_model": request.asked_model,
                "state": request.state,
                "title": request.title[:MAX_TITLE_CHARS],
                "question_set_id": set_id,
                "images": list(request.images),
                "truncate": request.truncate,
                "digest": request_digest(request),
                "cells": request.cells,
                "labels": request.labels,
                "input_error": list(request.problems) or None,
                "source": source,
                "idempotency_key": request.idempotency_key,
                "created_at": now,
            }
            for request, set_id in zip(requests, set_ids, strict=True)
        ],
    ).all()
    is_cancelled = batch_id is not None and session.scalar(
        select(Batch.cancel_requested_at.is_not(None)).where(Batch.id == batch_id).with_for_update()
    )
    decisions = [
        {
            "request_id": request_id,
            "batch_id": batch_id,
            "variant": variant,
            "take": 0,
            "status": (status := "failed" if request.problems else "cancelled" if is_cancelled else "queued"),
            "priority": PRIORITY_SINGLE if batch_id is None else PRIORITY_BATCH,
            "attempts": 0,
            "crashes": 0,
            "error": list(request.problems) or None,
            "created_at": now,
            "finished_at": None if status == "queued" else now,
        }
        for request, request_id in zip(requests, request_ids, strict=True)
        for variant in variants
    ]
    inserted = insert(Decision).returning(Decision.id, sort_by_parameter_order=True)
    decision_ids = session.scalars(inserted, decisions).all() if decisions else []
    num = len(variants)
    return [
        StoredRequest(request_id, dict(zip(variants, decision_ids[at * num : (at + 1) * num], strict=True)))
        for at, request_id in enumerate(request_ids)
    ]


def find_idempotent(session: Session, key: str) -> KnownRequest | None:
    found = session.execute(
        select(Request.id, Request.digest, Request.asked_model).where(Request.idempotency_key == key)
    ).one_or_none()
    if found is None:
        return None
    decisions = session.execute(
        select(Decision.variant, Decision.id).where(Decision.request_id == found.id, Decision.take == 0)
    )
    return KnownRequest(
        found.id, found.digest, found.asked_model, {variant: decision_id for variant, decision_id in decisions}
    )


def get_request(session: Session, request_id: int) -> RequestView | None:
    row = session.execute(_requests().where(Request.id == request_id)).one_or_none()
    return None if row is None else request_view(*row)


def get_decision(session: Session, decision_id: int) -> DecisionView | None:
    return next(iter(get_decisions(session, [decision_id])), None)


def get_decisions(session: Session, decision_ids: Sequence[int]) -> list[DecisionView]:
    """The decisions that exist, in the order asked."""
    rows = session.execute(_decisions().where(Decision.id.in_(decision_ids)))
    views = {decision.id: decision_view(decision, run) for decision, run in rows}
    return [views[decision_id] for decision_id in decision_ids if decision_id in views]


def list_decisions(session: Session, request_id: int) -> list[DecisionView]:
    """The decisions that were asked for, one per variant; what a comparison computed again is not among them."""
    wanted = (Decision.request_id == request_id) & (Decision.take == 0)
    rows = session.execute(_decisions().where(wanted).order_by(Decision.id))
    return [decision_view(decision, run) for decision, run in rows]


def count_unfinished(session: Session, decision_ids: Sequence[int]) -> int:
    """How many of the decisions are still queued or running: the cheap question for someone who waits."""
    return session.scalars(
        select(func.count())
        .select_from(Decision)
        .where(Decision.id.in_(decision_ids), Decision.status.in_(("queued", "running")))
    ).one()


def ensure_run(session: Session, run: NewRun) -> int:
    """The id of the run with exactly these facts, stored if it is new."""
    facts = vars(run)
    fingerprint = digest_of(facts, sort_keys=True)
    _insert_missing(session, Run, [facts | {"fingerprint": fingerprint, "created_at": now_utc()}], key="fingerprint")
    return session.scalars(select(Run.id).where(Run.fingerprint == fingerprint)).one()


def request_view(request: Request, questions: dict[str, Any]) -> RequestView:
    return RequestView(
        id=request.id,
        batch_id=request.batch_id,
        row_number=request.row_number,
        external_id=request.external_id,
        asked_model=request.asked_model,
        state=request.state,
        questions=questions,
        images=tuple(request.images),
        truncate=request.truncate,
        labels=request.labels,
        cells=request.cells,
        input_error=request.input_error,
        source=request.source,
        created_at=request.created_at,
    )


def decision_view(decision: Decision, run: Run | None) -> DecisionView:
    return DecisionView(
        id=decision.id,
        request_id=decision.request_id,
        variant=decision.variant,
        status=decision.status,  # type: ignore[arg-type]  # only this package writes the column
        log_probs=decision.log_probs,
        answers=decision.answers,
        input_tokens=decision.input_tokens,
        truncated_tokens=decision.truncated_tokens,
        latency_ms=decision.latency_ms,
        error=decision.error,
        run=None if run is None else run_view(run),
        created_at=decision.created_at,
        finished_at=decision.finished_at,
    )


def run_view(run: Run) -> RunView:
    return RunView(
        id=run.id,
        variant=run.variant,
        release_checksum=run.release_checksum,
        linear_mode=run.linear_mode,
        dtype=run.dtype,
        head_dtype=run.head_dtype,
        device=run.device,
        threads=run.threads,
        batching=run.batching,
        versions=run.versions,
        created_at=run.created_at,
    )


def _requests() -> Any:
    return select(Request, QuestionSet.questions).join(QuestionSet, Request.question_set_id == QuestionSet.id)


def _decisions() -> Any:
    return select(Decision, Run).outerjoin(Run, Decision.run_id == Run.id)


def _store_question_sets(session: Session, requests: Sequence[NewRequest]) -> list[str]:
    ids = [question_set_id(request.questions) for request in requests]
    sets = {set_id: request.questions for set_id, request in zip(ids, requests, strict=True)}
    _insert_missing(session, QuestionSet, [{"id": set_id, "questions": value} for set_id, value in sets.items()])
    return ids


def _insert_missing(session: Session, table: type[Base], rows: list[dict[str, Any]], key: str | None = None) -> None:
    is_postgresql = session.get_bind().dialect.name == "postgresql"
    keys = [key] if key else [column.name for column in table.__mapper__.primary_key]
    for at in range(0, len(rows), _INSERT_CHUNK):
        chunk = rows[at : at + _INSERT_CHUNK]
        session.execute(
            postgresql.insert(table).values(chunk).on_conflict_do_nothing(index_elements=keys)
            if is_postgresql
            else sqlite.insert(table).values(chunk).on_conflict_do_nothing(index_elements=keys)
        )
