"""What stands in the Batch form, and the way from there to checked rows.

Knows no Gradio components; it opens uploaded files, after `web.uploads` has checked where they lie. Everything that can
be wrong is a `ClefError` whose text is fit to show.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from clef_core.errors import ClefError, RequestError
from clef_core.schema import Json
from clef_core.tokens import PromptTokenizer
from web.uploads import uploaded
from worker.questions_file import load_questions
from worker.settings import Settings
from worker.submit import BatchRow
from worker.tables import (
    ColumnMapping,
    ImageZip,
    Plan,
    RowNote,
    Table,
    TableError,
    check_mapping,
    guess_mapping,
    plan,
    read_table,
    table_rows,
)

MAX_PREVIEW_ROWS = 5
_MAX_READ_TABLES = 8


@dataclass(frozen=True)
class BatchDraft:
    """The form's fields. `labels` are column names; `label_of` says which question each belongs to."""

    file: str | None
    images_zip: str | None
    questions: str
    state: tuple[str, ...]
    id: str | None
    images: str | None
    labels: tuple[str, ...]
    variants: tuple[str, ...]

    @property
    def model(self) -> str:
        """What the rows ask for; two variants answer one request under the default name."""
        return "clef" if len(self.variants) > 1 else f"clef-{self.variants[0]}"


@dataclass(frozen=True)
class CheckedBatch:
    """A draft that can run."""

    table: Table
    mapping: ColumnMapping
    questions: dict[str, Json]
    model: str
    zip_path: Path | None

    @contextmanager
    def rows(self, warnings: list[RowNote] | None = None) -> Iterator[Iterator[BatchRow]]:
        """The rows as requests, while the archive of images is open; `warnings` collects labels that fit no option."""
        notes: list[RowNote] = [] if warnings is None else warnings
        if self.zip_path is None:
            yield table_rows(self.table, self.mapping, self.questions, self.model, on_warning=notes.append)
            return
        with ImageZip(self.zip_path) as images:
            yield table_rows(self.table, self.mapping, self.questions, self.model, images, on_warning=notes.append)


@dataclass(frozen=True)
class PreviewRow:
    """One of the first rows. `prompt` is what the model reads; both are None for a row that cannot be asked."""

    row: BatchRow
    tokens: int | None
    prompt: str | None


def open_table(path: str, settings: Settings) -> Table:
    """The uploaded table, checked from beginning to end.

    Raises:
        ClefError: it is no upload, or no table.
    """
    return _read_table(uploaded(path, ("file",)), settings.max_upload_bytes, settings.max_rows)


@lru_cache(maxsize=_MAX_READ_TABLES)
def _read_table(path: Path, max_bytes: int, max_rows: int) -> Table:
    """An upload never changes, so it is read once."""
    return read_table(path, max_bytes=max_bytes, max_rows=max_rows)


def guess_columns(table: Table, questions: str) -> ColumnMapping:
    """A first mapping; questions that are not valid yet count as none."""
    return guess_mapping(table.columns, list(_questions_or_none(questions)))


def _questions_or_none(text: str) -> Mapping[str, Any]:
    try:
        return load_questions(text) if text.strip() else {}
    except ClefError:
        return {}


def label_of(labels: Sequence[str], question_ids: Sequence[str]) -> dict[str, str]:
    """Question id to label column: `label:<id>` names its question, any other column goes with a single question.

    Raises:
        TableError: a column belongs to no question, or two to one.
    """
    found: dict[str, str] = {}
    by_name = {f"label:{question_id}".lower(): question_id for question_id in question_ids}
    for column in labels:
        named = by_name.get(column.strip().lower(), question_ids[0] if len(question_ids) == 1 else None)
        if named is None:
            raise TableError(
                f'the column "{column}" is no label of a question: with several questions its name must be '
                f'"label:" and the id ({", ".join(question_ids) or "there are no questions yet"})'
            )
        if named in found:
            raise TableError(f'"{found[named]}" and "{column}" are both labels of "{named}"; choose one')
        found[named] = column
    return found


def check_draft(draft: BatchDraft, settings: Settings) -> CheckedBatch:
    """Everything about a draft that does not need its rows.

    Raises:
        ClefError: the first thing that is missing or wrong.
    """
    if draft.file is None:
        raise TableError("choose a file")
    table = open_table(draft.file, settings)
    questions = load_questions(draft.questions) if draft.questions.strip() else {}
    mapping = ColumnMapping(draft.state, draft.id, draft.images, label_of(draft.labels, list(questions)))
    check_mapping(table, mapping, list(questions))
    zip_path = uploaded(draft.images_zip, ("images",)) if draft.images_zip else None
    return CheckedBatch(table, mapping, questions, draft.model, zip_path)


def first_rows(batch: CheckedBatch, tokenizer: PromptTokenizer | None) -> list[PreviewRow]:
    """The first rows as the model would read them."""
    with batch.rows() as rows:
        return [_preview(row, tokenizer) for row in islice(rows, MAX_PREVIEW_ROWS)]


def _preview(row: BatchRow, tokenizer: PromptTokenizer | None) -> PreviewRow:
    if row.submission is None or tokenizer is None:
        return PreviewRow(row, None, None)
    request, images = row.submission.request, row.submission.images
    prompt = tokenizer.render(request, len(images))
    try:
        tokens = tokenizer.count(request, [(image.width, image.height) for image in images]).total
    except RequestError:
        return PreviewRow(row, None, prompt)
    return PreviewRow(row, tokens, prompt)


def dry_run(
    batch: CheckedBatch, tokenizer: PromptTokenizer, max_tokens: int, tokens_per_s: float | None
) -> tuple[Plan, list[RowNote]]:
    """Go through all rows: what a run would do, and which labels fit no option."""
    warnings: list[RowNote] = []
    with batch.rows(warnings) as rows:
        return plan(rows, tokenizer, max_tokens=max_tokens, tokens_per_s=tokens_per_s), warnings
