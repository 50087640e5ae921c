"""AMD Quark as the oracle of plain rounding, as the maker of AWQ builds, and as a reader of both kinds of release.

Importing Quark and calibrating takes a minute, so these tests share two builds: `quark_rounded`, without an algorithm,
and `awq`, which is killed at several places on its way.
"""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import PROJECT
from safetensors.torch import load_file, save_file

from clef_core.build_plan import plan_build
from clef_core.engine import Engine, Record
from clef_core.errors import EngineError
from clef_core.model import load_release
from clef_core.mxfp4_linear import MXFP4Linear
from clef_core.quantize import quantize
from clef_core.quark_build import Report, build
from clef_core.quark_process import run_quark
from clef_core.recipe import ORIGINAL_CONFIG, Recipe
from clef_core.release import read_release
from clef_core.schema import parse_request
from clef_core.verify import verify

BF16 = PROJECT / "checkpoints" / "random-bf16"
KEPT = ("in_proj_[ab]", "layers.1.mlp.gate_proj", "layers.1.mlp.up_proj", "layers.2.*")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Quark warns a lot; its warnings are not ours


@pytest.fixture(scope="module")
def hostile_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small BF16 release with weights that are hard to round, a float32 tensor and multi-token prediction."""
    source = Path(shutil.copytree(BF16, tmp_path_factory.mktemp("hostile") / "source"))
    tensors = load_file(source / "model.safetensors")
    prefix = "model.language_model.layers.0."
    weight = tensors[f"{prefix}mlp.gate_proj.weight"]
    generator = torch.Generator().manual_seed(0)
    octaves = torch.randint(-60, 60, (weight.shape[0], 4, 1), generator=generator).float()
    weight.copy_((torch.randn(weight.shape, generator=generator).view(-1, 4, 32) * torch.exp2(octaves)).flatten(-2))
    weight[0] = 0
    weight[1] = -0.0
    weight[2, :32] = 2.0**-133
    weight[3, :32] = -(2.0**-126)
    weight[4, 5] = 2.9e38
    weight[5] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(16)
    weight[6] = -weight[5] * 2.0**-100
    weight[7] = torch.tensor([7.0] + [-0.2] * 31).repeat(4)
    tensors[f"{prefix}linear_attn.A_log"] = tensors[f"{prefix}linear_attn.A_log"].float()
    tensors["mtp.fc.weight"] = torch.randn(8, 64, generator=generator).bfloat16()
    tensors["mtp.norm.weight"] = torch.ones(8)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    (source / "model.safetensors.index.json").unlink()
    return source


@pytest.fixture(scope="module")
def quark_rounded(hostile_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What Quark makes of it by itself, with some linears kept."""
    exported = tmp_path_factory.mktemp("quark") / "exported"
    plan = plan_build(str(hostile_source), Recipe(algorithm="none", keep_bf16=KEPT))
    job = {
        "source": str(hostile_source), "exported": str(exported), "recipe": plan.recipe.to_json(),
        "exclude": [*plan.backbone.others, *plan.kept], "blocks": [], "device": "cpu",
    }  # fmt: skip
    build(job, Report(io.StringIO()))
    return exported


def test_the_route_by_files_equals_quarks_round_to_nearest_build_bit_for_bit(hostile_source, quark_rounded, tmp_path):
    quantize(hostile_source, tmp_path / "ours", Recipe(algorithm="none", keep_bf16=KEPT))
    ours = (tmp_path / "ours" / "model.safetensors").read_bytes()
    assert ours == (quark_rounded / "model.safetensors").read_bytes()


def test_the_configuration_says_what_quarks_says(hostile_source, quark_rounded, tmp_path):
    quantize(hostile_source, tmp_path / "ours", Recipe(algorithm="none", keep_bf16=KEPT))
    ours, quarks = (
        json.loads((release / "config.json").read_text())["quantization_config"]
        for release in (tmp_path / "ours", quark_rounded)
    )
    assert ours == quarks  # `exclude` in the same order, too


# AWQ


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    file = tmp_path_factory.mktemp("calibration") / "texts.jsonl"
    lines = (PROJECT / "examples" / "messages.csv").read_text().splitlines()
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return Recipe(calibration=str(file), num_samples=4, sample_tokens=32, keep_bf16=KEPT, min_shard_bytes=300_000)


KILLED_AT = ("load", "calibrate", "export", "reshard", "copies", "checksums", "publish")


@pytest.fixture(scope="module")
def awq(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An AWQ build that was killed in each of its steps, with `kill -9`, and called again."""
    target = tmp_path_factory.mktemp("awq") / "target"
    script = (
        "import json, os, signal, sys\n"
        "from clef_core.quantize import quantize\n"
        "from clef_core.recipe import Recipe\n"
        "source, target, recipe, step = sys.argv[1:]\n"
        "def listen(progress):\n"
        "    if progress.step == step: os.kill(os.getpid(), signal.SIGKILL)\n"
        "quantize(source, target, Recipe.from_json(json.loads(recipe)), listener=listen)\n"
    )
    for step in KILLED_AT:
        command = [sys.executable, "-c", script, str(BF16), str(target), json.dumps(recipe.to_json()), step]
        done = subprocess.run(command, cwd=PROJECT, capture_output=True, check=False)
        assert done.returncode == -signal.SIGKILL, (step, done.stderr[-2000:])
        assert not target.exists()
    seen = []
    quantize(BF16, target, recipe, listener=seen.append)
    assert {progress.step for progress in seen} == {"publish"}  # everything else was done
    return target


def test_an_awq_build_that_was_killed_in_every_step_holds_every_law(awq):
    report = verify(awq, BF16)
    assert report.holds, [law for law in report.laws if law.status == "broken"]
    assert [law.status for law in report.laws] == ["holds"] * len(report.laws)
    assert [entry.name for entry in awq.parent.iterdir()] == ["target"]


def test_an_awq_build_has_five_files_head_copies_and_the_config_as_quark_exported_it(awq):
    assert len(list(awq.glob("model-0000?-of-00005.safetensors"))) == 5
    assert (awq / "joint_head.safetensors").read_bytes() == (BF16 / "joint_head.safetensors").read_bytes()
    config, original = (json.loads((awq / name).read_text()) for name in ("config.json", ORIGINAL_CONFIG))
    assert [algorithm["name"] for algorithm in original["quantization_config"]["algo_config"]] == ["awq"]
    original["quantization_config"]["algo_config"] = None
    assert config == original


def test_awq_scales_the_mlp_and_nothing_else(awq):
    backbones = [load_release(path).backbone for path in (awq, BF16)]
    tensors = [dict(backbone.state_dict()) for backbone in backbones]
    changed = {
        name.rpartition(".layers.")[2].partition(".")[2]
        for name, tensor in tensors[1].items()
        if tensors[0][name].dtype == torch.bfloat16 and not torch.equal(tensors[0][name], tensor)
        and not isinstance(backbones[0].get_submodule(name.rpartition(".")[0]), MXFP4Linear)
    }  # fmt: skip
    assert "post_attention_layernorm.weight" in changed
    assert changed <= {"post_attention_layernorm.weight", "mlp.up_proj.weight"}


def test_recipe_and_card_name_calibration_and_quark(awq, recipe):
    facts = json.loads((awq / "recipe.json").read_text())
    assert Recipe.from_json(facts["recipe"]) == recipe
    assert facts["versions"]["amd-quark"] == "0.13"
    assert facts["calibration"]["num_blocks"] == 4
    assert len(facts["calibration"]["file_sha256"]) == len(facts["calibration"]["tokens_sha256"]) == 64
    assert "AWQ (AMD Quark, template `qwen3_5`" in (awq / "README.md").read_text()


def test_a_process_of_quark_that_fails_says_where_its_log_is(recipe, tmp_path):
    job = {"source": str(tmp_path), "exported": str(tmp_path / "e"), "recipe": recipe.to_json(), "device": "cpu"}
    with pytest.raises(EngineError, match=r"(?s)failed; the end of .*quark\.log: .*not a Clef release"):
        run_quark(job, tmp_path, lambda *at: None)


def test_quarks_process_ends_with_the_one_that_started_it(recipe, tmp_path):
    """The starter is killed while Quark is being imported; the process must not outlive it for long."""
    (tmp_path / "work").mkdir()
    plan = plan_build(str(BF16), recipe)
    job = {
        "source": str(BF16), "exported": str(tmp_path / "e"), "recipe": recipe.to_json(),
        "exclude": list(plan.exclude), "blocks": [[1, 2, 3]], "device": "cpu",
    }  # fmt: skip
    script = (
        "import json, sys\nfrom pathlib import Path\nfrom clef_core.quark_process import run_quark\n"
        "run_quark(json.loads(sys.argv[1]), Path(sys.argv[2]), lambda *at: print(at, flush=True))\n"
    )
    command = [sys.executable, "-c", script, json.dumps(job), str(tmp_path / "work")]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout.readline().startswith("('load'")
        starter.kill()
    deadline = time.monotonic() + 60
    while processes_with(str(tmp_path / "work")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_with(str(tmp_path / "work")) == []
    assert not (tmp_path / "e").exists()


def processes_with(argument: str) -> list[int]:
    """Process ids whose command line names a path."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                found += [int(entry.name)] if argument.encode() in (entry / "cmdline").read_bytes() else []
            except OSError:
                continue
    return found


# Both kinds, read by our loader and by Transformers with Quark


@pytest.fixture(scope="module", params=["none", "awq"])
def mixed(request: pytest.FixtureRequest, awq: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "awq":
        return awq
    path = tmp_path_factory.mktemp("none") / "release"
    quantize(BF16, path, Recipe(algorithm="none", keep_bf16=KEPT, min_shard_bytes=300_000))
    return path


def linears_of(model: torch.nn.Module, kind: str) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if type(module).__name__ == kind}


def test_our_loader_and_transformers_with_quark_compute_the_same_linears_bit_for_bit(mixed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import Qwen3_5ForConditionalGeneration

        quarks = Qwen3_5ForConditionalGeneration.from_pretrained(mixed, dtype=torch.bfloat16)
    ours = load_release(mixed, linear_mode="packed").backbone
    plan = plan_build(str(BF16), Recipe(keep_bf16=KEPT))
    coded = linears_of(quarks, "QParamsLinear")
    assert set(coded) == set(plan.linears) == set(linears_of(ours, "MXFP4Linear"))
    for name in plan.backbone.linears:
        linear, other = ours.get_submodule(name), quarks.get_submodule(name)
        generator = torch.Generator().manual_seed(len(name))
        x = torch.randn(1, 9, linear.in_features, generator=generator).bfloat16()
        assert torch.equal(linear(x), other(x)), name
        assert (type(other) is torch.nn.Linear) == (name in plan.kept)


def test_the_engine_answers_with_it(mixed):
    request = parse_request((PROJECT / "examples" / "card_example.json").read_text()).request
    (decision,) = Engine(load_release(mixed)).decide([Record(request)])
    assert set(decision.response["answers"]) == {"department", "urgency", "outage"}
    assert read_release(mixed).kind == "mxfp4"


def test_vllms_reader_finds_one_format_for_every_linear_it_joins(mixed):
    """Its rules, written down anew: names are compared as they are, and joined linears must agree."""
    quantization = json.loads((mixed / "config.json").read_text())["quantization_config"]
    exclude = quantization["exclude"]
    for value in quantization.values():  # names in lists are mapped to vLLM's one by one
        assert all(isinstance(one, str) for one in value) if isinstance(value, list) else True
    coded = {name.removesuffix(".weight_scale") for name in read_release(mixed).tensors if name.endswith("_scale")}
    joined = {
        "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), "mlp.gate_up_proj": ("gate_proj", "up_proj"),
        "linear_attn.in_proj_qkvz": ("in_proj_qkv", "in_proj_z"), "linear_attn.in_proj_ba": ("in_proj_b", "in_proj_a"),
        "self_attn.o_proj": ("o_proj",), "mlp.down_proj": ("down_proj",), "linear_attn.out_proj": ("out_proj",),
    }  # fmt: skip
    for layer in range(4):
        for name, members in joined.items():
            parts = [f"model.language_model.layers.{layer}.{name.partition('.')[0]}.{member}" for member in members]
            assert len({part in exclude for part in parts}) == 1
            is_there = layer == 3 if name.startswith("self_attn") else layer < 3 or name.startswith("mlp")
            assert all((part in coded) == (is_there and part not in exclude) for part in parts)
