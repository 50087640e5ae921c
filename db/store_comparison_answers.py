"""The compared answers of a comparison: paired rows to compare, the answers to store, list and filter.

Everything is read in pieces, so that the memory does not grow with the comparison. What surprises: an answer row holds
no log-probabilities; those stay with the decisions and are read for one request at a time, when somebody looks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from sqlalchemy import ColumnElement, func, insert, select
from sqlalchemy.orm import Session

from db.comparison_views import (
    AnswerFilter,
    AnswerOrder,
    AnswerPage,
    ComparedAnswer,
    ListedAnswer,
    PairedRow,
    SideDecisions,
)
from db.models import Base, Comparison, ComparisonAnswer, Decision, QuestionSet, Request, Run
from db.store_requests import decision_view, request_view, run_view
from db.views import DecisionView, ResultRow, RunView, Side

_READ_CHUNK = 500
_COLUMNS = tuple(getattr(ComparisonAnswer, field.name) for field in fields(ComparedAnswer))


def compared_up_to(session: Session, comparison_id: int) -> int:
    """The last request whose answers are stored, or 0: they are stored in the order of the requests' ids."""
    last = select(func.max(ComparisonAnswer.request_id)).where(ComparisonAnswer.comparison_id == comparison_id)
    return session.scalar(last) or 0


def paired_rows(session: Session, comparison_id: int, *, after: int, limit: int) -> list[PairedRow]:
    """The next requests after a request id, with what each side decided."""
    request_ids = _request_ids(session, comparison_id, after, limit)
    labels = {
        request_id: found
        for request_id, found in session.execute(select(Request.id, Request.labels).where(Request.id.in_(request_ids)))
    }
    log_probs: dict[int, dict[Side, dict[str, dict[str, float]]]] = {request_id: {} for request_id in request_ids}
    rows = session.execute(
        select(Decision.request_id, Decision.side, Decision.log_probs).where(
            Decision.comparison_id == comparison_id,
            Decision.request_id.in_(request_ids),
            Decision.status == "done",
        )
    )
    for request_id, side, found in rows:
        if side is not None and found is not None:
            log_probs[request_id][side] = found
    return [PairedRow(request_id, labels[request_id] or {}, log_probs[request_id]) for request_id in request_ids]


def add_answers(session: Session, comparison_id: int, after: int, answers: Sequence[ComparedAnswer]) -> bool:
    """Store the answers of the requests that follow `after`; False when somebody has stored them already."""
    session.execute(select(Comparison.id).where(Comparison.id == comparison_id).with_for_update())
    if compared_up_to(session, comparison_id) != after:
        return False
    rows = [{"comparison_id": comparison_id} | vars(answer) for answer in answers]
    table = Base.metadata.tables[ComparisonAnswer.__tablename__]
    session.execute(insert(table), rows)  # of the table: the class would be inserted row by row
    return True


def iter_answers(session: Session, comparison_id: int) -> Iterator[ComparedAnswer]:
    """Every answer, in the order of the requests; the questions of a request come in no particular order."""
    rows = session.execute(
        select(*_COLUMNS)
        .where(ComparisonAnswer.comparison_id == comparison_id)
        .order_by(ComparisonAnswer.request_id)
        .execution_options(yield_per=_READ_CHUNK)
    )
    return (ComparedAnswer(*row) for row in rows)


def question_order(session: Session, comparison_id: int) -> list[str]:
    """Every question that the comparison's requests ask, in the order in which they are first met."""
    batch_id = select(Comparison.batch_id).where(Comparison.id == comparison_id).scalar_subquery()
    first = (
        select(Request.question_set_id, func.min(Request.id).label("request_id"))
        .where(Request.batch_id == batch_id, Request.input_error.is_(None))
        .group_by(Request.question_set_id)
        .subquery()
    )
    sets = session.scalars(
        select(QuestionSet.questions)
        .join(first, QuestionSet.id == first.c.question_set_id)
        .order_by(first.c.request_id)
        .execution_options(yield_per=_READ_CHUNK)
    )
    questions: dict[str, None] = {}
    for asked in sets:
        questions |= dict.fromkeys(asked)
    return list(questions)


def list_answers(
    session: Session,
    comparison_id: int,
    wanted: AnswerFilter,
    *,
    order: AnswerOrder = "margin",
    offset: int = 0,
    limit: int = 50,
) -> AnswerPage:
    """One page of the answers that pass the filter: closest calls first, in row order, or widest apart first."""
    conditions = _conditions(comparison_id, wanted)
    total = session.scalars(select(func.count()).select_from(ComparisonAnswer).where(*conditions)).one()
    by: dict[AnswerOrder, ColumnElement[Any]] = {
        "margin": ComparisonAnswer.margin.asc(),
        "row": ComparisonAnswer.request_id.asc(),
        "divergence": ComparisonAnswer.kl.desc(),
    }
    rows = session.execute(
        select(*_COLUMNS, Request.row_number, Request.external_id, Request.title)
        .join(Request, ComparisonAnswer.request_id == Request.id)
        .where(*conditions)
        .order_by(by[order], ComparisonAnswer.request_id, ComparisonAnswer.question_id)
        .offset(offset)
        .limit(limit)
    )
    width = len(_COLUMNS)
    listed = (ListedAnswer(ComparedAnswer(*row[:width]), *row[width:]) for row in rows)
    return AnswerPage(total, tuple(listed))


def side_decisions(session: Session, comparison_id: int, request_id: int) -> SideDecisions:
    """What each side of the comparison decided for one request."""
    found = _side_decisions(session, comparison_id, [request_id])
    return SideDecisions(request_id, found[request_id])


def side_runs(session: Session, comparison_id: int) -> dict[Side, list[tuple[RunView, int]]]:
    """The runs of each side with their number of decisions, the main one first; more than one after a restart."""
    rows = session.execute(
        select(Decision.side, Run, func.count())
        .join(Run, Decision.run_id == Run.id)
        .where(Decision.comparison_id == comparison_id)
        .group_by(Decision.side, Run.id)
        .order_by(func.count().desc(), Run.id)
    )
    runs: dict[Side, list[tuple[RunView, int]]] = {}
    for side, run, count in rows:
        if side is not None:
            runs.setdefault(side, []).append((run_view(run), count))  # type: ignore[arg-type]  # written here alone
    return runs


def iter_compared_results(session: Session, comparison_id: int) -> Iterator[ResultRow]:
    """Every request of a comparison with its decisions by side, reading a few hundred at a time."""
    after = 0
    while request_ids := _request_ids(session, comparison_id, after, _READ_CHUNK):
        requests = session.execute(
            select(Request, QuestionSet.questions)
            .join(QuestionSet, Request.question_set_id == QuestionSet.id)
            .where(Request.id.in_(request_ids))
            .order_by(Request.id)
        ).all()
        decisions = _side_decisions(session, comparison_id, request_ids)
        results = [
            ResultRow(request_view(request, questions), {side: view for side, view in decisions[request.id].items()})
            for request, questions in requests
        ]
        after = request_ids[-1]
        session.expunge_all()
        yield from results


def _request_ids(session: Session, comparison_id: int, after: int, limit: int) -> list[int]:
    return list(
        session.scalars(
            select(Decision.request_id)
            .where(Decision.comparison_id == comparison_id, Decision.request_id > after)
            .distinct()
            .order_by(Decision.request_id)
            .limit(limit)
        )
    )


def _side_decisions(
    session: Session, comparison_id: int, request_ids: Sequence[int]
) -> dict[int, dict[Side, DecisionView]]:
    found: dict[int, dict[Side, DecisionView]] = {request_id: {} for request_id in request_ids}
    rows = session.execute(
        select(Decision, Run)
        .outerjoin(Run, Decision.run_id == Run.id)
        .where(Decision.comparison_id == comparison_id, Decision.request_id.in_(request_ids))
        .order_by(Decision.id)
    )
    for decision, run in rows:
        side: Side = decision.side  # type: ignore[assignment]  # a comparison's decisions have one
        found[decision.request_id][side] = decision_view(decision, run)
    return found


def _conditions(comparison_id: int, wanted: AnswerFilter) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = [ComparisonAnswer.comparison_id == comparison_id]
    if wanted.question_id is not None:
        conditions.append(ComparisonAnswer.question_id == wanted.question_id)
    if wanted.is_flip is not None:
        conditions.append(ComparisonAnswer.is_flip.is_(wanted.is_flip))
    if wanted.effect is not None:
        conditions.append(ComparisonAnswer.effect == wanted.effect)
    if wanted.max_margin is not None:
        conditions.append(ComparisonAnswer.margin < wanted.max_margin)
    return conditions
