"""Memory that a loaded release gives back, and memory that a worker keeps."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from paths import RANDOM_VARIANTS

from clef_core.model import load_release
from clef_core.mxfp4_linear import MXFP4Linear
from clef_core.room import drop_pages
from worker.settings import PROJECT_DIR

NUM_BYTES = 2**24


def resident_file_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssFile:"))


@pytest.mark.skipif(sys.platform != "linux", reason="pages are given back on Linux alone")
def test_dropped_pages_leave_the_process_and_are_read_again(tmp_path):
    file = tmp_path / "bytes"
    file.write_bytes(bytes(range(256)) * (NUM_BYTES // 256))
    tensor = torch.UntypedStorage.from_file(str(file), shared=False, nbytes=NUM_BYTES)
    mapped = torch.tensor([], dtype=torch.uint8).set_(tensor)[100:]  # not at the start of a page
    sum_before = int(mapped.sum())
    touched = resident_file_bytes()
    drop_pages(mapped)
    assert touched - resident_file_bytes() > 0.9 * NUM_BYTES
    assert int(mapped.sum()) == sum_before
    drop_pages(mapped[:10])  # less than a page


FAULTS_OF_TEN_TENSORS = """
import resource, sys
import torch
from clef_core.room import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()

def make_ten():
    for _ in range(10):
        torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

before, after = make_ten(), make_ten()
print(after - before)
"""


def faults_of_ten_tensors(how: str) -> int:
    """Page faults of ten tensors of 64 MB, one after the other, in a process that made ten before."""
    command = [sys.executable, "-c", FAULTS_OF_TEN_TENSORS, how]
    return int(subprocess.run(command, cwd=PROJECT_DIR, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is glibc's here alone")
def test_kept_memory_serves_the_next_tensors():
    given_back, kept = faults_of_ten_tensors("default"), faults_of_ten_tensors("keep")
    assert kept < given_back / 10


@pytest.mark.skipif(sys.platform != "linux", reason="pages are given back on Linux alone")
def test_codes_lie_in_the_mapped_file_until_they_are_decoded():
    """What `drop_pages` rests on: it would destroy codes that lie in memory of their own."""
    release = load_release(RANDOM_VARIANTS["mxfp4"], linear_mode="packed")
    linears = [module for module in release.backbone.modules() if isinstance(module, MXFP4Linear)]
    files = [str(file.resolve()) for file in Path(RANDOM_VARIANTS["mxfp4"]).glob("*.safetensors")]
    maps = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [tuple(int(end, 16) for end in fields[0].split("-")) for fields in maps if fields[-1].strip() in files]
    assert linears
    for linear in linears:
        assert any(start <= linear.weight.data_ptr() < end for start, end in spans)
