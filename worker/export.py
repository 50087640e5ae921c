"""A stored batch as a file, in any of the three formats; also while it runs.

Reads the database and hands the rows to `worker.results` and `worker.results_csv`. Knows no file names: it writes to
what it is given.
"""

from __future__ import annotations

from typing import Literal, TextIO, get_args

from clef_core.answers import Confidence
from db import store
from db.session import Database
from worker.results import Written, write_jevl, write_jsonl
from worker.results_csv import collect_question_types, question_types, write_csv
from worker.table_files import TableError
from worker.table_rows import QUESTIONS_KEY

ExportFormat = Literal["csv", "jsonl", "jevl"]
EXPORT_FORMATS: tuple[ExportFormat, ...] = get_args(ExportFormat)


def export_batch(
    database: Database, batch_id: int, format: ExportFormat, out: TextIO, *, confidence: Confidence = "top"
) -> Written:
    """Write a batch's rows in order.

    Args:
        out: opened with `newline=""`.
        confidence: which definition the CSV's confidence columns have.

    Raises:
        TableError: there is no such batch, or the CSV would have two columns of one name.
    """
    with database.read() as session:
        batch = store.get_batch(session, batch_id)
        if batch is None:
            raise TableError(f"there is no batch {batch_id}")
        results = store.iter_results(session, batch_id)
        if format == "jsonl":
            return write_jsonl(results, out, variants=batch.variants, id_column=batch.mapping.get("id"))
        if format == "jevl":
            return write_jevl(results, out, variants=batch.variants)
        types = question_types(batch.questions)
        if QUESTIONS_KEY in batch.columns:  # rows may bring questions of their own
            types |= collect_question_types(store.iter_results(session, batch_id))
        return write_csv(
            results, out, columns=batch.columns, types=types, variants=batch.variants, confidence=confidence
        )
