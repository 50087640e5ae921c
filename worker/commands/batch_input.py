"""What a batch is made of: table, questions, meaning of the columns, pictures. All is checked before anything runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clef_core.errors import count
from worker.commands.terminal import say
from worker.questions_file import load_questions
from worker.settings import Settings
from worker.submit import BatchRow
from worker.tables import (
    ColumnMapping,
    ExportFormat,
    ImageZip,
    RowNote,
    Table,
    TableError,
    check_mapping,
    guess_mapping,
    output_columns,
    question_types,
    read_table,
    table_rows,
)

MAX_WARNINGS = 5


@dataclass(frozen=True)
class ColumnOptions:
    """The column options of the command line; None means guess, an empty text means none."""

    state: Sequence[str]
    id: str | None
    images: str | None
    labels: Sequence[str]


@dataclass(frozen=True)
class BatchInput:
    """A checked batch. `fingerprint` is the same for the same files, columns and releases."""

    table: Table
    questions: Mapping[str, Any]
    mapping: ColumnMapping
    images_zip: ImageZip | None
    variants: tuple[str, ...]
    fingerprint: str

    def rows(self) -> Iterator[BatchRow]:
        """Stream the rows; label warnings go to stderr, the first few in full."""
        model = f"clef-{self.variants[0]}" if len(self.variants) == 1 else "clef"
        warnings = _Warnings()
        yield from table_rows(
            self.table, self.mapping, self.questions, model, self.images_zip, on_warning=warnings.hear
        )
        warnings.sum_up()


@contextmanager
def read_input(
    file: Path,
    questions_file: Path | None,
    zip_file: Path | None,
    columns: ColumnOptions,
    settings: Settings,
    variants: tuple[str, ...],
    format: ExportFormat,
) -> Iterator[BatchInput]:
    """Read and check everything that the command line names; the zip stays open inside.

    Raises:
        TableError: the table, the columns or the zip cannot be used.
        QuestionsFileError, RequestError: the questions cannot be used.
    """
    questions = load_questions(questions_file) if questions_file is not None else {}
    table = read_table(file, max_bytes=settings.max_upload_bytes, max_rows=settings.max_rows)
    mapping = _mapping_of(table, columns, list(questions))
    check_mapping(table, mapping, list(questions))
    if table.kind == "csv" or format == "csv":
        output_columns(table.columns, question_types(questions), variants)
    say(_describe(table, mapping))
    with ExitStack() as stack:
        images_zip = stack.enter_context(ImageZip(zip_file)) if zip_file is not None else None
        releases = [[name, settings.variants[name]] for name in sorted(variants)]
        parts = [table.sha256, _sha256(zip_file), questions, mapping.to_json(), releases]
        fingerprint = hashlib.sha256(json.dumps(parts, ensure_ascii=False).encode()).hexdigest()
        yield BatchInput(table, questions, mapping, images_zip, variants, fingerprint)


def _mapping_of(table: Table, options: ColumnOptions, question_ids: Sequence[str]) -> ColumnMapping:
    guess = guess_mapping(table.columns, question_ids)
    labels = _labels_of(options.labels, question_ids) if options.labels else guess.labels
    return ColumnMapping(
        state=tuple(options.state) or guess.state,
        id=guess.id if options.id is None else options.id or None,
        images=guess.images if options.images is None else options.images or None,
        labels=labels,
    )


def _labels_of(options: Sequence[str], question_ids: Sequence[str]) -> dict[str, str]:
    labels: dict[str, str] = {}
    for option in filter(None, options):
        question_id = next((name for name in question_ids if option.startswith(f"{name}=")), None)
        if question_id is not None:
            labels[question_id] = option.removeprefix(f"{question_id}=")
        elif len(question_ids) == 1:
            labels[question_ids[0]] = option
        else:
            raise TableError(
                f'--label-column "{option}" must say which question it labels: QUESTION=COLUMN; '
                f"there are {', '.join(question_ids) or 'none'}"
            )
    return labels


def _describe(table: Table, mapping: ColumnMapping) -> str:
    parts = [f"state: {' + '.join(mapping.state)}"]
    parts += [f"{name}: {column}" for name, column in (("id", mapping.id), ("images", mapping.images)) if column]
    parts += [f"label of {question_id}: {column}" for question_id, column in mapping.labels.items()]
    bad = f", {table.num_bad_rows:,} unreadable" if table.num_bad_rows else ""
    return f"{table.path.name}: {count(table.num_rows, 'row')}{bad} ({'; '.join(parts)})"


def _sha256(path: Path | None) -> str | None:
    if path is None:
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _Warnings:
    """Prints the first few notes and says how many more there were."""

    def __init__(self) -> None:
        self.number = 0

    def hear(self, note: RowNote) -> None:
        self.number += 1
        if self.number <= MAX_WARNINGS:
            say(f"note: {note.message}; the row counts as unlabelled")

    def sum_up(self) -> None:
        if self.number > MAX_WARNINGS:
            say(f"note: {self.number - MAX_WARNINGS:,} more labels are no option")
