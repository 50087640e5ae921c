"""The progress of long work in steps: a bar per step on a terminal, a line now and then elsewhere.

Knows no step by name. Surprising: a step's bar appears with its first event, and its throughput counts from then on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.filesize import decimal
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TaskID, TextColumn, TimeRemainingColumn

from clef_core.progress import Listener
from clef_core.progress import Progress as At
from worker.commands.terminal import say, stderr

PLAIN_LINE_EVERY_S = 10.0


@contextmanager
def shown_steps() -> Iterator[Listener]:
    """A listener that shows what it hears; everything it shows goes to stderr."""
    console = stderr()
    if not console.is_terminal:
        yield _PlainLines()
        return
    columns: tuple[ProgressColumn, ...] = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bars:
        yield _Bars(bars)


class _Step:
    """One step on its way: when it began, to tell its throughput."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.first_done: int | None = None

    def rate(self, at: At) -> str:
        """`123 MB/s`, `40 s per layer`, or nothing while there is nothing to tell."""
        if self.first_done is None:
            self.first_done = at.done
        elapsed_s = time.monotonic() - self.started
        done = at.done - self.first_done
        if at.unit == "steps" or not done or elapsed_s < 1e-3:
            return ""
        if done < elapsed_s:
            return f"{elapsed_s / done:.3g} s per {at.unit.removesuffix('s')}"
        return f"{_amount(done / elapsed_s, at)}/s"


class _Bars:
    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, tuple[TaskID, _Step]] = {}

    def __call__(self, at: At) -> None:
        if at.step not in self._tasks:
            task = self._bars.add_task(at.step, total=at.total, amount="", rate="")
            self._tasks[at.step] = (task, _Step())
        task, step = self._tasks[at.step]
        self._bars.update(task, completed=at.done, total=at.total, amount=_far(at), rate=step.rate(at))


class _PlainLines:
    def __init__(self) -> None:
        self._steps: dict[str, _Step] = {}
        self._next_line = 0.0

    def __call__(self, at: At) -> None:
        step = self._steps.setdefault(at.step, _Step())
        rate = step.rate(at)
        if at.done < at.total and time.monotonic() < self._next_line:
            return
        self._next_line = time.monotonic() + PLAIN_LINE_EVERY_S
        say(f"{at.step}: {_far(at)}{f', {rate}' if rate else ''}")


def _far(at: At) -> str:
    """`3.1 MB of 4.2 MB`, `3 of 64 layers`, or whether a step without parts is done."""
    if at.unit == "steps":
        return "done" if at.done == at.total else "…"
    if at.unit == "bytes":
        return f"{decimal(at.done)} of {decimal(at.total)}"
    return f"{at.done:,} of {at.total:,} {at.unit}"


def _amount(number: float, at: At) -> str:
    return decimal(int(number)) if at.unit == "bytes" else f"{number:,.3g} {at.unit}"
