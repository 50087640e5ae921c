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
        """`123 MB/s`, or nothing while there is nothing to tell."""
        if self.first_done is None:
            self.first_done = at.done
        elapsed_s = time.monotonic() - self.started
        done = at.done - self.first_done
        if not done or elapsed_s < 1e-3:
            return ""
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
        amount = f"{_amount(at.done, at)} of {_amount(at.total, at)}"
        self._bars.update(task, completed=at.done, total=at.total, amount=amount, rate=step.rate(at))


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
        say(f"{at.step}: {_amount(at.done, at)} of {_amount(at.total, at)}{f', {rate}' if rate else ''}")


def _amount(number: float, at: At) -> str:
    return decimal(int(number)) if at.unit == "bytes" else f"{number:,.3g} {at.unit}"
