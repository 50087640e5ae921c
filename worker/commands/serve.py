"""`serve`: hold one or several variants in memory and answer what is queued."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from worker.commands.terminal import errors_on_one_line


@errors_on_one_line
def serve(
    variant: Annotated[
        list[str],
        typer.Option("--variant", "-v", help="Variant to hold in memory, e.g. bf16 or mxfp4. Repeat for several."),
    ],
) -> None:
    """Run a worker: load the release of each VARIANT and answer what is queued, until Ctrl-C.

    The releases come from CLEF_BF16, CLEF_MXFP4 and CLEF_VARIANTS. app.py starts its own workers; use this to run one
    by hand, or on another machine with the same REDIS_URL and DATABASE_URL.
    """
    import logging

    from worker.serve import serve as run_worker
    from worker.settings import load_settings

    settings = load_settings()
    logging.getLogger().setLevel(settings.log_level)
    if settings.log_level in ("WARNING", "ERROR"):
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns by a handler of its own
    # A worker has no results to print: what libraries write to stdout must not mix with those of who started it.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    run_worker(settings, list(dict.fromkeys(variant)))
