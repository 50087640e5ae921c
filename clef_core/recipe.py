"""How an MXFP4 release is made, as data: the recipe, which linears it leaves in BF16, and what config.json says of it.

Knows no torch and reads no weights. What surprises: `exclude` in a release lists exact module names and never a
pattern, because vLLM compares names; and vLLM loads some linears as one (`FUSED`), so these are kept in BF16 together
or not at all.
"""

import dataclasses
import fnmatch
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from clef_core.errors import SettingsError

PILE_VAL = "mit-han-lab/pile-val-backup"
"""Hub name of the calibration set of the released build: the validation part of the Pile."""

QUARK_VERSION = "0.13"
"""The version of the format that config.json names; the tests hold this project's builds beside Quark's of it."""

RECIPE_FILE = "recipe.json"
ORIGINAL_CONFIG = "config.json.orig_with_algo_config"
"""The config as Quark exported it. In config.json `algo_config` is null: vLLM stops at a list of objects."""

FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
"""Linears of one layer that vLLM's Qwen3.5 joins into one, and which must therefore have one format."""

MIN_SHARD_BYTES = 256 * 1024**2
VERSIONED = ("torch", "transformers", "safetensors")

Algorithm = Literal["awq", "none"]


@dataclass(frozen=True)
class Recipe:
    """How to make an MXFP4 release from a BF16 one.

    algorithm: `awq` has Quark calibrate, scale and clip; `none` rounds each weight to nearest, file by file.
    template: Quark's name for the architecture; it decides what AWQ scales (the MLP alone).
    calibration: a `.jsonl` or `.txt` file, or the hub name `PILE_VAL`. Not used by `none`.
    num_samples, sample_tokens: calibration blocks and their length.
    keep_bf16: patterns of language-model linears that stay BF16, see `kept_linears`.
    shards: weight files to write, fewer when they would be smaller than `min_shard_bytes`.
    base_model: what the model card names as its base; None takes the source's name.
    """

    algorithm: Algorithm = "awq"
    scheme: Literal["mxfp4"] = "mxfp4"
    scale_rounding: Literal["even"] = "even"
    block: Literal[32] = 32
    template: Literal["qwen3_5"] = "qwen3_5"
    calibration: str = PILE_VAL
    num_samples: int = 128
    sample_tokens: int = 512
    seed: int = 0
    keep_bf16: tuple[str, ...] = ()
    shards: int = 5
    min_shard_bytes: int = MIN_SHARD_BYTES
    base_model: str | None = None

    def __post_init__(self) -> None:
        for name in ("num_samples", "sample_tokens", "shards", "min_shard_bytes"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name} must be at least 1, got {getattr(self, name)}")

    def to_json(self) -> dict[str, Any]:
        """A JSON object; `from_json` gives an equal recipe back."""
        return dataclasses.asdict(self) | {"keep_bf16": list(self.keep_bf16)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Recipe":
        """Read what `to_json` wrote.

        Raises:
            SettingsError: a key is unknown or a value impossible.
        """
        unknown = set(value) - {field.name for field in dataclasses.fields(cls)}
        if unknown:
            raise SettingsError(f"a recipe has no {', '.join(sorted(unknown))}")
        return cls(**(value | {"keep_bf16": tuple(value.get("keep_bf16", ()))}))


def kept_linears(linears: Sequence[str], patterns: Sequence[str]) -> tuple[str, ...]:
    """The linears that patterns keep in BF16.

    A pattern is a shell pattern (`*`, `?`, `[ab]`) for the whole name or for its end after a dot: `layers.0.*` is
    layer 0, `linear_attn.in_proj_[ab]` the DeltaNet gates of all layers, `mlp.*` every MLP.

    Args:
        linears: names of all language-model linears, in the order of the model.

    Returns:
        the matching names, in that order.

    Raises:
        SettingsError: a pattern matches nothing, or everything is kept, or linears that vLLM joins are torn apart.
    """
    kept: set[str] = set()
    for pattern in patterns:
        matched = {
            name for name in linears if fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"*.{pattern}")
        }
        if not matched:
            kinds = sorted({name.split(".layers.", 1)[-1].split(".", 1)[-1] for name in linears})
            raise SettingsError(f'--keep-bf16 "{pattern}" matches no linear; there are {", ".join(kinds)}')
        kept |= matched
    if kept and len(kept) == len(linears):
        raise SettingsError("--keep-bf16 keeps every linear: nothing would be MXFP4")
    for group in torn_groups(linears, kept):
        inside = ", ".join(name for name in group if name in kept)
        raise SettingsError(f"--keep-bf16 keeps only {inside} of {', '.join(group)}; vLLM loads these as one linear")
    return tuple(name for name in linears if name in kept)


def torn_groups(linears: Sequence[str], kept: set[str]) -> list[tuple[str, ...]]:
    """Groups of linears that vLLM joins and of which only some are in `kept`."""
    present = set(linears)
    torn = []
    for name in linears:
        parent, _, leaf = name.rpartition(".")
        for members in FUSED:
            group = tuple(f"{parent}.{member}" for member in members)
            if leaf == members[0] and present >= set(group) and len({member in kept for member in group}) > 1:
                torn.append(group)
    return torn


def quantization_config(exclude: Sequence[str]) -> dict[str, Any]:
    """What Quark writes into config.json for the scheme `mxfp4` in its `hf_format`, with `algo_config` null.

    Args:
        exclude: exact names of the modules that stay BF16.
    """
    tensor = {
        "dtype": "fp4", "qscheme": "per_group", "group_size": 32, "ch_axis": -1, "symmetric": None,
        "round_method": "half_even", "observer_cls": "PerBlockMXObserver", "scale_type": "float",
        "scale_format": "e8m0", "scale_calculation_mode": "even", "is_scale_quant": False, "mx_element_dtype": None,
        "zero_point_type": "int32", "block_size": None, "enable_buffer_reuse": False, "max_input_numel": 4_194_304,
    }  # fmt: skip
    layer = {
        "weight": {**tensor, "is_dynamic": False}, "input_tensors": {**tensor, "is_dynamic": True},
        "output_tensors": None, "bias": None, "target_device": None,
    }  # fmt: skip
    return {
        "quant_method": "quark", "quant_mode": "eager_mode", "version": QUARK_VERSION, "algo_config": None,
        "global_quant_config": layer, "layer_quant_config": {}, "layer_type_quant_config": {},
        "kv_cache_quant_config": {}, "kv_cache_post_rope": False, "softmax_quant_spec": None,
        "exclude": list(exclude),
        "export": {
            "kv_cache_group": [], "min_kv_scale": 0.0, "pack_method": "reorder", "weight_format": "real_quantized",
            "weight_merge_groups": None,
        },
    }  # fmt: skip


def config_problems(config: dict[str, Any], linears: Sequence[str]) -> list[str]:
    """What vLLM's parser of Quark configurations would stumble over, in words; empty when it takes the config.

    Args:
        config: the whole config.json.
        linears: names of all language-model linears, in the order of the model.

    Source: vllm/model_executor/layers/quantization/quark (quark.py, utils.py) and models/qwen3_5.py.
    """
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        return ["quantization_config is missing"]
    problems = []
    if quantization.get("quant_method") != "quark":
        problems.append(f"quant_method is {json.dumps(quantization.get('quant_method'))}, not quark")
    if quantization.get("algo_config") is not None:
        problems.append("algo_config is not null")
    export = quantization.get("export")
    if not isinstance(export, dict) or export.get("kv_cache_group") != [] or not export.get("pack_method"):
        problems.append("export needs an empty kv_cache_group and a pack_method")
    problems += [
        f"{name} must be an object"
        for name in ("layer_quant_config", "layer_type_quant_config")
        if not isinstance(quantization.get(name), dict)
    ]
    problems += _scheme_problems(quantization.get("global_quant_config"))
    exclude = quantization.get("exclude")
    if not isinstance(exclude, list) or not all(isinstance(name, str) for name in exclude):
        return [*problems, "exclude must be a list of names"]
    problems += [f'exclude has the pattern "{name}": vLLM compares names' for name in exclude if set(name) & set("*?[")]
    if "lm_head" not in exclude:
        problems.append("exclude lacks lm_head")
    problems += [f"exclude tears {', '.join(group)} apart" for group in torn_groups(linears, set(exclude))]
    return problems


def _scheme_problems(layer: Any) -> list[str]:
    if not isinstance(layer, dict):
        return ["global_quant_config is missing"]
    wanted = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
    problems = []
    for part, is_dynamic in (("weight", False), ("input_tensors", True)):
        found = layer.get(part)
        if not isinstance(found, dict):
            problems.append(f"{part} is not quantised")
            continue
        for key, value in (wanted | {"is_dynamic": is_dynamic}).items():
            if found.get(key) != value:
                problems.append(f"{part} has {key} {json.dumps(found.get(key))}, not {json.dumps(value)}")
    return problems + [f"{part} must be null" for part in ("output_tensors", "bias") if layer.get(part) is not None]


def program_versions(algorithm: Algorithm) -> dict[str, str | None]:
    """Versions of what has a say in the result; None for what is not installed."""
    names = (*VERSIONED, "tokenizers", "amd-quark") if algorithm == "awq" else VERSIONED
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found
