"""The bell: RQ jobs that name waiting rows. The database says who does a row, so a bell too many is harmless.

One queue per variant. A job carries row ids as JSON and the name of one handler; nothing that stands in Redis is ever
imported or unpickled. What surprises: ringing does not raise when Redis is away; the sweeper rings again.
"""

import logging
from array import array
from collections.abc import Callable, Collection, Sequence
from typing import Any

import redis
from rq import Queue
from rq.exceptions import DeserializationError
from rq.job import Job
from rq.serializers import JSONSerializer

from db.views import PRIORITY_SINGLE, WaitingRow

logger = logging.getLogger(__name__)

ROWS_PER_JOB = 64
JOBS_PER_FETCH = 256
HANDLER = "decide_rows"
FAILURE_TTL_S = 3600
MAX_ROW_ID = 2**63 - 1
NO_TIMEOUT = -1
"""Of RQ. The time limit is the worker's own watchdog, which also ends a native call that hangs."""

Handler = Callable[[list[int]], None]


class BellJob(Job):  # type: ignore[misc]  # rq is read without its types
    """A job that can only call the handlers given by the worker, and has no callbacks whatever Redis says."""

    handlers: dict[str, Handler] = {}  # noqa: RUF012  replaced, never changed

    @property
    def func(self) -> Handler:
        if self.func_name not in self.handlers:
            raise PermissionError(f"a job asks for {self.func_name!r}, which this worker does not do")
        return self.handlers[self.func_name]

    success_callback = failure_callback = stopped_callback = property(lambda self: None)


def queue_of(client: redis.Redis, variant: str) -> Queue:
    return Queue(f"clef:{variant}", connection=client, serializer=JSONSerializer, job_class=BellJob)


class Bell:
    """Rings for rows, and knows which rows have been rung for. Not for several threads at once."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._rows_of_job: dict[str, array[int]] = {}

    def ring(self, variant: str, decision_ids: Sequence[int], *, at_front: bool, alone: bool = False) -> bool:
        """Enqueue jobs of up to 64 rows each, or of one row each. False when Redis cannot be reached."""
        step = 1 if alone else ROWS_PER_JOB
        jobs = [
            Queue.prepare_data(
                HANDLER,
                args=[list(decision_ids[at : at + step])],
                timeout=NO_TIMEOUT,
                result_ttl=0,
                failure_ttl=FAILURE_TTL_S,
                description=f"{variant}: rows from {decision_ids[at]}",
                at_front=at_front,
            )
            for at in range(0, len(decision_ids), step)
        ]
        try:
            queue_of(self._client, variant).enqueue_many(jobs)
        except redis.RedisError as error:
            logger.warning("%s: no bell for %d rows, the sweeper will ring: %s", variant, len(decision_ids), error)
            return False
        return True

    def ring_for(self, rows: Sequence[WaitingRow]) -> None:
        """Ring as each row needs it: single requests at the front, a row that was in a crash in a job of its own."""
        groups: dict[tuple[str, bool, bool], list[int]] = {}
        for row in rows:
            key = (row.variant, row.priority == PRIORITY_SINGLE, row.crashes > 0)
            groups.setdefault(key, []).append(row.decision_id)
        for (variant, at_front, alone), decision_ids in groups.items():
            self.ring(variant, decision_ids, at_front=at_front, alone=alone)

    def rung_rows(self, variant: str, among: Collection[int] | None = None) -> set[int]:
        """The rows named by jobs that wait in the queue, all or those of `among`.

        What a job names is remembered, so this stays cheap, and in eight bytes a row, so a million may wait.

        Raises:
            redis.RedisError: Redis cannot be reached.
        """
        queue = queue_of(self._client, variant)
        job_ids: list[str] = queue.get_job_ids()
        known = {job_id: self._rows_of_job[job_id] for job_id in job_ids if job_id in self._rows_of_job}
        unknown = [job_id for job_id in job_ids if job_id not in known]
        for at in range(0, len(unknown), JOBS_PER_FETCH):
            some = unknown[at : at + JOBS_PER_FETCH]
            jobs: list[Any] = BellJob.fetch_many(some, connection=self._client, serializer=JSONSerializer)
            known |= {job.id: _rows_named(job) for job in jobs if job is not None}
        self._rows_of_job = known
        return {row for rows in known.values() for row in rows if among is None or row in among}


def _rows_named(job: Any) -> "array[int]":
    """The rows of a job; none where somebody else wrote the job."""
    try:
        rows = job.args[0] if job.args else []
    except DeserializationError:
        rows = []
    named = rows if isinstance(rows, list) else []
    return array("q", [row for row in named if isinstance(row, int) and 0 <= row <= MAX_ROW_ID])
