"""AMD Quark's part of a build, in a process of its own: load, calibrate, quantise with AWQ, export.

Run as `python -m clef_core.quark_build JOB.json` by `quantize`. Its own process, because Quark talks on stdout,
compiles kernels and holds the whole model: the builder keeps its terminal and gets its memory back. What surprises:
standard output carries progress as JSON lines and nothing else, what Quark prints goes to standard error; and the
process ends itself when its standard input closes, so it never outlives a builder that was killed.
"""

import gc
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn

from clef_core.model import load_backbone
from clef_core.recipe import Recipe
from clef_core.release import read_release

ORPHANED = 70  # exit status of a process whose builder is gone


def build(job: dict[str, Any], report: "Report") -> None:
    """Quantise the backbone of `job["source"]` into the directory `job["exported"]`, which appears when complete.

    `exclude` holds the exact names of the modules that stay BF16, `blocks` the calibration's token ids.
    """
    recipe = Recipe.from_json(job["recipe"])
    exported = Path(job["exported"])
    part = exported.with_name(exported.name + ".part")
    shutil.rmtree(part, ignore_errors=True)

    report("load", 0, 1)
    torch.manual_seed(recipe.seed)
    model: Any = load_backbone(read_release(job["source"]), torch.device(job["device"]), torch.bfloat16)
    model.config._name_or_path = job["source"]  # where Quark finds tensors that no module reads (`mtp.*`)
    from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors  # takes longer than to load a small model

    report("load", 1, 1)

    config = LLMTemplate.get(recipe.template).get_config(
        scheme=recipe.scheme,
        algorithm=None if recipe.algorithm == "none" else recipe.algorithm,
        exclude_layers=job["exclude"],
    )
    blocks = [torch.tensor([block], device=job["device"]) for block in job["blocks"]]
    quantizer = ModelQuantizer(config)
    gc.freeze()  # Quark collects garbage at every step of its searches, and imports left much to look through
    with _reported_layers(model.model.language_model.layers, len(blocks), report):
        model = quantizer.quantize_model(model, blocks or None)
    model = quantizer.freeze(model)

    report("export", 0, 1)
    with torch.no_grad():
        export_safetensors(model, str(part), custom_mode="quark", weight_format="real_quantized", pack_method="reorder")
    part.replace(exported)
    report("export", 1, 1)


@contextmanager
def _reported_layers(layers: nn.ModuleList, num_blocks: int, report: "Report") -> Iterator[None]:
    """Report each layer when the calibration reaches it: AWQ runs every block through a layer before it scales it."""
    calls = [0] * len(layers)

    def hook(number: int) -> Any:
        def count(*_: object) -> None:
            calls[number] += 1
            if calls[number] == num_blocks:
                report("calibrate", number, len(layers))

        return count

    hooks = [layer.register_forward_pre_hook(hook(number)) for number, layer in enumerate(layers)]
    report("calibrate", 0, len(layers))
    yield
    report("calibrate", len(layers), len(layers))
    for one in hooks:
        one.remove()


class Report:
    """Writes progress lines to whoever started this process."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __call__(self, step: str, done: int, total: int) -> None:
        self._stream.write(json.dumps({"step": step, "done": done, "total": total}) + "\n")
        self._stream.flush()


def main() -> None:
    """Run the job that the command line names."""
    progress = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    threading.Thread(target=_end_with_the_builder, daemon=True).start()
    build(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Report(progress))


def _end_with_the_builder() -> None:
    os.read(0, 1)  # returns when the other end is closed
    os._exit(ORPHANED)


if __name__ == "__main__":
    main()
