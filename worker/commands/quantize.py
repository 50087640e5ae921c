"""`quantize`: make an MXFP4 release from a BF16 one."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from worker.commands.terminal import SOME_FAILED, errors_on_one_line, fail, one_line, say


class AlgorithmName(StrEnum):
    """How weights are quantised."""

    awq = "awq"
    none = "none"


@errors_on_one_line
def quantize(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="BF16 release: a directory, or a hub id[@revision].")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="Directory to make. It must not exist.")],
    algorithm: Annotated[
        AlgorithmName,
        typer.Option("--algorithm", "-a", help="awq: calibrated by AMD Quark. none: rounded to nearest, file by file."),
    ] = AlgorithmName.awq,
    calibration: Annotated[
        str | None,
        typer.Option(
            "--calibration",
            "-c",
            metavar="FILE",
            help='Text for awq: .jsonl (objects with a "text") or .txt (paragraphs). Default: pile-val from the hub.',
        ),
    ] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Calibration samples.")] = 128,
    sample_tokens: Annotated[int, typer.Option("--sample-tokens", min=1, help="Tokens per sample.")] = 512,
    seed: Annotated[int, typer.Option("--seed", help="Draws the calibration text.")] = 0,
    keep_bf16: Annotated[
        list[str] | None,
        typer.Option(
            "--keep-bf16",
            metavar="PATTERN",
            help="Linears to keep in BF16, e.g. 'linear_attn.in_proj_[ab]' or 'layers.0.*'. Repeat for several.",
        ),
    ] = None,
    shards: Annotated[
        int, typer.Option("--shards", min=1, help="Weight files to write; small releases get fewer.")
    ] = 5,
    device: Annotated[str, typer.Option("--device", help="Where the work is done: cpu, cuda, cuda:1.")] = "cpu",
    base_model: Annotated[
        str | None, typer.Option("--base-model", help="Hub name for the model card. Default: SOURCE's name.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Throw away what an earlier attempt left in TARGET.partial.")
    ] = False,
) -> None:
    """Make an MXFP4 release from the BF16 release SOURCE.

    Work goes on in TARGET.partial and is renamed at the end. If it is stopped, the same command goes on where it was.

    awq needs AMD Quark (pip install amd-quark) and memory for the whole model; none needs about 1 GB whatever the size.
    `python -m worker verify TARGET --against SOURCE` proves the result.

    Exit codes: 0 made, 1 Quark failed, 2 bad input, no room, or TARGET exists, 130 stopped by Ctrl-C.
    """
    from worker.commands.devices import checked_device, prepare_torch

    prepare_torch()
    from clef_core.errors import EngineError, count
    from clef_core.quantize import quantize as build
    from clef_core.recipe import PILE_VAL, Recipe
    from clef_core.room import gigabytes
    from worker.commands.steps import shown_steps

    recipe = Recipe(
        algorithm=algorithm.value,
        calibration=calibration or PILE_VAL,
        num_samples=samples,
        sample_tokens=sample_tokens,
        seed=seed,
        keep_bf16=tuple(keep_bf16 or ()),
        shards=shards,
        base_model=base_model,
    )
    try:
        with shown_steps() as listener:
            plan = build(source, target, recipe, device=checked_device(device), fresh=fresh, listener=listener)
    except EngineError as error:
        fail(one_line(str(error)), SOME_FAILED)
    kept = f", {len(plan.kept)} kept in BF16" if plan.kept else ""
    share = f"{plan.weight_bytes / plan.source_bytes:.1%} of {gigabytes(plan.source_bytes)}"
    say(
        f"{target}: {len(plan.linears)} linears in MXFP4{kept}; {gigabytes(plan.weight_bytes)} of weights in "
        f"{count(len(plan.shards), 'file')}, {share}"
    )
