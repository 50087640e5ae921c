"""Write the results of a batch: CSV for spreadsheets, JSONL without loss, `.jevl` for drift tools.

CSV has all input columns, then per question its answer, then `model`, `_row` and `error`; one variant gives
`<question>`, `<question>_confidence` and `<question>_probabilities`, several give `<question>_<variant>` each,
`<question>_agree` and `<question>_kl`. Knows no database: it takes rows as they come and keeps none.

Surprising: a batch can be written while it runs. A row that is not done has empty answers, and its `error` says
`not done yet` or `cancelled`, so that an empty `error` always means an answer. Cells that a spreadsheet would run as a
formula get an apostrophe, headers too. `.jevl` has only answered rows, one line per variant.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC
from typing import Any, TextIO

from clef_core.answers import Confidence, build_answers
from clef_core.errors import Problem
from clef_core.schema import AnyQuestion, parse_questions
from db.views import DecisionView, ResultRow
from worker.table_files import TableError
from worker.table_rows import RowNote

NOT_DONE = "not done yet"
CANCELLED = "cancelled"
LAST_COLUMNS = ("model", "_row", "error")
REFERENCE_VARIANT = "bf16"  # the one the others are measured against, if it is there
SIGNIFICANT_DIGITS = 6
MAX_FAILURES = 5

_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
_PLAIN_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")

QuestionTypes = Mapping[str, frozenset[str]]


@dataclass
class Written:
    """How the rows that were written stand; `failures` has the first few reasons."""

    num_rows: int = 0
    num_answered: int = 0
    num_failed: int = 0
    num_unfinished: int = 0
    failures: list[RowNote] = field(default_factory=list)


def question_types(questions: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """The type of each question of one map."""
    return {question_id: frozenset({question["type"]}) for question_id, question in questions.items()}


def collect_question_types(results: Iterable[ResultRow]) -> dict[str, frozenset[str]]:
    """The types of all questions that rows ask, for rows that bring their own; a question may change its type."""
    types: dict[str, frozenset[str]] = {}
    for row in results:
        for question_id, found in question_types(row.request.questions).items():
            types[question_id] = types.get(question_id, frozenset()) | found
    return types


def output_columns(columns: Sequence[str], types: QuestionTypes, variants: Sequence[str]) -> tuple[str, ...]:
    """The header of the CSV.

    Raises:
        TableError: two columns would have one name; nothing is overwritten.
    """
    added = [name for question_id in types for name in _question_columns(question_id, types[question_id], variants)]
    header = [neutralise(name) for name in (*columns, *added, *LAST_COLUMNS)]
    twice = [name for name, times in Counter(header).items() if times > 1]
    if twice:
        listed = ", ".join(f'"{name}"' for name in twice)
        raise TableError(
            f"the results need a column {listed}, which exists already: rename that column or the question"
            if set(twice) & {neutralise(name) for name in columns}
            else f"two questions (or a question and model, _row or error) would share the column {listed}: rename one"
        )
    return tuple(header)


def write_csv(
    results: Iterable[ResultRow],
    out: TextIO,
    *,
    columns: Sequence[str],
    types: QuestionTypes,
    variants: Sequence[str],
    confidence: Confidence = "top",
) -> Written:
    """Write the header and a line per row.

    Args:
        out: opened with `newline=""`.
        columns: the input's columns, in order.

    Raises:
        TableError: as `output_columns`.
    """
    header = output_columns(columns, types, variants)
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    written = Written()
    parse = _QuestionCache()
    model = ";".join(f"clef-{variant}" for variant in variants)
    for row in results:
        _count(row, variants, written)
        answers = {
            variant: build_answers(parse(row.request.questions), decision.log_probs, confidence, decimals=None)
            for variant, decision in row.decisions.items()
            if decision.log_probs is not None
        }
        cells = [_cell_text((row.request.cells or {}).get(column)) for column in columns]
        for question_id, kinds in types.items():
            cells += _question_cells(row, question_id, kinds, variants, answers)
        cells += [model, str(row.request.row_number), _row_error(row, variants)]
        writer.writerow([neutralise(cell) for cell in cells])
    return written


def write_jsonl(
    results: Iterable[ResultRow], out: TextIO, *, variants: Sequence[str], id_column: str | None = None
) -> Written:
    """Write a line per row: `{"id", …response}`, or `{"id", "error": {"message"}}`.

    With several variants: `{"id", "responses": {variant: response or {"error": …}}}`. Without an id column the id is
    the row's number.
    """
    written = Written()
    for row in results:
        _count(row, variants, written)
        responses = {variant: _response(row, variant) for variant in variants}
        body = responses[variants[0]] if len(variants) == 1 else {"responses": responses}
        out.write(json.dumps({"id": _row_id(row, id_column), **body}, ensure_ascii=False) + "\n")
    return written


def write_jevl(results: Iterable[ResultRow], out: TextIO, *, variants: Sequence[str]) -> Written:
    """Write a line per answered row and variant, in the record format of jevkit (version 1).

    The `id` covers state and questions, so that two runs over the same rows can be paired; images are not in it.
    """
    written = Written()
    parse = _QuestionCache()
    for row in results:
        _count(row, variants, written)
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


def neutralise(text: str) -> str:
    """Put an apostrophe before a text that a spreadsheet would run as a formula; a plain number stays one."""
    return "'" + text if text.startswith(_FORMULA_STARTS) and not _PLAIN_NUMBER.fullmatch(text) else text


def _question_columns(question_id: str, kinds: frozenset[str], variants: Sequence[str]) -> list[str]:
    if len(variants) == 1:
        confidence = [] if kinds == {"noul"} else [f"{question_id}_confidence"]
        return [question_id, *confidence, f"{question_id}_probabilities"]
    reference, *others = _reference_first(variants)
    divergences = ["kl"] if len(others) == 1 else [f"kl_{variant}" for variant in others]
    return [f"{question_id}_{suffix}" for suffix in (reference, *others, "agree", *divergences)]


def _question_cells(
    row: ResultRow,
    question_id: str,
    kinds: frozenset[str],
    variants: Sequence[str],
    answers: Mapping[str, Mapping[str, Any]],
) -> list[str]:
    """The cells that belong to `_question_columns`; empty where there is no answer."""
    of_variant = {variant: answer[question_id] for variant, answer in answers.items() if question_id in answer}
    if len(variants) == 1:
        answer = of_variant.get(variants[0])
        if answer is None:
            return [""] * len(_question_columns(question_id, kinds, variants))
        confidence = [] if kinds == {"noul"} else [_number(answer["confidence"]) if "confidence" in answer else ""]
        return [_value(answer), *confidence, _probabilities(answer)]
    ordered = _reference_first(variants)
    values = [_value(of_variant[variant]) if variant in of_variant else "" for variant in ordered]
    if len(of_variant) < len(variants):
        return [*values, "", *([""] * (len(variants) - 1))]
    log_probs = [(row.decisions[variant].log_probs or {})[question_id] for variant in ordered]
    tops = {max(options, key=options.__getitem__) for options in log_probs}
    divergences = [_number(_kl(log_probs[0], other)) for other in log_probs[1:]]
    return [*values, "true" if len(tops) == 1 else "false", *divergences]


def _reference_first(variants: Sequence[str]) -> list[str]:
    """BF16 first, if it is among them, so that the divergence is KL(BF16‖other)."""
    return sorted(variants, key=lambda variant: variant != REFERENCE_VARIANT)


def _kl(reference: Mapping[str, float], other: Mapping[str, float]) -> float:
    """KL(reference‖other) in nats, from log-probabilities; rounding must not make it negative."""
    return max(0.0, math.fsum(math.exp(p) * (p - other[option]) for option, p in reference.items()))


def _value(answer: Mapping[str, Any]) -> str:
    value = answer[answer["type"]]
    return value if isinstance(value, str) else _number(value)


def _probabilities(answer: Mapping[str, Any]) -> str:
    true = answer.get("noul")
    probabilities = answer["probabilities"] if true is None else {"true": true, "false": 1 - true}
    return _compact({option: float(_number(p)) for option, p in probabilities.items()})


def _number(value: float) -> str:
    return f"{value:.{SIGNIFICANT_DIGITS}g}"


def _cell_text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else _compact(value)


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _canonical(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def _answered(row: ResultRow, variants: Sequence[str]) -> Iterator[tuple[str, DecisionView]]:
    for variant in variants:
        decision = row.decisions.get(variant)
        if decision is not None and decision.status == "done":
            yield variant, decision


def _count(row: ResultRow, variants: Sequence[str], written: Written) -> None:
    statuses = {row.decisions[variant].status if variant in row.decisions else "queued" for variant in variants}
    written.num_rows += 1
    if "failed" in statuses:
        written.num_failed += 1
        if len(written.failures) < MAX_FAILURES:
            written.failures.append(RowNote(row.request.row_number or 0, _row_error(row, variants)))
    elif statuses == {"done"}:
        written.num_answered += 1
    else:
        written.num_unfinished += 1


def _row_error(row: ResultRow, variants: Sequence[str]) -> str:
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


def _response(row: ResultRow, variant: str) -> dict[str, Any]:
    decision = row.decisions.get(variant)
    if decision is None or decision.status != "done":
        return {"error": {"message": _error(decision)}}
    response: dict[str, Any] = {
        "model": row.request.asked_model,
        "answers": decision.answers,
        "usage": {"input_tokens": decision.input_tokens, "output_tokens": 0},
        "x_variant": variant,
    }
    if decision.truncated_tokens:
        response["x_truncated_tokens"] = decision.truncated_tokens
    return response


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


class _QuestionCache:
    """Parses a map of questions once for the many rows that share it."""

    def __init__(self) -> None:
        self._raw: Mapping[str, Any] | None = None
        self._parsed: dict[str, AnyQuestion] = {}

    def __call__(self, raw: Mapping[str, Any]) -> dict[str, AnyQuestion]:
        if raw != self._raw:
            self._raw, self._parsed = raw, parse_questions(raw)
        return self._parsed
