"""What is read from a GPU's description, and the warning about packages that it lacks; no GPU is needed."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from paths import PROJECT
from transformers.integrations import hub_kernels
from transformers.models.qwen3_5 import modeling_qwen3_5

from clef_core import gpu
from clef_core.errors import SettingsError
from clef_core.gpu import FAST_PACKAGES, Gpu, missing_packages, read_gpu, report
from clef_core.model import load_release

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("device", "fp8_dtype", "has_mxfp4_units"),
    [
        (Gpu("Tesla T4", (7, 5)), None, False),
        (Gpu("A100", (8, 0)), None, False),
        (Gpu("L40S", (8, 9)), torch.float8_e4m3fn, False),
        (Gpu("H200", (9, 0)), torch.float8_e4m3fn, False),
        (Gpu("B200", (10, 0)), torch.float8_e4m3fn, True),
        (Gpu("RTX 5090", (12, 0)), torch.float8_e4m3fn, True),
        (Gpu("MI250X", (9, 0), "gfx90a"), None, False),
        (Gpu("MI300X", (9, 4), "gfx942"), torch.float8_e4m3fnuz, False),
        (Gpu("MI355X", (9, 5), "gfx950"), torch.float8_e4m3fn, True),
    ],
    ids=lambda value: value.name if isinstance(value, Gpu) else "",
)
def test_units_follow_from_the_architecture(device, fp8_dtype, has_mxfp4_units):
    assert device.fp8_dtype == fp8_dtype
    assert device.has_mxfp4_units == has_mxfp4_units


def test_a_torch_without_the_type_has_no_mxfp4_products(monkeypatch):
    monkeypatch.delattr(torch, "float4_e2m1fn_x2")
    assert not Gpu("B200", (10, 0)).has_mxfp4_units


@pytest.mark.parametrize(("hip", "arch"), [(None, ""), ("7.2", "gfx942")])
def test_amds_architecture_counts_where_torch_is_built_for_it(hip, arch, monkeypatch):
    facts = SimpleNamespace(name="A GPU", major=9, minor=4, gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert read_gpu(CUDA) == Gpu("A GPU", (9, 4), arch)


def test_a_package_is_missing_when_its_import_fails_or_lacks_the_function():
    modules = {package.module: SimpleNamespace(**{package.function: object()}) for package in FAST_PACKAGES}
    assert missing_packages(modules.__getitem__) == {}

    def broken(name: str) -> object:
        if name == "causal_conv1d":
            raise OSError("undefined symbol\nin line 2")
        return SimpleNamespace()

    assert missing_packages(broken) == {
        "flash-linear-attention": "it has no chunk_gated_delta_rule",
        "causal-conv1d": "undefined symbol",
    }


def test_the_packages_are_those_that_transformers_looks_for():
    source = Path(modeling_qwen3_5.__file__).read_text(encoding="utf-8")
    for package in FAST_PACKAGES:
        root, _, inner = package.module.partition(".")
        assert f'@use_kernel_func_from_hub_with_fallback("{package.function}", "{root}")' in source
        assert hub_kernels._KERNELS_INTERNAL_PATH_MAPPINGS.get(package.function, "") == inner
    wanted = (PROJECT / "requirements-gpu.txt").read_text()
    assert all(f"\n{package.distribution}==" in wanted for package in FAST_PACKAGES)


def test_the_log_says_what_a_gpu_has_and_lacks(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(gpu, "read_gpu", lambda _: Gpu("B200", (10, 0)))
    monkeypatch.setattr(gpu, "missing_packages", lambda: {"causal-conv1d": "No module named 'causal_conv1d'"})
    with caplog.at_level(logging.INFO):
        report(CUDA)
    assert "B200 (capability 10.0)" in caplog.text
    assert "has MXFP4 units; Clef's linears do not use them" in caplog.text
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "causal-conv1d is missing" in warnings[0]
    assert "requirements-gpu.txt" in warnings[0]


def test_a_gpu_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SettingsError, match="no device cuda:1: torch sees 1 GPUs here"):
        load_release(PROJECT / "checkpoints" / "random-mxfp4", "cuda:1")


def test_a_cpu_is_not_reported(caplog):
    with caplog.at_level(logging.INFO):
        report(torch.device("cpu"))
    assert caplog.text == ""
