"""What the tests of queue and database share: requests, settings of a private data folder, waiting for a condition."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from paths import RANDOM_VARIANTS

from clef_core.schema import Submission, parse_request
from worker.settings import Settings, load_settings
from worker.submit import BatchRow, Submitter

QUESTIONS: dict[str, Any] = {
    "urgent": {"type": "noul", "instructions": "Is it urgent?"},
    "team": {"type": "choice", "criteria": {"billing": "Payments", "technical": None}},
}


def submission_of(state: Any, **fields: Any) -> Submission:
    return parse_request({"model": "clef", "state": state, "questions": QUESTIONS, **fields})


def rows_of(states: Iterable[Any]) -> list[BatchRow]:
    return [BatchRow(number, f"row-{number}", submission_of(state)) for number, state in enumerate(states)]


def settings_of(folder: Path, **overrides: Any) -> Settings:
    """Settings of a data folder of its own and random weights; nothing of the environment's Redis or database."""
    own = {"data_dir": folder / "data", "redis_url": None, "database_url": ""}
    return load_settings(**{**RANDOM_VARIANTS, **own, **overrides})


def submit_batch(submitter: Submitter, states: Iterable[Any], variants: Iterable[str]) -> int:
    return submitter.submit_batch(
        "rows.csv", QUESTIONS, rows_of(states), list(variants), source="test", columns=["state"], mapping={}
    )


def wait_until(is_true: Callable[[], Any], timeout_s: float, poll_s: float = 0.05) -> Any:
    """The first true value; fails when none comes in time."""
    deadline = time.monotonic() + timeout_s
    while not (value := is_true()):
        assert time.monotonic() < deadline, f"still not true after {timeout_s} s"
        time.sleep(poll_s)
    return value
