"""Ctrl-C at a safe moment.

Python raises KeyboardInterrupt in the middle of whatever runs. Inside a database call that leaves a transaction open,
and the clean-up that follows waits for its own lock. So while rows are stored or watched, the first Ctrl-C only sets a
flag, and the loop that owns the work asks for it. A second Ctrl-C interrupts at once.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Whether Ctrl-C was pressed."""

    def __init__(self) -> None:
        self.was_pressed = False

    def check(self) -> None:
        """Raise KeyboardInterrupt here if Ctrl-C was pressed."""
        if self.was_pressed:
            raise KeyboardInterrupt

    def note(self, signum: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        if self.was_pressed:
            signal.default_int_handler(signum, frame)
        self.was_pressed = True


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """Inside, Ctrl-C is only noted; whoever loops calls `check`."""
    interrupt = Interrupt()
    before = signal.signal(signal.SIGINT, interrupt.note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
