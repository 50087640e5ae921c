"""What benchmarks share: how ways are timed beside each other, and the conditions that their numbers hold under."""

import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch


def conditions() -> str:
    """One paragraph for the head of a table."""
    threads = f"{torch.get_num_threads()} threads, OMP_WAIT_POLICY={os.environ.get('OMP_WAIT_POLICY', 'unset')}"
    cap = os.environ.get("ONEDNN_MAX_CPU_ISA")
    limit = f", oneDNN limited to {cap}" if cap else ""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    cpu = f"{cpu_name()} ({torch.backends.cpu.get_cpu_capability()}{limit})"
    return f"{cpu}, {threads}, {versions}, {datetime.now(UTC):%Y-%m-%d}"


def cpu_name() -> str:
    """The processor's name, and whether it multiplies BF16 and INT8 in tiles (AMX)."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    facts = {name.strip(): value.strip() for name, value in facts.items()}
    amx = " with AMX" if "amx_tile" in facts.get("flags", "").split() else ""
    return facts.get("model name", platform.machine()) + amx


def time_in_turn(ways: dict[str, Callable[[], object]], num_rounds: int) -> dict[str, float]:
    """Median seconds of each way, all timed in turn within the same seconds, since a shared machine drifts."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for run in ways.values():
        run()
    for _ in range(num_rounds):
        for name, run in ways.items():
            started = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in times.items()}
