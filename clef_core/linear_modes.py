"""How the linears of a loaded backbone compute: chosen by device, memory and a short measurement.

On a CPU the fastest way to multiply differs widely: with AMX, BF16 beats float32 five times over; without, it may be
three times slower, and INT8 beats both. So products of one shape are timed once per process, in a few hundredths of a
second. The margins are wide, because the choice moves the last bits of the answers and must not flip with the load.
On a GPU with FP8 units their products are tried too (`clef_core.gpu_products`).
"""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clef_core import gpu
from clef_core.errors import SettingsError
from clef_core.gpu_products import MAX_SUM_ERROR, measure_gpu_products
from clef_core.int8 import Int8Kernel, Int8Weight, split_rows
from clef_core.kernels import PLAIN, compiled_kernels
from clef_core.mxfp4 import fake_quantize
from clef_core.mxfp4_linear import LinearMode, MXFP4Linear, Steps
from clef_core.room import drop_pages, free_memory_bytes

logger = logging.getLogger(__name__)

MEASURED_SHAPE = (256, 1024, 1024)
"""Rows, features and outputs of the timed products."""

CLEAR_MARGIN = 1.5
"""A way is taken for faster when it takes less than 1 / 1.5 of the other's time."""

HOPELESS = 5
"""An INT8 product that takes so many times as long as float32's on a small shape is not tried on a larger one."""

MIN_COMPILED_WEIGHTS = 2**24
"""With fewer quantised weights, compiling the steps around the products costs more than it saves."""

MEMORY_SHARE = 0.25
"""Weights are kept in a larger form when that takes at most this share of the device's free memory."""

INT8_BYTES_PER_WEIGHT = 1.54
"""One INT8 value beside the code and its share of a scale."""

FP8_BYTES_PER_WEIGHT = 1.0
"""Codes and scales go."""


class Float32Linear(nn.Linear):
    """A linear with BF16 weights whose product runs in float32, for CPUs on which BF16 products are slow."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight = linear.weight
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return F.linear(x.float(), self.weight.float(), bias).to(x.dtype)


@dataclass(frozen=True)
class Timings:
    """Milliseconds of one product of `MEASURED_SHAPE` on this CPU, with the threads that torch has.

    `int8_kernel` is None where no INT8 product is exact; `int8` is infinite there, and where it is far too slow.
    """

    bfloat16: float
    float32: float
    int8: float
    int8_kernel: Int8Kernel | None

    @property
    def is_float32_faster(self) -> bool:
        """Than BF16, clearly."""
        return self.float32 * CLEAR_MARGIN < self.bfloat16

    @property
    def is_int8_faster(self) -> bool:
        """Than the product in BF16, clearly."""
        return self.int8 * CLEAR_MARGIN < self.bfloat16


@cache
def measure_products() -> Timings:
    """Time the ways to multiply; about 50 ms, once per process."""
    num_rows, features, outputs = MEASURED_SHAPE
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        x = fake_quantize(torch.randn(num_rows, features, generator=generator).bfloat16())
        weight = fake_quantize(torch.randn(outputs, features, generator=generator).bfloat16())
        small, small_weight = x[:64, :512].contiguous(), weight[:256, :512].contiguous()
        exact = _exact_int8_kernels(small, small_weight)
        limit = HOPELESS * _best_ms(lambda: F.linear(small.float(), small_weight.float()))
        int8 = {kernel: _int8_ms(x, weight, kernel) for kernel, ms in exact.items() if ms <= limit}
        found = int8 or exact
        fastest = min(found, key=lambda kernel: found[kernel], default=None)
        timings = Timings(
            bfloat16=_best_ms(lambda: F.linear(x, weight)),
            float32=_best_ms(lambda: F.linear(x.float(), weight.float())),
            int8=min(int8.values(), default=math.inf),
            int8_kernel=fastest,
        )
    logger.info(
        "products of %d x %d x %d: BF16 %.2f ms, float32 %.2f ms, INT8 %.2f ms (%s)",
        *MEASURED_SHAPE, timings.bfloat16, timings.float32, timings.int8, fastest or "none is exact here",
    )  # fmt: skip
    return timings


def _exact_int8_kernels(x: Tensor, weight: Tensor) -> dict[Int8Kernel, float]:
    """The kernels that are exact on this CPU, with their milliseconds.

    Tried on a small product, as oneDNN's is a thousand times slower than torch's on CPUs that it has no code for.
    """
    kernels: tuple[Int8Kernel, ...] = ("int_mm", "onednn")
    found: dict[Int8Kernel, float] = {}
    for kernel in kernels:
        try:
            if _is_exact(kernel):
                found[kernel] = _int8_ms(x, weight, kernel)
        except RuntimeError as error:
            logger.info("no INT8 products by %s: %s", kernel, str(error).split("\n")[0])
    return found


def _is_exact(kernel: Int8Kernel) -> bool:
    """Without VNNI, CPUs add INT8 products in 16 bits that overflow: the largest values show it."""
    features = 1_024
    x = torch.full((8, features), 6.0).bfloat16()
    x[1::2, ::3] = -6.0
    product, _ = Int8Weight(x, kernel, PLAIN).product(split_rows(x, PLAIN), torch.float32)
    return torch.equal(product.double(), x.double() @ x.double().t())


def _int8_ms(x: Tensor, weight: Tensor, kernel: Int8Kernel) -> float:
    rows, prepared = split_rows(x, PLAIN), Int8Weight(weight, kernel, PLAIN)
    return _best_ms(lambda: prepared.product(rows, torch.bfloat16))


def _best_ms(run: Callable[[], object], num_runs: int = 5) -> float:
    """Shortest time: the one that other processes disturbed least."""
    run()
    times = []
    for _ in range(num_runs):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times) * 1e3


def choose_mode(num_weights: int, device: torch.device, dtype: torch.dtype) -> LinearMode:
    """The mode for so many quantised weights.

    INT8 on a CPU, FP8 on a GPU, where it is clearly faster (on a CPU not if the weights are few and BF16 is fast too);
    decoded once where memory allows; else packed.
    """
    room = MEMORY_SHARE * _free_bytes(device)
    if device.type == "cpu" and dtype == torch.bfloat16 and num_weights * INT8_BYTES_PER_WEIGHT <= room:
        timings = measure_products()
        if timings.is_int8_faster and (num_weights >= MIN_COMPILED_WEIGHTS or timings.is_float32_faster):
            return "int8"
    plain: LinearMode = "expanded" if num_weights * dtype.itemsize <= room else "packed"
    if device.type == "cuda" and dtype == torch.bfloat16 and num_weights * FP8_BYTES_PER_WEIGHT <= room:
        fp8_dtype = gpu.read_gpu(device).fp8_dtype
        if fp8_dtype is not None:
            products = measure_gpu_products(device, fp8_dtype)
            plain_ms = products.expanded if plain == "expanded" else products.packed
            if products.is_fp8_accurate and products.fp8 * CLEAR_MARGIN < plain_ms:
                return "fp8"
    return plain


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_memory_bytes()


def prepare_linears(
    model: nn.Module, mode: LinearMode, device: torch.device, dtype: torch.dtype, *, is_mapped: bool = False
) -> Steps:
    """Bring every `MXFP4Linear` into a mode, sharing one `Steps`, compiled where the weights are many.

    Args:
        is_mapped: whether the codes lie in mapped files, so that their pages can go once they are decoded.

    Raises:
        SettingsError: INT8 products were asked for on another device than a CPU, FP8 products on one without FP8 units
            or in another dtype than bfloat16, or the device's products are not what they should be.
    """
    if mode == "int8" and device.type != "cpu":
        raise SettingsError(f"the linear mode int8 runs on a CPU, not on {device}; use packed or expanded")
    kernel = measure_products().int8_kernel if mode == "int8" else None
    if mode == "int8" and kernel is None:
        raise SettingsError("the linear mode int8 needs exact INT8 products, which this CPU lacks; use expanded")
    fp8_dtype = _fp8_dtype(device, dtype) if mode == "fp8" else None
    linears = [module for module in model.modules() if isinstance(module, MXFP4Linear)]
    num_weights = sum(linear.in_features * linear.out_features for linear in linears)
    steps = Steps(compiled_kernels(dtype, device, kernel, fp8_dtype) if num_weights >= MIN_COMPILED_WEIGHTS else PLAIN)
    for linear in linears:
        linear.steps = steps
        if mode == "expanded":
            codes = linear.weight
            linear.expand(dtype)
            if is_mapped:
                drop_pages(codes)
        elif kernel is not None:
            linear.prepare_int8(kernel)
        elif fp8_dtype is not None:
            linear.prepare_fp8(fp8_dtype)
    return steps


def _fp8_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The format of the device's FP8 products, once they are known to work.

    Raises:
        SettingsError: they do not.
    """
    if device.type != "cuda":
        raise SettingsError(f"the linear mode fp8 runs on a GPU, not on {device}; use int8, packed or expanded")
    if dtype != torch.bfloat16:
        raise SettingsError(f"the linear mode fp8 computes in bfloat16, not in {dtype}; use packed or expanded")
    found = gpu.read_gpu(device)
    if found.fp8_dtype is None:
        needed = "FP8 units (NVIDIA Ada and later, AMD MI300 and later)"
        raise SettingsError(f"the linear mode fp8 needs {needed}, which {found.name} lacks; use packed or expanded")
    products = measure_gpu_products(device, found.fp8_dtype)
    if math.isinf(products.fp8):
        raise SettingsError(
            f"{found.name} does not multiply FP8 with this torch (the log says why); use packed or expanded"
        )
    if not products.is_fp8_accurate:
        raise SettingsError(
            f"the linear mode fp8 needs sums within {MAX_SUM_ERROR:.1e} of their magnitudes, "
            f"and those of {found.name} are off by {products.fp8_error:.1e}; use packed or expanded"
        )
    return found.fp8_dtype


def use_float32_products(model: nn.Module) -> None:
    """Replace every BF16 linear by one that multiplies in float32."""
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if type(module) is nn.Linear and module.weight.dtype == torch.bfloat16:
                setattr(parent, name, Float32Linear(module))
