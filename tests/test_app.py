"""`python app.py` as a person starts and ends it: in a process of its own, with everything it starts."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from web_app import PROJECT, RELEASE

from app import CANNOT_START, load_tokenizers
from clef_core.errors import ReleaseError

BODY = {"model": "clef", "state": "The order is late.", "questions": {"late": {"type": "noul"}}}


@dataclass
class Program:
    """A start of `app.py`; `environment` says on which folder and port."""

    data_dir: Path
    port: int
    environment: dict[str, str] = field(default_factory=dict)

    def start(self) -> "subprocess.Popen[str]":
        own = {
            "CLEF_DATA_DIR": str(self.data_dir),
            "CLEF_PORT": str(self.port),
            "CLEF_BF16": str(RELEASE),
            "CLEF_MXFP4": "",
            "CLEF_DEFAULT_VARIANT": "bf16",
        }
        return subprocess.Popen(
            [sys.executable, "app.py"],
            cwd=PROJECT,
            env={**os.environ, **own, **self.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def refuse(self) -> str:
        """Start it where it must refuse; returns what it says."""
        started = self.start()
        output, _ = started.communicate(timeout=60)
        assert started.returncode == CANNOT_START, output
        return output

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def decide(self) -> dict[str, object]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/systemone",
            json.dumps(BODY).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            answer: dict[str, object] = json.load(reply)
        return answer

    def wait_for(self, path: str, timeout_s: float) -> None:
        """Until the path answers 200."""
        deadline = time.monotonic() + timeout_s
        while self.get(path)[0] != 200:
            assert time.monotonic() < deadline, self.get(path)
            time.sleep(0.1)

    def processes(self) -> list[str]:
        """Command lines of the processes that were started for this data folder, by whomever."""
        marks = (f"CLEF_DATA_DIR={self.data_dir}".encode(), str(self.data_dir / "redis").encode())
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                command = (process / "cmdline").read_bytes()
                text = (process / "environ").read_bytes() + command
            except (OSError, ProcessLookupError):
                continue
            if command and any(mark in text for mark in marks):
                found.append(command.replace(b"\0", b" ").decode())
        return found


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = Program(tmp_path / "data", port)
    yield program
    if Path("/proc/self").exists():
        assert program.processes() == []


@pytest.mark.slow
def test_it_answers_refuses_a_second_start_and_ends_all_it_started(program: Program) -> None:
    app = program.start()
    try:
        program.wait_for("/", 120)
        program.wait_for("/healthz", 120)
        assert program.decide()["x_variant"] == "bf16"

        again = program.refuse()
        assert "already runs" in again
        assert f"http://127.0.0.1:{program.port}" in again
        other = Program(program.data_dir.with_name("other"), program.port)
        assert "CLEF_PORT" in other.refuse()
        assert program.get("/healthz")[0] == 200
    finally:
        app.send_signal(signal.SIGINT)
        output, _ = app.communicate(timeout=60)
    assert app.returncode == 0, output
    assert f"http://127.0.0.1:{program.port}" in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_it_ends_while_it_still_starts(program: Program) -> None:
    app = program.start()
    assert app.stdout is not None
    while not app.stdout.readline().startswith("Clef starts"):
        assert app.poll() is None
    time.sleep(1)
    app.send_signal(signal.SIGTERM)
    output, _ = app.communicate(timeout=60)
    assert app.returncode == 0, output
    assert "Traceback" not in output


@pytest.mark.slow
def test_a_killed_one_leaves_the_data_folder_to_the_next(program: Program) -> None:
    killed = program.start()
    program.wait_for("/", 120)
    killed.kill()
    killed.communicate(timeout=30)
    app = program.start()
    try:
        program.wait_for("/healthz", 120)
        assert program.decide()["x_variant"] == "bf16"
    finally:
        app.terminate()
        output, _ = app.communicate(timeout=60)
    assert app.returncode == 0, output


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"CLEF_HOST": "0.0.0.0"}, ["CLEF_API_KEY", "CLEF_AUTH"]),
        ({"CLEF_HOST": "203.0.113.7", "CLEF_ALLOW_ANONYMOUS": "1"}, ["CLEF_HOST=203.0.113.7"]),
        ({"CLEF_PORT": "http"}, ["CLEF_PORT"]),
        ({"CLEF_BF16": "/etc"}, ["/etc", "not a Clef release"]),
        ({"CLEF_DATA_DIR": "/proc/clef"}, ["/proc/clef"]),
        ({"REDIS_URL": "redis://127.0.0.1:9"}, ["127.0.0.1:9"]),
    ],
)
def test_what_cannot_work_is_refused_in_one_line_that_names_it(
    program: Program, environment: dict[str, str], words: list[str]
) -> None:
    program.environment = environment
    output = program.refuse()
    assert "Traceback" not in output
    (line,) = [line for line in output.splitlines() if line.startswith("Clef cannot start: ")]
    assert all(word in line for word in words), line


def test_a_hub_id_does_not_hold_up_the_start(tmp_path: Path) -> None:
    assert load_tokenizers({"hub": "nobody/nothing@0000000", "bf16": str(RELEASE)}).keys() == {"bf16"}
    with pytest.raises(ReleaseError, match="no such release"):
        load_tokenizers({"bf16": str(tmp_path / "absent")})
