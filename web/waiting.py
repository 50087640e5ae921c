"""Waiting for decisions: one poll of the database for everybody who waits.

Two thousand waiting clients cost one query per poll and no thread each. Knows neither HTTP nor the queue: the worker
saves, and this looks. Lives on one event loop; starts looking with the first who waits and stops with the last.
"""

import asyncio
import contextlib

from anyio import to_thread
from sqlalchemy.exc import SQLAlchemyError

from db import store
from db.session import Database

POLL_S = 0.05


class DecisionWatch:
    """Wakes those who wait for a decision when it is finished."""

    def __init__(self, database: Database, poll_s: float = POLL_S) -> None:
        self._database = database
        self._poll_s = poll_s
        self._waiting: dict[int, set[asyncio.Future[None]]] = {}
        self._task: asyncio.Task[None] | None = None

    async def wait(self, decision_id: int, timeout_s: float) -> None:
        """Return when the decision is finished or the time is over.

        Raises:
            SQLAlchemyError: the database cannot be read.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters = self._waiting.setdefault(decision_id, set())
        waiters.add(future)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look())
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(future, timeout_s)
        finally:
            waiters.discard(future)
            if not waiters and self._waiting.get(decision_id) is waiters:
                del self._waiting[decision_id]

    async def _look(self) -> None:
        while self._waiting:
            try:
                finished = await to_thread.run_sync(self._finished, list(self._waiting))
            except SQLAlchemyError as error:
                for future in [future for waiters in self._waiting.values() for future in waiters]:
                    if not future.done():
                        future.set_exception(error)
                return
            for decision_id in finished:
                for future in self._waiting.get(decision_id, ()):
                    if not future.done():
                        future.set_result(None)
            await asyncio.sleep(self._poll_s)

    def _finished(self, decision_ids: list[int]) -> list[int]:
        with self._database.read() as session:
            return [decision.id for decision in store.get_decisions(session, decision_ids) if decision.is_finished]
