"""Comparisons without a model: decisions of any number of rows written straight into the database."""

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import bindparam, select, update

from db import store
from db.comparison_views import NewComparison
from db.models import Decision
from db.session import Database
from db.store_comparisons import add_decisions, answerable_requests, close_comparison, create_comparison
from db.store_requests import now_utc
from db.views import SOURCE_COMPARISON, Batching, NewRequest, NewRun, Side

BATCHING: dict[Side, Batching] = {"left": "single", "right": "single", "floor": "padded"}
OPTIONS = {"team": ("billing", "technical", "sales"), "urgent": ("true", "false")}
QUESTIONS: dict[str, Any] = {
    "team": {"type": "choice", "criteria": dict.fromkeys(OPTIONS["team"])},
    "urgent": {"type": "noul"},
}

LogProbs = dict[str, dict[str, float]]


def logs(team: Sequence[float], urgent: Sequence[float]) -> LogProbs:
    """Log-probabilities from probabilities: `logs((0.5, 0.3, 0.2), (0.9, 0.1))`."""
    given = {"team": team, "urgent": urgent}
    return {name: dict(zip(OPTIONS[name], map(math.log, given[name]), strict=True)) for name in OPTIONS}


def random_logs(generator: random.Random, like: LogProbs | None = None, noise: float = 2.0) -> LogProbs:
    """Log-probabilities of all questions; near those of `like` when given."""
    found: LogProbs = {}
    for question, options in OPTIONS.items():
        logits = [(like[question][option] if like else 0.0) + generator.gauss(0, noise) for option in options]
        total = math.log(sum(map(math.exp, logits)))
        found[question] = {option: logit - total for option, logit in zip(options, logits, strict=True)}
    return found


def store_batch(database: Database, labels: Sequence[dict[str, str] | None]) -> int:
    """A batch of as many rows as there are labels, with no decisions of its own."""
    with database.write() as session:
        batch_id = store.create_batch(session, "rows", QUESTIONS, [], source=SOURCE_COMPARISON, columns=[], mapping={})
        requests = [
            NewRequest("clef", f"state {n}", QUESTIONS, title=f"state {n}", row_number=n, labels=of_row)
            for n, of_row in enumerate(labels)
        ]
        for at in range(0, len(requests), 500):
            store.store_requests(session, requests[at : at + 500], [], source=SOURCE_COMPARISON, batch_id=batch_id)
        store.count_rows(session, batch_id, len(requests))
        store.close_batch(session, batch_id)
    return batch_id


def store_comparison(
    database: Database, batch_id: int, left: str = "bf16", right: str = "mxfp4", floor: str | None = "bf16"
) -> int:
    """A comparison of all rows of the batch, its decisions waiting."""
    new = NewComparison(batch_id, "rows", left, right, floor, {})
    with database.write() as session:
        comparison_id = create_comparison(session, new)
        request_ids = answerable_requests(session, batch_id, after=0, limit=1_000_000)
        for at in range(0, len(request_ids), 500):
            add_decisions(session, comparison_id, request_ids[at : at + 500], new.variants, BATCHING)
        close_comparison(session, comparison_id)
    return comparison_id


def request_ids_of(database: Database, batch_id: int) -> list[int]:
    with database.read() as session:
        return answerable_requests(session, batch_id, after=0, limit=1_000_000)


def decide(database: Database, comparison_id: int, side: Side, answers: Mapping[int, LogProbs | None]) -> None:
    """Write a side's decisions, by request id, as a worker would have; None fails."""
    run = NewRun(side, "checksum", None, "bfloat16", "float32", "cpu", 1, {"mode": BATCHING[side], "side": side}, {})
    with database.write() as session:
        run_id = store.ensure_run(session, run)
        ids = dict(
            session.execute(
                select(Decision.request_id, Decision.id).where(
                    Decision.comparison_id == comparison_id, Decision.side == side
                )
            ).all()
        )
        rows = [
            {
                "row": ids[request_id],
                "status": "done" if log_probs else "failed",
                "log_probs": log_probs,
                "answers": {} if log_probs else None,
            }
            for request_id, log_probs in answers.items()
        ]
        values = {name: bindparam(name) for name in ("status", "log_probs", "answers")}
        session.connection().execute(
            update(Decision.__table__)
            .where(Decision.__table__.c.id == bindparam("row"))
            .values(**values, run_id=run_id, finished_at=now_utc()),
            rows,
        )
