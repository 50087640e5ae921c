"""The supervisor: one worker process per variant, started again when it ends, and ended with the supervisor.

Also keeps the embedded Redis running and sweeps. Imports no torch. What surprises: workers run in sessions of their
own, so that Ctrl-C reaches only the supervisor, which then asks each worker to finish its micro-batch; a worker whose
supervisor was killed notices by itself and does the same.
"""

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

import redis
from sqlalchemy.exc import SQLAlchemyError

from clef_core.errors import SettingsError
from db import store
from db.session import Database
from worker.redis_server import open_redis
from worker.settings import PROJECT_DIR, Settings
from worker.sweep import SWEEP_EVERY_S, Sweeper

logger = logging.getLogger(__name__)

POLL_S = 0.25
REVIVE_EVERY_S = 1.0
FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 60.0
STABLE_S = 60.0
"""A worker that ran this long starts again without a longer wait."""

STOP_TIMEOUT_S = 30.0

Command = Callable[[str], list[str]]


def worker_command(variant: str) -> list[str]:
    return [sys.executable, "-m", "worker", "serve", "--variant", variant]


class _Child:
    """One variant's worker process and when it may start again."""

    def __init__(self, variant: str) -> None:
        self.variant = variant
        self.process: subprocess.Popen[bytes] | None = None
        self.started_at = 0.0
        self.start_at = 0.0
        self.backoff_s = FIRST_BACKOFF_S
        self.failed_row: str | None = None


class Supervisor:
    """Context manager: workers run inside. `command` says how a variant's worker is started."""

    def __init__(self, settings: Settings, variants: Sequence[str], command: Command = worker_command) -> None:
        self._settings = settings
        self._command = command
        self._children = [_Child(variant) for variant in variants]
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)

    def __enter__(self) -> "Supervisor":
        self._database = Database(self._settings.database_url)
        self._redis = open_redis(self._settings)
        self._sweeper = Sweeper(self._database, self._redis.client, list(self._settings.variants))
        for child in self._children:
            self._start(child)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join()
        self._end_children()
        self._redis.close()
        self._database.close()

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the workers that run now, by variant."""
        running = [(child.variant, child.process) for child in self._children]
        return {variant: process.pid for variant, process in running if process and process.poll() is None}

    def _watch(self) -> None:
        next_revive = next_sweep = time.monotonic()
        while not self._stopped.wait(POLL_S):
            now = time.monotonic()
            try:
                has_ended = [self._look_after(child, now) for child in self._children]
                if now >= next_revive:
                    next_revive = now + REVIVE_EVERY_S
                    self._redis.revive()
                if now >= next_sweep or any(has_ended):
                    next_sweep = now + SWEEP_EVERY_S
                    self._keep_failures_visible()
                    self._sweeper.sweep()
            except (SQLAlchemyError, redis.RedisError, SettingsError, OSError) as error:
                logger.warning("supervisor: %s", error)
            except Exception:  # the workers would be left alone if this thread ended
                logger.exception("supervisor: this should not happen")

    def _look_after(self, child: _Child, now: float) -> bool:
        """Start the child if it is due; True if it has just ended."""
        if child.process is None:
            if now >= child.start_at:
                self._start(child)
            return False
        code = child.process.poll()
        if code is None:
            return False
        pid, child.process = child.process.pid, None
        if now - child.started_at >= STABLE_S:
            child.backoff_s = FIRST_BACKOFF_S
        child.start_at = now + child.backoff_s
        reason = f"signal {-code}" if code < 0 else f"exit code {code}"
        message = f"The worker for {child.variant} ended ({reason}); it starts again in {child.backoff_s:.0f} s."
        logger.warning("%s", message)
        child.backoff_s = min(child.backoff_s * 2, MAX_BACKOFF_S)
        with self._database.write() as session:
            child.failed_row = store.mark_worker_failed(session, socket.gethostname(), pid, [child.variant], message)
        return True

    def _start(self, child: _Child) -> None:
        cores = os.cpu_count() or 1
        threads = self._settings.threads or max(1, cores // len(self._children))
        environment = os.environ | self._settings.to_environment()
        environment |= {
            "OMP_WAIT_POLICY": "PASSIVE",
            "OMP_NUM_THREADS": str(threads),
            "CLEF_THREADS": str(threads),
            "CLEF_SUPERVISOR_PID": str(os.getpid()),
        }
        child.process = subprocess.Popen(
            self._command(child.variant),
            env=environment,
            cwd=PROJECT_DIR,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        child.started_at = time.monotonic()

    def _keep_failures_visible(self) -> None:
        """A failed worker cannot say any more why; its row stays fresh until the next one takes its place."""
        rows = [child.failed_row for child in self._children if child.process is None and child.failed_row]
        if rows:
            with self._database.write() as session:
                store.beat(session, rows)

    def _end_children(self) -> None:
        processes = [child.process for child in self._children if child.process is not None]
        names = [child.failed_row for child in self._children if child.failed_row]
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("worker %d does not end: killing it", process.pid)
                process.kill()
                process.wait()
        with self._database.write() as session:
            store.remove_processes(session, socket.gethostname(), [process.pid for process in processes])
            for name in names:
                store.remove_worker(session, name)
