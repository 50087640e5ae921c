"""Workers for the duration of a command: those that run already, and own ones for the variants that have none.

Knows no rows. Surprising: a worker that ran when the command began may end meanwhile (somebody closed the app), so
`ensure` is called again while the command waits, and starts one in its place.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType

from clef_core.errors import EngineError, ReleaseError
from clef_core.release import read_release, resolve_release
from db import store
from db.views import WorkerView
from worker.commands.interrupt import Interrupt
from worker.commands.terminal import say, stderr
from worker.settings import Settings
from worker.submit import Submitter
from worker.supervise import Supervisor

POLL_S = 0.2
GIVE_UP_S = 120.0  # how long a variant may be without a working worker before a waiting command ends


class Workers:
    """Context manager: inside, every variant has a worker with its model in memory.

    `settings` are the submitter's unless the workers are to have others, such as another dtype.
    """

    def __init__(
        self, submitter: Submitter, variants: Sequence[str], interrupt: Interrupt, settings: Settings | None = None
    ) -> None:
        self._submitter = submitter
        self._settings = settings or submitter.settings
        self._interrupt = interrupt
        self._variants = tuple(variants)
        self._own: set[str] = set()
        self._last_ready = dict.fromkeys(self._variants, time.monotonic())
        self._stack = ExitStack()

    def __enter__(self) -> Workers:
        """Start what is missing and wait until it is ready.

        Raises:
            ReleaseError: a release is missing or cannot be loaded.
        """
        for variant in self._variants:
            release = read_release(resolve_release(self._settings.variants[variant]))
            if release.is_random:
                say(f"note: the release of {variant} has random weights, its answers mean nothing")
        try:
            if started := self.ensure():
                self._wait_until_ready(started)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def ensure(self) -> list[str]:
        """Start a worker for each variant that has none; returns these variants.

        Raises:
            EngineError: a variant's worker fails again and again.
        """
        alive = self._alive()
        now = time.monotonic()
        missing = []
        for variant in self._variants:
            of_variant = [worker for worker in alive if variant in worker.variants]
            if any(worker.state != "failed" for worker in of_variant):
                self._last_ready[variant] = now
            elif variant not in self._own:
                missing.append(variant)
            elif now - self._last_ready[variant] > GIVE_UP_S:
                reason = next((worker.message for worker in of_variant if worker.message), "it does not answer")
                raise EngineError(f"the {variant} worker does not work: {reason}")
        if missing:
            for variant in missing:
                say(f"starting a {variant} worker ...")
            quiet = self._settings.model_copy(update={"log_level": "WARNING"})
            self._stack.enter_context(Supervisor(quiet, missing))
            self._own.update(missing)
        return missing

    def _wait_until_ready(self, variants: Sequence[str]) -> None:
        with stderr().status("loading the model", spinner="dots"):
            waiting = set(variants)
            while waiting:
                self._interrupt.check()
                for worker in self._alive():
                    if worker.is_ready:
                        waiting -= set(worker.variants)
                    elif worker.state == "failed" and waiting & set(worker.variants):
                        raise ReleaseError(f"the {', '.join(worker.variants)} worker cannot start: {worker.message}")
                time.sleep(POLL_S)

    def _alive(self) -> list[WorkerView]:
        with self._submitter.database.read() as session:
            return store.live_workers(session)
