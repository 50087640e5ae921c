"""The folder where a build goes on: `TARGET.partial`, with a lock and a list of the steps that are done.

Knows no step. What surprises: the lock is inherited by processes that are started meanwhile, so it is free only when
the last of them has ended; and a folder that has anything in it but no list was not made here and is left alone.
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from clef_core.errors import SettingsError
from clef_core.weight_files import write_whole

LOCK_WAIT_S = 10.0
"""How long a second build waits: a process of a builder that was killed ends just after it."""

_STATE = "state.json"
_LOCK = "lock"


class WorkFolder:
    """What one build leaves for its next attempt. `release` grows in it, everything else is the steps' own."""

    def __init__(self, target: Path) -> None:
        self.path = target.with_name(target.name + ".partial")
        self.release = self.path / "release"

    @property
    def done(self) -> list[str] | None:
        """Names of the finished steps; None where no build has begun."""
        state = self._state()
        return None if state is None else list(state["done"])

    def num_bytes(self) -> int:
        """What lies in it already."""
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())

    @contextmanager
    def opened(self, fingerprint: str, *, fresh: bool) -> Iterator[None]:
        """Hold the folder for one build: begin it, or go on with what an earlier call began.

        Args:
            fingerprint: changes with anything that would change the result.
            fresh: throw away what an earlier call left.

        Raises:
            SettingsError: another process is at work in it, the earlier call had another fingerprint, or the folder is
                none of ours.
        """
        self.path.mkdir(exist_ok=True)
        with (self.path / _LOCK).open("w") as lock:
            self._wait_for(lock)
            state = self._state()
            if state is None and {entry.name for entry in self.path.iterdir()} - {_LOCK, f"{_STATE}.part"}:
                raise SettingsError(f"{self.path} is in the way: it was not made by a build; remove or rename it")
            if state is not None and (fresh or state.get("is_emptying")):
                # Said first, so that an attempt that is stopped here leaves nothing that the next one would trust.
                self._write({**state, "is_emptying": True})
                self._empty()
                state = None
            if state is None:
                self.write_done(fingerprint, [])
            elif state["fingerprint"] != fingerprint:
                raise SettingsError(
                    f"{self.path} holds work on another source, recipe or set of versions; --fresh throws it away"
                )
            self.release.mkdir(exist_ok=True)
            yield

    def write_done(self, fingerprint: str, done: Sequence[str]) -> None:
        """Remember the finished steps."""
        self._write({"fingerprint": fingerprint, "done": list(done)})

    def remove(self) -> None:
        """Delete the folder, the list of steps last."""
        self._empty()
        shutil.rmtree(self.path)

    def _state(self) -> dict[str, Any] | None:
        file = self.path / _STATE
        return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None

    def _write(self, state: dict[str, Any]) -> None:
        write_whole(self.path / _STATE, json.dumps(state))

    def _empty(self) -> None:
        for entry in self.path.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name not in (_LOCK, _STATE):
                entry.unlink()

    def _wait_for(self, lock: TextIO) -> None:
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise SettingsError(f"another process is at work in {self.path}") from error
                time.sleep(0.1)
            else:
                os.set_inheritable(lock.fileno(), True)
                return
