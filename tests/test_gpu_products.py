"""The measurement before FP8 linears: it times, it finds coarse sums, and a device that refuses is no failure."""

import logging
import math

import torch
from torch import Tensor

from clef_core.fp8 import Multiply, scaled_product
from clef_core.gpu_products import MAX_SUM_ERROR, GpuTimings, measure_gpu_products

OCP = torch.float8_e4m3fn
SMALL_SHAPE = (16, 4096, 16)


def measure(multiply: Multiply = scaled_product) -> GpuTimings:
    """On a CPU, which has FP8 products too, slow ones."""
    return measure_gpu_products.__wrapped__(torch.device("cpu"), OCP, multiply, SMALL_SHAPE)


def short_sums(products_per_sum: int) -> Multiply:
    """Units as Hopper's are described: they add 32 products at a time, aligned to the largest and cut to 14 bits, and
    hand their sum over to float32 after so many products.

    Source: DeepSeek-V3 Technical Report (arXiv 2412.19437), 3.3.2.
    """

    def multiply(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor) -> Tensor:
        total = torch.zeros(len(x), len(weight))
        short = torch.zeros(len(x), len(weight), dtype=torch.float64)
        for start in range(0, x.shape[1], 32):
            part = slice(start, start + 32)
            terms = x[:, None, part].double() * weight[None, :, part].double()
            terms = torch.cat([terms, short.unsqueeze(-1)], -1)
            unit = torch.exp2(torch.frexp(terms.abs().amax(-1)).exponent.double() - 14).unsqueeze(-1)
            short = (torch.trunc(terms / unit) * unit).sum(-1)
            if (start + 32) % products_per_sum == 0:
                total += short.float()
                short.zero_()
        return (total * x_scale.unsqueeze(1) * weight_scale).bfloat16()

    return multiply


def refusing(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor) -> Tensor:
    raise NotImplementedError("no scaled product here\nC++ stack")


def test_float32_sums_are_found_accurate():
    timings = measure()
    assert timings.is_fp8_accurate
    assert 0 <= timings.fp8_error < 2**-20
    assert min(timings.packed, timings.expanded, timings.fp8) > 0


def test_short_sums_that_are_handed_over_early_are_accurate():
    assert measure(short_sums(128)).is_fp8_accurate


def test_short_sums_over_a_whole_row_are_found_out():
    timings = measure(short_sums(4096))
    assert timings.fp8_error > MAX_SUM_ERROR
    assert not timings.is_fp8_accurate


def test_a_device_that_refuses_the_product_has_none(caplog):
    with caplog.at_level(logging.INFO):
        timings = measure(refusing)
    assert (timings.fp8, timings.is_fp8_accurate) == (math.inf, False)
    assert "no FP8 products on cpu: no scaled product here" in caplog.text
