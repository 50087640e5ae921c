"""`verify`: prove an MXFP4 release law by law."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from worker.commands.terminal import SOME_FAILED, errors_on_one_line

if TYPE_CHECKING:
    from clef_core.verify import Report

MAX_PROBLEMS = 5
MAX_LAYERS = 10
_MARKS = {"holds": ("✓", "green"), "broken": ("✗", "bold red"), "unchecked": ("–", "dim")}


@errors_on_one_line
def verify(
    release: Annotated[Path, typer.Argument(metavar="DIR", help="The MXFP4 release.")],
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="SOURCE", help="The BF16 release it was made from: a directory or hub id."),
    ] = None,
    layers: Annotated[int, typer.Option("--layers", min=0, help="How many of the worst linears to list.")] = MAX_LAYERS,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Look whether DIR is what an MXFP4 release must be, law by law.

    Reads every file. With --against also: the copies are the source's, nothing else changed, and how far each linear's
    weights are from the source's (relative Frobenius norm, signal-to-noise ratio), the worst first.

    Exit codes: 0 every law holds, 1 one is broken, 2 bad input.
    """
    from worker.commands.devices import prepare_torch

    prepare_torch()
    from clef_core.release import resolve_release
    from clef_core.verify import verify as look
    from worker.commands.steps import shown_steps

    source = None if against is None else resolve_release(against)
    with shown_steps() as listener:
        report = look(release, source, listener)
    if as_json:
        import json

        typer.echo(json.dumps(_to_json(report), ensure_ascii=False, indent=2))
    else:
        _print(report, layers)
    if not report.holds:
        raise typer.Exit(SOME_FAILED)


def _to_json(report: Report) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "release": str(report.path),
        "source": None if report.source is None else str(report.source),
        "holds": report.holds,
        "laws": [asdict(law) for law in report.laws],
        "errors": [asdict(error) | {"sqnr_db": _finite(error.sqnr_db)} for error in report.errors],
    }


def _finite(number: float) -> float | None:
    """JSON has no infinity: a weight without error has no ratio."""
    import math

    return number if math.isfinite(number) else None


def _print(report: Report, num_layers: int) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table.grid(padding=(0, 1))
    for law in report.laws:
        mark, style = _MARKS[law.status]
        table.add_row(Text(mark, style=style), Text(law.name, style="bold"), Text(law.statement))
        problems = [Text(problem, style="red") for problem in law.problems[:MAX_PROBLEMS]]
        if len(law.problems) > MAX_PROBLEMS:
            problems.append(Text(f"… and {len(law.problems) - MAX_PROBLEMS:,} more", style="red"))
        for line in [*problems, *([Text(law.detail, style="dim")] if law.detail else [])]:
            table.add_row("", "", line)
    console.print(table)
    if report.errors and num_layers:
        worst = Table("linear", "relative error", "SQNR, dB", box=None, header_style="dim")
        for error in report.errors[:num_layers]:
            worst.add_row(Text(error.name), f"{error.relative:.4f}", f"{error.sqnr_db:.2f}")
        console.print(
            f"\nThe worst {min(num_layers, len(report.errors))} of {len(report.errors)} linears", style="bold"
        )
        console.print(worst)
    broken = [law.name for law in report.laws if law.status == "broken"]
    if broken:
        console.print(f"\nBroken: {', '.join(broken)}", style="bold red")
    else:
        console.print("\nEvery law that was looked at holds.", style="bold green")
