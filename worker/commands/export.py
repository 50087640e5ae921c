"""`export`: the results of a batch as a file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from worker.commands.terminal import ALL_ANSWERED, SOME_FAILED, errors_on_one_line, say

if TYPE_CHECKING:
    from worker.tables import ExportFormat, Written


class Format(StrEnum):
    """The formats of a results file."""

    csv = "csv"
    jsonl = "jsonl"
    jevl = "jevl"


@errors_on_one_line
def export(
    batch_id: Annotated[int, typer.Argument(metavar="BATCH_ID", help="Number of the batch; `status` lists them.")],
    format: Annotated[
        Format | None,
        typer.Option("--format", "-f", help="Default: what the name of the output ends in, else csv."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write, replaced if it exists. Default: stdout.")
    ] = None,
) -> None:
    """Write the results of a batch, also of one that still runs or was stopped.

    csv has the input's columns and one or more per question; jsonl is lossless; jevl is for jevkit's tools and has only
    answered rows. Rows that are not done say so in `error`.

    Exit codes: 0 all rows answered, 1 some failed or are not done, 2 bad input.
    """
    from worker.commands.connect import open_database
    from worker.tables import export_batch

    with open_database() as (settings, database), open_output(output) as out:
        name = format_of(output, format, "csv")
        written = export_batch(database, batch_id, name, out, confidence=settings.confidence)
    say(describe_written(batch_id, written))
    raise typer.Exit(ALL_ANSWERED if written.num_answered == written.num_rows else SOME_FAILED)


def format_of(output: Path | None, asked: Format | None, default: str) -> ExportFormat:
    """The format asked for, else the one that the file's name ends in, else the default."""
    if asked is not None:
        return asked.value
    suffix = output.suffix.lower().removeprefix(".") if output is not None else ""
    return Format(suffix if suffix in Format.__members__ else default).value


@contextmanager
def open_output(path: Path | None) -> Iterator[TextIO]:
    """Stdout, or a file that appears under its name only when it is complete."""
    if path is None:
        sys.stdout.reconfigure(encoding="utf-8", newline="")  # type: ignore[union-attr]  # a real stream here
        yield sys.stdout
        sys.stdout.flush()
        return
    part = path.with_name(path.name + ".part")
    try:
        with part.open("w", encoding="utf-8", newline="") as file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def describe_written(batch_id: int, written: Written) -> str:
    """`batch 7, 300 rows: 298 answered, 2 failed`, then the first reasons."""
    from clef_core.errors import count

    counts = [f"{written.num_answered:,} answered"]
    if written.num_failed:
        counts.append(f"{written.num_failed:,} failed")
    if written.num_unfinished:
        counts.append(f"{written.num_unfinished:,} not done")
    lines = [f"batch {batch_id}, {count(written.num_rows, 'row')}: {', '.join(counts)}"]
    lines += [f"  row {note.number}: {note.message}" for note in written.failures]
    if written.num_failed > len(written.failures):
        lines.append(f"  … and {written.num_failed - len(written.failures):,} more, see the column error")
    return "\n".join(lines)
