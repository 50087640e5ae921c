"""Which modules of a backbone are which: read from Transformers' own classes, built without weights.

A release's config.json says what the backbone is; names in weight files do not (`conv1d` is no linear, `pos_embed` no
language model). Building it empty takes a moment and no memory, whatever its size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForConditionalGeneration

from clef_core.errors import ReleaseError

LANGUAGE_MODEL = "model.language_model."
VISION = "model.visual."
_QUANTISABLE = (nn.Linear, nn.Embedding, nn.Conv2d)
"""The kinds of modules that Quark could quantise and therefore names when it leaves them out."""


@dataclass(frozen=True)
class Backbone:
    """Names of a backbone's modules and tensors, in the order of the model.

    linears: every linear of the language model; these become MXFP4.
    others: lm_head and what else Quark names in `exclude`: linears and embeddings of the vision tower.
    modules: both, as they stand in the model.
    shapes: every tensor of the BF16 backbone.
    is_tied: lm_head is the embedding matrix, and a release then need not hold it.
    """

    linears: tuple[str, ...]
    others: tuple[str, ...]
    modules: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    is_tied: bool


def read_backbone(config: Mapping[str, Any], path: Path) -> Backbone:
    """Build the backbone of a config.json without weights and list its modules.

    Raises:
        ReleaseError: no backbone can be built; the message names `path`.
    """
    settings = {key: value for key, value in config.items() if key != "quantization_config"}
    try:
        parsed = Qwen3_5Config(**settings)
        with torch.device("meta"):
            model = Qwen3_5ForConditionalGeneration._from_config(parsed, dtype=torch.bfloat16)
    except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        raise ReleaseError(f"{path / 'config.json'}: no backbone can be built from it: {error}") from error
    linears, others = [], []
    for name, module in model.named_modules():
        if name.startswith(LANGUAGE_MODEL) and isinstance(module, nn.Linear):
            linears.append(name)
        elif (name.startswith(VISION) or name == "lm_head") and isinstance(module, _QUANTISABLE):
            others.append(name)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()}
    modules = tuple(name for name, _ in model.named_modules() if name in {*linears, *others})
    return Backbone(tuple(linears), tuple(others), modules, shapes, bool(parsed.tie_word_embeddings))
