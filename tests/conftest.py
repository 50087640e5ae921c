"""Shared fixtures: the golden releases and answers, the releases that ship, and paths to data outside the project."""

import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: spinning threads starve each other
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

pytest_plugins = ["database_fixtures"]

PROJECT = Path(__file__).parent.parent
DATA = Path(__file__).parent / "data"
GOLDEN = DATA / "golden"
SHARED = PROJECT.parent / "shared"


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """BANKING77, CLINC150, receipts: beside the project on the developers' machines, absent in a fresh clone."""
    data = SHARED / "data"
    if not data.is_dir():
        pytest.skip(f"{data} is not here: public data sets are not part of the project")
    return data
