"""`batch`: answer every row of a table, resumable."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from worker.commands.export import Format, describe_written, format_of, open_output
from worker.commands.terminal import ALL_ANSWERED, SOME_FAILED, errors_on_one_line, fail, say


@errors_on_one_line
def batch(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="CSV (comma, UTF-8, with a header) or JSONL.")
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option("--questions", "-q", help="Questions as JSON or YAML. JSONL rows may bring their own instead."),
    ] = None,
    state_column: Annotated[
        list[str] | None,
        typer.Option("--state-column", "-s", help="Column that is the state. Repeat: several become a JSON object."),
    ] = None,
    id_column: Annotated[str | None, typer.Option("--id-column", help="Column with the rows' ids.")] = None,
    image_column: Annotated[
        str | None,
        typer.Option("--image-column", help="Column with picture names in the zip or data URLs, several split by ;"),
    ] = None,
    images_zip: Annotated[
        Path | None, typer.Option("--images-zip", help="Zip of the pictures, without folders.")
    ] = None,
    label_column: Annotated[
        list[str] | None,
        typer.Option("--label-column", "-l", help="Column with the right answers: COLUMN, or QUESTION=COLUMN; repeat."),
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            "--variant", "-v", help="Variant to ask. Repeat for several. Default: CLEF_DEFAULT_VARIANT, else mxfp4."
        ),
    ] = None,
    both: Annotated[bool, typer.Option("--both", help="Ask bf16 and mxfp4 and set them side by side.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write, replaced if it exists. Default: stdout.")
    ] = None,
    format: Annotated[
        Format | None,
        typer.Option("--format", "-f", help="Default: what the output's name ends in, else that of FILE."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count rows, tokens and bad rows; ask nothing.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew although the same command ran before.")] = False,
    resume: Annotated[
        int | None, typer.Option("--resume", metavar="ID", help="Go on with this batch; needs no FILE.")
    ] = None,
) -> None:
    """Answer every row of FILE and write its columns with the answers.

    The columns for state, id, pictures and labels are guessed from their names; the options choose others, and an empty
    name ("") means none. A bad row gets an error and the others go on.

    The same command again (same file, questions, columns and variants) goes on where it stopped and repeats no finished
    row. If no worker holds a variant, one is started for the duration.

    Exit codes: 0 all rows answered, 1 some failed, 2 bad input, 130 stopped by Ctrl-C.
    """
    from worker.commands.batch_input import ColumnOptions, read_input
    from worker.commands.batch_run import find_or_submit, run_to_end, show_plan
    from worker.commands.connect import chosen_variants, open_submitter
    from worker.commands.interrupt import deferred_interrupt
    from worker.tables import export_batch

    if (file is None) == (resume is None):
        fail("give a FILE, or --resume with the number of a batch")
    with open_submitter() as submitter, deferred_interrupt() as interrupt:
        if file is not None:
            variants = chosen_variants(submitter.settings, variant or [], both=both)
            columns = ColumnOptions(state_column or [], id_column, image_column, label_column or [])
            format_name = format_of(output, format, "jsonl" if file.suffix.lower() in (".jsonl", ".ndjson") else "csv")
            with read_input(file, questions, images_zip, columns, submitter.settings, variants, format_name) as found:
                if dry_run:
                    raise typer.Exit(show_plan(submitter, found, interrupt, is_terminal=sys.stdout.isatty()))
                _check_output(output, file, questions, images_zip)
                batch_id = find_or_submit(submitter, found, interrupt, fresh=fresh)
        else:
            assert resume is not None
            batch_id = resume
            format_name = format_of(output, format, "csv")
        run_to_end(submitter, batch_id, interrupt)
        with open_output(output) as out:
            written = export_batch(
                submitter.database, batch_id, format_name, out, confidence=submitter.settings.confidence
            )
    say(describe_written(batch_id, written))
    raise typer.Exit(ALL_ANSWERED if written.num_answered == written.num_rows else SOME_FAILED)


def _check_output(output: Path | None, *inputs: Path | None) -> None:
    """Find out before the rows are computed that the results cannot be written, or would replace an input."""
    if output is not None and not output.parent.is_dir():
        fail(f"--output {output}: there is no folder {output.parent}")
    if output is not None and output.exists():
        for path in inputs:
            if path is not None and path.samefile(output):
                fail(f"--output {output} is the input {path}: give it another name")
