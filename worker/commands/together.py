"""`together`: each question of a request alone, and all of them at once."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from worker.commands.terminal import ALL_ANSWERED, SOME_FAILED, errors_on_one_line, say, stderr

if TYPE_CHECKING:
    from worker.together import Together

CHECK_WORKERS_S = 2.0


@errors_on_one_line
def together(
    request: Annotated[
        str, typer.Argument(metavar="REQUEST.json", help="A SystemOne request as JSON; - reads it from stdin.")
    ],
    variant: Annotated[
        list[str] | None,
        typer.Option("--variant", "-v", help="Variant to ask instead of the request's model. Repeat for several."),
    ] = None,
    both: Annotated[bool, typer.Option("--both", help="Ask bf16 and mxfp4.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON also to a terminal. Into a file or pipe it is always JSON.")
    ] = False,
) -> None:
    """Ask each question of REQUEST alone and all of them together, and print what moves.

    Clef decides the questions of a request jointly, so a question may get another answer when its neighbours go. Every
    forward holds one request, so nothing else moves a number. If no worker holds a variant, one is started for the
    duration.

    Exit codes: 0 answered, 1 not all answered, 2 bad input, 130 stopped by Ctrl-C.
    """
    from worker.commands.connect import chosen_variants, open_submitter
    from worker.commands.decide import read_submission
    from worker.commands.interrupt import deferred_interrupt
    from worker.commands.workers import Workers
    from worker.together import decision_ids_of, read_together, start_together

    submission = read_submission(request, [])
    with open_submitter() as submitter, deferred_interrupt() as interrupt:
        model = submission.request.model
        variants = chosen_variants(submitter.settings, variant or [], both=both, model=model)
        with Workers(submitter, variants, interrupt) as workers:
            batch_id = start_together(submitter, submission, variants)
            decision_ids = decision_ids_of(submitter.database, batch_id)
            with stderr().status("deciding", spinner="dots"):
                while not all(one.is_finished for one in submitter.wait(decision_ids, CHECK_WORKERS_S)):
                    interrupt.check()
                    workers.ensure()
        found = read_together(submitter.database, batch_id)
    if as_json or not sys.stdout.isatty():
        _print_json(found)
    else:
        _print_table(found)
    for name, reasons in found.failures.items():
        for reason in reasons:
            say(f"{name}: {reason}")
    raise typer.Exit(SOME_FAILED if any(found.failures.values()) else ALL_ANSWERED)


def _print_json(found: Together) -> None:
    import json
    import math

    body: dict[str, Any] = {
        variant: {
            one.question_id: {
                "together": one.compared.left_option,
                "alone": one.compared.right_option,
                "is_flip": one.compared.is_flip,
                "kl": one.compared.kl,
                "total_variation": one.compared.total_variation,
                "max_abs_dp": one.compared.max_abs_dp,
                "probabilities_together": {option: math.exp(value) for option, value in one.together.items()},
                "probabilities_alone": {option: math.exp(value) for option, value in one.alone.items()},
            }
            for one in moved
        }
        for variant, moved in found.moved.items()
    }
    typer.echo(json.dumps(body, ensure_ascii=False, indent=2))


def _print_table(found: Together) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from worker.commands.answers import printable

    console = Console(highlight=False)
    for variant, moved in found.moved.items():
        table = Table("question", "together", "alone", "moves", "largest |Δp|", "KL", title=Text(variant))
        for one in moved:
            numbers = one.compared
            table.add_row(
                Text(printable(one.question_id)),
                Text(f"{printable(numbers.left_option)} {numbers.left_confidence:.3f}"),
                Text(f"{printable(numbers.right_option)} {numbers.right_confidence:.3f}"),
                "another option" if numbers.is_flip else "the same option",
                f"{numbers.max_abs_dp:.4f}",
                f"{numbers.kl:.2e}",
            )
        console.print(table)
