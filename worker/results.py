"""Write the results of a batch as JSON lines: JSONL without loss, `.jevl` for drift tools; CSV is in `results_csv`.

Knows no database: it takes rows as they come and keeps none. Says for all formats how a row stands.

Surprising: a batch can be written while it runs. A row that is not done has no answers, and its error says `not done
yet` or `cancelled`, so that an empty error always means an answer. `.jevl` has only answered rows, a line per variant.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC
from typing import Any, TextIO

from clef_core.errors import Problem
from clef_core.schema import AnyQuestion, parse_questions
from db.views import DecisionView, ResultRow
from worker.table_rows import RowNote

NOT_DONE = "not done yet"
CANCELLED = "cancelled"
MAX_FAILURES = 5


@dataclass
class Written:
    """How the rows that were written stand; `failures` has the first few reasons."""

    num_rows: int = 0
    num_answered: int = 0
    num_failed: int = 0
    num_unfinished: int = 0
    failures: list[RowNote] = field(default_factory=list)

    def add(self, row: ResultRow, variants: Sequence[str]) -> None:
        """Count one row: failed in any variant, answered in all, or neither yet."""
        statuses = {row.decisions[variant].status if variant in row.decisions else "queued" for variant in variants}
        self.num_rows += 1
        if "failed" in statuses:
            self.num_failed += 1
            if len(self.failures) < MAX_FAILURES:
                self.failures.append(RowNote(row.request.row_number or 0, row_error(row, variants)))
        elif statuses == {"done"}:
            self.num_answered += 1
        else:
            self.num_unfinished += 1


def write_jsonl(
    results: Iterable[ResultRow], out: TextIO, *, variants: Sequence[str], id_column: str | None = None
) -> Written:
    """Write a line per row: `{"id", …response}`, or `{"id", "error": {"message"}}`.

    With several variants: `{"id", "responses": {variant: response or {"error": …}}}`. Without an id column the id is
    the row's number.
    """
    written = Written()
    for row in results:
        written.add(row, variants)
        responses = {variant: _response_or_error(row, variant) for variant in variants}
        body = responses[variants[0]] if len(variants) == 1 else {"responses": responses}
        out.write(json.dumps({"id": _row_id(row, id_column), **body}, ensure_ascii=False) + "\n")
    return written


def write_jevl(results: Iterable[ResultRow], out: TextIO, *, variants: Sequence[str]) -> Written:
    """Write a line per answered row and variant, in the record format of jevkit (version 1).

    The `id` covers state and questions, so that two runs over the same rows can be paired; images are not in it.
    """
    written = Written()
    parse = QuestionCache()
    for row in results:
        written.add(row, variants)
        asked = {"state": row.request.state, "questions": row.request.questions}
        for variant, decision in _answered(row, variants):
            record: dict[str, Any] = {
                "v": 1,
                "id": "sha256:" + hashlib.sha256(_canonical(asked).encode()).hexdigest(),
                "ts": _timestamp(decision),
                "model": f"clef-{variant}",
                "request": asked,
                "answers": decision.answers,
                "usage": {"input_tokens": decision.input_tokens, "output_tokens": 0},
            }
            if row.request.labels:
                questions = parse(row.request.questions)
                record["label"] = {key: _typed_label(questions[key], v) for key, v in row.request.labels.items()}
            out.write(json.dumps(record, ensure_ascii=False) + "\n")
    return written


def compact_json(value: Any) -> str:
    """JSON without spaces, letters as they are."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _canonical(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def _answered(row: ResultRow, variants: Sequence[str]) -> Iterator[tuple[str, DecisionView]]:
    for variant in variants:
        decision = row.decisions.get(variant)
        if decision is not None and decision.status == "done":
            yield variant, decision


def row_error(row: ResultRow, variants: Sequence[str]) -> str:
    """Why a row has no answer, or not from all variants; empty if it is complete."""
    errors = {variant: text for variant in variants if (text := _error(row.decisions.get(variant)))}
    if len(errors) == len(variants) and len(set(errors.values())) == 1:
        return next(iter(errors.values()))
    return "; ".join(f"{variant}: {text}" for variant, text in errors.items())


def _error(decision: DecisionView | None) -> str:
    """Why this decision has no answer, on one line; empty if it has one."""
    if decision is None or decision.status in ("queued", "running"):
        return NOT_DONE
    if decision.status == "cancelled":
        return CANCELLED
    problems = [
        str(Problem(tuple(problem["loc"]), problem["msg"], problem["type"])) for problem in decision.error or ()
    ]
    return " ".join("; ".join(problems).split()) if decision.status == "failed" else ""


def response_of(decision: DecisionView, asked_model: str) -> dict[str, Any]:
    """The SystemOne response of a decision that is done."""
    response: dict[str, Any] = {
        "model": asked_model,
        "answers": decision.answers,
        "usage": {"input_tokens": decision.input_tokens, "output_tokens": 0},
        "x_variant": decision.variant,
    }
    if decision.truncated_tokens:
        response["x_truncated_tokens"] = decision.truncated_tokens
    return response


def _response_or_error(row: ResultRow, variant: str) -> dict[str, Any]:
    decision = row.decisions.get(variant)
    if decision is None or decision.status != "done":
        return {"error": {"message": _error(decision)}}
    return response_of(decision, row.request.asked_model)


def _row_id(row: ResultRow, id_column: str | None) -> Any:
    """The id as it stood in the file (in JSONL it may be a number), else the row's number."""
    given = (row.request.cells or {}).get(id_column) if id_column is not None else None
    if given is not None:
        return given
    return row.request.row_number if row.request.external_id is None else row.request.external_id


def _timestamp(decision: DecisionView) -> str:
    moment = decision.finished_at or decision.created_at
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _typed_label(question: AnyQuestion, label: str) -> str | int | bool:
    if question.type == "score":
        return int(label)
    return label == "true" if question.type == "noul" else label


class QuestionCache:
    """Parses a map of questions once for the many rows that share it."""

    def __init__(self) -> None:
        self._raw: Mapping[str, Any] | None = None
        self._parsed: dict[str, AnyQuestion] = {}

    def __call__(self, raw: Mapping[str, Any]) -> dict[str, AnyQuestion]:
        if raw != self._raw:
            self._raw, self._parsed = raw, parse_questions(raw)
        return self._parsed
