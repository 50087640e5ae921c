"""Alone or together: one request's questions asked one by one and all at once, to see what moves.

The joint head lets the questions of a request influence each other, and the text of each stands in the prompt of all,
so an answer may move when its neighbours go. Both ways go through the queue, each in a forward of its own, so that
nothing but the neighbours can move a number. Imports no torch; the page and the command line share it.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from clef_core.comparison import Compared, Pair, compare_pair
from clef_core.errors import ClefError, RequestError
from clef_core.schema import Submission
from db import store
from db.session import Database
from db.store_decisions import queue_decisions
from db.views import PRIORITY_SINGLE, SOURCE_TOGETHER, ResultRow
from worker.bell import Bell
from worker.submit import BatchRow, Submitter

VARIANTS = "variants"


class TogetherError(ClefError):
    """There is no such question asked alone and together."""


@dataclass(frozen=True)
class Moved:
    """One question in one variant: its log-probabilities asked with the others and asked alone.

    compared: the two ways; left is together, right is alone.
    """

    question_id: str
    together: dict[str, float]
    alone: dict[str, float]
    compared: Compared


@dataclass(frozen=True)
class Together:
    """What moves, by variant and in the order of the questions; a question that has no answer yet is absent.

    failures: why a question got no answer, by variant.
    """

    batch_id: int
    variants: tuple[str, ...]
    num_questions: int
    is_finished: bool
    moved: dict[str, tuple[Moved, ...]]
    failures: dict[str, tuple[str, ...]]


def start_together(submitter: Submitter, submission: Submission, variants: Sequence[str]) -> int:
    """Queue a request as it is and with each of its questions alone; returns the id to read it by.

    Raises:
        RequestError: it has only one question.
    """
    request = submission.request
    if len(request.questions) < 2:
        raise RequestError.at(("questions",), "Asking alone or together takes at least two questions.")
    alone = [
        dataclasses.replace(submission, request=request.model_copy(update={"questions": {name: question}}))
        for name, question in request.questions.items()
    ]
    rows = [BatchRow(number, None, one) for number, one in enumerate([submission, *alone])]
    questions = {name: question.to_json() for name, question in request.questions.items()}
    batch_id = submitter.submit_batch(
        "alone or together", questions, rows, (), source=SOURCE_TOGETHER, columns=(), mapping={VARIANTS: list(variants)}
    )
    with submitter.database.write() as session:
        queued = queue_decisions(session, batch_id, variants, batching="single", priority=PRIORITY_SINGLE)
    for variant, decision_ids in queued.items():
        Bell(submitter.redis).ring(variant, decision_ids, at_front=True)
    return batch_id


def read_together(database: Database, batch_id: int) -> Together:
    """What is known by now.

    Raises:
        TogetherError: no request was asked alone and together under this id.
    """
    with database.read() as session:
        batch = store.get_batch(session, batch_id)
        if batch is None or batch.source != SOURCE_TOGETHER:
            raise TogetherError(f"no request was asked alone and together under the number {batch_id}")
        whole, *alone = store.iter_results(session, batch_id)
    variants = tuple(batch.mapping[VARIANTS])
    decisions = [row.decisions[variant] for row in (whole, *alone) for variant in variants if variant in row.decisions]
    return Together(
        batch_id=batch_id,
        variants=variants,
        num_questions=len(alone),
        is_finished=len(decisions) == len(variants) * (1 + len(alone)) and all(one.is_finished for one in decisions),
        moved={variant: tuple(_moved(whole, alone, variant)) for variant in variants},
        failures={variant: tuple(_failures([whole, *alone], variant)) for variant in variants},
    )


def decision_ids_of(database: Database, batch_id: int) -> list[int]:
    """The decisions to wait for."""
    with database.read() as session:
        return [one.id for row in store.iter_results(session, batch_id) for one in row.decisions.values()]


def _moved(whole: ResultRow, alone: Sequence[ResultRow], variant: str) -> list[Moved]:
    together = whole.decisions[variant].log_probs if variant in whole.decisions else None
    found = []
    for row in alone:
        (question_id,) = row.request.questions
        own = row.decisions[variant].log_probs if variant in row.decisions else None
        if together is None or own is None:
            continue
        options = tuple(together[question_id])
        left = tuple(together[question_id].values())
        right = tuple(own[question_id][option] for option in options)
        compared = compare_pair(Pair(row.request.id, question_id, options, left, right))
        found.append(Moved(question_id, together[question_id], own[question_id], compared))
    return found


def _failures(rows: Sequence[ResultRow], variant: str) -> list[str]:
    failed = [row for row in rows if variant in row.decisions and row.decisions[variant].status == "failed"]
    return [
        f"{', '.join(row.request.questions)}: {'; '.join(p['msg'] for p in row.decisions[variant].error or ())}"
        for row in failed
    ]
