"""How long one linear takes in every mode, beside BF16 and float32, at Clef's real shapes.

For each shape one table row: median milliseconds of each way. `far` is the share of rows that need a second INT8
product: inputs with alike channels need none, inputs whose channels differ in size (as a transformer's do) some.
Numbers go to standard output as a Markdown table.

Run: OMP_WAIT_POLICY=PASSIVE .venv/bin/python benchmarks/linears.py [--full]
To see a CPU without AMX on one that has it: ONEDNN_MAX_CPU_ISA=AVX512_CORE_VNNI in front.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

PROJECT = Path(__file__).parent.parent
sys.path.insert(0, str(PROJECT))

from benchmarks.conditions import conditions, time_in_turn  # noqa: E402
from clef_core.kernels import compiled_kernels  # noqa: E402
from clef_core.linear_modes import measure_products  # noqa: E402
from clef_core.mxfp4 import fake_quantize, pack_codes, quantize  # noqa: E402
from clef_core.mxfp4_linear import MXFP4Linear, Steps  # noqa: E402
from clef_core.room import keep_freed_memory  # noqa: E402

SHAPES = ((1_024, 3_584), (5_120, 17_408), (17_408, 5_120), (5_120, 6_144))
ROWS = (1, 64, 512, 1_346, 4_096, 8_192)
QUICK_SHAPES = ((1_024, 3_584), (5_120, 6_144))
QUICK_ROWS = (64, 512, 1_346, 4_096)
NUM_ROUNDS = 7
CHANNEL_SPREAD = 0.7
"""Standard deviation of the natural logarithm of the channels' sizes."""


def make_linear(weight: Tensor, steps: Steps) -> MXFP4Linear:
    codes, scales = quantize(weight)
    linear = MXFP4Linear(weight.shape[1], weight.shape[0])
    linear.weight, linear.weight_scale, linear.steps = pack_codes(codes), scales, steps
    return linear


def measure(num_rows: int, features: int, outputs: int, spread: float, steps: Steps) -> tuple[float, dict[str, float]]:
    """Share of rows with a second product, and the milliseconds of each way."""
    generator = torch.Generator().manual_seed(0)
    channels = torch.exp(spread * torch.randn(features, generator=generator))
    x = (torch.randn(num_rows, features, generator=generator) * channels).bfloat16()
    weight = fake_quantize(torch.randn(outputs, features, generator=generator) * 0.02)
    packed, expanded, int8 = (make_linear(weight, steps) for _ in range(3))
    expanded.expand(torch.bfloat16)
    int8.prepare_int8(measure_products().int8_kernel)
    bf16 = expanded.weight

    def run(linear: MXFP4Linear) -> Callable[[], object]:
        def call() -> object:
            steps.forget()
            return linear(x)

        return call

    ways: dict[str, Callable[[], object]] = {
        "BF16": lambda: F.linear(x, bf16),
        "float32": lambda: F.linear(x.float(), bf16.float()),
        "packed": run(packed),
        "expanded": run(expanded),
        "int8": run(int8),
        "int8, input shared": lambda: int8(x),
    }
    steps.forget()
    times = time_in_turn(ways, NUM_ROUNDS)
    return len(steps.split(x).far_rows) / num_rows, {name: seconds * 1e3 for name, seconds in times.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="all shapes of the 27B, 1 to 8,192 rows: half an hour")
    is_full = parser.parse_args().full
    keep_freed_memory()  # as a worker does
    print(conditions(), "\n")
    timings = measure_products()
    shared = Steps(compiled_kernels(torch.bfloat16, torch.device("cpu"), timings.int8_kernel))
    print(f"INT8 products by {timings.int8_kernel}\n")
    is_first = True
    with torch.inference_mode():
        for features, outputs in SHAPES if is_full else QUICK_SHAPES:
            for num_rows in ROWS if is_full else QUICK_ROWS:
                for spread in (0.0, CHANNEL_SPREAD):
                    far, times = measure(num_rows, features, outputs, spread, shared)
                    if is_first:
                        print("| rows | K → N | far |", " | ".join(f"{name} ms" for name in times), "| better / int8 |")
                        print("|---" * (len(times) + 4) + "|")
                        is_first = False
                    ratio = min(times["BF16"], times["float32"]) / times["int8"]
                    cells = " | ".join(f"{value:.2f}" for value in times.values())
                    print(f"| {num_rows} | {features} → {outputs} | {far:.0%} | {cells} | {ratio:.2f} |", flush=True)
