"""The measurement before FP8 linears: it times, it finds coarse sums, and a device that refuses is no failure."""

import logging
import math

import pytest
import torch
from torch import Tensor

from clef_core import gpu_products
from clef_core.fp8 import scaled_product
from clef_core.gpu_products import MAX_SUM_ERROR, GpuTimings, measure_gpu_products

OCP = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def _small_products(monkeypatch):
    monkeypatch.setattr(gpu_products, "GPU_SHAPE", (48, 512, 64))


def measure(multiply=scaled_product) -> GpuTimings:
    """On a CPU, which has FP8 products too, slow ones."""
    return measure_gpu_products.__wrapped__(torch.device("cpu"), OCP, multiply)


def coarse(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor) -> Tensor:
    """Units that keep 8 bits while they add."""
    sums = torch.zeros(len(x), len(weight), dtype=torch.bfloat16)
    for part in range(0, x.shape[1], 16):
        sums += (x[:, part : part + 16].float() @ weight[:, part : part + 16].float().t()).bfloat16()
    return (sums.float() * x_scale.unsqueeze(1) * weight_scale).bfloat16()


def refusing(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor) -> Tensor:
    raise NotImplementedError("no scaled product here\nC++ stack")


def test_float32_sums_are_found_accurate():
    timings = measure()
    assert timings.is_fp8_accurate
    assert 0 <= timings.fp8_error < 2**-20
    assert min(timings.packed, timings.expanded, timings.fp8) > 0


def test_coarse_sums_are_found_out():
    timings = measure(coarse)
    assert timings.fp8_error > MAX_SUM_ERROR
    assert not timings.is_fp8_accurate


def test_a_device_that_refuses_the_product_has_none(caplog):
    with caplog.at_level(logging.INFO):
        timings = measure(refusing)
    assert (timings.fp8, timings.is_fp8_accurate) == (math.inf, False)
    assert "no FP8 products on cpu: no scaled product here" in caplog.text
