"""Tokens per second of a model of the 27B's shape on a GPU: BF16 and every MXFP4 mode that the GPU has.

The weights are random and made on the device, packed where they are MXFP4, so that no file is needed; only the language
model is built, without head and lm_head. For each mode and length: tokens per second, their share of the matrix peak
(2 operations per weight of a linear and token, against the rate of one large square BF16 product), and memory.
In FP8 a share above 1 is possible: the peak is BF16's.

It has never run on a GPU where it was written: there was none. `--device cpu --scale small` tries the code anywhere.

Run: .venv/bin/python benchmarks/gpu_27b.py [--layers 64] [--tokens 512 2048 8192] [--modes bf16 packed expanded fp8]
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextModel

PROJECT = Path(__file__).parent.parent
sys.path.insert(0, str(PROJECT))

from benchmarks.conditions import conditions  # noqa: E402
from clef_core import delta_rule, gpu  # noqa: E402
from clef_core.errors import SettingsError  # noqa: E402
from clef_core.gpu_products import measure_gpu_products  # noqa: E402
from clef_core.linear_modes import prepare_linears  # noqa: E402
from clef_core.mxfp4_linear import MXFP4Linear, Steps  # noqa: E402

SCALES: dict[str, dict[str, int]] = {
    "27b": {
        "hidden_size": 5_120, "intermediate_size": 17_408, "num_attention_heads": 24, "num_key_value_heads": 4,
        "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "vocab_size": 248_320,
    },
    "small": {
        "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64,
        "linear_value_head_dim": 64, "vocab_size": 2_048,
    },
}  # fmt: skip
LAYERS = {"27b": 64, "small": 4}
PEAK_SIZE = {"27b": 8_192, "small": 256}
"""Side of the square product that gives the peak."""

NUM_RUNS = 5
GIB = 2**30


@dataclass(frozen=True)
class Place:
    """Where it runs, and how large."""

    device: torch.device
    scale: str
    num_layers: int

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def best_seconds(self, run: Callable[[], object]) -> float:
        """Shortest of a few runs after a first one, each until the device is done."""
        times = []
        for _ in range(1 + NUM_RUNS):
            self.wait()
            started = time.perf_counter()
            run()
            self.wait()
            times.append(time.perf_counter() - started)
        return min(times[1:])

    def peak_operations(self) -> float:
        """Operations per second of a square BF16 product."""
        size = PEAK_SIZE[self.scale]
        square = torch.randn(size, size, device=self.device, dtype=torch.bfloat16)
        return 2 * size**3 / self.best_seconds(lambda: square @ square)

    def highest_gib(self) -> str:
        """The most memory that tensors took since `build`."""
        return f"{torch.cuda.max_memory_allocated(self.device) / GIB:.1f}" if self.device.type == "cuda" else "–"


def build(place: Place, *, is_mxfp4: bool) -> Qwen3_5TextModel:
    """The language model with random weights, every linear of its layers MXFP4 or BF16."""
    num_layers = place.num_layers
    kinds = ["full_attention" if number % 4 == 3 else "linear_attention" for number in range(num_layers)]
    config = Qwen3_5TextConfig(**SCALES[place.scale], num_hidden_layers=num_layers, layer_types=kinds)
    with torch.device("meta"):
        model = Qwen3_5TextModel._from_config(config, dtype=torch.bfloat16)
    for parent in list(model.modules()) if is_mxfp4 else []:
        for name, module in list(parent.named_children()):
            if type(module) is nn.Linear:
                setattr(parent, name, random_linear(module, place.device))
    for parent in model.modules():
        for name, parameter in parent._parameters.items():
            if parameter is not None:
                values = torch.empty(parameter.shape, device=place.device, dtype=torch.bfloat16)
                values = values.normal_(0, 0.02) if values.ndim > 1 else values.fill_(1)
                parent._parameters[name] = nn.Parameter(values, requires_grad=False)
    model.rotary_emb = type(model.rotary_emb)(config).to(place.device)
    return model.eval()


def random_linear(linear: nn.Linear, device: torch.device) -> MXFP4Linear:
    """Random codes under scales of 2**-8 to 2**-6: weights of about 0.02."""
    packed = MXFP4Linear(linear.in_features, linear.out_features, device=device)
    packed.weight.random_(0, 256)
    packed.weight_scale.random_(119, 122)
    return packed


def num_linear_weights(model: nn.Module) -> int:
    linears = [module for module in model.modules() if isinstance(module, nn.Linear | MXFP4Linear)]
    return sum(linear.in_features * linear.out_features for linear in linears)


def weight_gib(model: nn.Module) -> float:
    return sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()]) / GIB


def forward(model: Qwen3_5TextModel, ids: Tensor, steps: Steps | None) -> None:
    with nullcontext() if ids.is_cuda else delta_rule.installed():
        model(input_ids=ids, use_cache=False)
    if steps is not None:
        steps.forget()


def measure(place: Place, mode: str, tokens: list[int], peak: float) -> None:
    """Print the table's rows of one mode."""
    if place.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(place.device)
    model = build(place, is_mxfp4=mode != "bf16")
    steps = prepare_linears(model, mode, place.device, torch.bfloat16) if mode != "bf16" else None
    vocabulary = SCALES[place.scale]["vocab_size"]
    for num_tokens in tokens:
        ids = torch.randint(0, vocabulary, (1, num_tokens), device=place.device)
        seconds = place.best_seconds(lambda: forward(model, ids, steps))  # noqa: B023
        share = 2 * num_linear_weights(model) * num_tokens / seconds / peak
        print(
            f"| {mode} | {num_tokens} | {num_tokens / seconds:,.0f} | {share:.0%} | {weight_gib(model):.1f} "
            f"| {place.highest_gib()} |",
            flush=True,
        )


def main(place: Place, modes: list[str], tokens: list[int]) -> None:
    print(conditions(), "\n")
    if place.device.type == "cuda":
        found = gpu.read_gpu(place.device)
        print(f"{found.name}, torch for {torch.version.cuda or torch.version.hip}")
        print(f"Missing packages: {', '.join(gpu.missing_packages()) or 'none'}")
        if found.fp8_dtype is not None:
            print(f"One product in each mode: {measure_gpu_products(place.device, found.fp8_dtype)}")
    with torch.inference_mode():
        peak = place.peak_operations()
        print(f"{place.num_layers} layers of scale {place.scale}, peak {peak / 1e12:.1f} TFLOP/s in BF16\n")
        print("| linears | tokens | tokens/s | of the peak | weights GiB | highest GiB |\n|---|---|---|---|---|---|")
        for mode in modes:
            try:
                measure(place, mode, tokens, peak)
            except (torch.OutOfMemoryError, SettingsError) as error:
                print(f"| {mode} | not measured: {str(error).splitlines()[0]} | | | | |", flush=True)
            gc.collect()
            if place.device.type == "cuda":
                torch.cuda.empty_cache()


def run(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 or, to try the code, cpu")
    parser.add_argument("--scale", choices=SCALES, default="27b")
    parser.add_argument("--layers", type=int, help="64 at 27b, 4 at small; every fourth is full attention")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2_048, 8_192])
    parser.add_argument("--modes", nargs="+", default=["bf16", "packed", "expanded", "fp8"])
    chosen = parser.parse_args(arguments)
    device = torch.device(chosen.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("Not measured: there is no GPU here.")
        return
    main(Place(device, chosen.scale, chosen.layers or LAYERS[chosen.scale]), chosen.modes, chosen.tokens)


if __name__ == "__main__":
    run()
