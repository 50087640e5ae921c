"""How fast a GPU multiplies in each mode, and how well its FP8 units add: measured once per process.

FP8 operands are exact, but how many bits a GPU keeps while it adds their products is written nowhere. So its sums are
held against float64, and one that errs by more than `MAX_SUM_ERROR` gets no FP8 linears.
"""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from clef_core.fp8 import Fp8Weight, Multiply, scaled_product, split_rows
from clef_core.kernels import PLAIN
from clef_core.mxfp4 import fake_quantize, pack_codes, quantize
from clef_core.mxfp4_linear import MXFP4Linear

logger = logging.getLogger(__name__)

NUM_RUNS = 5

GPU_SHAPE = (1024, 4096, 4096)
"""Rows, features and outputs of the products timed on a GPU."""

CHECKED_ROWS, CHECKED_OUTPUTS = 64, 512
"""The corner of a GPU's product that is held against float64."""

MAX_SUM_ERROR = 2**-10
"""What an FP8 sum may be off, relative to the sum of the magnitudes of its products."""


@dataclass(frozen=True)
class GpuTimings:
    """Milliseconds of one product in three modes, the input rounded beforehand.

    `fp8_error` is the largest error of an FP8 sum, relative to the sum of its products' magnitudes and beyond the
    rounding of the result to bfloat16; it and `fp8` are infinite where the device refuses the product.
    """

    packed: float
    expanded: float
    fp8: float
    fp8_error: float

    @property
    def is_fp8_accurate(self) -> bool:
        return self.fp8_error <= MAX_SUM_ERROR


@cache
def measure_gpu_products(
    device: torch.device,
    fp8_dtype: torch.dtype,
    multiply: Multiply = scaled_product,
    shape: tuple[int, int, int] = GPU_SHAPE,
) -> GpuTimings:
    """Time FP8 products of a format beside BF16's, and see how well they add; once per process and device."""
    num_rows, features, outputs = shape
    generator = torch.Generator().manual_seed(0)

    def best_ms(run: Callable[[], object]) -> float:
        times = []
        for _ in range(1 + NUM_RUNS):
            _wait(device)
            started = time.perf_counter()
            run()
            _wait(device)
            times.append(time.perf_counter() - started)
        return min(times[1:]) * 1e3

    with torch.inference_mode():
        x, weight = (torch.randn(size, features, generator=generator).to(device) for size in (num_rows, outputs))
        for values in (x, weight):
            values[::2].abs_()  # sums that cancel, and sums that do not
        x = fake_quantize(x.bfloat16())
        packed = MXFP4Linear(features, outputs, device=device)
        codes, packed.weight_scale = quantize(weight)
        packed.weight = pack_codes(codes)
        expanded = packed.decoded_weight(torch.bfloat16)
        fp8, error = math.inf, math.inf
        try:
            prepared = Fp8Weight(expanded, fp8_dtype, PLAIN, multiply)
            rows = split_rows(x, fp8_dtype, PLAIN)
            fp8 = best_ms(lambda: prepared.product(rows))
            error = _sum_error(prepared.product(rows), x, expanded)
        except (RuntimeError, ValueError) as failure:
            logger.info("no FP8 products on %s: %s", device, str(failure).split("\n")[0])
        timings = GpuTimings(
            packed=best_ms(lambda: F.linear(x, packed.decoded_weight(x.dtype))),
            expanded=best_ms(lambda: F.linear(x, expanded)),
            fp8=fp8,
            fp8_error=error,
        )
    logger.info(
        "products of %d x %d x %d on %s: packed %.3f ms, expanded %.3f ms, FP8 %.3f ms with errors to %.1e of the sums",
        *shape, device, timings.packed, timings.expanded, timings.fp8, timings.fp8_error,
    )  # fmt: skip
    return timings


def _sum_error(product: Tensor, x: Tensor, weight: Tensor) -> float:
    """The largest error of the sums in a corner of `product`, relative to their magnitudes, rounding taken off."""
    x, weight = x[:CHECKED_ROWS].double(), weight[:CHECKED_OUTPUTS].double()
    exact = x @ weight.t()
    rounded = product[:CHECKED_ROWS, :CHECKED_OUTPUTS].double()
    half_a_place = torch.exp2(torch.frexp(rounded).exponent.double() - 9)  # bfloat16 has 8 bits
    beyond = (rounded - exact).abs() - half_a_place
    return float((beyond / (x.abs() @ weight.abs().t())).max().clamp(min=0.0))


def _wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
