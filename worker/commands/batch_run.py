"""Running a batch: found again or stored, watched to its end, stopped by Ctrl-C so that it can go on later.

Surprising: what identifies a batch is the fingerprint of its input, kept in the batch's mapping. A batch whose storing
was broken off has too few rows; it is cancelled and stored anew.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict

import typer
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

from clef_core.release import resolve_release
from clef_core.tokens import PromptTokenizer
from db import store
from db.views import BatchProgress, BatchView
from worker.commands.batch_input import BatchInput
from worker.commands.interrupt import Interrupt
from worker.commands.terminal import ALL_ANSWERED, INTERRUPTED, SOME_FAILED, say, stderr
from worker.commands.workers import Workers
from worker.progress import describe_duration, describe_progress, rows_done, tokens_per_s, watch
from worker.submit import BatchRow, Submitter
from worker.tables import Plan, TableError, plan

FINGERPRINT = "fingerprint"
STORED_BY = "stored_by"  # host and process id, to tell a batch that is being stored from one that was broken off
MAX_CANDIDATES = 200  # batches of the same file name that are looked at, newest first
CHECK_WORKERS_S = 2.0
LAST_ROWS_S = 10.0  # how long rows in the work of other people's workers are waited for after Ctrl-C
PLAIN_LINE_EVERY_S = 10.0  # where stderr is no terminal


def show_plan(submitter: Submitter, found: BatchInput, interrupt: Interrupt, *, is_terminal: bool) -> int:
    """Print what a run would do (JSON unless to a terminal); returns the exit code."""
    release = resolve_release(submitter.settings.variants[found.variants[0]])
    result = plan(
        _until_interrupted(found.rows(), interrupt),
        PromptTokenizer.from_release(release),
        max_tokens=submitter.settings.max_tokens,
        tokens_per_s=tokens_per_s(submitter.database, found.variants),
    )
    typer.echo(
        _describe_plan(result, found) if is_terminal else json.dumps(asdict(result), ensure_ascii=False, indent=2)
    )
    return ALL_ANSWERED if result.num_answerable == result.num_rows else SOME_FAILED


def _describe_plan(result: Plan, found: BatchInput) -> str:
    time_text = "unknown, no batch has run yet" if result.estimated_s is None else describe_duration(result.estimated_s)
    longest = f"{result.longest_tokens:,} (row {result.longest_row})" if result.longest_row else "none"
    lines = [
        f"rows        {result.num_rows:,}, of which {result.num_answerable:,} can be answered",
        f"distinct    {result.num_distinct:,} (identical rows are computed once)",
        f"variants    {', '.join(found.variants)}",
        f"tokens      {result.total_tokens:,} in all, longest {longest}, limit {result.max_tokens:,}",
        f"too long    {result.num_too_long:,}",
        *(f"  row {note.number}: {note.message}" for note in result.too_long),
        f"bad rows    {result.num_bad:,}",
        *(f"  row {note.number}: {note.message}" for note in result.bad),
        f"time        {time_text}",
    ]
    return "\n".join(lines)


def find_or_submit(submitter: Submitter, found: BatchInput, interrupt: Interrupt, *, fresh: bool) -> int:
    """The batch that the same command stored before, else a new one; returns its id."""
    if not fresh:
        known = _find(submitter, found)
        if known is not None:
            return known
    mapping = found.mapping.to_json() | {FINGERPRINT: found.fingerprint, STORED_BY: [socket.gethostname(), os.getpid()]}
    with stderr().status("storing the rows", spinner="dots"):
        return submitter.submit_batch(
            found.table.path.name,
            dict(found.questions),
            _until_interrupted(found.rows(), interrupt),
            found.variants,
            source="cli",
            columns=found.table.columns,
            mapping=mapping,
        )


def _until_interrupted(rows: Iterable[BatchRow], interrupt: Interrupt) -> Iterator[BatchRow]:
    for row in rows:
        interrupt.check()
        yield row


def _find(submitter: Submitter, found: BatchInput) -> int | None:
    """The newest batch of this input that is stored whole; one whose storing was broken off is cancelled.

    Raises:
        TableError: the same command is storing it at this moment.
    """
    with submitter.database.read() as session:
        items = store.list_history(session, kind="batch", text=found.table.path.name, limit=MAX_CANDIDATES)
        batches = [batch for item in items if (batch := store.get_batch(session, item.id)) is not None]
    for batch in batches:
        if batch.mapping.get(FINGERPRINT) != found.fingerprint:
            continue
        if batch.stored_at is None:
            _refuse_if_being_stored(batch)
            submitter.cancel_batch(batch.id)
        elif batch.num_rows == found.table.num_rows:
            return batch.id
    return None


def _refuse_if_being_stored(batch: BatchView) -> None:
    host, pid = batch.mapping[STORED_BY]
    if host != socket.gethostname() or _runs(pid):
        raise TableError(f"the same command stores these rows just now (process {pid} on {host}); wait, or use --fresh")


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def run_to_end(submitter: Submitter, batch_id: int, interrupt: Interrupt) -> None:
    """Wait until every row of the batch is answered or failed, with workers for it.

    Raises:
        TableError: there is no such batch.
        typer.Exit: stopped by Ctrl-C; the batch is cancelled and can go on.
    """
    with submitter.database.read() as session:
        batch = store.get_batch(session, batch_id)
        if batch is None:
            raise TableError(f"there is no batch {batch_id}")
        before = store.batch_progress(session, batch_id)
    num_queued = submitter.resume_batch(batch_id)
    if before.is_finished and not num_queued:
        if before.done:
            say(f"batch {batch_id} is finished already; --fresh computes it anew")
        return
    if rows_done(before):
        say(f"batch {batch_id} goes on: {rows_done(before):,} of {before.num_rows:,} rows are done already")
    try:
        with Workers(submitter, batch.variants, interrupt) as workers:
            try:
                _watch(submitter, batch, workers, interrupt)
            except KeyboardInterrupt:
                say("stopping, the rows in work are kept ...")
                submitter.cancel_batch(batch_id)
                raise
    except KeyboardInterrupt:
        _report_stop(submitter, batch_id)
        raise typer.Exit(INTERRUPTED) from None


def _watch(submitter: Submitter, batch: BatchView, workers: Workers, interrupt: Interrupt) -> None:
    console = stderr()
    next_check = next_line = time.monotonic() + CHECK_WORKERS_S
    bar = _progress_bar()
    with bar if console.is_terminal else nullcontext():
        task = bar.add_task(batch.name, total=batch.num_rows, rate="")
        for progress in watch(submitter.database, batch.id):
            interrupt.check()
            bar.update(task, completed=rows_done(progress), rate=_rate(progress))
            now = time.monotonic()
            if now >= next_check:
                next_check = now + CHECK_WORKERS_S
                workers.ensure()
            if now >= next_line and not console.is_terminal:
                next_line = now + PLAIN_LINE_EVERY_S
                say(describe_progress(progress))


def _progress_bar() -> Progress:
    columns: tuple[ProgressColumn, ...] = (
        SpinnerColumn(),
        _PlainName(),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
        TextColumn("{task.fields[rate]}"),
    )
    return Progress(*columns, console=stderr())


class _PlainName(ProgressColumn):
    """The file's name as it is, never as markup."""

    def render(self, task: Task) -> Text:
        return Text(task.description)


def _rate(progress: BatchProgress) -> str:
    failed = f"{progress.failed:,} failed  " if progress.failed else ""
    if progress.is_finished or not progress.rows_per_s:
        return failed.rstrip()
    left = f"  {describe_duration(progress.eta_s)} left" if progress.eta_s is not None else ""
    return f"{failed}{progress.rows_per_s:.3g} rows/s{left}"


def _report_stop(submitter: Submitter, batch_id: int) -> None:
    """Make sure that the batch is cancelled, give rows in work a moment to be saved, and say how to go on."""
    submitter.cancel_batch(batch_id)
    deadline = time.monotonic() + LAST_ROWS_S
    for progress in watch(submitter.database, batch_id):
        if progress.is_finished or time.monotonic() > deadline:
            break
    say(
        f"Stopped: {rows_done(progress):,} of {progress.num_rows:,} rows are done. The same command goes on with the "
        f"rest, and so does: python -m worker batch --resume {batch_id}"
    )
    say(f"What is done so far: python -m worker export {batch_id} --output PART.csv")
