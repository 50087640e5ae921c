"""Whether a build fits on this machine, said before it starts; and what this process gives back or keeps of its memory.

Disk is known exactly from the tensors' shapes. Memory is known for the route by files (measured, and it does not grow
with the release) and estimated for AWQ, where Quark holds the model and the inputs of a layer's linears for the whole
calibration at once.
"""

import ctypes
import math
import mmap
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clef_core.errors import SettingsError
from clef_core.recipe import Recipe

DISK_RESERVE_BYTES = 64 * 1024**2
FILES_MEMORY_BYTES = 1_000_000_000
"""Anonymous memory of the route by files, imports included; see benchmarks/quantize_memory.py."""

PROCESS_BYTES = 2_000_000_000  # interpreter, torch, Quark and its compiled kernels
COPIES_OF_A_LAYER = 4  # its weight, the search's copy, float32 temporaries

KEPT_BYTES = 2**30
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h


def check_disk(parent: Path, num_bytes: int, what: str) -> None:
    """Refuse a build that the disk has no room for.

    Raises:
        SettingsError: less than `num_bytes` is free.
    """
    free = shutil.disk_usage(parent).free
    if free < num_bytes + DISK_RESERVE_BYTES:
        raise SettingsError(f"{what} needs {gigabytes(num_bytes)} of disk in {parent}, {gigabytes(free)} are free")


def check_memory(recipe: Recipe, config: Mapping[str, Any], source_bytes: int, device: torch.device) -> None:
    """Refuse a build that the memory cannot hold.

    Raises:
        SettingsError: less is free than the recipe needs; the message says whether that is an estimate.
    """
    free = free_memory_bytes()
    if recipe.algorithm == "none":
        if free < FILES_MEMORY_BYTES:
            raise SettingsError(
                f"the build needs {gigabytes(FILES_MEMORY_BYTES)} of memory, {gigabytes(free)} are free"
            )
        return
    calibration = awq_activation_bytes(recipe, config)
    needed = PROCESS_BYTES + source_bytes + calibration
    if free < needed:
        raise SettingsError(
            f"AWQ needs about {gigabytes(needed)} of memory (estimate), {gigabytes(free)} are free; "
            "fewer or shorter --samples need less, and --algorithm none needs none of it"
        )
    if device.type == "cuda":
        free_device = torch.cuda.mem_get_info(device)[0]
        if free_device < source_bytes + calibration:
            raise SettingsError(
                f"AWQ needs about {gigabytes(source_bytes + calibration)} of memory on {device} (estimate), "
                f"{gigabytes(free_device)} are free"
            )


def awq_activation_bytes(recipe: Recipe, config: Mapping[str, Any]) -> int:
    """Estimate what AWQ holds beside the model: inputs of all linears of a layer, its MLP's output twice, bfloat16."""
    text = config.get("text_config", {})
    hidden, intermediate = int(text.get("hidden_size", 0)), int(text.get("intermediate_size", 0))
    tokens = recipe.num_samples * recipe.sample_tokens
    return 2 * tokens * (12 * hidden + 6 * intermediate) + COPIES_OF_A_LAYER * 4 * hidden * intermediate


def free_memory_bytes() -> int:
    """Memory that processes can still get: what the system has, or less where a container allows less."""
    free = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = [int(fields["MemAvailable"].split()[0]) * 1024]
    group = Path("/sys/fs/cgroup")
    limit = group / "memory.max"
    if limit.is_file() and (allowed := limit.read_text().strip()) != "max":
        free.append(int(allowed) - int((group / "memory.current").read_text()))
    return min(free)


def drop_pages(tensor: Tensor) -> None:
    """Take the pages of a mapped file out of this process, on Linux; who looks at them reads the file again.

    Args:
        tensor: on a CPU, in the private mapping of a file. What lies in other memory is lost.
    """
    if sys.platform != "linux":
        return
    page = mmap.PAGESIZE
    first = math.ceil(tensor.data_ptr() / page) * page
    end = (tensor.data_ptr() + tensor.nbytes) // page * page
    if first < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)


def keep_freed_memory(num_bytes: int = KEPT_BYTES) -> None:
    """Let glibc keep up to `num_bytes` of freed memory for the next tensors instead of giving it to the system at once.

    Without it each forward pays again for the pages of its large tensors, which is dear on virtual machines. Does
    nothing where the C library is another.

    Args:
        num_bytes: less than 2 GiB, what glibc takes.
    """
    if sys.platform != "linux" or not hasattr(libc := ctypes.CDLL(None), "gnu_get_libc_version"):
        return
    libc.mallopt(M_MMAP_MAX, 0)  # no tensor in a mapping of its own, which would go with it
    libc.mallopt(M_TRIM_THRESHOLD, num_bytes)


def gigabytes(num_bytes: int) -> str:
    """`18.9 GB`, with the units of disk makers, as the model card has them."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
