"""Where test data lie, and how lines of JSON are read. A module of its own: `conftest` names more than one file."""

import json
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parent.parent
DATA = Path(__file__).parent / "data"
GOLDEN = DATA / "golden"
SHARED = PROJECT.parent / "shared"

RANDOM_VARIANTS = {kind: str(PROJECT / "checkpoints" / f"random-{kind}") for kind in ("bf16", "mxfp4")}
"""The releases with random weights, as settings: small enough for any test that does not mind what is answered."""

RANDOM_ENVIRONMENT = {f"CLEF_{kind.upper()}": path for kind, path in RANDOM_VARIANTS.items()}


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
