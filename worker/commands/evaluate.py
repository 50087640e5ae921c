"""`evaluate`: the model card's table, measured here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from worker.commands.terminal import errors_on_one_line, say

if TYPE_CHECKING:
    from worker.commands.compare_run import Finished

ALL = "all"
STDOUT = Path("-")


@errors_on_one_line
def evaluate(
    task: Annotated[
        list[str], typer.Option("--task", "-t", help="banking77, clinc150, receipts, card or all; repeat for several.")
    ],
    n: Annotated[int, typer.Option("--n", min=1, help="Records to draw from each task; the card draws 300.")] = 300,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the draw; the card's is 0.")] = 0,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="Folder with the tasks' data. Default: data/tasks of the project."),
    ] = None,
    left: Annotated[str, typer.Option("--left", help="Reference: a variant or a release directory.")] = "bf16",
    right: Annotated[str, typer.Option("--right", help="What is held against it: likewise.")] = "mxfp4",
    floor: Annotated[
        bool, typer.Option("--floor/--no-floor", help="Run the reference again in another batch shape.")
    ] = True,
    json_out: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Write everything as JSON; - for stdout.")
    ] = None,
) -> None:
    """Run benchmarks in both variants and print the model card's table with intervals and a noise floor.

    A second table has the card's own numbers for the 27B. The tasks' data are read from local files; a message says
    where they come from when they are missing. Each task is stored as a comparison, and the page shows it too.

    Exit codes: 0 all compared, 1 some rows failed, 2 bad input, 130 stopped by Ctrl-C.
    """
    import json

    from clef_core.tasks import TASKS, find_task
    from worker.commands.compare_run import compare_batch, store_task, workers_for
    from worker.commands.connect import open_submitter
    from worker.commands.export import open_output
    from worker.commands.interrupt import deferred_interrupt
    from worker.comparison_export import comparison_json
    from worker.evaluation_tables import evaluation_markdown
    from worker.settings import load_settings
    from worker.sides import choose_sides
    from worker.task_rows import load_task

    names = list(TASKS) if ALL in task else list(dict.fromkeys(task))
    loaded = [(name, load_task(find_task(name), data, n, seed)) for name in names]
    sides = choose_sides(load_settings(), left, right, has_floor=floor)
    results: dict[str, Finished] = {}
    with (
        open_submitter(sides.settings) as submitter,
        deferred_interrupt() as interrupt,
        workers_for(submitter, sides, interrupt) as workers,
    ):
        for name, rows in loaded:
            say(f"{name}: {len(rows.rows):,} records")
            batch_id = store_task(submitter, rows)
            parameters: dict[str, Any] = {"task": name, "n": n, "seed": seed}
            results[name] = compare_batch(submitter, batch_id, sides, workers, interrupt, parameters)
    reports = {name: (one.view, one.report) for name, one in results.items() if one.report is not None}
    if json_out is not None:
        bodies = {name: comparison_json(view, report) for name, (view, report) in reports.items()}
        with open_output(None if json_out == STDOUT else json_out) as out:
            out.write(json.dumps(bodies, ensure_ascii=False, indent=2) + "\n")
    if json_out != STDOUT:
        typer.echo(evaluation_markdown(reports), nl=False)
    raise typer.Exit(max(one.exit_code for one in results.values()))
