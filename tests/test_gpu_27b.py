"""The GPU benchmark runs, at a tiny size on a CPU: its numbers mean nothing here, its code does."""

import pytest
import torch

from benchmarks import gpu_27b


def test_each_mode_gets_a_row_per_length(capsys):
    arguments = "--device cpu --scale small --tokens 16 40 --modes bf16 packed expanded fp8"
    gpu_27b.run(arguments.split())
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    assert [(row[0], row[1]) for row in rows[:-1]] == [
        (f"| {mode}", tokens) for mode in ("bf16", "packed", "expanded") for tokens in ("16", "40")
    ]
    assert all(float(row[2].replace(",", "")) > 0 for row in rows[:-1])
    assert rows[-1][:2] == [
        "| fp8",
        "not measured: the linear mode fp8 runs on a GPU, not on cpu; use int8, packed or expanded",
    ]


def test_the_27b_shape_has_the_27bs_linears():
    with torch.device("meta"):
        place = gpu_27b.Place(torch.device("meta"), "27b", 64)
        model = gpu_27b.build(place, is_mxfp4=True)
    # The card's sizes, 54.7 GB in BF16 and 18.9 GB in MXFP4, put 24.3 billion weights into the linears.
    assert gpu_27b.num_linear_weights(model) / 1e9 == pytest.approx(24.3, abs=0.2)
    assert gpu_27b.weight_gib(model) < 17.0


def test_without_a_gpu_nothing_is_measured(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu_27b.run([])
    assert capsys.readouterr().out == "Not measured: there is no GPU here.\n"
