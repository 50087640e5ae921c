"""What micro-batches bring: requests answered together against one at a time, and how much of a batch is padding.

Asks BANKING77's messages (`--data`, as `evaluate` does) with all 77 options, and again with 5 of them, through the bare
engine. Both ways of both kinds run in one process, one after the other. The table goes to standard output as Markdown.

Run: OMP_WAIT_POLICY=PASSIVE .venv/bin/python benchmarks/batching.py [--n 300] [--release DIR]
"""

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PROJECT = Path(__file__).parent.parent
sys.path.insert(0, str(PROJECT))

from benchmarks.conditions import conditions  # noqa: E402
from clef_core.encoding import Record  # noqa: E402
from clef_core.engine import Batching, Decision, Engine  # noqa: E402
from clef_core.model import load_release  # noqa: E402
from clef_core.room import keep_freed_memory  # noqa: E402
from clef_core.schema import ChoiceQuestion, Request  # noqa: E402
from clef_core.tasks import find_task  # noqa: E402


def with_options(request: Request, num_options: int, generator: random.Random) -> Request:
    """The same request with so many of its options, drawn anew."""
    (name, question), *_ = request.questions.items()
    assert isinstance(question, ChoiceQuestion)
    kept = generator.sample(sorted(question.criteria), num_options)
    criteria = {option: question.criteria[option] for option in kept}
    return request.model_copy(update={"questions": {name: question.model_copy(update={"criteria": criteria})}})


def measure(engine: Engine, records: Sequence[Record], batching: Batching) -> tuple[float, float]:
    """Seconds, and the share of the computed tokens that were padding."""
    started = time.perf_counter()
    decisions = [one for one in engine.decide(records, batching) if isinstance(one, Decision)]
    seconds = time.perf_counter() - started
    computed = sum(one.padded_tokens / one.batch_rows for one in decisions)
    return seconds, 1 - sum(one.input_tokens for one in decisions) / computed


def main(n: int, data: Path, release: Path) -> None:
    keep_freed_memory()  # as a worker does
    print(conditions(), "\n")
    engine = Engine(load_release(release))
    rows = find_task("banking77").load(data, n, 0)
    generator = random.Random(0)
    print(f"{release.name}, {n} requests\n\n| options | one at a time | in micro-batches | ratio | padding |")
    print("|---|---|---|---|---|")
    for num_options in (5, 77):
        records = [Record(with_options(row.submission.request, num_options, generator)) for row in rows]
        engine.decide(records[:8])
        single, _ = measure(engine, records, "single")
        fast, padding = measure(engine, records, "fast")
        print(f"| {num_options} | {single:.1f} s | {fast:.1f} s | {single / fast:.2f} | {padding:.1%} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=300)
    parser.add_argument("--data", type=Path, default=PROJECT.parent / "shared" / "data")
    parser.add_argument("--release", type=Path, default=PROJECT / "checkpoints" / "random-bf16")
    arguments = parser.parse_args()
    main(arguments.n, arguments.data, arguments.release)
