"""From the rows of a table to requests: which column is the state, the id, the pictures, the labels.

One state column makes a text state (in JSONL: its value as it is), several make an object of column → value. Knows no
queue and no model; whether a request is too long is for `worker.plan` and the engine.

Surprising: a row that cannot be asked becomes a `BatchRow` with problems, never an exception, so that the others run.
An empty label means "no label"; one that no option has makes the row unlabelled and is reported as a warning, because
the row itself can be answered. JSONL rows may bring their own `questions` and `labels`.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clef_core.errors import Problem, RequestError, describe
from clef_core.schema import AnyQuestion, Json, Submission, options, parse_request
from worker.image_zip import ImageFileError, ImageZip, split_image_cell
from worker.questions_file import QuestionsFileError, usual_questions
from worker.submit import BatchRow
from worker.table_files import Table, TableError, TableRow

QUESTIONS_KEY = "questions"
LABELS_KEY = "labels"
LABEL_COLUMN = "label"

_STATE_NAMES = (
    *("state", "text", "message", "content", "body", "input", "utterance", "sentence", "query"),
    *("prompt", "review", "comment", "description", "note", "title", "subject"),
)
_ID_NAMES = ("id", "_id", "row_id", "uuid", "key")
_IMAGE_NAMES = ("image", "images", "picture", "photo")
_NOUL_LABELS = {"true": "true", "yes": "true", "1": "true", "false": "false", "no": "false", "0": "false"}
_WHOLE_NUMBER = re.compile(r"([0-9]+)(?:\.0*)?")  # spreadsheets and pandas write level 2 as 2.0


@dataclass(frozen=True)
class ColumnMapping:
    """What each column means; `labels` maps question id to column. A column that is not named is only carried along."""

    state: tuple[str, ...]
    id: str | None = None
    images: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The mapping as it is stored with a batch."""
        return {"state": list(self.state), "id": self.id, "images": self.images, "labels": dict(self.labels)}


@dataclass(frozen=True)
class RowNote:
    """Something to say about one row; `number` counts rows from 1."""

    number: int
    message: str


def guess_mapping(columns: Sequence[str], question_ids: Sequence[str]) -> ColumnMapping:
    """Guess from the columns' names; the state is empty if no column offers itself."""
    by_name = {column.strip().lower(): column for column in reversed(columns)}
    row_id = _first_of(_ID_NAMES, by_name)
    images = _first_of(_IMAGE_NAMES, by_name)
    labels = {
        question_id: column
        for question_id in question_ids
        if (column := by_name.get(f"{LABEL_COLUMN}:{question_id}".lower())) is not None
    }
    if len(question_ids) == 1 and not labels and LABEL_COLUMN in by_name:
        labels[question_ids[0]] = by_name[LABEL_COLUMN]
    state = _first_of(_STATE_NAMES, by_name)
    if state is None:
        taken = {row_id, images, *labels.values(), QUESTIONS_KEY, LABELS_KEY}
        state = next(
            (name for name in columns if name not in taken and not name.lower().startswith(LABEL_COLUMN)), None
        )
    return ColumnMapping(() if state is None else (state,), row_id, images, labels)


def check_mapping(table: Table, mapping: ColumnMapping, question_ids: Sequence[str]) -> None:
    """Refuse a mapping that does not fit the table.

    Raises:
        TableError: a column does not exist, none is the state, or a label belongs to no question.
    """
    named = [*mapping.state, *(name for name in (mapping.id, mapping.images) if name), *mapping.labels.values()]
    missing = [name for name in dict.fromkeys(named) if name not in table.columns]
    if missing:
        raise TableError(f"there is no column {_listed(missing)}; the columns are {_listed(table.columns)}")
    if not mapping.state:
        raise TableError(f"choose the state column; the columns are {_listed(table.columns)}")
    unknown = [question_id for question_id in mapping.labels if question_id not in question_ids]
    if unknown:
        raise TableError(f"there is no question {_listed(unknown)} to be labelled; there are {_listed(question_ids)}")
    if not question_ids and not (table.kind == "jsonl" and QUESTIONS_KEY in table.columns):
        raise TableError("questions are missing: give a questions file, or JSONL rows with their own questions")


def table_rows(
    table: Table,
    mapping: ColumnMapping,
    questions: Mapping[str, Json],
    model: str,
    images_zip: ImageZip | None = None,
    *,
    on_warning: Callable[[RowNote], None] = lambda note: None,
) -> Iterator[BatchRow]:
    """Stream the rows of a table as rows of a batch, in order and complete.

    Args:
        questions: the questions of every row that brings none of its own.
        model: what the requests ask for, such as `clef-mxfp4`.
        on_warning: hears of labels that no option has.
    """
    for row in table.rows():
        external_id = _id_of(row, mapping)
        cells = dict(row.values)
        submission, problems = _submission_of(row, mapping, questions, model, images_zip)
        if submission is None:
            yield BatchRow(row.number, external_id, None, problems, cells)
            continue
        labels, warnings = _labels_of(row, mapping, submission.request.questions)
        for warning in warnings:
            on_warning(RowNote(row.number, f"line {row.line}: {warning}"))
        yield BatchRow(row.number, external_id, submission, (), cells, labels or None)


def _submission_of(
    row: TableRow,
    mapping: ColumnMapping,
    questions: Mapping[str, Json],
    model: str,
    images_zip: ImageZip | None,
) -> tuple[Submission | None, tuple[Problem, ...]]:
    if row.problem is not None:
        return None, (Problem((), row.problem, "table_row"),)
    try:
        images = _images_of(row, mapping.images, images_zip)
        body = {
            "model": model,
            "state": _state_of(row, mapping, has_images=bool(images)),
            "questions": _own_questions(row, mapping) or dict(questions),
            "images": images,
        }
        return parse_request(body), ()
    except RequestError as error:
        return None, error.problems


def _state_of(row: TableRow, mapping: ColumnMapping, *, has_images: bool) -> Json:
    absent = [column for column in mapping.state if column not in row.values]
    if absent:
        raise RequestError.at(("state",), f"line {row.line} has no {_listed(absent)}", "missing")
    values = {column: row.values[column] for column in mapping.state}
    if not has_images and all(isinstance(value, str) and not value.strip() for value in values.values()):
        raise RequestError.at(("state",), f"line {row.line}: {_listed(mapping.state)} is empty", "empty_state")
    return values[mapping.state[0]] if len(mapping.state) == 1 else values


def _images_of(row: TableRow, column: str | None, images_zip: ImageZip | None) -> list[Json]:
    """The row's pictures as a request carries them: data URLs as they are, files from the zip as base64."""
    value = row.values.get(column) if column is not None else None
    if value is None:
        return []
    sources = value if isinstance(value, list) else list(split_image_cell(value)) if isinstance(value, str) else [value]
    images: list[Json] = []
    for index, source in enumerate(sources):
        if not isinstance(source, str) or source[:5].lower() == "data:":
            images.append(source)
            continue
        try:
            if images_zip is None:
                raise ImageFileError(f"{describe(source)} names a picture, but no zip of pictures was given")
            images.append(base64.b64encode(images_zip.read(source)).decode("ascii"))
        except ImageFileError as error:
            raise RequestError.at(("images", index), str(error), "image_file") from None
    return images


def _labels_of(
    row: TableRow, mapping: ColumnMapping, questions: Mapping[str, AnyQuestion]
) -> tuple[dict[str, str], list[str]]:
    given: dict[str, Json] = {question_id: row.values.get(column) for question_id, column in mapping.labels.items()}
    own = row.values.get(LABELS_KEY)
    if isinstance(own, dict) and LABELS_KEY not in mapping.state:
        given.update(own)
    labels: dict[str, str] = {}
    warnings: list[str] = []
    for question_id, value in given.items():
        if value is None or (isinstance(value, str) and not value.strip()):
            continue
        question = questions.get(question_id)
        label = None if question is None else _option_of(question, value)
        if label is not None:
            labels[question_id] = label
        elif question is None:
            warnings.append(f"a label for {describe(question_id)}, which is no question of this row")
        else:
            warnings.append(f"the label {describe(value)} is no option of {describe(question_id)}")
    return labels, warnings


def _option_of(question: AnyQuestion, value: Json) -> str | None:
    """The id of the option that a label means, or None."""
    text = json.dumps(value) if isinstance(value, bool) else str(value)
    ids = [option.id for option in options(question)]
    for candidate in (text, text.strip()):
        if candidate in ids:
            return candidate
    text = text.strip()
    if question.type == "noul":
        return _NOUL_LABELS.get(text.lower())
    if question.type == "score":
        number = _WHOLE_NUMBER.fullmatch(text)
        if number is not None and str(int(number[1])) in ids:
            return str(int(number[1]))
        levels = [str(index) for index, level in enumerate(question.criteria) if level in (value, text)]
        return levels[0] if len(levels) == 1 else None
    return None


def _own_questions(row: TableRow, mapping: ColumnMapping) -> dict[str, Json]:
    """The questions that a JSONL row brings itself; in a CSV, or as a state, `questions` is a column like any other."""
    value = row.values.get(QUESTIONS_KEY)
    if not isinstance(value, dict | list) or QUESTIONS_KEY in mapping.state:
        return {}
    try:
        return usual_questions(value, f"line {row.line}")
    except QuestionsFileError as error:
        raise RequestError.at((QUESTIONS_KEY,), str(error)) from None


def _id_of(row: TableRow, mapping: ColumnMapping) -> str | None:
    value = row.values.get(mapping.id) if mapping.id is not None else None
    if value is None or (isinstance(value, str) and "\0" in value):
        return None
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _first_of(names: Sequence[str], by_name: Mapping[str, str]) -> str | None:
    return next((by_name[name] for name in names if name in by_name), None)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names) or "none"
