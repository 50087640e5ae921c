"""The worker process: releases in memory, a queue to listen to, a sign of life every five seconds.

`serve` returns after one SIGTERM or SIGINT, with the micro-batch in work saved and the other rows given back. Knows
nothing of who started it, except that a supervisor's process id in the settings makes it end with the supervisor.

What surprises: torch is imported inside `serve`, after the thread settings that it reads only once; and Redis may come
and go while the models stay in memory, because RQ's loop is entered anew.
"""

import logging
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import closing
from types import FrameType
from typing import TYPE_CHECKING, Any

import redis
from rq import SimpleWorker
from rq.exceptions import StopRequested
from rq.executions import Execution
from rq.job import Job
from rq.queue import Queue
from rq.serializers import JSONSerializer
from rq.worker import WorkerStatus

import db
from clef_core.errors import EngineError, SettingsError
from clef_core.release import resolve_release
from db.session import Database
from worker.bell import HANDLER, Bell, BellJob, Handler, queue_of
from worker.image_store import ImageStore
from worker.presence import Heart, Presence
from worker.redis_server import RedisHandle, open_redis
from worker.settings import Settings
from worker.sweep import Sweeper
from worker.watchdog import Watchdog

if TYPE_CHECKING:
    from clef_core.engine import Engine
    from worker.jobs import RowJobs

logger = logging.getLogger(__name__)

JOB_TTL_S = 15
WORKER_TTL_S = 30
RECONNECT_S = 0.5
EXIT_FORCED = 130

LoadEngine = Callable[[Settings, str, "Engine | None"], "Engine"]


def load_engine(settings: Settings, variant: str, beside: "Engine | None" = None) -> "Engine":
    """Load a variant's release on the configured device; what it has in common with `beside` is held once."""
    import torch

    from clef_core.engine import Engine
    from clef_core.model import load_release
    from clef_core.room import keep_freed_memory

    if settings.threads:
        torch.set_num_threads(settings.threads)
    release = load_release(
        resolve_release(settings.variants[variant]),
        device=device_of(settings),
        dtype=torch.float32 if settings.dtype == "float32" else torch.bfloat16,
        linear_mode=settings.linear_mode,
        beside=beside.release if beside else None,
    )
    if release.device.type == "cpu":
        keep_freed_memory()
    return Engine(
        release,
        max_tokens=settings.max_tokens,
        max_batch_tokens=settings.max_batch_tokens,
        confidence=settings.confidence,
        variant=variant,
    )


def device_of(settings: Settings) -> str:
    """The device to run on; `auto` takes a GPU where torch sees one."""
    import torch

    if settings.device != "auto":
        return settings.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def serve(settings: Settings, variants: Sequence[str], load_engine: LoadEngine = load_engine) -> None:
    """Hold the variants in memory and answer what is queued, until SIGTERM or SIGINT.

    Raises:
        SettingsError: a variant is not configured.
        ReleaseError: a release cannot be loaded; the worker's row says so too.
        EngineError: a forward crashed, so that this process must not go on.
    """
    unknown = [variant for variant in variants if variant not in settings.variants]
    if unknown or not variants:
        raise SettingsError(f"no variant {', '.join(unknown)}; configured: {', '.join(settings.variants)}")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(name)s: %(message)s")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    db.migrate(settings.database_url)
    watchdog = Watchdog(settings.forward_timeout_s, parent_pid=settings.supervisor_pid, on_orphan=_terminate)
    with closing(Database(settings.database_url)) as database, open_redis(settings) as handle:
        presence = Presence(database, variants, settings.device)
        sweeper = Sweeper(database, handle.client, list(settings.variants))
        stop = threading.Event()
        heart = Heart(presence, sweeper, handle, stop)
        watchdog.start()
        heart.start()
        try:
            from worker.jobs import RowJobs

            engines = _load_engines(settings, variants, load_engine, presence)
            images = ImageStore(settings.images_url)
            bell = Bell(handle.client)
            jobs = RowJobs(presence.name, engines, database, images, bell, stop=stop, watchdog=watchdog)
            _listen(handle, jobs, heart, list(engines), stop)
            presence.leave()
        finally:
            heart.stop()
            watchdog.stop()


def _load_engines(
    settings: Settings, variants: Sequence[str], load_engine: LoadEngine, presence: Presence
) -> dict[str, "Engine"]:
    try:
        engines: dict[str, Engine] = {}
        for variant in variants:
            engines[variant] = load_engine(settings, variant, next(iter(engines.values()), None))
    except Exception as error:
        presence.set("failed", message=f"{error}" or type(error).__name__)
        raise
    facts = {variant: _facts(engine) for variant, engine in engines.items()}
    presence.set("idle", device=next(iter(facts.values()))["device"], releases=facts)
    logger.info("%s: ready for %s", presence.name, ", ".join(variants))
    return engines


def _facts(engine: "Engine") -> dict[str, Any]:
    files = engine.release.files
    facts = dict(engine.provenance()) | {"is_random": files.is_random, "kind": files.kind}
    facts["checksum"] = facts.pop("release_checksum")
    return facts | {"source": str(files.path), "weight_bytes": files.weight_bytes}


def _listen(handle: RedisHandle, jobs: "RowJobs", heart: Heart, variants: Sequence[str], stop: threading.Event) -> None:
    """Enter RQ's loop, and enter it again when Redis was away, until asked to stop."""
    heart.is_busy = lambda: jobs.is_busy
    try:
        while not stop.is_set():
            try:
                handle.revive()
                worker = ClefWorker(handle.client, jobs, variants, stop)
                heart.keep_job_alive = worker.keep_alive
                worker.work(logging_level="WARNING")
            except (redis.RedisError, SettingsError) as error:
                logger.warning("Redis is away: %s", error)
            if jobs.broken is not None:
                raise EngineError(f"a forward crashed, so this worker ends: {jobs.broken}") from jobs.broken
            if not stop.is_set():
                time.sleep(RECONNECT_S)
    except StopRequested:  # a signal between two loops
        logger.info("stopped")


class ClefWorker(SimpleWorker):  # type: ignore[misc]  # rq is read without its types
    """RQ's worker without fork, callbacks, scheduler or remote commands."""

    max_connection_wait_time = 2.0
    log_result_lifespan = False

    def __init__(self, client: redis.Redis, jobs: "RowJobs", variants: Sequence[str], stop: threading.Event) -> None:
        handlers: dict[str, Handler] = {HANDLER: jobs.decide_rows}
        self._jobs = jobs
        self._stop = stop
        self._first_signal_at: float | None = None
        self._current: tuple[Job, Execution] | None = None
        super().__init__(
            [queue_of(client, variant) for variant in variants],
            name=f"{jobs.name}-{uuid.uuid4().hex[:6]}",
            connection=client,
            serializer=JSONSerializer,
            job_class=type("OwnJob", (BellJob,), {"handlers": handlers}),
            worker_ttl=WORKER_TTL_S,
            maintenance_interval=60,
            log_job_description=False,
        )

    def execute_job(self, job: Job, queue: Queue) -> None:
        execution = self.prepare_execution(job)
        self._current = (job, execution)
        try:
            self.perform_job(job, queue, execution)
        finally:
            self._current = None
        self.set_state(WorkerStatus.IDLE)
        if self._stop.is_set() or self._jobs.broken is not None:
            raise StopRequested

    def keep_alive(self) -> None:
        """Tell RQ that the job in work is alive; called from the heart's thread."""
        if self._current is not None:
            self.maintain_heartbeats(*self._current)

    def get_heartbeat_ttl(self, job: Job, working_time: float = 0.0) -> int:
        return JOB_TTL_S

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        """The first signal stops after the micro-batch in work; another one, a second later, ends the process."""
        now = time.monotonic()
        if self._first_signal_at is not None and now - self._first_signal_at > 1.0:
            os._exit(EXIT_FORCED)
        self._first_signal_at = self._first_signal_at or now
        self._stop.set()
        if self.get_state() != WorkerStatus.BUSY:
            raise StopRequested

    def subscribe(self) -> None:
        """RQ's remote commands are not listened to: signals and the database say when to stop."""

    def unsubscribe(self) -> None:
        """Nothing was subscribed."""


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
