"""The command line: `python -m worker COMMAND`.

Only puts the commands together; each lives in its own file under `worker/commands`. They import what is heavy inside
the command, so that `--help` answers at once. Torch is loaded by `serve` alone.
"""

from __future__ import annotations

import typer

from worker.commands.batch import batch
from worker.commands.chat import chat
from worker.commands.compare import compare
from worker.commands.decide import decide
from worker.commands.evaluate import evaluate
from worker.commands.export import export
from worker.commands.perplexity import perplexity
from worker.commands.quantize import quantize
from worker.commands.sensitivity import sensitivity
from worker.commands.serve import serve
from worker.commands.status import status
from worker.commands.together import together
from worker.commands.verify import verify
from worker.commands.vllm import vllm

app = typer.Typer(
    name="worker",
    epilog="Exit codes: 0 all answered, 1 some rows failed, 2 bad input, 130 stopped by Ctrl-C.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _program() -> None:
    """Decide with Clef from the command line, and run the workers that hold a release in memory."""


for command in (
    serve,
    decide,
    batch,
    status,
    export,
    compare,
    evaluate,
    together,
    perplexity,
    chat,
    vllm,
    quantize,
    verify,
    sensitivity,
):
    app.command()(command)


def main() -> None:
    """Run the command named on the command line."""
    app(prog_name="python -m worker")


if __name__ == "__main__":
    main()
