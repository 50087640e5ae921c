"""Running comparisons from the command line: stored, watched to their end, stopped by Ctrl-C so that they can go on.

Shared by `compare` and `evaluate`. Surprising: the same command again computes everything again; only `--resume` goes
on with what is there, because a comparison that took its numbers from elsewhere would not be one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from clef_core.comparison_report import Report
from clef_core.errors import count
from db import store
from db.comparison_views import ComparisonProgress, ComparisonView
from db.store_comparison_reads import get_comparison
from db.views import SOURCE_COMPARISON, Json
from worker.commands.interrupt import Interrupt
from worker.commands.terminal import ALL_ANSWERED, INTERRUPTED, SOME_FAILED, say, stderr
from worker.commands.workers import Workers
from worker.compare import (
    ComparisonError,
    continue_comparison,
    open_comparison,
    start_comparison,
    stop_comparison,
    watch_comparison,
)
from worker.progress import describe_duration
from worker.questions_file import load_questions
from worker.sides import Sides
from worker.submit import Submitter
from worker.tables import RowNote, check_mapping, guess_mapping, read_table, table_rows
from worker.task_rows import TaskRows

CHECK_WORKERS_S = 2.0
PLAIN_LINE_EVERY_S = 10.0  # where stderr is no terminal
LAST_ROWS_S = 10.0  # how long rows in the work of other people's workers are waited for after Ctrl-C
MAX_WARNINGS = 5


@dataclass(frozen=True)
class Finished:
    """A comparison at its end. num_refused: rows that could not be asked at all."""

    view: ComparisonView
    report: Report | None
    num_refused: int

    @property
    def exit_code(self) -> int:
        is_whole = self.report is not None and not self.report.num_skipped and not self.num_refused
        return ALL_ANSWERED if is_whole else SOME_FAILED


@contextmanager
def workers_for(submitter: Submitter, sides: Sides, interrupt: Interrupt) -> Iterator[list[Workers]]:
    """Workers for every side, those of the floor with its own settings."""
    groups = [(sides.variants, sides.settings), (sides.floor_variants, sides.floor_settings)]
    with ExitStack() as stack:
        yield [
            stack.enter_context(Workers(submitter, variants, interrupt, settings))
            for variants, settings in groups
            if variants
        ]


def store_table(submitter: Submitter, file: Path, questions_file: Path | None) -> int:
    """Store the rows of a table as a batch without decisions; returns its id.

    Raises:
        TableError, QuestionsFileError, RequestError: the table or the questions cannot be used.
    """
    settings = submitter.settings
    questions = load_questions(questions_file) if questions_file is not None else {}
    table = read_table(file, max_bytes=settings.max_upload_bytes, max_rows=settings.max_rows)
    mapping = guess_mapping(table.columns, list(questions))
    check_mapping(table, mapping, list(questions))
    warnings: list[RowNote] = []
    batch_id = submitter.submit_batch(
        file.name,
        dict(questions),
        table_rows(table, mapping, questions, "clef", on_warning=warnings.append),
        (),
        source=SOURCE_COMPARISON,
        columns=table.columns,
        mapping=mapping.to_json(),
    )
    for note in warnings[:MAX_WARNINGS]:
        say(f"note: {note.message}")
    if len(warnings) > MAX_WARNINGS:
        say(f"note: … and {count(len(warnings) - MAX_WARNINGS, 'more label')} that no option has")
    return batch_id


def store_task(submitter: Submitter, task: TaskRows) -> int:
    """Store the sample of a task as a batch without decisions; returns its id."""
    return submitter.submit_batch(
        task.name, task.questions, task.rows, (), source=SOURCE_COMPARISON, columns=(), mapping={}
    )


def compare_batch(
    submitter: Submitter,
    batch_id: int,
    sides: Sides,
    workers: list[Workers],
    interrupt: Interrupt,
    parameters: Mapping[str, Json],
) -> Finished:
    """Compare the requests of a batch, with workers that are there already.

    Raises:
        ComparisonError: there is no such batch, or nothing in it can be asked.
        typer.Exit: stopped by Ctrl-C; the comparison is cancelled and can go on.
    """
    comparison_id = start_comparison(
        submitter,
        batch_id,
        left=sides.left,
        right=sides.right,
        floor=sides.floor,
        parameters=sides.to_parameters() | dict(parameters),
    )
    return _run_to_end(submitter, comparison_id, workers, interrupt)


def resume(submitter: Submitter, comparison_id: int, workers: list[Workers], interrupt: Interrupt) -> Finished:
    """Go on with a comparison that was stopped; one that is finished is only opened."""
    continue_comparison(submitter, comparison_id)
    return _run_to_end(submitter, comparison_id, workers, interrupt)


def view_of(submitter: Submitter, comparison_id: int) -> ComparisonView:
    """The stored comparison.

    Raises:
        ComparisonError: there is none.
    """
    with submitter.database.read() as session:
        view = get_comparison(session, comparison_id)
    if view is None:
        raise ComparisonError(f"there is no comparison {comparison_id}")
    return view


def _run_to_end(submitter: Submitter, comparison_id: int, workers: list[Workers], interrupt: Interrupt) -> Finished:
    view = view_of(submitter, comparison_id)
    try:
        _watch(submitter, view, workers, interrupt)
    except KeyboardInterrupt:
        _stop(submitter, comparison_id)
        raise typer.Exit(INTERRUPTED) from None
    view, report = open_comparison(submitter.database, comparison_id)
    with submitter.database.read() as session:
        batch = store.get_batch(session, view.batch_id)
    finished = Finished(view, report, 0 if batch is None else batch.num_rows - view.num_rows)
    if finished.num_refused:
        say(f"note: {count(finished.num_refused, 'row')} could not be asked")
    if report is not None and report.num_skipped:
        say(f"note: {count(report.num_skipped, 'record')} left out, a run has no answer to them")
    return finished


def _watch(submitter: Submitter, view: ComparisonView, workers: list[Workers], interrupt: Interrupt) -> None:
    console = stderr()
    next_check = next_line = time.monotonic() + CHECK_WORKERS_S
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} decisions  {task.fields[left]}"),
        console=console,
    )
    with bar if console.is_terminal else nullcontext():
        task = bar.add_task(f"comparison {view.id}", total=len(view.variants) * view.num_rows, left="")
        for progress in watch_comparison(submitter.database, view.id):
            interrupt.check()
            bar.update(task, completed=progress.done + progress.failed, left=_time_left(progress))
            now = time.monotonic()
            if now >= next_check:
                next_check = now + CHECK_WORKERS_S
                for one in workers:
                    one.ensure()
            if now >= next_line and not console.is_terminal:
                next_line = now + PLAIN_LINE_EVERY_S
                done = progress.done + progress.failed
                say(f"comparison {view.id}: {done:,} of {progress.num_decisions:,} decisions  {_time_left(progress)}")


def _time_left(progress: ComparisonProgress) -> str:
    if progress.is_finished or not progress.eta_s:
        return ""
    return f"about {describe_duration(progress.eta_s)} left"


def _stop(submitter: Submitter, comparison_id: int) -> None:
    """Cancel, give rows in work a moment to be saved, and say how to go on."""
    say("stopping, the decisions in work are kept ...")
    stop_comparison(submitter.database, comparison_id)
    deadline = time.monotonic() + LAST_ROWS_S
    for progress in watch_comparison(submitter.database, comparison_id):
        if progress.is_finished or time.monotonic() > deadline:
            break
    say(f"Stopped. It goes on with: python -m worker compare --resume {comparison_id}")
