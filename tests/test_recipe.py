"""The recipe as data: patterns, what vLLM joins, what config.json says, calibration text."""

import copy
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard
from paths import GOLDEN, PROJECT

from clef_core.calibration import draw_calibration
from clef_core.errors import SettingsError
from clef_core.recipe import Recipe, config_problems, kept_linears, quantization_config, torn_groups

TOKENIZER = PROJECT / "checkpoints" / "random-bf16" / "tokenizer.json"
DELTA = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def names(layer: int, attention: str, kinds: tuple[str, ...]) -> list[str]:
    prefix = f"model.language_model.layers.{layer}"
    return [f"{prefix}.{attention}.{kind}" for kind in kinds] + [f"{prefix}.mlp.{kind}" for kind in MLP]


LINEARS = [
    *(name for layer in range(11) for name in names(layer, "linear_attn", DELTA)),
    *names(11, "self_attn", ATTENTION),
]


def test_a_recipe_survives_the_way_through_json():
    recipe = Recipe(algorithm="none", keep_bf16=("layers.0.*",), shards=3, base_model="owner/name")
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe


def test_the_default_recipe_is_that_of_the_released_build():
    recipe = Recipe()
    assert (recipe.algorithm, recipe.scheme, recipe.scale_rounding, recipe.block) == ("awq", "mxfp4", "even", 32)
    assert (recipe.template, recipe.num_samples, recipe.sample_tokens, recipe.shards) == ("qwen3_5", 128, 512, 5)
    assert recipe.calibration == "mit-han-lab/pile-val-backup"


def test_impossible_recipes_are_refused():
    with pytest.raises(SettingsError, match="num_samples"):
        Recipe(num_samples=0)
    with pytest.raises(SettingsError, match="no bits"):
        Recipe.from_json({"bits": 3})


@pytest.mark.parametrize(
    ("pattern", "number"),
    [
        ("layers.0.*", 8),
        ("layers.1.*", 8),  # not layers 10 and 11
        ("linear_attn.in_proj_[ab]", 22),
        ("mlp.down_proj", 12),
        ("model.language_model.layers.11.self_attn.o_proj", 1),
        ("*.layers.1?.*", 15),
    ],
)
def test_a_pattern_matches_whole_names_or_their_ends(pattern, number):
    kept = kept_linears(LINEARS, [pattern])
    assert len(kept) == number
    assert list(kept) == [name for name in LINEARS if name in kept]


def test_several_patterns_keep_what_any_of_them_matches():
    assert len(kept_linears(LINEARS, ["layers.0.*", "mlp.down_proj"])) == 8 + 12 - 1
    assert kept_linears(LINEARS, []) == ()


def test_a_pattern_that_matches_nothing_names_what_there_is():
    with pytest.raises(SettingsError, match=r'"mlp.dwon_proj" matches no linear; there are .*mlp\.down_proj'):
        kept_linears(LINEARS, ["mlp.dwon_proj"])


def test_keeping_everything_is_refused():
    with pytest.raises(SettingsError, match="nothing would be MXFP4"):
        kept_linears(LINEARS, ["layers.*"])


@pytest.mark.parametrize(
    ("pattern", "torn"),
    [
        ("in_proj_a", "in_proj_b"),
        ("in_proj_z", "in_proj_qkv"),
        ("up_proj", "gate_proj"),
        ("[qk]_proj", "v_proj"),
    ],
)
def test_what_vllm_joins_is_kept_together_or_not_at_all(pattern, torn):
    with pytest.raises(SettingsError, match=f"{torn}.*vLLM loads these as one linear"):
        kept_linears(LINEARS, [pattern])


def test_torn_groups_are_found_where_they_are():
    kept = {name for name in LINEARS if name.endswith(("3.mlp.up_proj", "11.self_attn.q_proj"))}
    assert [group[0].split("layers.")[1] for group in torn_groups(LINEARS, kept)] == [
        "3.mlp.gate_proj",
        "11.self_attn.q_proj",
    ]


def test_the_quantisation_config_is_that_of_a_release_made_by_quark():
    """The golden release was exported by Quark 0.13 itself."""
    golden = json.loads((GOLDEN / "release-mxfp4" / "config.json").read_text())["quantization_config"]
    assert quantization_config(golden["exclude"]) == golden


def good_config() -> dict:
    return {"quantization_config": quantization_config(["model.visual.merger.linear_fc1", "lm_head"])}


def test_a_good_config_has_no_problems():
    assert config_problems(good_config(), LINEARS) == []


def set_deep(config: dict, path: str, value: object) -> None:
    *parents, leaf = path.split(".")
    for parent in parents:
        config = config[parent]
    config[leaf] = value


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("quantization_config", None, "quantization_config is missing"),
        ("quantization_config.quant_method", "awq", "quant_method"),
        ("quantization_config.algo_config", [{"name": "awq"}], "algo_config is not null"),
        ("quantization_config.export", None, "export needs"),
        ("quantization_config.export.kv_cache_group", ["*k_proj"], "export needs"),
        ("quantization_config.layer_quant_config", None, "layer_quant_config must be an object"),
        ("quantization_config.global_quant_config", None, "global_quant_config is missing"),
        ("quantization_config.global_quant_config.weight", None, "weight is not quantised"),
        ("quantization_config.global_quant_config.weight.dtype", "fp6_e3m2", "weight has dtype"),
        ("quantization_config.global_quant_config.weight.group_size", 16, "weight has group_size 16"),
        ("quantization_config.global_quant_config.weight.scale_format", "e4m3", "weight has scale_format"),
        ("quantization_config.global_quant_config.input_tensors.is_dynamic", False, "input_tensors has is_dynamic"),
        ("quantization_config.global_quant_config.output_tensors", {}, "output_tensors must be null"),
        ("quantization_config.exclude", ["lm_head", 3], "exclude must be a list of names"),
        ("quantization_config.exclude", ["model.visual.*", "lm_head"], "vLLM compares names"),
        ("quantization_config.exclude", [], "exclude lacks lm_head"),
        ("quantization_config.exclude", [LINEARS[2], "lm_head"], "tears .*in_proj_b"),
    ],
)
def test_what_vllm_would_stumble_over_is_named(path, value, problem):
    config = copy.deepcopy(good_config())
    set_deep(config, path, value)
    found = config_problems(config, LINEARS)
    assert len(found) == 1
    assert re.search(problem, found[0])


# Calibration


def write_documents(path: Path, documents: list[str]) -> Path:
    if path.suffix == ".txt":
        path.write_text("\n\n\n".join(documents))
    else:
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


DOCUMENTS = [f"Document {n} speaks of matter {n * n}. " * (1 + n % 7) for n in range(300)]


def recipe_of(file: Path, **changes) -> Recipe:
    return Recipe(calibration=str(file), **{"num_samples": 6, "sample_tokens": 16, **changes})


@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
def test_blocks_have_the_wanted_number_and_length(tmp_path, suffix):
    file = write_documents(tmp_path / f"texts{suffix}", DOCUMENTS)
    drawn = draw_calibration(recipe_of(file), TOKENIZER)
    assert [len(block) for block in drawn.blocks] == [16] * 6
    assert drawn.facts()["source"] == f"texts{suffix}"


def test_the_draw_depends_on_the_seed_and_the_text_alone(tmp_path):
    file = write_documents(tmp_path / "a.jsonl", DOCUMENTS)
    other = write_documents(tmp_path / "b.txt", DOCUMENTS)
    one = draw_calibration(recipe_of(file), TOKENIZER)
    assert draw_calibration(recipe_of(file), TOKENIZER) == one
    assert draw_calibration(recipe_of(other), TOKENIZER).checksum == one.checksum
    assert draw_calibration(recipe_of(file, seed=1), TOKENIZER).checksum != one.checksum


def test_no_document_gives_more_than_one_block(tmp_path):
    file = write_documents(tmp_path / "a.jsonl", ["long " * 5000 for _ in range(20)])
    drawn = draw_calibration(recipe_of(file, num_samples=8), TOKENIZER)
    assert drawn.num_documents == 8


def test_a_file_many_times_larger_than_needed_is_not_held_in_memory(tmp_path):
    from clef_core.calibration import _draw

    held = _draw(iter(f"text {n:07d}" for n in range(50_000)), 0, max_chars=1_200, max_document_chars=100)
    assert sum(map(len, held)) < 1_300
    assert len(set(held)) == len(held) == 100
    assert max(int(text[5:]) for text in held) > 40_000  # also from the end


def test_too_little_text_says_how_much_there_is(tmp_path):
    file = write_documents(tmp_path / "a.txt", ["a few words"])
    with pytest.raises(SettingsError, match=r"gives \d+ tokens of calibration text, 6 samples of 16 need 96"):
        draw_calibration(recipe_of(file), TOKENIZER)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.txt", None, "no such file"),
        ("data.csv", "a", r"must be \.jsonl"),
        ("data.jsonl", "{", "line 1: not JSON"),
        ("data.jsonl", '{"text": "a"}\n{"txt": "b"}\n', "line 2: needs a string"),
    ],
)
def test_a_calibration_file_that_cannot_be_used_is_named(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(SettingsError, match=message):
        draw_calibration(recipe_of(tmp_path / name), TOKENIZER)


def test_a_file_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match="not UTF-8"):
        draw_calibration(recipe_of(tmp_path / "a.txt"), TOKENIZER)


def hub_call(cache: Path) -> str:
    """In a process of its own: the hub client reads its settings at import. Offline mode asks no network."""
    script = (
        "from pathlib import Path\n"
        "from clef_core.calibration import draw_calibration\n"
        "from clef_core.errors import SettingsError\n"
        "from clef_core.recipe import Recipe\n"
        f"try: print(draw_calibration(Recipe(num_samples=2, sample_tokens=8), Path({str(TOKENIZER)!r})).facts())\n"
        "except SettingsError as error: print(error)"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(cache), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=PROJECT, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_the_default_set_without_the_hub_is_one_clear_message(tmp_path):
    message = hub_call(tmp_path)
    assert message.startswith("the calibration set mit-han-lab/pile-val-backup cannot be had from the hub")
    assert "--calibration FILE" in message


def test_the_default_set_is_read_from_the_hubs_cache(tmp_path):
    """As the hub's client lays it down: a snapshot of the data set with one compressed file."""
    snapshot = tmp_path / "hub" / "datasets--mit-han-lab--pile-val-backup" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    lines = "".join(json.dumps({"text": text, "meta": {}}) + "\n" for text in DOCUMENTS)
    (snapshot / "val.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    facts = hub_call(tmp_path)
    assert "'source': 'mit-han-lab/pile-val-backup'" in facts
    assert "'num_blocks': 2" in facts
