"""What a worker does with the rows that a bell names: claim, decide, save, give back.

Runs in the worker process and imports torch. Knows the engine and the database, not RQ. Between micro-batches it looks
whether the batch was cancelled or the worker shall stop, and answers single requests that wait; a micro-batch is saved
while the next one runs. Equal rows of a batch are computed once; rows of a comparison always are, each.

What surprises: a forward that raises counts as a crash. The rows go back, to be tried alone, and the worker is broken:
after a CUDA error nothing in this process can be trusted.
"""

import dataclasses
import logging
import math
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from clef_core.encoding import Record
from clef_core.engine import Decision, Engine
from clef_core.errors import ClefError, Problem, RequestError
from clef_core.images import open_image
from clef_core.schema import Request
from db import store
from db.session import Database
from db.views import PRIORITY_BATCH, PRIORITY_SINGLE, Batching, ClaimedRow, NewResult, NewRun, RequestView, Side
from worker.bell import ROWS_PER_JOB, Bell
from worker.image_store import ImageStore
from worker.watchdog import Watchdog

logger = logging.getLogger(__name__)

MAX_OPEN_PIXELS = 64_000_000
"""Decoded images held at a time, about 200 MB; a row with more of them goes alone."""

SECONDS_PER_CLAIM, MAX_ROWS_PER_CLAIM = 1.0, 256
"""Where rows are fast, a job takes along waiting ones until it has work for a second: what it costs besides its rows
would weigh otherwise. Slow rows stay for other workers."""

LOOK_UP_EVERY_S = 0.05
"""How old an answer of the database may be to whether somebody waits or cancelled; fast micro-batches share one."""


@dataclasses.dataclass(frozen=True)
class _Task:
    """What rows have in common that are decided together: one run. Each side of a comparison has a run of its own."""

    variant: str
    batching: Batching
    comparison_id: int | None
    side: Side | None


class ForwardCrash(Exception):
    """The engine raised instead of answering. `token` is the claim that it was working on."""

    def __init__(self, token: str, reason: str) -> None:
        super().__init__(reason)
        self.token = token


class RowJobs:
    """Decides rows with the engines of one worker. `stop` is looked at between micro-batches."""

    def __init__(
        self,
        name: str,
        engines: Mapping[str, Engine],
        database: Database,
        images: ImageStore,
        bell: Bell,
        *,
        stop: threading.Event,
        watchdog: Watchdog,
        look_up_every_s: float = LOOK_UP_EVERY_S,
        seconds_per_claim: float = SECONDS_PER_CLAIM,
    ) -> None:
        self.name = name
        self.is_busy = False
        self.broken: ForwardCrash | None = None
        self._engines = engines
        self._database = database
        self._images = images
        self._bell = bell
        self._stop = stop
        self._watchdog = watchdog
        self._run_ids: dict[_Task, int] = {}
        self._seconds_per_claim = seconds_per_claim
        self._row_s: dict[str, float] = {}  # by variant, of the last claim
        self._look_up_every_s = look_up_every_s
        self._looked_up_at = -math.inf
        self._seen: dict[str, list[str] | None] = {}
        self._alike: tuple[dict[str, Any], Request] | None = None

    def decide_rows(self, decision_ids: Sequence[int]) -> None:
        """Decide those of the rows that nobody has taken yet, and others that wait like the first of them."""
        token = uuid.uuid4().hex
        with self._database.write(is_durable=False) as session:
            rows = store.claim_rows(session, decision_ids, owner=self.name, token=token)
            if rows and not rows[0].crashes:
                first, missing = rows[0], self._rows_per_claim(rows[0]) - len(rows)
                if missing > 0:
                    rows += store.claim_waiting(
                        session, first.variant, first.priority, limit=missing, owner=self.name, token=token
                    )
            if rows:
                store.set_worker_state(session, self.name, "busy")
        if not rows:
            return
        self.is_busy = True
        try:
            self._decide_claimed(rows, token)
        finally:
            self.is_busy = False

    def _rows_per_claim(self, like: ClaimedRow) -> int:
        if like.priority == PRIORITY_SINGLE:
            return ROWS_PER_JOB
        return min(MAX_ROWS_PER_CLAIM, int(self._seconds_per_claim / self._row_s.get(like.variant, math.inf)))

    def _decide_claimed(self, rows: Sequence[ClaimedRow], token: str) -> None:
        """Decide claimed rows and give back what remains, whatever happens."""
        crash = None
        try:
            for task, of_task in groupby(sorted(rows, key=_order), key=_task_of):
                self._decide(task, list(of_task), token)
        except ForwardCrash as error:
            self.broken = error
            crash = str(error) if error.token == token else None
            raise
        finally:
            with self._database.write() as session:
                waiting = store.release_claims(session, token, crash=crash)
            self._bell.ring_for(waiting)

    def _decide(self, task: _Task, rows: Sequence[ClaimedRow], token: str) -> None:
        run_id = self._run_id(task)
        firsts, copies = self._copy_twins(rows, run_id, token)
        started = time.monotonic()
        with self._saving(token, run_id) as save:
            for group in self._open(firsts, run_id, token):
                records = [record for _, record in group]
                for finished in self._steps(task, records, token):
                    results = [_result(group[index][0], outcome) for index, outcome in finished]
                    results += [_copy_of(one, other) for one in results for other in copies[one.decision_id]]
                    singles = self._look_up(token)
                    save(results)
                    if singles is None:
                        return
                    if rows[0].priority == PRIORITY_BATCH:
                        for variant in singles:
                            self._decide_waiting_singles(variant)
                    if self._stop.is_set():
                        return
        if firsts:
            self._row_s[task.variant] = (time.monotonic() - started) / len(firsts)

    def _copy_twins(
        self, rows: Sequence[ClaimedRow], run_id: int, token: str
    ) -> tuple[list[ClaimedRow], defaultdict[int, list[int]]]:
        """Answer rows whose like was done in this batch and run.

        Returns:
            the rows left to compute, one of each kind, and for each of them the decisions that want its answer too.
        """
        twins: dict[tuple[int | None, str], NewResult] = {}
        digests: defaultdict[int, set[str]] = defaultdict(set)
        for row in rows:
            if row.request.batch_id is not None and row.comparison_id is None:
                digests[row.request.batch_id].add(row.digest)
        with self._database.read() as session:
            for batch_id, of_batch in digests.items():
                found = store.find_twins(session, batch_id, run_id, list(of_batch))
                twins |= {(batch_id, digest): twin for digest, twin in found.items()}
        firsts: dict[tuple[int | None, str], ClaimedRow] = {}
        copies: defaultdict[int, list[int]] = defaultdict(list)
        copied = []
        for row in rows:
            kind = _kind(row)
            if kind in twins:
                copied.append(_copy_of(twins[kind], row.decision_id))
            elif kind in firsts:
                copies[firsts[kind].decision_id].append(row.decision_id)
            else:
                firsts[kind] = row
        self._save(token, run_id, copied)
        return list(firsts.values()), copies

    def _open(self, rows: Sequence[ClaimedRow], run_id: int, token: str) -> Iterator[list[tuple[ClaimedRow, Record]]]:
        """Make records of rows, in groups whose decoded images fit into memory; rows that cannot be opened fail."""
        group: list[tuple[ClaimedRow, Record]] = []
        num_pixels = 0
        for row in rows:
            try:
                record = self._record(row)
            except RequestError as error:
                self._save(token, run_id, [_result(row, error)])
                continue
            pixels = sum(image.width * image.height for image in record.images)
            if group and num_pixels + pixels > MAX_OPEN_PIXELS:
                yield group
                group, num_pixels = [], 0
            group.append((row, record))
            num_pixels += pixels
        if group:
            yield group

    def _record(self, row: ClaimedRow) -> Record:
        images = []
        for number, sha256 in enumerate(row.request.images):
            try:
                images.append(open_image(self._images.get(sha256)))
            except OSError as error:
                raise RequestError.at(("images", number), f"The stored image cannot be read: {error}") from error
        return Record(self._request(row.request), images)

    def _request(self, stored: RequestView) -> Request:
        """The stored request. It was checked when it was stored; rows that share their questions are built alike."""
        if self._alike is None or self._alike[0] is not stored.questions:
            body = {"model": stored.asked_model, "state": stored.state, "questions": stored.questions}
            self._alike = stored.questions, Request.model_validate(body)
        own = {"model": stored.asked_model, "state": stored.state, "x_truncate": stored.truncate}
        return self._alike[1].model_copy(update=own)

    def _steps(
        self, task: _Task, records: Sequence[Record], token: str
    ) -> Iterator[list[tuple[int, Decision | ClefError]]]:
        """The engine's micro-batches, each under the watchdog."""
        steps = self._engines[task.variant].run(records, task.batching)
        while True:
            try:
                with self._watchdog.limit():
                    finished = next(steps, None)
            except Exception as error:
                raise ForwardCrash(token, f"{type(error).__name__}: {error}") from error
            if finished is None:
                return
            yield finished

    @contextmanager
    def _saving(self, token: str, run_id: int) -> Iterator[Callable[[Sequence[NewResult]], None]]:
        """Yields a function that saves in a thread while the next micro-batch runs, and waits for the one before.

        The thread also looks ahead for who waits. At the end everything is saved, also after a crash. A save that fails
        then is not heard of, but its rows are given back next, through the same database.
        """
        saves: list[Future[None]] = []
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="save") as executor:

            def save(results: Sequence[NewResult]) -> None:
                if saves:
                    saves.pop().result()
                saves.append(executor.submit(save_and_look, results))

            def save_and_look(results: Sequence[NewResult]) -> None:
                self._save(token, run_id, results)
                if time.monotonic() - self._looked_up_at > self._look_up_every_s / 2:
                    self._ask(token)

            yield save
            if saves:
                saves.pop().result()
        self._seen.pop(token, None)

    def _save(self, token: str, run_id: int, results: Sequence[NewResult]) -> None:
        if not results:
            return
        with self._database.write() as session:
            saved = store.save_results(session, token, run_id, results)
        if len(saved) < len(results):
            logger.warning("%d results were dropped: their rows had been taken away", len(results) - len(saved))

    def _look_up(self, token: str) -> list[str] | None:
        """Between micro-batches: the variants for which single requests wait; None to stop here."""
        if self._stop.is_set():
            return None
        if time.monotonic() - self._looked_up_at > self._look_up_every_s:
            self._ask(token)
        return self._seen.pop(token, [])

    def _ask(self, token: str) -> None:
        self._looked_up_at = time.monotonic()
        with self._database.read() as session:
            self._seen[token] = store.interruptions(session, token, list(self._engines))

    def _decide_waiting_singles(self, variant: str) -> None:
        token = uuid.uuid4().hex
        with self._database.write(is_durable=False) as session:
            rows = store.claim_waiting(
                session, variant, PRIORITY_SINGLE, limit=ROWS_PER_JOB, owner=self.name, token=token
            )
        if rows:
            self._decide_claimed(rows, token)

    def _run_id(self, task: _Task) -> int:
        if task not in self._run_ids:
            facts = self._engines[task.variant].provenance(task.batching)
            run = NewRun(variant=task.variant, **facts)  # type: ignore[arg-type]  # the engine names a run's columns
            if task.comparison_id is not None:
                of = {"comparison_id": task.comparison_id, "side": task.side}
                run = dataclasses.replace(run, batching=run.batching | of)
            with self._database.write() as session:
                self._run_ids[task] = store.ensure_run(session, run)
        return self._run_ids[task]


def _task_of(row: ClaimedRow) -> _Task:
    return _Task(row.variant, row.batching, row.comparison_id, row.side)


def _order(row: ClaimedRow) -> tuple[str, str, int, str]:
    return (row.variant, row.batching, row.comparison_id or 0, row.side or "")


def _kind(row: ClaimedRow) -> tuple[int | None, str]:
    """Rows of one kind have one answer: equal rows of a batch. A single request is a kind of its own, and so is a row
    of a comparison."""
    batch_id = row.request.batch_id
    if batch_id is None or row.comparison_id is not None:
        return (None, str(row.decision_id))
    return (batch_id, row.digest)


def _copy_of(result: NewResult, decision_id: int) -> NewResult:
    return dataclasses.replace(
        result,
        decision_id=decision_id,
        copied_from_id=None if result.error else result.decision_id,
        latency_ms=None,
    )


def _result(row: ClaimedRow, outcome: Decision | ClefError) -> NewResult:
    if isinstance(outcome, RequestError):
        return NewResult(row.decision_id, error=tuple(problem.to_json() for problem in outcome.problems))
    if isinstance(outcome, ClefError):
        return NewResult(row.decision_id, error=(Problem((), str(outcome), "engine_error").to_json(),))
    return NewResult(
        row.decision_id,
        log_probs=outcome.log_probs,
        answers=outcome.response["answers"],  # type: ignore[arg-type]  # a response's answers are a map
        input_tokens=outcome.input_tokens,
        truncated_tokens=outcome.truncated_tokens,
        latency_ms=outcome.latency_ms,
    )
