"""`sensitivity`: which part of the model minds 4 bits, for one's own requests."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from worker.commands.terminal import SOME_FAILED, errors_on_one_line, fail, say

if TYPE_CHECKING:
    from clef_core.encoding import Record
    from worker.settings import Settings

MAX_REASONS = 5


class PartsName(StrEnum):
    """What is quantised at a time."""

    layer = "layer"
    kind = "kind"
    linear = "linear"


@errors_on_one_line
def sensitivity(
    release: Annotated[str, typer.Argument(metavar="BF16_DIR", help="BF16 release: a directory, or a hub id.")],
    requests: Annotated[
        Path,
        typer.Option(
            "--requests", "-r", metavar="FILE", help="JSONL of requests, or a CSV or JSONL table with --questions."
        ),
    ],
    questions: Annotated[
        Path | None, typer.Option("--questions", "-q", help="Questions as JSON or YAML for rows that bring none.")
    ] = None,
    images_zip: Annotated[Path | None, typer.Option("--images-zip", help="Zip of the pictures that rows name.")] = None,
    parts: Annotated[
        PartsName,
        typer.Option("--by", help="What to quantise at a time: each layer, each kind of linear, or each linear."),
    ] = PartsName.layer,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Use only the first rows.")] = None,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:1.")] = "cpu",
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.svg", help="Write the plot to this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Quantise one part of a BF16 release at a time and hold its answers against the untouched model's.

    Prints agreement, KL and the largest change of a probability per part, with everything quantised and with the noise
    floor (BF16 again, in batches of another shape) for scale. The run is stored, for the page to show.

    It answers all requests once per part: a 64-layer model needs 67 times the time of one pass.

    Exit codes: 0 all requests used, 1 some were refused, 2 bad input.
    """
    from worker.commands.devices import checked_device, prepare_torch

    prepare_torch()
    from clef_core.model import load_release
    from clef_core.release import resolve_release
    from clef_core.sensitivity import measure_sensitivity
    from worker.commands.connect import open_database
    from worker.commands.steps import shown_steps
    from worker.settings import load_settings

    if plot is not None and plot.suffix.lower() != ".svg":
        fail(f"--plot {plot}: the plot is SVG, so the name must end in .svg")
    settings = load_settings()
    records, num_bad, digest = _read_records(requests, questions, images_zip, settings, limit)
    loaded = load_release(resolve_release(release), checked_device(device))
    if loaded.files.is_random:
        say("note: this release has random weights, its answers mean nothing")
    with shown_steps() as listener:
        found = measure_sensitivity(
            loaded, records, parts.value, max_batch_tokens=settings.max_batch_tokens, listener=listener
        )
    results = found.to_json() | {"num_bad_rows": num_bad}
    with open_database() as (_, database):
        from clef_core.engine import Engine
        from db.store_sensitivity import NewSensitivityRun, store_sensitivity_run

        run = NewSensitivityRun(
            release=release,
            release_checksum=loaded.checksum,
            requests=requests.name,
            requests_sha256=digest,
            parts=parts.value,
            results=results,
            provenance=Engine(loaded, max_batch_tokens=settings.max_batch_tokens).provenance(),
        )
        with database.write() as session:
            run_id = store_sensitivity_run(session, run)
    title = f"{release}, {found.num_requests:,} requests of {requests.name}"
    if plot is not None:
        from clef_core.sensitivity_plot import sensitivity_svg

        plot.write_text(sensitivity_svg(results, parts.value, title), encoding="utf-8")
        say(f"plot: {plot}")
    if as_json:
        import json

        typer.echo(json.dumps({"id": run_id, "parts": parts.value, **results}, ensure_ascii=False, indent=2))
    else:
        _print(results, parts.value, title)
    say(f"stored as sensitivity run {run_id}")
    if num_bad or found.num_refused:
        say(f"{num_bad + found.num_refused:,} requests were refused and left out")
        raise typer.Exit(SOME_FAILED)


def _read_records(
    file: Path, questions: Path | None, images_zip: Path | None, settings: Settings, limit: int | None
) -> tuple[list[Record], int, str]:
    """The requests of a table with their pictures, how many rows were bad, and the file's SHA-256."""
    import hashlib
    from itertools import islice

    from clef_core.encoding import Record
    from clef_core.images import open_image
    from worker.commands.batch_input import ColumnOptions, read_input

    variants = (settings.default_variant,)
    records, num_bad = [], 0
    guess = ColumnOptions((), None, None, ())
    with read_input(file, questions, images_zip, guess, settings, variants, "jsonl") as found:
        for row in islice(found.rows(), limit):
            if row.submission is None:
                num_bad += 1
                if num_bad <= MAX_REASONS:
                    say(f"row {row.number}: {'; '.join(map(str, row.problems))}")
            else:
                images = tuple(open_image(image.data) for image in row.submission.images)
                records.append(Record(row.submission.request, images))
    if not records:
        fail(f"{file}: no row is a request that can be asked")
    with file.open("rb") as stream:
        return records, num_bad, hashlib.file_digest(stream, "sha256").hexdigest()


def _print(results: dict[str, Any], parts: str, title: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(parts, "linears", "agreement", "95 %", "mean KL", "± s.e.", "max |Δp|", box=None, header_style="dim")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in (results["noise_floor"], results["everything"], *results["effects"]):
        share, low, high = row["agreement"]
        error = row["kl_standard_error"]
        table.add_row(
            Text(row["part"]),
            str(row["num_linears"]),
            f"{share:.1%}",
            f"{low:.1%} – {high:.1%}",
            f"{row['kl']:.2e}",
            "" if error is None else f"{error:.0e}",
            f"{row['max_abs_dp']:.4f}",
        )
    console.print(Text(title, style="bold"))
    console.print(Text(f"{results['everything']['num_answers']:,} answers, held against BF16", style="dim"))
    console.print(table)
