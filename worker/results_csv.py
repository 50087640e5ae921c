"""Write the results of a batch as CSV, for spreadsheets.

All input columns, then per question its answer, then `model`, `_row` and `error`; one variant gives `<question>`,
`<question>_confidence` and `<question>_probabilities`, several give `<question>_<variant>` each, `<question>_agree` and
`<question>_kl`. Knows no database: it takes rows as they come and keeps none.

Surprising: cells that a spreadsheet would run as a formula get an apostrophe, headers too. Numbers come from the
unrounded log-probabilities, so they have more digits than the stored answers.
"""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

from clef_core.answers import Confidence, build_answers
from db.views import ResultRow
from worker.results import QuestionCache, Written, compact_json, row_error
from worker.table_files import TableError

LAST_COLUMNS = ("model", "_row", "error")
REFERENCE_VARIANT = "bf16"  # the one the others are measured against, if it is there
SIGNIFICANT_DIGITS = 6

_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
_PLAIN_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")

QuestionTypes = Mapping[str, frozenset[str]]


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
    parse = QuestionCache()
    model = ";".join(f"clef-{variant}" for variant in variants)
    for row in results:
        written.add(row, variants)
        answers = {
            variant: build_answers(parse(row.request.questions), decision.log_probs, confidence, decimals=None)
            for variant, decision in row.decisions.items()
            if decision.log_probs is not None
        }
        cells = [_cell_text((row.request.cells or {}).get(column)) for column in columns]
        for question_id, kinds in types.items():
            cells += _question_cells(row, question_id, kinds, variants, answers)
        cells += [model, str(row.request.row_number), row_error(row, variants)]
        writer.writerow([neutralise(cell) for cell in cells])
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
    return compact_json({option: float(_number(p)) for option, p in probabilities.items()})


def _number(value: float) -> str:
    return f"{value:.{SIGNIFICANT_DIGITS}g}"


def _cell_text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else compact_json(value)
