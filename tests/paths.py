"""Where test data lie, and how lines of JSON are read. A module of its own: `conftest` names more than one file."""

import json
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parent.parent
DATA = Path(__file__).parent / "data"
GOLDEN = DATA / "golden"
SHARED = PROJECT.parent / "shared"


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
