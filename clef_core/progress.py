"""How long work tells how far it is: one event type and one kind of listener. Knows no terminal."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Unit = Literal["bytes", "layers", "linears", "files", "rows", "steps"]


@dataclass(frozen=True)
class Progress:
    """How far a step is: `done` of `total` units."""

    step: str
    done: int
    total: int
    unit: Unit


Listener = Callable[[Progress], None]


def silent(progress: Progress) -> None:
    """The listener that hears nothing."""


class Count:
    """Adds up what a step has done and tells a listener."""

    def __init__(self, listener: Listener, step: str, total: int, unit: Unit) -> None:
        self._listener = listener
        self._at = Progress(step, 0, total, unit)
        listener(self._at)

    def add(self, number: int) -> None:
        at = self._at
        self._at = Progress(at.step, at.done + number, at.total, at.unit)
        self._listener(self._at)
