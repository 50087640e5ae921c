"""Starts Quark's part of a build (`quark_build`) and listens to it.

Knows nothing of Quark but where its process tells its progress and where it talks.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from clef_core.errors import EngineError, SettingsError
from clef_core.recipe import QUARK_VERSION
from clef_core.weight_files import write_whole

PROJECT = Path(__file__).parent.parent
TAIL_CHARS = 600


def check_quark() -> None:
    """Say it early when Quark is not there.

    Raises:
        SettingsError: it is not installed.
    """
    if find_spec("quark") is None:
        raise SettingsError(
            f"AWQ needs AMD Quark: pip install amd-quark=={QUARK_VERSION}; --algorithm none works without it"
        )


def run_quark(job: Mapping[str, Any], folder: Path, report: Callable[[str, int, int], None]) -> None:
    """Run `quark_build` to its end; what Quark prints goes to `quark.log` in `folder`.

    Args:
        job: see `quark_build.build`.
        report: called with (step, done, total).

    Raises:
        EngineError: the process failed; the message has the end of its log.
    """
    job_file, log_file = folder / "quark.json", folder / "quark.log"
    write_whole(job_file, json.dumps(job))
    command = [sys.executable, "-m", "clef_core.quark_build", str(job_file)]
    with (
        log_file.open("w") as log,
        subprocess.Popen(
            command,
            cwd=PROJECT,
            stdin=subprocess.PIPE,  # never written to: it closes when this process is gone
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            close_fds=False,  # the work folder's lock goes along
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                progress = json.loads(line)
                report(progress["step"], progress["done"], progress["total"])
            process.wait()
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        tail = log_file.read_text(encoding="utf-8", errors="replace").strip()[-TAIL_CHARS:]
        status = f"was killed by signal {-process.returncode}" if process.returncode < 0 else "failed"
        raise EngineError(f"Quark's process {status}; the end of {log_file}: {tail}")
