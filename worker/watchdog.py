"""A thread that ends the worker when nothing else can: a native call that hangs, or a supervisor that is gone.

It needs code that lets go of the interpreter lock, as torch's kernels do. What surprises: a hanging call ends the
process without any clean-up, because no Python code of the main thread can run; the sweeper then frees its rows.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

EXIT_HANGING = 75
_POLL_S = 0.5


class Watchdog:
    """Watches from `start` on. `on_orphan` is called once, in the watchdog's thread, when the parent has changed."""

    def __init__(self, limit_s: float, *, parent_pid: int | None, on_orphan: Callable[[], None]) -> None:
        self._limit_s = limit_s
        self._parent_pid = parent_pid
        self._on_orphan = on_orphan
        self._deadline: float | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    @contextmanager
    def limit(self) -> Iterator[None]:
        """The body must end within the limit, or the process does."""
        self._deadline = time.monotonic() + self._limit_s
        try:
            yield
        finally:
            self._deadline = None

    def _watch(self) -> None:
        is_orphan = False
        while not self._stopped.wait(_POLL_S):
            deadline = self._deadline
            if deadline is not None and time.monotonic() > deadline:
                logger.critical("a micro-batch took longer than %.0f s: ending this process", self._limit_s)
                os._exit(EXIT_HANGING)
            if not is_orphan and self._parent_pid is not None and os.getppid() != self._parent_pid:
                is_orphan = True
                logger.warning("the supervisor is gone: finishing what is in work, then ending")
                self._on_orphan()
