"""`compare`: the same requests in two variants, side by side, with a noise floor."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from worker.commands.terminal import errors_on_one_line, fail, say

if TYPE_CHECKING:
    from worker.commands.compare_run import Finished
    from worker.submit import Submitter

STDOUT = Path("-")


@dataclass(frozen=True)
class Outputs:
    """Where to write what; None does not write it, `json` may be stdout."""

    json: Path | None
    markdown: Path | None
    csv: Path | None
    jevl: Path | None

    def check(self) -> None:
        """Find out before anything is computed that a file cannot be written."""
        paths = [path for path in (self.json, self.markdown, self.csv, self.jevl) if path not in (None, STDOUT)]
        for path in paths:
            if path is not None and not path.parent.is_dir():
                fail(f"{path}: there is no folder {path.parent}")
        if len(set(paths)) < len(paths):
            fail("two outputs have one name")


class FloorDtype(StrEnum):
    """The dtypes that the floor may be run in."""

    bfloat16 = "bfloat16"
    float32 = "float32"


@errors_on_one_line
def compare(
    requests: Annotated[
        Path | None,
        typer.Option("--requests", "-r", help="JSONL of requests (state, questions, images, labels), or CSV."),
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option("--questions", "-q", help="Questions as JSON or YAML for rows that bring none of their own."),
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", metavar="ID", help="Compare the rows of this batch; `status` lists them.")
    ] = None,
    task: Annotated[
        str | None, typer.Option("--task", "-t", help="Benchmark: banking77, clinc150, receipts or card.")
    ] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Records to draw from the task.")] = 300,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the draw.")] = 0,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="Folder with the tasks' data. Default: data/tasks of the project."),
    ] = None,
    left: Annotated[str, typer.Option("--left", help="Reference: a variant or a release directory.")] = "bf16",
    right: Annotated[str, typer.Option("--right", help="What is held against it: likewise.")] = "mxfp4",
    floor: Annotated[
        bool, typer.Option("--floor/--no-floor", help="Run the reference again in another batch shape.")
    ] = True,
    floor_dtype: Annotated[
        FloorDtype | None, typer.Option("--floor-dtype", help="Run the floor in this dtype, in a worker of its own.")
    ] = None,
    floor_device: Annotated[
        str | None,
        typer.Option("--floor-device", help="Run the floor on this device (cpu, cuda:1), in a worker of its own."),
    ] = None,
    resume: Annotated[
        int | None, typer.Option("--resume", metavar="ID", help="Go on with (or write again) this comparison.")
    ] = None,
    json_out: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Write everything as JSON; - for stdout.")
    ] = None,
    markdown_out: Annotated[
        Path | None, typer.Option("--markdown", metavar="OUT", help="Write the tables as Markdown.")
    ] = None,
    csv_out: Annotated[
        Path | None, typer.Option("--csv", metavar="OUT", help="Write a line per record and question.")
    ] = None,
    jevl_out: Annotated[
        Path | None, typer.Option("--jevl", metavar="OUT", help="Write both runs' records for jevkit-drift.")
    ] = None,
) -> None:
    """Decide the same requests in two variants and print how far they are apart, as Markdown tables.

    Each record runs alone in its forward, so that nothing but the variant moves a number; nothing is taken from earlier
    runs. The floor is the reference against itself in another batch shape: a difference inside it is rounding. If no
    worker holds a variant, one is started for the duration. The comparison is stored, and the page shows it too.

    Exit codes: 0 all compared, 1 some rows failed, 2 bad input, 130 stopped by Ctrl-C.
    """
    from worker.commands.compare_run import compare_batch, store_table, store_task, workers_for
    from worker.commands.connect import open_submitter
    from worker.commands.interrupt import deferred_interrupt
    from worker.settings import load_settings
    from worker.sides import choose_sides

    if sum(source is not None for source in (requests, batch, task, resume)) != 1:
        fail("give one of --requests FILE, --batch ID, --task NAME or --resume ID")
    if questions is not None and requests is None:
        fail("--questions belongs to --requests")
    if not floor and (floor_dtype is not None or floor_device is not None):
        fail("--floor-dtype and --floor-device need the floor")
    if floor_device is not None:
        from worker.commands.devices import checked_device

        checked_device(floor_device, "--floor-device")
    outputs = Outputs(json_out, markdown_out, csv_out, jevl_out)
    outputs.check()
    if resume is not None:
        finished = _resume(resume, outputs)
        raise typer.Exit(finished.exit_code)
    task_rows = None
    if task is not None:
        from clef_core.tasks import find_task
        from worker.task_rows import load_task

        task_rows = load_task(find_task(task), data, n, seed)
    sides = choose_sides(
        load_settings(),
        left,
        right,
        has_floor=floor,
        floor_dtype=None if floor_dtype is None else floor_dtype.value,
        floor_device=floor_device,
    )
    with (
        open_submitter(sides.settings) as submitter,
        deferred_interrupt() as interrupt,
        workers_for(submitter, sides, interrupt) as workers,
    ):
        parameters: dict[str, Any] = {}
        if task_rows is not None:
            batch = store_task(submitter, task_rows)
            parameters = {"task": task, "n": n, "seed": seed}
        elif requests is not None:
            batch = store_table(submitter, requests, questions)
        assert batch is not None
        finished = compare_batch(submitter, batch, sides, workers, interrupt, parameters)
        _write(submitter, finished, outputs)
    raise typer.Exit(finished.exit_code)


def _resume(comparison_id: int, outputs: Outputs) -> Finished:
    from contextlib import ExitStack

    from worker.commands.compare_run import resume, view_of, workers_for
    from worker.commands.connect import open_submitter
    from worker.commands.interrupt import deferred_interrupt
    from worker.settings import load_settings
    from worker.sides import sides_from_parameters

    settings = load_settings()
    with open_submitter(settings) as submitter:
        view = view_of(submitter, comparison_id)
    sides = sides_from_parameters(settings, view.left_variant, view.right_variant, view.floor_variant, view.parameters)
    is_over = view.finished_at is not None and view.cancel_requested_at is None
    with open_submitter(sides.settings) as submitter, deferred_interrupt() as interrupt, ExitStack() as stack:
        workers = [] if is_over else stack.enter_context(workers_for(submitter, sides, interrupt))
        finished = resume(submitter, comparison_id, workers, interrupt)
        _write(submitter, finished, outputs)
    return finished


def _write(submitter: Submitter, finished: Finished, outputs: Outputs) -> None:
    import json

    from worker.commands.export import open_output
    from worker.comparison_export import comparison_json, write_comparison_csv, write_comparison_jevl
    from worker.comparison_tables import comparison_markdown

    view, report = finished.view, finished.report
    if outputs.csv is not None:
        with open_output(outputs.csv) as out:
            write_comparison_csv(submitter.database, view.id, out)
    if outputs.jevl is not None:
        with open_output(outputs.jevl) as out:
            write_comparison_jevl(submitter.database, view, out)
    if report is None:
        say(f"comparison {view.id}: no record has an answer of both runs")
        return
    say(f"comparison {view.id} is stored")
    markdown = comparison_markdown(view, report)
    if outputs.json is not None:
        text = json.dumps(comparison_json(view, report), ensure_ascii=False, indent=2) + "\n"
        with open_output(None if outputs.json == STDOUT else outputs.json) as out:
            out.write(text)
    if outputs.markdown is not None:
        with open_output(outputs.markdown) as out:
            out.write(markdown)
    if outputs.json != STDOUT:
        typer.echo(markdown, nl=False)
