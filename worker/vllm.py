"""Will vLLM serve a release, and with which command? Looks at files only; vLLM itself is not needed for the answer.

The rules are those seen with vLLM 0.32. What surprises: vLLM serves the backbone (text in, text out, prompt
log-probabilities); the joint head stays unused, so it is for chat and perplexity, not for decisions.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from clef_core.release import INDEX, ReleaseFiles

Device = Literal["cpu", "gpu"]

MAX_MODEL_TOKENS = 16_384
MIN_CPU_HEAD_DIM = 64
DEFAULT_PORT = 8_000
GPU_FILES = ("/dev/nvidia0", "/dev/kfd")
"""Device files of NVIDIA's and AMD's drivers."""


@dataclass(frozen=True)
class VllmCommand:
    """How to start vLLM on a release. `program` is what must be installed."""

    program: str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join([self.program, *self.arguments])


def find_device() -> Device:
    """Where vLLM would run on this machine."""
    return "gpu" if any(Path(file).exists() for file in GPU_FILES) else "cpu"


def vllm_problems(files: ReleaseFiles, device: Device) -> list[str]:
    """Why vLLM would not serve the release; empty when nothing speaks against it."""
    problems = []
    if not (files.path / INDEX).is_file():
        problems.append(
            f"{INDEX} is missing: without it vLLM reads every *.safetensors of the directory and stops at the joint "
            "head's tensors"
        )
    quantization: Mapping[str, Any] = files.config.get("quantization_config") or {}
    if quantization.get("algo_config") is not None:
        problems.append("config.json: vLLM cannot read quantization_config.algo_config; it must be null")
    if device == "cpu" and files.kind == "mxfp4":
        problems.append("vLLM has no MXFP4 kernel for a CPU; serve the BF16 release there, or this one on a GPU")
    if device == "cpu" and (head_dim := _head_dim(files)) < MIN_CPU_HEAD_DIM:
        problems.append(f"heads of {head_dim} dimensions: vLLM's attention on a CPU needs at least {MIN_CPU_HEAD_DIM}")
    return problems


def vllm_command(files: ReleaseFiles, device: Device, python: str = "python", port: int = DEFAULT_PORT) -> VllmCommand:
    """The command that serves the release, in bfloat16 and as long as our own limit (or the model's, if shorter)."""
    longest = min(MAX_MODEL_TOKENS, _text_config(files).get("max_position_embeddings", MAX_MODEL_TOKENS))
    common = ("--max-model-len", str(longest), "--port", str(port))
    if device == "gpu":
        return VllmCommand("vllm", ("serve", str(files.path), *common))
    server = ("-m", "vllm.entrypoints.openai.api_server", "--model", str(files.path))
    return VllmCommand(python, (*server, "--dtype", "bfloat16", "--enforce-eager", *common))


def _text_config(files: ReleaseFiles) -> Mapping[str, Any]:
    found: Mapping[str, Any] = files.config.get("text_config") or files.config
    return found


def _head_dim(files: ReleaseFiles) -> int:
    text = _text_config(files)
    return int(text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"])
