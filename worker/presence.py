"""A worker's signs of life: its row in the database, and the thread that keeps the row fresh.

Runs from before the releases are loaded, which may take minutes, to the end. Knows no torch and no RQ.
"""

import logging
import os
import socket
import threading
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import redis
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from clef_core.errors import SettingsError
from db import store
from db.session import Database
from db.views import WorkerState
from worker.redis_server import RedisHandle
from worker.sweep import Sweeper

logger = logging.getLogger(__name__)

HEARTBEAT_S = 5.0


class Presence:
    """The worker's row in the database. Safe to use from two threads."""

    def __init__(self, database: Database, variants: Sequence[str], device: str) -> None:
        host = socket.gethostname()
        self.name = f"{host}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self._database = database
        self._variants = tuple(variants)
        self._host = host
        self._device = device
        self._state: WorkerState = "starting"
        self._message: str | None = None
        self._releases: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        with database.write() as session:
            self._register(session)

    def set(
        self,
        state: WorkerState,
        *,
        message: str | None = None,
        device: str | None = None,
        releases: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        with self._lock:
            self._state, self._message, self._device = state, message, device or self._device
            self._releases = self._releases if releases is None else releases
        self.beat()

    def beat(self, now: WorkerState | None = None) -> None:
        """Write the row, with a passing state or the last one set; one removed in a long silence is written anew."""
        with self._lock, self._database.write() as session:
            state = now or self._state
            write = partial(
                store.set_worker_state,
                session,
                self.name,
                state,
                message=self._message,
                device=self._device,
                releases=self._releases,
            )
            if not write():
                self._register(session)
                write()

    def leave(self) -> None:
        with self._lock, self._database.write() as session:
            store.remove_worker(session, self.name)

    def _register(self, session: Session) -> None:
        store.register_worker(session, self.name, self._variants, host=self._host, pid=os.getpid(), device=self._device)


class Heart:
    """A thread with a sign of life every five seconds, and a sweep while the worker is idle.

    `is_busy` and `keep_job_alive` belong to the worker, once it has loaded its releases.
    """

    def __init__(self, presence: Presence, sweeper: Sweeper, handle: RedisHandle, stop: threading.Event) -> None:
        self.is_busy: Callable[[], bool] = lambda: False
        self.keep_job_alive: Callable[[], None] = lambda: None
        self._presence = presence
        self._sweeper = sweeper
        self._handle = handle
        self._stop_requested = stop
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heart", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._stopped.wait(HEARTBEAT_S):
            is_busy = self.is_busy()
            try:
                self._presence.beat("stopping" if self._stop_requested.is_set() else "busy" if is_busy else None)
                self._handle.revive()
                self.keep_job_alive()
                if not is_busy:
                    self._sweeper.sweep()
            except (SQLAlchemyError, redis.RedisError, SettingsError) as error:
                logger.warning("a heartbeat was missed: %s", error)
            except Exception:  # a worker whose heart stopped would lose every row it works on
                logger.exception("a heartbeat was missed")
