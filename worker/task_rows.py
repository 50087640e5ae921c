"""A task's records as rows of a batch, and where its data are looked for.

Knows no queue. The data are never part of the project: `data/tasks` in the project folder is where an operator puts
them, and a folder `shared/data` beside the project is looked at too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clef_core.schema import Json
from clef_core.tasks import Task
from worker.settings import PROJECT_DIR
from worker.submit import BatchRow

DATA_FOLDERS = (PROJECT_DIR / "data" / "tasks", PROJECT_DIR.parent / "shared" / "data")


@dataclass(frozen=True)
class TaskRows:
    """The sample of a task; `questions` are those of its first record."""

    name: str
    questions: dict[str, Json]
    rows: Sequence[BatchRow]


def load_task(task: Task, data: Path | None, n: int, seed: int) -> TaskRows:
    """Read and sample a task.

    Args:
        data: the folder with the data; None looks in `DATA_FOLDERS`, and takes the first where every file lies.

    Raises:
        TaskError: a file is missing or cannot be read.
    """
    folder = data or next((one for one in DATA_FOLDERS if _has_all(task, one)), DATA_FOLDERS[0])
    records = task.load(folder, n, seed)
    first = records[0].submission.request.questions
    return TaskRows(
        name=f"{task.name} (n = {len(records)}, seed {seed})",
        questions={name: question.to_json() for name, question in first.items()},
        rows=[
            BatchRow(number, record.id, record.submission, labels=dict(record.labels))
            for number, record in enumerate(records, start=1)
        ],
    )


def _has_all(task: Task, folder: Path) -> bool:
    return all((folder / name).is_file() for name in task.files)
