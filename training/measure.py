"""Measure a release on records that training never saw: test splits with five options, the set outside, new pictures.

    python -m training.measure RELEASE --data ../shared/data [--n 1000] [--outside tests/data/nano_outside.jsonl]

The whole 77- and 151-way benchmarks are those of `python -m worker evaluate`.
"""

import argparse
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from clef_core.encoding import Record
from clef_core.engine import Decision, Engine
from clef_core.model import load_release
from clef_core.schema import Json, parse_request
from clef_core.stats import expected_calibration_error, wilson
from clef_core.tasks import DEFAULT_SEED, INTENT, find_task, intent_questions
from training.pictures import Pictures

OUTSIDE = Path("tests/data/nano_outside.jsonl")
NUM_OPTIONS = 5
NUM_PICTURES = 120

Labelled = tuple[Record, Mapping[str, str]]


def five_way(task: str, data: Path, n: int, seed: int = DEFAULT_SEED) -> Iterator[Labelled]:
    """Records of a benchmark's test split, each with its label and four others drawn from the rest."""
    rng = random.Random(seed)
    for record in find_task(task).load(data, n, seed):
        request = record.submission.request
        right = record.labels[INTENT]
        criteria = request.questions[INTENT].to_json()["criteria"]
        assert isinstance(criteria, dict)
        others = rng.sample([label for label in criteria if label != right], NUM_OPTIONS - 1)
        questions = intent_questions(rng.sample([right, *others], NUM_OPTIONS))
        body: dict[str, Json] = {"model": "clef", "state": request.state, "questions": questions}
        yield Record(parse_request(body).request), record.labels


def outside(path: Path) -> Iterator[tuple[str, Labelled]]:
    """The kind and the record of each line."""
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        request = parse_request({"model": "clef", "state": row["state"], "questions": row["questions"]}).request
        yield row["kind"], (Record(request), row["labels"])


def drawn_pictures(num: int) -> dict[str, list[Labelled]]:
    """By kind and question, what is asked about `num` drawn pictures of each kind."""
    pictures = Pictures("measured")
    result: dict[str, list[Labelled]] = {}
    for draw in (pictures.receipt, pictures.shape, pictures.scene, pictures.chart):
        for example in (draw() for _ in range(num)):
            for id, label in example.labels.items():
                result.setdefault(f"{draw.__name__}: {id}", []).append((example.record, {id: label}))
    return result


def measure(engine: Engine, labelled: Sequence[Labelled]) -> dict[str, Json]:
    """Accuracy with its 95 % Wilson interval and ECE over all questions of the records."""
    sure: list[float] = []
    is_right: list[bool] = []
    for outcome, (_, labels) in zip(engine.decide([record for record, _ in labelled]), labelled, strict=True):
        if not isinstance(outcome, Decision):
            raise outcome
        for id, label in labels.items():
            best = max(outcome.log_probs[id].items(), key=lambda option: option[1])
            sure.append(math.exp(best[1]))
            is_right.append(best[0] == label)
    share = wilson(sum(is_right), len(is_right))
    return {
        "right": share.successes, "n": share.n, "accuracy": round(share.share, 4),
        "interval": [round(share.low, 4), round(share.high, 4)],
        "ece": round(expected_calibration_error(sure, is_right), 4),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("release", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="folder with banking77/ and clinc150/")
    parser.add_argument("--n", type=int, default=1_000, help="records per test split")
    parser.add_argument("--outside", type=Path, default=OUTSIDE)
    arguments = parser.parse_args()
    engine = Engine(load_release(arguments.release))
    results = {
        task: measure(engine, list(five_way(task, arguments.data, arguments.n))) for task in ("banking77", "clinc150")
    }
    rows = list(outside(arguments.outside))
    results["outside"] = measure(engine, [labelled for _, labelled in rows])
    for kind in dict.fromkeys(kind for kind, _ in rows):
        results[f"outside: {kind}"] = measure(engine, [labelled for one, labelled in rows if one == kind])
    for name, labelled in drawn_pictures(NUM_PICTURES).items():
        results[name] = measure(engine, labelled)
    for name, result in results.items():
        print(json.dumps({"set": name, **result}))


if __name__ == "__main__":
    main()
