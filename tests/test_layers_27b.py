"""One decoder layer of each kind at the 27B model's real shape: ours and Transformers with AMD Quark, bit for bit.

Weights are random codes and scales, written as a release of two layers; what comes after each layer is compared.
"""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import PROJECT
from safetensors.torch import save_file
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForConditionalGeneration

from benchmarks.gpu_27b import SCALES
from clef_core.model import load_backbone
from clef_core.mxfp4 import BLOCK
from clef_core.mxfp4_linear import MXFP4Linear
from clef_core.release import CHECKSUMS, INDEX, read_release
from clef_core.room import free_memory_bytes

SMALL = PROJECT / "checkpoints" / "random-mxfp4"
NEEDED_BYTES = 8 * 2**30
KINDS = ("linear_attention", "full_attention")
SHAPE_OF_27B = {name: size for name, size in SCALES["27b"].items() if name != "vocab_size"}
SHAPE_OF_27B |= {"num_hidden_layers": len(KINDS), "layer_types": list(KINDS)}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Quark warns a lot
    pytest.mark.skipif(
        free_memory_bytes() < NEEDED_BYTES,
        reason="two layers of a 27B model need 8 GiB of free memory",
    ),
]


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MXFP4 release with the files of the small one around two large layers."""
    path = tmp_path_factory.mktemp("27b") / "release"
    shutil.copytree(SMALL, path, ignore=shutil.ignore_patterns("model.safetensors", INDEX, CHECKSUMS))
    settings = json.loads((SMALL / "config.json").read_text())
    settings["text_config"] |= SHAPE_OF_27B
    settings["vision_config"]["out_hidden_size"] = SHAPE_OF_27B["hidden_size"]
    (path / "config.json").write_text(json.dumps(settings))
    with torch.device("meta"):
        model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(**settings))
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, tensor in model.state_dict().items():
        module = model.get_submodule(name.rpartition(".")[0])
        if ".layers." in name and isinstance(module, torch.nn.Linear):
            rows, columns = tensor.shape
            tensors[name] = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
            scales = torch.randint(116, 121, (rows, columns // BLOCK), generator=generator, dtype=torch.uint8)
            tensors[f"{name}_scale"] = scales
        else:
            tensors[name] = (torch.randn(tensor.shape, generator=generator) / 20).bfloat16()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}))
    return path


def states_of(model: Any) -> tuple[torch.Tensor, ...]:
    """What goes into the first layer and comes out of each."""
    ids = torch.randint(0, 2_000, (1, 12), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        output = model.model.language_model(input_ids=ids, use_cache=False, output_hidden_states=True)
    states: tuple[torch.Tensor, ...] = output.hidden_states
    return states


def test_each_kind_of_layer_equals_transformers_with_quark_bit_for_bit(release: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quarks = Qwen3_5ForConditionalGeneration.from_pretrained(release, dtype=torch.bfloat16)
    assert type(quarks.model.language_model.layers[1].mlp.down_proj).__name__ == "QParamsLinear"
    expected = states_of(quarks)
    del quarks
    ours = load_backbone(read_release(release), torch.device("cpu"), torch.bfloat16)
    linears = [module for module in ours.modules() if isinstance(module, MXFP4Linear)]
    assert len(linears) == 5 + 4 + 2 * 3  # DeltaNet, attention, and each layer's MLP
    for linear in linears:
        linear.expand(torch.bfloat16)
    states = states_of(ours)
    assert len(states) == len(KINDS) + 1
    for number, (mine, other) in enumerate(zip(states, expected, strict=True)):
        assert mine.std() > 0.01
        assert torch.equal(mine, other), f"after {number} layers"
