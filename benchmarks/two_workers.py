"""Whether the BF16 and the MXFP4 worker starve each other: both busy at once against one after the other, same rows.

Builds the 130M release of `whole_model` and its MXFP4 build in a temporary folder, with a database and a Redis of their
own, and lets the supervisor start the workers as the app does. `taking turns` are the same two workers, one busy at a
time; `alone` is each worker by itself, started with every core. The table goes to standard output as Markdown.

Run: OMP_WAIT_POLICY=PASSIVE .venv/bin/python benchmarks/two_workers.py [--rows 24] [--rounds 2]
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

PROJECT = Path(__file__).parent.parent
sys.path.insert(0, str(PROJECT))

from benchmarks.conditions import conditions  # noqa: E402
from benchmarks.rows import submit, wait_until_finished, wait_until_ready, write_table  # noqa: E402
from benchmarks.whole_model import write_release  # noqa: E402
from clef_core.errors import count  # noqa: E402
from clef_core.quantize import quantize  # noqa: E402
from clef_core.recipe import Recipe  # noqa: E402
from worker.commands.connect import open_submitter  # noqa: E402
from worker.settings import Settings, load_settings  # noqa: E402
from worker.submit import Submitter  # noqa: E402
from worker.supervise import Supervisor  # noqa: E402

BOTH = ("bf16", "mxfp4")
NUM_WARM_UP_ROWS = 16
SHOWN = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS")


def describe_workers(submitter: Submitter, supervisor: Supervisor) -> str:
    """What each worker runs with, once all are ready."""
    texts = []
    for worker in wait_until_ready(submitter, len(supervisor.pids)):
        (variant,) = worker.variants
        pairs = (pair.partition("=") for pair in Path(f"/proc/{worker.pid}/environ").read_text().split("\0"))
        environment = " ".join(f"{name}={value}" for name, _, value in pairs if name in SHOWN)
        facts = worker.releases[variant]
        texts.append(f"{variant}: {count(facts['threads'], 'thread')}, linears {facts['linear_mode']}, {environment}")
    return "; ".join(texts)


def time_batch(submitter: Submitter, path: Path, variants: Sequence[str]) -> float:
    started = time.perf_counter()
    wait_until_finished(submitter, submit(submitter, path, variants))
    return time.perf_counter() - started


def measure(settings: Settings, variants: Sequence[str], folder: Path, num_rounds: int) -> tuple[str, dict[str, float]]:
    """The workers, and the median seconds of `at once` and of each variant in turn: one worker per variant."""
    times: dict[str, list[float]] = {name: [] for name in ("at once", *variants)}
    with open_submitter(settings) as submitter, Supervisor(settings, variants) as supervisor:
        found = describe_workers(submitter, supervisor)
        time_batch(submitter, folder / "warm_up.csv", variants)
        for _ in range(num_rounds):
            times["at once"].append(time_batch(submitter, folder / "rows.csv", variants))
            for variant in variants if len(variants) > 1 else ():
                times[variant].append(time_batch(submitter, folder / "rows.csv", [variant]))
    return found, {name: statistics.median(values) for name, values in times.items() if values}


def main(num_rows: int, num_rounds: int) -> None:
    print(conditions(), "\n")
    with tempfile.TemporaryDirectory(prefix="clef-two-") as name:
        folder = Path(name)
        num_parameters = write_release(folder / "bf16")
        quantize(folder / "bf16", folder / "mxfp4", Recipe(algorithm="none"))
        write_table(folder / "warm_up.csv", NUM_WARM_UP_ROWS, "warm-up")
        write_table(folder / "rows.csv", num_rows, "row")
        own = {"data_dir": folder / "data", "redis_url": None, "database_url": "", "log_level": "WARNING"}
        settings = load_settings(bf16=str(folder / "bf16"), mxfp4=str(folder / "mxfp4"), **own)
        settings.data_dir.mkdir()
        workers, together = measure(settings, BOTH, folder, num_rounds)
        alone = [measure(settings, [variant], folder, num_rounds) for variant in BOTH]
    print(f"{num_parameters / 1e6:.0f}M parameters, {num_rows} rows in both variants, {os.cpu_count()} cores\n")
    print("| | bf16 | mxfp4 | both | at once against it | workers |")
    print("|---|---|---|---|---|---|")
    at_once = together.pop("at once")
    print(f"| at once | | | {at_once:.1f} s | | {workers} |")
    apart = [times["at once"] for _, times in alone]
    for way, (bf16, mxfp4), what in (
        ("taking turns", [together[variant] for variant in BOTH], "the same"),
        ("alone", apart, "; ".join(found for found, _ in alone)),
    ):
        both = bf16 + mxfp4
        print(f"| {way} | {bf16:.1f} s | {mxfp4:.1f} s | {both:.1f} s | {at_once / both:.2f} | {what} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    main(arguments.rows, arguments.rounds)
