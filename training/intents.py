"""BANKING77 and CLINC150 as labelled texts, from local copies: the training splits, never the test splits.

Source: BANKING77, PolyAI task-specific-datasets, CC BY 4.0 (Casanueva et al. 2020); CLINC150, clinc/oos-eval, CC BY 3.0
(Larson et al. 2019).
"""

import csv
import json
import random
from dataclasses import dataclass
from pathlib import Path

from clef_core.tasks import OUT_OF_SCOPE

HELD_OUT_SHARE = 0.05


@dataclass(frozen=True)
class IntentData:
    """Texts with labels: `train` to learn from, `held_out` (a part of the training split) to watch and to calibrate."""

    name: str
    labels: tuple[str, ...]
    train: tuple[tuple[str, str], ...]
    held_out: tuple[tuple[str, str], ...]


def read_banking77(data: Path, seed: int) -> IntentData:
    labels = json.loads((data / "banking77/categories.json").read_text(encoding="utf-8"))
    with (data / "banking77/train.csv").open(encoding="utf-8", newline="") as stream:
        rows = [(row["text"], row["category"]) for row in csv.DictReader(stream)]
    return _split("banking77", labels, rows, seed)


def read_clinc150(data: Path, seed: int) -> IntentData:
    loaded = json.loads((data / "clinc150/data_oos_plus.json").read_text(encoding="utf-8"))
    rows = [(text, label) for part in ("train", "oos_train") for text, label in loaded[part]]
    labels = [*dict.fromkeys(label for _, label in loaded["train"]), OUT_OF_SCOPE]
    return _split("clinc150", labels, rows, seed)


def _split(name: str, labels: list[str], rows: list[tuple[str, str]], seed: int) -> IntentData:
    shuffled = random.Random(seed).sample(rows, len(rows))
    num_held_out = round(HELD_OUT_SHARE * len(rows))
    return IntentData(name, tuple(labels), tuple(shuffled[num_held_out:]), tuple(shuffled[:num_held_out]))
