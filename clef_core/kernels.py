"""The elementwise steps around an MXFP4 product, as plain torch or fused by `torch.compile`.

Both are the same functions, so that they are equal bit for bit; compiling takes seconds and a C++ compiler, plain torch
takes several passes over memory in every call. Knows no layer and no model.
"""

import logging
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clef_core import fp8, int8, mxfp4

logger = logging.getLogger(__name__)

WARM_UP_SHAPE = (48, 256)
"""Rows and features of what the compiled steps are tried with; `dynamic` makes them fit every other shape."""


@dataclass(frozen=True)
class Kernels:
    """One implementation of every step; what each does stands with its plain function."""

    largest_bits: Callable[[Tensor], Tensor] = mxfp4.largest_bits
    round_blocks: Callable[[Tensor, Tensor], Tensor] = mxfp4.round_blocks
    place_blocks: Callable[[Tensor], tuple[Tensor, Tensor, Tensor, Tensor]] = int8.place_blocks
    scaled_codes: Callable[[Tensor, Tensor, Tensor], Tensor] = int8.scaled_codes
    finish: Callable[[Tensor, Tensor, Tensor, Tensor], None] = int8.finish
    finish_checked: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = int8.finish_checked
    finish_far: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] = int8.finish_far
    place_rows: Callable[[Tensor], tuple[Tensor, Tensor, Tensor, Tensor]] = fp8.place_rows
    fp8_values: Callable[[Tensor, Tensor, Tensor, torch.dtype], Tensor] = fp8.fp8_values

    def fake_quantize(self, x: Tensor) -> Tensor:
        """As `mxfp4.fake_quantize`."""
        blocks = x.reshape(-1, x.shape[-1] // mxfp4.BLOCK, mxfp4.BLOCK)
        exponents = mxfp4.exponents_of(self.largest_bits(blocks))
        return self.round_blocks(blocks, exponents).view(x.shape)


PLAIN = Kernels()


def compiled_kernels(
    dtype: torch.dtype,
    device: torch.device,
    kernel: int8.Int8Kernel | None = None,
    fp8_dtype: torch.dtype | None = None,
) -> Kernels:
    """Compile the steps and try them, so that no request waits for a compiler.

    Args:
        dtype, device: of what goes through the linears.
        kernel: the INT8 product to try.
        fp8_dtype: the FP8 format to try; without either, the rounding alone is tried.

    Returns:
        the compiled steps, or the plain ones where they cannot be compiled (the log says why).
    """
    started = time.perf_counter()
    # Code compiled for one width of vectors and found in the cache by another has corrupted memory (torch 2.14.1).
    own_cache = f"clef-kernels-{os.getuid()}-{torch.backends.cpu.get_cpu_capability().lower()}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / own_cache))
    compiled = Kernels(**{field.name: _compiled(getattr(PLAIN, field.name)) for field in fields(Kernels)})
    try:
        with torch.inference_mode():
            _try(compiled, dtype, device, kernel, fp8_dtype)
    except Exception as error:  # noqa: BLE001  a compiler fails in many ways, and plain torch always works
        logger.warning("the MXFP4 steps run unfused: torch.compile failed: %s", str(error).split("\n")[0])
        return PLAIN
    logger.info("compiled the MXFP4 steps in %.1f s", time.perf_counter() - started)
    return compiled


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    fused = torch.compile(function, dynamic=True)

    @wraps(function)
    def call(*tensors: Tensor) -> Any:
        # One row is a shape of its own to the compiler, and not worth a compilation.
        return fused(*tensors) if len(tensors[0]) > 1 else function(*tensors)

    return call


def _try(
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    kernel: int8.Int8Kernel | None,
    fp8_dtype: torch.dtype | None,
) -> None:
    """Run every step on values that need each of them, and compare with the plain ones: compilers have bugs too."""
    rows, features = WARM_UP_SHAPE
    x = torch.randn(rows, features, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    x[::2, : mxfp4.BLOCK] *= 2**-6
    _compare(kernels.fake_quantize(x), PLAIN.fake_quantize(x))
    if fp8_dtype is not None:
        compiled, plain = (fp8.split_rows(x, fp8_dtype, steps) for steps in (kernels, PLAIN))
        _compare(compiled.decode(torch.float32), plain.decode(torch.float32))
    if kernel is None:
        return
    weight = mxfp4.fake_quantize(x[: rows // 2] * 2)
    for may_overflow in (True, False):
        products = []
        for steps in (kernels, PLAIN):
            prepared = int8.Int8Weight(weight, kernel, steps)
            prepared.may_overflow = may_overflow
            products.append(prepared.product(int8.split_rows(x, steps), dtype)[0])
        _compare(*products)


def _compare(compiled: Tensor, plain: Tensor) -> None:
    if not torch.equal(compiled, plain):
        raise RuntimeError("the compiled steps do not compute what the plain ones do")
