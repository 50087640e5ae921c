"""What queue and database cost: rows of a CSV through everything, against the bare engine on the same requests.

A run of N rows is three processes in a temporary folder of its own: the app's side (checks the table, stores the rows,
rings, supervises, watches to the end, exports), a worker under that supervisor, an embedded Redis. Worker and bare
engine have a stand-in for the network: the real engine plans, tokenises and records, but a row costs 5 ms and every
option is equally likely. `--cores` says how many cores the stand-in keeps at work; with 0 it sleeps, as a worker does
whose GPU computes. Peak memory is that of the run alone (`VmHWM`, set back before it; Linux only).

Run: OMP_WAIT_POLICY=PASSIVE .venv/bin/python benchmarks/rows.py [--rows 1000 4000 10000] [--cores 0] [--profile FILE]
"""

import argparse
import cProfile
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

PROJECT = Path(__file__).parent.parent
sys.path.insert(0, str(PROJECT))

from db import store  # noqa: E402
from db.views import WorkerView  # noqa: E402
from worker.commands.connect import open_submitter  # noqa: E402
from worker.progress import watch  # noqa: E402
from worker.questions_file import load_questions  # noqa: E402
from worker.settings import Settings, load_settings  # noqa: E402
from worker.submit import BatchRow, Submitter  # noqa: E402
from worker.supervise import Supervisor  # noqa: E402
from worker.tables import check_mapping, export_batch, guess_mapping, read_table, table_rows  # noqa: E402

if TYPE_CHECKING:
    from clef_core.engine import Engine

QUESTIONS = PROJECT / "examples" / "questions.json"
RELEASE = PROJECT / "checkpoints" / "random-bf16"
VARIANT = "bf16"
COLUMNS = ("id", "message", "channel")
NUM_WARM_UP_ROWS = 128
START_TIMEOUT_S = 120.0
ROW_MS, CORES, PROFILE = "CLEF_BENCH_ROW_MS", "CLEF_BENCH_CORES", "CLEF_BENCH_PROFILE"
"""Environment variables that reach a worker through its supervisor."""


@dataclass(frozen=True)
class Run:
    """What the app's side measured: seconds since the start of the run, and peaks in MB."""

    stored_s: float
    finished_s: float
    exported_s: float
    app_mb: float
    worker_mb: float


def write_table(path: Path, num_rows: int, what: str) -> None:
    """A CSV of messages, each one different."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for n in range(num_rows):
            text = (
                f"{what} {n}: I was charged {n % 97} euros twice for order {20_000 + n}. Please send one payment back."
            )
            writer.writerow([f"m{n}", text, ("email", "chat")[n % 2]])


def rows_of(path: Path) -> Iterator[BatchRow]:
    questions = load_questions(QUESTIONS)
    table = read_table(path)
    mapping = guess_mapping(table.columns, list(questions))
    check_mapping(table, mapping, list(questions))
    return table_rows(table, mapping, questions, f"clef-{VARIANT}")


def submit(submitter: Submitter, path: Path, variants: Sequence[str] = (VARIANT,)) -> int:
    return submitter.submit_batch(
        path.name, load_questions(QUESTIONS), rows_of(path), variants, source="benchmark", columns=COLUMNS, mapping={}
    )


def load_stand_in(settings: Settings, variant: str, beside: "Engine | None" = None) -> "Engine":
    """The small release's engine with a network that only takes time."""
    from concurrent.futures import ThreadPoolExecutor
    from hashlib import sha256
    from math import log

    from clef_core.engine import Engine
    from clef_core.model import load_release

    row_s, num_cores = float(os.environ[ROW_MS]) / 1e3, int(os.environ[CORES])
    cores = ThreadPoolExecutor(max(1, num_cores))
    block = bytes(1 << 16)

    def work(seconds: float) -> None:
        """Use a core for so many seconds of its time, without the interpreter lock."""
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            sha256(block)

    class StandIn(Engine):
        def _log_probs(self, encoded: Any, multiple: int) -> tuple[list[list[float]], int]:
            seconds = row_s * len(encoded)
            if num_cores:
                list(cores.map(work, [seconds] * num_cores))
            else:
                time.sleep(seconds)
            even = [
                [-log(len(question.options)) for question in one.questions for _ in question.options] for one in encoded
            ]
            return even, len(encoded) * max(len(one.input_ids) for one in encoded)

    return StandIn(load_release(RELEASE), variant=variant)


def run_worker() -> None:
    """What the supervisor starts: the real worker around the stand-in. May profile its main thread's CPU time."""
    from worker.serve import serve

    profile = cProfile.Profile(time.thread_time)
    file = os.environ.get(PROFILE)
    if not file:
        serve(load_settings(), [VARIANT], load_stand_in)
        return
    try:
        profile.runcall(serve, load_settings(), [VARIANT], load_stand_in)
    finally:
        profile.dump_stats(file)


def run_app(folder: Path) -> Run:
    """Send the folder's rows through queue and database. Raises SystemExit unless every one is answered."""
    own = {"data_dir": folder / "data", "redis_url": None, "database_url": "", "log_level": "WARNING"}
    settings = load_settings(bf16=str(RELEASE), mxfp4="", default_variant=VARIANT, **own)
    settings.data_dir.mkdir()
    command = [sys.executable, "-W", "ignore", __file__, "--role", "worker"]
    with open_submitter(settings) as submitter, Supervisor(settings, [VARIANT], lambda variant: command) as supervisor:
        wait_until_ready(submitter, 1)
        wait_until_finished(submitter, submit(submitter, folder / "warm_up.csv"))
        worker = supervisor.pids[VARIANT]
        forget_peak(os.getpid())
        forget_peak(worker)
        started = time.perf_counter()
        batch_id = submit(submitter, folder / "rows.csv")
        stored = time.perf_counter()
        wait_until_finished(submitter, batch_id)
        finished = time.perf_counter()
        with (folder / "answers.csv").open("w", encoding="utf-8", newline="") as out:
            written = export_batch(submitter.database, batch_id, "csv", out, confidence=settings.confidence)
        exported = time.perf_counter()
        if written.num_answered != written.num_rows:
            raise SystemExit(f"{written.num_answered} of {written.num_rows} rows were answered")
        times = (moment - started for moment in (stored, finished, exported))
        return Run(*times, app_mb=peak_mb(os.getpid()), worker_mb=peak_mb(worker))


def wait_until_ready(submitter: Submitter, num_workers: int) -> list[WorkerView]:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        with submitter.database.read() as session:
            ready = [worker for worker in store.live_workers(session) if worker.is_ready]
        if len(ready) == num_workers:
            return ready
        time.sleep(0.1)
    raise SystemExit(f"not ready after {START_TIMEOUT_S:.0f} s")


def wait_until_finished(submitter: Submitter, batch_id: int) -> None:
    for _ in watch(submitter.database, batch_id):
        pass


def run_bare(folder: Path) -> dict[str, float]:
    """The bare engine on the requests of the same table: seconds, and rows per micro-batch."""
    from clef_core.encoding import Record
    from clef_core.engine import Decision

    def records_of(path: Path) -> list[Record]:
        return [Record(row.submission.request) for row in rows_of(path) if row.submission is not None]

    engine = load_stand_in(load_settings(), VARIANT)
    engine.decide(records_of(folder / "warm_up.csv"))
    records = records_of(folder / "rows.csv")
    started = time.perf_counter()
    decided = [one for one in engine.decide(records) if isinstance(one, Decision)]
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "batch_rows": len(decided) / sum(1 / one.batch_rows for one in decided)}


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def in_process(role: str, folder: Path, variables: Mapping[str, str]) -> dict[str, float]:
    """Run a part of this file in a process of its own; returns what it measured."""
    command = [sys.executable, "-W", "ignore", __file__, "--role", role, "--folder", str(folder)]
    run = subprocess.run(command, env=os.environ | variables, stdout=subprocess.PIPE, text=True, check=True)
    measured: dict[str, float] = json.loads(run.stdout)
    return measured


def measure(num_rows: int, variables: Mapping[str, str]) -> tuple[Run, dict[str, float]]:
    with tempfile.TemporaryDirectory(prefix="clef-rows-") as name:
        folder = Path(name)
        write_table(folder / "warm_up.csv", NUM_WARM_UP_ROWS, "warm-up")
        write_table(folder / "rows.csv", num_rows, "row")
        return Run(**in_process("app", folder, variables)), in_process("bare", folder, variables)


def main(sizes: list[int], variables: Mapping[str, str]) -> None:
    from benchmarks.conditions import conditions

    print(conditions(), "\n")
    cores = variables[CORES]
    how = f"keeps {cores} of {os.cpu_count()} cores at work" if cores != "0" else "sleeps, as while a GPU computes"
    print(f"{variables[ROW_MS]} ms a row by a stand-in for the network, which {how}; three questions a row.\n")
    print("| rows | bare engine | queue and database | adds | all stored | export | app's peak | worker's peak |")
    print("|---" * 8 + "|")
    runs: dict[int, Run] = {}
    for num_rows in sizes:
        runs[num_rows], bare = measure(num_rows, variables)
        run = runs[num_rows]
        print(
            f"| {num_rows:,} | {bare['seconds']:.2f} s | {run.finished_s:.2f} s | "
            f"{run.finished_s / bare['seconds'] - 1:.1%} | after {run.stored_s:.2f} s | "
            f"{run.exported_s - run.finished_s:.2f} s | {run.app_mb:.1f} MB | {run.worker_mb:.1f} MB |",
            flush=True,
        )
    print(f"\nMicro-batches of {bare['batch_rows']:.1f} rows.")
    if {1_000, 4_000} <= set(runs):
        print(f"4,000 rows take {runs[4_000].finished_s / runs[1_000].finished_s:.2f} times as long as 1,000.")
    few, many = min(runs), max(runs)
    if few < many:
        app, worker = runs[many].app_mb - runs[few].app_mb, runs[many].worker_mb - runs[few].worker_mb
        print(f"Peak memory for {many:,} rows against {few:,}: app {app:+.1f} MB, worker {worker:+.1f} MB.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000, 4_000, 10_000])
    parser.add_argument("--row-ms", type=float, default=5.0, help="what a row costs the stand-in")
    parser.add_argument("--cores", type=int, default=0, help="cores that the stand-in keeps at work; 0: it sleeps")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="where the worker's profile goes")
    parser.add_argument("--role", choices=["app", "worker", "bare"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    match arguments.role:
        case "worker":
            run_worker()
        case "app":
            print(json.dumps(asdict(run_app(arguments.folder))))
        case "bare":
            print(json.dumps(run_bare(arguments.folder)))
        case _:
            chosen = {ROW_MS: f"{arguments.row_ms:g}", CORES: str(arguments.cores)}
            profile = {PROFILE: str(arguments.profile.resolve())} if arguments.profile else {}
            main(arguments.rows, chosen | profile)
