"""How linears compute: every mode gives the same answers but for rounding, and the choice follows the measurement."""

import math
from pathlib import Path

import pytest
import torch
from paths import GOLDEN, PROJECT
from torch import Tensor, nn

from clef_core import gpu, linear_modes
from clef_core.errors import SettingsError
from clef_core.gpu import Gpu
from clef_core.gpu_products import GpuTimings
from clef_core.kernels import PLAIN
from clef_core.linear_modes import (
    Float32Linear,
    Timings,
    choose_mode,
    measure_products,
    prepare_linears,
    use_float32_products,
)
from clef_core.model import Release, load_release
from clef_core.mxfp4_linear import MXFP4Linear, Steps

CPU = torch.device("cpu")
RELEASE = GOLDEN / "release-mxfp4"
BF16 = PROJECT / "checkpoints" / "random-bf16"


@pytest.fixture(scope="module")
def by_mode() -> dict[str, Release]:
    return {mode: load_release(RELEASE, linear_mode=mode) for mode in ("expanded", "packed", "int8")}


@pytest.fixture(scope="module")
def with_fp8() -> Release:
    """FP8 linears on a CPU, whose own FP8 products add in float32; a person cannot ask for them there."""
    release = load_release(RELEASE, linear_mode="packed")
    for linear in linears(release).values():
        linear.prepare_fp8(torch.float8_e4m3fn)
    return release


def linears(release: Release) -> dict[str, MXFP4Linear]:
    return {name: module for name, module in release.backbone.named_modules() if isinstance(module, MXFP4Linear)}


def ulps(left: Tensor, right: Tensor) -> int:
    """Distance of bfloat16 values in units in the last place."""
    bits = [values.view(torch.int16).int() for values in (left, right)]
    ordered = [torch.where(one < 0, -(one & 0x7FFF), one) for one in bits]
    return int((ordered[0] - ordered[1]).abs().max())


def test_int8_is_the_float64_product_rounded_once_in_every_linear(by_mode):
    for name, linear in linears(by_mode["int8"]).items():
        x = torch.randn(17, linear.in_features, generator=torch.Generator().manual_seed(1)).bfloat16()
        exact = PLAIN.fake_quantize(x).double() @ linear.decoded_weight(torch.float32).double().t()
        assert (linear(x).double() - exact).abs().max() <= exact.abs().max() * 2**-8, name
        assert linear.mode == "int8"


def test_int8_lies_within_one_unit_in_the_last_place_of_expanded(by_mode):
    others = linears(by_mode["expanded"])
    for name, linear in linears(by_mode["int8"]).items():
        x = torch.randn(2, 9, linear.in_features, generator=torch.Generator().manual_seed(2)).bfloat16()
        left, right = linear(x), others[name](x)
        exact = PLAIN.fake_quantize(x).double() @ linear.decoded_weight(torch.float32).double().t()
        # A sum that cancels to nearly nothing has a tiny last place; float32 sums err by their operands' size.
        is_clear = exact.abs() > exact.abs().mean() / 16
        assert ulps(left[is_clear], right[is_clear]) <= 1, name


def test_linears_that_read_the_same_tensor_share_its_rounding():
    calls = []

    class Counted(Steps):
        def _split_rows(self, x):
            calls.append(x)
            return super()._split_rows(x)

    steps = Counted(PLAIN)
    x, y = torch.randn(2, 3, 64).bfloat16().unbind()
    assert steps.split(x) is steps.split(x)
    assert len(calls) == 1
    steps.split(y)
    steps.split(x)
    assert len(calls) == 3
    x[0] = 0
    assert steps.split(x).near[0].eq(0).all()
    steps.forget()
    assert torch.equal(steps.rounded(y), PLAIN.fake_quantize(y))


def test_the_measurement_finds_a_working_product():
    timings = measure_products()
    assert min(timings.bfloat16, timings.float32, timings.int8) > 0
    assert measure_products() is timings


def test_memory_that_holds_copies_of_files_counts_as_free():
    """Reading a release of 19 GB fills what is free with its pages, which the system gives back."""
    if not Path("/proc/meminfo").is_file():
        pytest.skip("no /proc/meminfo here")
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    assert linear_modes._free_bytes(CPU) <= 1.1 * available
    if not Path("/sys/fs/cgroup/memory.max").is_file():
        assert linear_modes._free_bytes(CPU) >= 0.9 * available


def test_a_busy_moment_takes_no_mode_away(monkeypatch):
    """Whoever asks for int8 gets it wherever it is exact, however slow it looked."""
    monkeypatch.setattr(linear_modes, "_int8_ms", lambda *_: 1e6)
    timings = measure_products.__wrapped__()
    assert (timings.int8, timings.int8_kernel is None) == (math.inf, False)
    assert not timings.is_int8_faster


@pytest.mark.parametrize(
    ("timings", "num_weights", "mode"),
    [
        (Timings(4.0, 30.0, 2.0, "onednn"), 2**30, "int8"),  # AMX, a large release
        (Timings(4.0, 30.0, 2.0, "onednn"), 2**20, "expanded"),  # AMX, a small one: compiling would cost more
        (Timings(60.0, 30.0, 9.0, "int_mm"), 2**20, "int8"),  # BF16 is slow here, whatever the size
        (Timings(4.0, 30.0, 3.5, "onednn"), 2**30, "expanded"),  # no clear difference
        (Timings(60.0, 30.0, 9.0, "int_mm"), 2**37, "packed"),  # does not fit otherwise
    ],
)
def test_the_mode_follows_speed_and_memory(timings, num_weights, mode, monkeypatch):
    monkeypatch.setattr(linear_modes, "measure_products", lambda: timings)
    monkeypatch.setattr(linear_modes, "_free_bytes", lambda _: 24 * 2**30)
    assert choose_mode(num_weights, CPU, torch.bfloat16) == mode


def test_fp8_lies_within_one_unit_in_the_last_place_of_expanded(by_mode, with_fp8):
    others = linears(by_mode["expanded"])
    for name, linear in linears(with_fp8).items():
        x = torch.randn(2, 9, linear.in_features, generator=torch.Generator().manual_seed(3)).bfloat16()
        x[0, 4, :32] *= 2.0**20
        left, right = linear(x), others[name](x)
        exact = PLAIN.fake_quantize(x).double() @ linear.decoded_weight(torch.float32).double().t()
        # As for int8: a sum that cancels to nearly nothing has a tiny last place.
        is_clear = exact.abs() > exact.abs().mean(-1, keepdim=True) / 16
        assert ulps(left[is_clear], right[is_clear]) <= 1, name
        assert torch.equal(left[0, 4], others[name](x[:1, 4:5])[0, 0]), name
        assert torch.equal(linear.decoded_weight(torch.bfloat16), others[name].weight), name
        assert (linear.mode, left.shape) == ("fp8", right.shape)


def test_fp8_weights_take_half_the_memory_of_expanded_ones(by_mode, with_fp8):
    def num_bytes(release: Release) -> int:
        return sum(buffer.nbytes for linear in linears(release).values() for buffer in linear.buffers())

    assert num_bytes(with_fp8) <= 0.51 * num_bytes(by_mode["expanded"])


CUDA = torch.device("cuda", 0)
H200, A100 = Gpu("H200", (9, 0)), Gpu("A100", (8, 0))


@pytest.mark.parametrize(
    ("device", "products", "free_gib", "mode"),
    [
        (H200, GpuTimings(1.0, 0.3, 0.15, 2e-5), 140, "fp8"),
        (H200, GpuTimings(1.0, 0.3, 0.25, 2e-5), 140, "expanded"),  # no clear difference
        (H200, GpuTimings(1.0, 0.3, 0.15, 2e-3), 140, "expanded"),  # sums too coarse
        (H200, GpuTimings(1.0, 0.3, math.inf, math.inf), 140, "expanded"),  # no product in this torch
        (H200, GpuTimings(1.0, 0.3, 0.25, 2e-5), 6, "fp8"),  # against packed, as expanded does not fit
        (H200, GpuTimings(1.0, 0.3, 0.15, 2e-5), 3, "packed"),
        (A100, GpuTimings(1.0, 0.3, 0.15, 2e-5), 140, "expanded"),  # no FP8 units
    ],
)
def test_fp8_is_chosen_where_it_is_clearly_faster_accurate_and_fits(device, products, free_gib, mode, monkeypatch):
    monkeypatch.setattr(linear_modes, "_free_bytes", lambda _: free_gib * 2**30)
    monkeypatch.setattr(gpu, "read_gpu", lambda _: device)
    monkeypatch.setattr(linear_modes, "measure_gpu_products", lambda device, dtype: products)
    assert choose_mode(2**30, CUDA, torch.bfloat16) == mode


@pytest.mark.parametrize(
    ("device", "gpu_there", "dtype", "products", "message"),
    [
        (CPU, None, torch.bfloat16, None, "fp8 runs on a GPU, not on cpu; use int8"),
        (CUDA, H200, torch.float32, None, "computes in bfloat16, not in torch.float32"),
        (CUDA, A100, torch.bfloat16, None, "needs FP8 units .* which A100 lacks"),
        (CUDA, H200, torch.bfloat16, GpuTimings(1.0, 0.3, math.inf, math.inf), "H200 does not multiply FP8"),
        (CUDA, H200, torch.bfloat16, GpuTimings(1.0, 0.3, 0.1, 2e-3), "within 9.8e-04 .* H200 are off by 2.0e-03"),
    ],
)
def test_fp8_is_refused_where_it_cannot_be_had(device, gpu_there, dtype, products, message, monkeypatch):
    monkeypatch.setattr(gpu, "read_gpu", lambda _: gpu_there)
    monkeypatch.setattr(linear_modes, "measure_gpu_products", lambda device, dtype: products)
    with pytest.raises(SettingsError, match=message):
        prepare_linears(nn.Module(), "fp8", device, dtype)


def test_preparing_for_fp8_brings_every_linear_into_the_gpus_format(monkeypatch):
    monkeypatch.setattr(gpu, "read_gpu", lambda _: Gpu("MI300X", (9, 4), "gfx942"))
    monkeypatch.setattr(linear_modes, "measure_gpu_products", lambda device, dtype: GpuTimings(1.0, 0.3, 0.1, 1e-5))
    model = nn.Sequential(MXFP4Linear(64, 32), MXFP4Linear(32, 16))
    for linear in model:
        linear.weight.zero_()
        linear.weight_scale.fill_(127)
    prepare_linears(model, "fp8", CUDA, torch.bfloat16)
    assert {(linear.mode, linear.weight.dtype) for linear in model} == {("fp8", torch.float8_e4m3fnuz)}


def test_a_cuda_device_or_float32_never_gets_int8(monkeypatch):
    monkeypatch.setattr(linear_modes, "_free_bytes", lambda _: 140 * 2**30)
    monkeypatch.setattr(gpu, "read_gpu", lambda _: A100)
    assert choose_mode(2**30, torch.device("cuda"), torch.bfloat16) == "expanded"
    assert choose_mode(2**30, CPU, torch.float32) == "expanded"
    with pytest.raises(SettingsError, match="int8 runs on a CPU"):
        prepare_linears(nn.Module(), "int8", torch.device("cuda"), torch.bfloat16)


def test_a_cpu_without_exact_int8_products_says_so(monkeypatch):
    monkeypatch.setattr(linear_modes, "_is_exact", lambda kernel: False)
    measured = measure_products.__wrapped__()
    assert (measured.int8_kernel, measured.is_int8_faster) == (None, False)
    monkeypatch.setattr(linear_modes, "measure_products", lambda: measured)
    with pytest.raises(SettingsError, match="exact INT8 products"):
        prepare_linears(nn.Module(), "int8", CPU, torch.bfloat16)


def test_bf16_linears_multiply_in_float32_where_that_is_faster(monkeypatch):
    slow = Timings(60.0, 30.0, 9.0, "int_mm")
    monkeypatch.setattr("clef_core.model.measure_products", lambda: slow)
    monkeypatch.setattr(linear_modes, "measure_products", lambda: slow)
    release = load_release(BF16)
    assert release.linears == "bf16 in float32"
    assert not any(type(module) is nn.Linear for module in release.backbone.model.modules())
    assert type(release.backbone.lm_head) is nn.Linear


def test_a_product_in_float32_rounds_once():
    linear = nn.Linear(64, 8).bfloat16()
    holder = nn.Sequential(linear)
    use_float32_products(holder)
    assert isinstance(holder[0], Float32Linear)
    x = torch.randn(5, 64).bfloat16()
    exact = x.double() @ linear.weight.double().t() + linear.bias.double()
    assert ulps(holder(x), exact.float().bfloat16()) <= 1
