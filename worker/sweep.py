"""The sweeper: frees rows of silent workers, rings for rows without a bell, summarises comparisons nobody waits for.

Runs in the supervisor and in each idle worker. Several at once do no harm: a bell too many is answered with nothing.
"""

import logging
from collections.abc import Sequence

import redis
from sqlalchemy.exc import SQLAlchemyError

from db import store
from db.session import Database
from db.store_comparisons import comparisons_to_finish
from worker.bell import Bell

logger = logging.getLogger(__name__)

SWEEP_EVERY_S = 5.0
"""A worker counts as silent after 15 s; with this its rows are free after 20 s at the latest."""

MAX_ROWS_PER_SWEEP = 5000
"""Rows looked at per variant; those behind them have their turn when these are done."""

SUMMARY_BUDGET_S = 2.0
"""For comparisons, per sweep: a worker's sign of life waits meanwhile. A large one takes several sweeps."""


class Sweeper:
    """Sweeps for the given variants. Not for several threads at once."""

    def __init__(self, database: Database, client: redis.Redis, variants: Sequence[str]) -> None:
        self._database = database
        self._bells = {variant: Bell(client) for variant in variants}

    def sweep(self) -> None:
        """One round. A database or Redis that is away is logged and met again in the next round."""
        try:
            self._free_silent_claims()
            for variant, bell in self._bells.items():
                self._ring_missing(variant, bell)
            self._summarise_comparisons()
        except (SQLAlchemyError, redis.RedisError) as error:
            logger.warning("a sweep was broken off: %s", error)

    def _free_silent_claims(self) -> None:
        with self._database.read() as session:
            if not store.has_silent_claims(session):
                return
        with self._database.write() as session:
            freed = store.free_silent_claims(session)
        if freed:
            logger.warning("%d rows of a silent worker wait again", len(freed))

    def _ring_missing(self, variant: str, bell: Bell) -> None:
        with self._database.read() as session:
            waiting = store.waiting_rows(session, variant, limit=MAX_ROWS_PER_SWEEP)
        if not waiting:
            return
        rung = bell.rung_rows(variant, among={row.decision_id for row in waiting})
        missing = [row for row in waiting if row.decision_id not in rung]
        if missing:
            logger.info("%s: ringing for %d rows without a bell", variant, len(missing))
            bell.ring_for(missing)

    def _summarise_comparisons(self) -> None:
        with self._database.read() as session:
            if not comparisons_to_finish(session):
                return
        from worker.comparison_summary import summarise_waiting  # loads scipy, which most workers never need

        summarise_waiting(self._database, SUMMARY_BUDGET_S)
