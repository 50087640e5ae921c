"""How far a batch is, how long it will take, and both in words. Page and command line share it.

Reads the database, changes nothing. Surprising: the counts of a `BatchProgress` are decisions; divided by the variants
they give rows, so that a row answered by one of two variants counts half.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from db.session import Database
from db.store_batches import batch_progress
from db.store_rates import recent_tokens_per_s
from db.views import BatchProgress

POLL_S = 0.25
MAX_SHARE_OF_TIME = 0.1
"""What asking may take of the time. To count a million rows takes longer than `POLL_S` is fit for."""


def watch(database: Database, batch_id: int, poll_s: float = POLL_S) -> Iterator[BatchProgress]:
    """Yield the progress now and again until the batch is finished; the last one yielded is finished."""
    while True:
        started = time.monotonic()
        with database.read() as session:
            progress = batch_progress(session, batch_id)
        asked_s = time.monotonic() - started
        yield progress
        if progress.is_finished:
            return
        time.sleep(max(poll_s, asked_s / MAX_SHARE_OF_TIME))


def rows_done(progress: BatchProgress) -> int:
    """Rows (not decisions) that are answered or failed, rounded down."""
    if not progress.num_decisions:
        return 0
    return (progress.done + progress.failed) * progress.num_rows // progress.num_decisions


def describe_progress(progress: BatchProgress) -> str:
    """`120 of 300 rows, 4.2 rows per s, about 43 s left`."""
    parts = [f"{rows_done(progress):,} of {progress.num_rows:,} rows"]
    if progress.failed:
        parts.append(f"{progress.failed:,} failed")
    if progress.is_finished:
        parts.append("cancelled" if progress.cancelled else "finished")
    else:
        if progress.rows_per_s:
            parts.append(f"{progress.rows_per_s:.3g} rows per s")
        if progress.eta_s is not None:
            parts.append(f"about {describe_duration(progress.eta_s)} left")
    return ", ".join(parts)


def describe_duration(seconds: float) -> str:
    """`42 s`, `3 min 20 s`, `1 h 05 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60:02d} min"


def tokens_per_s(database: Database, variants: Sequence[str]) -> float | None:
    """How fast the slowest of these variants was lately; None if one of them has not run yet.

    The variants run side by side, so the slowest decides.
    """
    with database.read() as session:
        rates = [recent_tokens_per_s(session, variant) for variant in variants]
    known = [rate for rate in rates if rate is not None]
    return min(known) if known and len(known) == len(rates) else None
