"""A stored comparison as a file: JSON, a Markdown table, a CSV of its answers, `.jevl` for drift tools.

JSON and Markdown (`worker.comparison_tables`) come from the report alone; CSV and `.jevl` read the decisions, a few
hundred records at a time. The CSV has a line per answer (record and question), and a line with an `error` for a record
that a run could not answer.
"""

import csv
import dataclasses
import json
from collections.abc import Iterator
from typing import Any, Literal, TextIO

from clef_core.comparison_report import Report
from db.comparison_views import ComparedAnswer, ComparisonView, PairedRow
from db.session import Database
from db.store_comparison_answers import iter_compared_results
from db.views import DecisionView, Json, ResultRow, RunView, Side
from worker.comparison_summary import compare_row
from worker.tables import Written, neutralise, write_jevl

ComparisonFormat = Literal["json", "markdown", "csv", "jevl"]
SIGNIFICANT_DIGITS = 6

CSV_COLUMNS = (
    *("row", "id", "state", "question", "left", "right", "agree", "label", "effect", "margin"),
    *("left_confidence", "right_confidence", "kl", "total_variation", "max_abs_dp"),
    *("floor", "floor_kl", "floor_max_abs_dp", "error"),
)


def comparison_json(view: ComparisonView, report: Report) -> dict[str, Json]:
    """The report with what was compared and how; `overall` has the figures over all answers."""
    runs = {"left": view.left_run, "right": view.right_run, "floor": view.floor_run}
    facts: dict[str, Json] = {
        "id": view.id,
        "name": view.name,
        "batch_id": view.batch_id,
        "created_at": view.created_at.isoformat(),
        "is_cancelled": view.cancel_requested_at is not None,
        "parameters": view.parameters,
        **{side: None if run is None else _run_json(run) for side, run in runs.items()},
    }
    return {"comparison": facts, **report.model_dump(mode="json")}


def write_comparison_csv(database: Database, comparison_id: int, out: TextIO) -> int:
    """Write the answers, a line each; returns the number of lines. `out` is opened with `newline=""`."""
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    num_lines = 0
    with database.read() as session:
        for row in iter_compared_results(session, comparison_id):
            for cells in _csv_lines(row):
                writer.writerow([neutralise(cells.get(column, "")) for column in CSV_COLUMNS])
                num_lines += 1
    return num_lines


def write_comparison_jevl(database: Database, view: ComparisonView, out: TextIO) -> Written:
    """Write both runs in jevkit's record format, a line per record and run.

    A variant that is compared with itself is called `<variant>-again` the second time, so that the lines can be paired.
    """
    left, right = view.left_variant, view.right_variant
    names: dict[Side, str] = {"left": left, "right": right if right != left else f"{right}-again"}
    with database.read() as session:
        rows = (_renamed(row, names) for row in iter_compared_results(session, view.id))
        return write_jevl(rows, out, variants=list(names.values()))


def _renamed(row: ResultRow, names: dict[Side, str]) -> ResultRow:
    decisions = {name: row.decisions[side] for side, name in names.items() if side in row.decisions}
    return dataclasses.replace(row, decisions=decisions)


def _csv_lines(row: ResultRow) -> Iterator[dict[str, str]]:
    request = row.request
    state = request.state if isinstance(request.state, str) else json.dumps(request.state, ensure_ascii=False)
    common = {"row": str(request.row_number), "id": request.external_id or "", "state": state}
    log_probs: dict[Side, Any] = {
        side: row.decisions[side].log_probs
        for side in ("left", "right", "floor")
        if side in row.decisions and row.decisions[side].log_probs is not None
    }
    answers = list(compare_row(PairedRow(request.id, request.labels or {}, log_probs)))
    for answer in answers:
        yield common | _answer_cells(answer)
    if not answers:
        yield common | {"error": "; ".join(f"{side}: {_why(row.decisions.get(side))}" for side in ("left", "right"))}


def _answer_cells(answer: ComparedAnswer) -> dict[str, str]:
    numbers = {
        name: getattr(answer, name)
        for name in (
            *("margin", "left_confidence", "right_confidence", "kl", "total_variation", "max_abs_dp"),
            *("floor_kl", "floor_max_abs_dp"),
        )
    }
    return {
        "question": answer.question_id,
        "left": answer.left_option,
        "right": answer.right_option,
        "agree": "false" if answer.is_flip else "true",
        "label": answer.label or "",
        "effect": answer.effect or "",
        "floor": answer.floor_option or "",
        **{name: f"{value:.{SIGNIFICANT_DIGITS}g}" for name, value in numbers.items() if value is not None},
    }


def _why(decision: DecisionView | None) -> str:
    if decision is None or decision.status in ("queued", "running"):
        return "not done yet"
    problems = "; ".join(problem["msg"] for problem in decision.error or ())
    return " ".join(problems.split()) or decision.status


def _run_json(run: RunView) -> dict[str, Json]:
    facts: dict[str, Json] = dataclasses.asdict(run)
    return facts | {"created_at": run.created_at.isoformat()}
