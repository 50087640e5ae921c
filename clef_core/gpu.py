"""What a GPU is able to do, read from torch's description of it; and whether the packages are there that it wants.

Knows no model and measures nothing. What surprises: Transformers takes flash-linear-attention and causal-conv1d for
missing whenever their import fails, for whatever reason; so here they are imported too, and a broken installation
shows in the log.

Source: the devices for which torch 2.14 has scaled products (aten/src/ATen/native/cuda/ScaledBlas.cpp); how
Transformers 5.24 finds the packages (integrations/hub_kernels.py, use_kernel_func_from_hub_with_fallback).
"""

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from clef_core.errors import SettingsError

logger = logging.getLogger(__name__)

FIRST_FP8 = (8, 9)
"""NVIDIA's compute capability of Ada; Hopper and Blackwell follow."""

FIRST_MXFP4 = (10, 0)
"""NVIDIA's compute capability of Blackwell."""

AMD_FP8 = {
    "gfx942": torch.float8_e4m3fnuz,  # MI300
    "gfx950": torch.float8_e4m3fn,  # MI350
    "gfx1200": torch.float8_e4m3fn,  # Radeon RX 9000
    "gfx1201": torch.float8_e4m3fn,
}
AMD_MXFP4 = ("gfx950",)


@dataclass(frozen=True)
class Gpu:
    """One device. `capability` is NVIDIA's (major, minor); `arch` is AMD's, such as gfx942, and empty elsewhere."""

    name: str
    capability: tuple[int, int]
    arch: str = ""

    @property
    def fp8_dtype(self) -> torch.dtype | None:
        """The E4M3 format that its FP8 units multiply; None if it has none."""
        if self.arch:
            return AMD_FP8.get(self.arch)
        return torch.float8_e4m3fn if self.capability >= FIRST_FP8 else None

    @property
    def has_mxfp4_units(self) -> bool:
        """Whether it multiplies MXFP4 itself and torch has the type for it."""
        has_units = self.arch in AMD_MXFP4 if self.arch else self.capability >= FIRST_MXFP4
        return has_units and hasattr(torch, "float4_e2m1fn_x2")


def read_gpu(device: torch.device) -> Gpu:
    """The device as torch describes it."""
    facts = torch.cuda.get_device_properties(device)
    arch = facts.gcnArchName.split(":")[0] if torch.version.hip else ""
    return Gpu(facts.name, (facts.major, facts.minor), arch)


@dataclass(frozen=True)
class FastPackage:
    """A package with a kernel that DeltaNet layers use if `function` can be had from `module`."""

    distribution: str
    module: str
    function: str


FAST_PACKAGES = (
    FastPackage("flash-linear-attention", "fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    FastPackage("causal-conv1d", "causal_conv1d", "causal_conv1d_fn"),
)


def missing_packages(load: Callable[[str], object] = importlib.import_module) -> dict[str, str]:
    """Distributions that DeltaNet layers do without, each with the reason."""
    missing = {}
    for package in FAST_PACKAGES:
        try:
            if not hasattr(load(package.module), package.function):
                missing[package.distribution] = f"it has no {package.function}"
        except Exception as error:  # noqa: BLE001  a package with native code fails to load in many ways
            missing[package.distribution] = str(error).split("\n")[0]
    return missing


def report(device: torch.device) -> None:
    """Log what the device offers, and warn of what it lacks; silent on a CPU.

    Raises:
        SettingsError: torch does not see that device.
    """
    if device.type != "cuda":
        return
    if (device.index or 0) >= torch.cuda.device_count():
        raise SettingsError(f"there is no device {device}: torch sees {torch.cuda.device_count()} GPUs here")
    gpu = read_gpu(device)
    logger.info("%s is %s (%s)", device, gpu.name, gpu.arch or "capability {}.{}".format(*gpu.capability))
    if gpu.has_mxfp4_units:
        logger.info(
            "%s has MXFP4 units; Clef's linears do not use them: the modes fp8, expanded and packed run", device
        )
    for name, reason in missing_packages().items():
        logger.warning(
            "%s is missing (%s): DeltaNet layers run on %s in plain torch, with right results but slowly; "
            "pip install --no-build-isolation -r requirements-gpu.txt",
            name, reason, device,
        )  # fmt: skip
