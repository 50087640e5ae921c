"""How much the decisions depend on the linear mode: every mode of an MXFP4 release over the same BANKING77 rows.

All modes run in one process, each record alone in its forward, and are held against `expanded`. The table goes to
standard output as Markdown: agreement with its interval, largest |Δp|, seconds.

Run: OMP_WAIT_POLICY=PASSIVE .venv/bin/python benchmarks/modes.py [--n 300] [--release DIR]
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PROJECT = Path(__file__).parent.parent
sys.path.insert(0, str(PROJECT))

from benchmarks.conditions import conditions  # noqa: E402
from clef_core.encoding import Record  # noqa: E402
from clef_core.engine import Decision, Engine  # noqa: E402
from clef_core.errors import SettingsError  # noqa: E402
from clef_core.model import load_release  # noqa: E402
from clef_core.mxfp4_linear import LinearMode  # noqa: E402
from clef_core.room import keep_freed_memory  # noqa: E402
from clef_core.stats import max_abs_difference, top, wilson  # noqa: E402
from clef_core.tasks import find_task  # noqa: E402

MODES: tuple[LinearMode, ...] = ("expanded", "packed", "int8", "fp8")


def decide(release: Path, mode: LinearMode, records: Sequence[Record]) -> tuple[list[list[float]], float]:
    """The log-probabilities of the only question of each record, and seconds."""
    engine = Engine(load_release(release, linear_mode=mode))
    engine.decide(records[:1])
    started = time.perf_counter()
    outcomes = engine.decide(records, "single")
    seconds = time.perf_counter() - started
    decisions = [one for one in outcomes if isinstance(one, Decision)]
    assert len(decisions) == len(records)
    return [list(values.values()) for one in decisions for values in one.log_probs.values()], seconds


def main(n: int, data: Path, release: Path) -> None:
    keep_freed_memory()  # as a worker does
    print(conditions(), "\n")
    records = [Record(row.submission.request) for row in find_task("banking77").load(data, n, 0)]
    print(f"{release.name}, {n} rows of BANKING77 with 77 options\n")
    print("| mode | same top option as expanded | largest |Δp| | seconds |\n|---|---|---|---|")
    expanded: list[list[float]] = []
    for mode in MODES:
        try:
            decided, seconds = decide(release, mode, records)
        except SettingsError as error:
            print(f"| {mode} | not on this machine: {error} | | |")
            continue
        expanded = expanded or decided
        pairs = list(zip(expanded, decided, strict=True))
        same = sum(top(one) == top(other) for one, other in pairs)
        interval = wilson(same, n)
        moved = max(max_abs_difference(one, other) for one, other in pairs)
        share = f"{same} of {n} ({same / n:.1%}, {interval.low:.1%} to {interval.high:.1%})"
        print(f"| {mode} | {share} | {moved:.1e} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=300)
    parser.add_argument("--data", type=Path, default=PROJECT.parent / "shared" / "data")
    parser.add_argument("--release", type=Path, default=PROJECT / "checkpoints" / "nano-mxfp4")
    arguments = parser.parse_args()
    main(arguments.n, arguments.data, arguments.release)
