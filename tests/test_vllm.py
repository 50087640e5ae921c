"""What vLLM will accept, and the command for it; vLLM itself is not needed."""

import json
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest
from paths import PROJECT
from test_cli import Cli

from clef_core.release import read_release
from worker.vllm import find_device, vllm_command, vllm_problems

BF16 = PROJECT / "checkpoints" / "random-bf16"
MXFP4 = PROJECT / "checkpoints" / "random-mxfp4"


@pytest.fixture
def run_cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path / "data")


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Path]:
    """A copy of a release with another config.json."""

    def change(source: Path, edit: Callable[[dict], None]) -> Path:
        path = tmp_path / source.name
        copytree(source, path)
        config = json.loads((path / "config.json").read_text())
        edit(config)
        (path / "config.json").write_text(json.dumps(config))
        return path

    return change


def test_the_shipped_bf16_release_is_accepted_anywhere() -> None:
    files = read_release(BF16)
    assert vllm_problems(files, "cpu") == []
    assert vllm_problems(files, "gpu") == []


def test_an_mxfp4_release_is_for_a_gpu() -> None:
    files = read_release(MXFP4)
    assert vllm_problems(files, "gpu") == []
    (problem,) = vllm_problems(files, "cpu")
    assert "no MXFP4 kernel for a CPU" in problem


def test_a_release_without_index_is_refused(changed) -> None:
    path = changed(BF16, lambda config: None)
    (path / "model.safetensors.index.json").unlink()
    (problem,) = vllm_problems(read_release(path), "gpu")
    assert problem.startswith("model.safetensors.index.json is missing")


def test_small_heads_are_refused_on_a_cpu(changed) -> None:
    path = changed(BF16, lambda config: config["text_config"].update(head_dim=32))
    assert vllm_problems(read_release(path), "gpu") == []
    (problem,) = vllm_problems(read_release(path), "cpu")
    assert problem == "heads of 32 dimensions: vLLM's attention on a CPU needs at least 64"


def test_quarks_algorithm_must_be_null(changed) -> None:
    path = changed(MXFP4, lambda config: config["quantization_config"].update(algo_config={"name": "awq"}))
    (problem,) = vllm_problems(read_release(path), "gpu")
    assert "algo_config" in problem


def test_the_commands() -> None:
    files = read_release(BF16)
    assert str(vllm_command(files, "gpu")) == f"vllm serve {BF16} --max-model-len 16384 --port 8000"
    assert str(vllm_command(files, "cpu", "/env/bin/python", 9000)) == (
        f"/env/bin/python -m vllm.entrypoints.openai.api_server --model {BF16} "
        "--dtype bfloat16 --enforce-eager --max-model-len 16384 --port 9000"
    )


def test_a_short_model_is_served_as_long_as_it_is(changed) -> None:
    path = changed(BF16, lambda config: config["text_config"].update(max_position_embeddings=4096))
    assert "--max-model-len 4096" in str(vllm_command(read_release(path), "gpu"))


def test_the_device_is_a_gpu_where_a_driver_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("worker.vllm.GPU_FILES", (str(tmp_path / "none"),))
    assert find_device() == "cpu"
    (tmp_path / "kfd").touch()
    monkeypatch.setattr("worker.vllm.GPU_FILES", (str(tmp_path / "kfd"),))
    assert find_device() == "gpu"


def test_the_command_line_prints_or_refuses(tmp_path: Path, run_cli) -> None:
    printed = run_cli("vllm", "bf16", "--device", "cpu")
    assert printed.code == 0
    assert printed.stdout.startswith("python -m vllm.entrypoints.openai.api_server --model ")
    refused = run_cli("vllm", MXFP4, "--device", "cpu")
    assert (refused.code, refused.stdout) == (2, "")
    assert "no MXFP4 kernel for a CPU" in refused.stderr
    run_cli("vllm", tmp_path / "nowhere").assert_bad_input("no such release")


def test_run_needs_vllm_and_then_becomes_it(tmp_path: Path, run_cli) -> None:
    run_cli("vllm", "bf16", "--device", "cpu", "--run", "--python", sys.executable).assert_bad_input("has no vLLM")
    python = tmp_path / "python"  # an environment that has vLLM, as far as a look tells
    python.write_text('#!/bin/sh\n[ "$1" = -c ] && exit 0\necho "started $@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    outcome = run_cli("vllm", "bf16", "--device", "cpu", "--run", "--python", python)
    assert outcome.code == 0
    assert outcome.stdout.startswith("started -m vllm.entrypoints.openai.api_server --model ")
