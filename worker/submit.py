"""From a checked request to a waiting row: the one path for page, HTTP and command line.

Store, commit, ring. Imports no torch. What surprises: a full queue is refused before anything is stored, and a bell
that cannot be rung is no error, because the sweeper rings for every waiting row.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Any

import redis
from sqlalchemy.exc import IntegrityError

from clef_core.errors import ClefError, Problem, RequestError
from clef_core.schema import Submission
from db import store
from db.models import MAX_KEY_CHARS
from db.session import Database
from db.views import DecisionView, NewImage, NewRequest
from worker.bell import Bell
from worker.image_store import ImageStore
from worker.redis_server import RedisHandle, open_redis
from worker.settings import Settings

ROWS_PER_TRANSACTION = 500
RETRY_AFTER_S = 5


class QueueFullError(ClefError):
    """Too many single requests wait. Nothing was stored; try again after `retry_after_s`."""

    def __init__(self, variant: str, waiting: int) -> None:
        super().__init__(f"{waiting} requests wait for {variant} already; try again in {RETRY_AFTER_S} s.")
        self.retry_after_s = RETRY_AFTER_S


@dataclass(frozen=True)
class Submitted:
    """`decision_ids` maps variant to decision; `is_new` is False for a repeated idempotency key."""

    request_id: int
    decision_ids: dict[str, int]
    is_new: bool


@dataclass(frozen=True)
class BatchRow:
    """One row of a table. A row with problems has no submission and is stored as failed."""

    number: int
    external_id: str | None
    submission: Submission | None
    problems: tuple[Problem, ...] = ()
    cells: dict[str, Any] | None = None
    labels: dict[str, str] | None = None


class Submitter:
    """Stores requests and rings for them. Safe to share between threads."""

    def __init__(self, settings: Settings, database: Database, images: ImageStore, handle: RedisHandle) -> None:
        self.settings = settings
        self.database = database
        self.images = images
        self._handle = handle

    @classmethod
    def connect(cls, settings: Settings) -> "Submitter":
        """Open database, image store and queue. The database must have been migrated."""
        return cls(settings, Database(settings.database_url), ImageStore(settings.images_url), open_redis(settings))

    @property
    def redis(self) -> redis.Redis:
        return self._handle.client

    def close(self) -> None:
        self.database.close()
        self._handle.close()

    def __enter__(self) -> "Submitter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(
        self, submission: Submission, variants: Sequence[str], *, source: str, idempotency_key: str | None = None
    ) -> Submitted:
        """Store one request and ring for it at the front of each variant's queue.

        Raises:
            QueueFullError: nothing was stored.
            RequestError: the idempotency key belongs to another request.
        """
        if idempotency_key is not None and not 0 < len(idempotency_key) <= MAX_KEY_CHARS:
            raise RequestError.at(("Idempotency-Key",), f"A key has 1 to {MAX_KEY_CHARS} characters.")
        self._put_images([submission])
        new = dataclasses.replace(_new_request(submission), idempotency_key=idempotency_key)
        try:
            submitted = self._store_single(new, submission, variants, source)
        except IntegrityError:
            if idempotency_key is None:
                raise
            # Another process stored the same key between our look and our insert; now it can be seen.
            submitted = self._store_single(new, submission, variants, source)
        if submitted.is_new:
            for variant, decision_id in submitted.decision_ids.items():
                Bell(self.redis).ring(variant, [decision_id], at_front=True)
        return submitted

    def submit_batch(
        self,
        name: str,
        questions: dict[str, Any],
        rows: Iterable[BatchRow],
        variants: Sequence[str],
        *,
        source: str,
        columns: Sequence[str],
        mapping: dict[str, Any],
        on_created: Callable[[int], None] = lambda batch_id: None,
    ) -> int:
        """Store rows as they come, 500 a transaction, and ring for each 500; returns the batch's id.

        If `rows` raises, the batch is cancelled with what it has, and the error goes on.

        Args:
            on_created: hears the batch's id before the first row is read, for who wants to watch.
        """
        with self.database.write() as session:
            batch_id = store.create_batch(
                session, name, questions, variants, source=source, columns=columns, mapping=mapping
            )
        on_created(batch_id)
        try:
            for chunk in _chunks(rows, ROWS_PER_TRANSACTION):
                self._store_chunk(batch_id, chunk, questions, variants, source)
        except BaseException:
            self.cancel_batch(batch_id)
            raise
        finally:
            with self.database.write() as session:
                store.close_batch(session, batch_id)
        return batch_id

    def cancel_batch(self, batch_id: int) -> None:
        """Cancel waiting rows now; rows in a forward are kept when they come out of it."""
        with self.database.write() as session:
            store.cancel_batch(session, batch_id)

    def resume_batch(self, batch_id: int) -> int:
        """Queue cancelled rows and rows that failed by crashes again; returns how many. Done rows stay as they are."""
        with self.database.write() as session:
            queued = store.resume_batch(session, batch_id, max_crashes=store.MAX_CRASHES)
        for variant in dict.fromkeys(variant for _, variant in queued):
            Bell(self.redis).ring(variant, [row for row, of in queued if of == variant], at_front=False)
        return len(queued)

    def wait(self, decision_ids: Sequence[int], timeout_s: float, poll_s: float = 0.05) -> list[DecisionView]:
        """Wait until all are finished or the time is over; returns them as they are then, in the order asked."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self.database.read() as session:
                if not store.count_unfinished(session, decision_ids) or time.monotonic() >= deadline:
                    return store.get_decisions(session, decision_ids)
            time.sleep(poll_s)

    def _store_single(self, new: NewRequest, submission: Submission, variants: Sequence[str], source: str) -> Submitted:
        with self.database.write() as session:
            known = store.find_idempotent(session, new.idempotency_key) if new.idempotency_key else None
            if known is not None:
                is_same = (known.digest, known.asked_model) == (store.request_digest(new), new.asked_model)
                if not is_same or set(known.decision_ids) != set(variants):
                    raise RequestError.at(
                        ("Idempotency-Key",), "This key was used for another request.", "idempotency_key_reused"
                    )
                return Submitted(known.request_id, known.decision_ids, is_new=False)
            for variant in variants:
                waiting = store.queue_depth(session, variant)
                if waiting >= self.settings.max_queue:
                    raise QueueFullError(variant, waiting)
            store.store_images(session, _image_facts([submission]))
            (stored,) = store.store_requests(session, [new], variants, source=source)
        return Submitted(stored.request_id, stored.decision_ids, is_new=True)

    def _store_chunk(
        self,
        batch_id: int,
        rows: Sequence[BatchRow],
        questions: dict[str, Any],
        variants: Sequence[str],
        source: str,
    ) -> None:
        submissions = [row.submission for row in rows if row.submission is not None]
        self._put_images(submissions)
        requests = [_row_request(row, questions) for row in rows]
        with self.database.write() as session:
            store.store_images(session, _image_facts(submissions))
            stored = store.store_requests(session, requests, variants, source=source, batch_id=batch_id)
            store.count_rows(session, batch_id, len(rows))
        good = [ids.decision_ids for ids, row in zip(stored, rows, strict=True) if row.submission is not None]
        for variant in variants if good else ():
            Bell(self.redis).ring(variant, [ids[variant] for ids in good], at_front=False)

    def _put_images(self, submissions: Sequence[Submission]) -> None:
        for submission in submissions:
            for image in submission.images:
                self.images.put(image.data, image.sha256)


def _new_request(submission: Submission) -> NewRequest:
    request = submission.request
    return NewRequest(
        asked_model=request.model,
        state=request.state,
        questions={name: question.to_json() for name, question in request.questions.items()},
        images=tuple(image.sha256 for image in submission.images),
        truncate=request.x_truncate,
        title=_title_of(request.state),
    )


def _row_request(row: BatchRow, questions: dict[str, Any]) -> NewRequest:
    new = (
        NewRequest(asked_model="", state=None, questions=questions, title="")
        if row.submission is None
        else _new_request(row.submission)
    )
    return dataclasses.replace(
        new,
        row_number=row.number,
        external_id=row.external_id,
        cells=row.cells,
        labels=row.labels,
        problems=tuple(problem.to_json() for problem in row.problems),
    )


def _title_of(state: Any) -> str:
    text = state if isinstance(state, str) else json.dumps(state, ensure_ascii=False)
    return " ".join(text[:1000].split())


def _image_facts(submissions: Sequence[Submission]) -> list[NewImage]:
    return [
        NewImage(image.sha256, image.media_type, image.width, image.height, len(image.data))
        for submission in submissions
        for image in submission.images
    ]


def _chunks(rows: Iterable[BatchRow], size: int) -> Iterator[list[BatchRow]]:
    iterator = iter(rows)
    while chunk := list(islice(iterator, size)):
        yield chunk
