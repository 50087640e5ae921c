"""Benchmarks as lists of labelled requests, read from local copies in their published formats.

The questions and the sample are those of the model card: each label is a choice option whose description is its
humanised name, and the sample is `random.Random(seed).sample(range(len(rows)), n)` over the test rows in file order.
Knows no torch and fetches nothing: a missing file is an error that says where the data come from.
"""

import base64
import csv
import json
import mimetypes
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clef_core.errors import ClefError
from clef_core.schema import Json, Submission, parse_request

INTENT = "intent"
INTENT_INSTRUCTIONS = "Which intent does the message express?"
OUT_OF_SCOPE = "oos"
DEFAULT_N = 300
DEFAULT_SEED = 0


class TaskError(ClefError):
    """A task's data are not where they should be, or are not what they should be."""


@dataclass(frozen=True)
class LabelledRequest:
    """One record of a task. `labels` maps question id to the right option's id."""

    id: str
    submission: Submission
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Task:
    """A benchmark: what it is, where its data come from, and how they are read from the folder `--data`."""

    name: str
    title: str
    source: str
    files: tuple[str, ...]
    read: Callable[[Path], Iterator[LabelledRequest]]

    def load(self, data: Path, n: int | None = DEFAULT_N, seed: int = DEFAULT_SEED) -> list[LabelledRequest]:
        """Read the data and draw the sample; all records, in order, where there are no more than n or n is None.

        Raises:
            TaskError: a file is missing or cannot be read.
        """
        missing = [name for name in self.files if not (data / name).is_file()]
        if missing:
            raise TaskError(f"{data / missing[0]} is missing. {self.title}: {self.source}; say where with --data DIR")
        try:
            records = list(self.read(data))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TaskError(f"{data / self.files[0]}: not {self.title} as published: {error!r}") from error
        if n is None or n >= len(records):
            return records
        return [records[index] for index in random.Random(seed).sample(range(len(records)), n)]


def humanise(label: str) -> str:
    """A label's name as a description: underscores become spaces, `oos` becomes `out of scope`."""
    return "out of scope" if label == OUT_OF_SCOPE else label.replace("_", " ")


def intent_questions(labels: Sequence[str]) -> dict[str, Json]:
    """The one question of both intent tasks, with an option per label."""
    criteria: dict[str, Json] = {label: humanise(label) for label in labels}
    return {INTENT: {"type": "choice", "instructions": INTENT_INSTRUCTIONS, "criteria": criteria}}


def _read_banking77(data: Path) -> Iterator[LabelledRequest]:
    labels = json.loads((data / "banking77/categories.json").read_text(encoding="utf-8"))
    with (data / "banking77/test.csv").open(encoding="utf-8", newline="") as stream:
        rows = [(row["text"], row["category"]) for row in csv.DictReader(stream)]
    yield from _intents("banking77", labels, rows)


def _read_clinc150(data: Path) -> Iterator[LabelledRequest]:
    loaded = json.loads((data / "clinc150/data_oos_plus.json").read_text(encoding="utf-8"))
    rows = [(text, label) for part in ("test", "oos_test") for text, label in loaded[part]]
    yield from _intents("clinc150", list(dict.fromkeys(label for _, label in rows)), rows)


def _intents(name: str, labels: Sequence[str], rows: Sequence[tuple[str, str]]) -> Iterator[LabelledRequest]:
    questions = intent_questions(labels)
    for number, (text, label) in enumerate(rows):
        if label not in labels:
            raise ValueError(f"row {number}: {label} is no label of {name}")
        yield _labelled(f"{name}-{number}", {"state": text, "questions": questions}, {INTENT: label})


def _read_receipts(data: Path) -> Iterator[LabelledRequest]:
    folder = data / "receipts"
    for line in (folder / "receipts.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        images: list[Json] = [_data_url(folder, name) for name in row["images"]]
        labels = {question: _option_id(value) for question, value in row["labels"].items()}
        body = {"state": row["state"], "questions": row["questions"], "images": images}
        yield _labelled(row["id"], body, labels)


def _data_url(folder: Path, name: str) -> str:
    file = (folder / name).resolve()
    if not file.is_relative_to(folder.resolve()):
        raise ValueError(f"{name} lies outside {folder}")
    media_type = mimetypes.guess_type(file.name)[0] or "image/png"
    return f"data:{media_type};base64,{base64.b64encode(file.read_bytes()).decode()}"


def _option_id(value: Json) -> str:
    return str(value).lower() if isinstance(value, bool | int) else str(value)


def _labelled(id: str, body: Mapping[str, Json], labels: Mapping[str, str]) -> LabelledRequest:
    return LabelledRequest(id, parse_request({"model": "clef", **body}), labels)


CARD_QUESTIONS: dict[str, Json] = {
    "department": {
        "type": "choice",
        "instructions": "Which team should handle the message?",
        "criteria": {"billing": "Payments or invoices", "technical": "Bugs or outages"},
    },
    "urgency": {"type": "score", "criteria": ["Can wait", "This week", "Today"]},
    "outage": {"type": "noul", "instructions": "Is a service down?"},
}


def _read_card(data: Path) -> Iterator[LabelledRequest]:
    body: dict[str, Json] = {
        "state": "Our checkout started returning errors and orders are blocked.",
        "questions": CARD_QUESTIONS,
    }
    yield _labelled("card", body, {"department": "technical", "urgency": "2", "outage": "true"})


TASKS: Mapping[str, Task] = {
    task.name: task
    for task in (
        Task(
            "banking77",
            "BANKING77 test, 77-way choice",
            "PolyAI task-specific-datasets, CC BY 4.0 (Casanueva et al. 2020)",
            ("banking77/test.csv", "banking77/categories.json"),
            _read_banking77,
        ),
        Task(
            "clinc150",
            "CLINC150 plus test, 151-way choice with out-of-scope",
            "clinc/oos-eval, CC BY 3.0 (Larson et al. 2019)",
            ("clinc150/data_oos_plus.json",),
            _read_clinc150,
        ),
        Task(
            "receipts",
            "receipt images, 2 noul and one 3-way choice",
            "ICDAR 2019 SROIE, CC BY 4.0",
            ("receipts/receipts.jsonl",),
            _read_receipts,
        ),
        Task("card", "the model card's example", "ships with the project", (), _read_card),
    )
}


def find_task(name: str) -> Task:
    """The task of this name.

    Raises:
        TaskError: there is none; the message lists those there are.
    """
    if name not in TASKS:
        raise TaskError(f"no task is called {name}; there are {', '.join(TASKS)}")
    return TASKS[name]
