"""Builds by plain rounding: what they hold, what stops them, and that `kill -9` at any moment leaves nothing bad."""

import contextlib
import fcntl
import hashlib
import json
import math
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from paths import GOLDEN, PROJECT
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from clef_core import work_folder
from clef_core.engine import Engine, Record
from clef_core.errors import ReleaseError, SettingsError
from clef_core.linears import read_backbone
from clef_core.model import load_release
from clef_core.mxfp4_linear import MXFP4Linear
from clef_core.progress import Progress
from clef_core.quantize import quantize
from clef_core.quantize_files import planned_entries
from clef_core.recipe import MIN_SHARD_BYTES, Recipe
from clef_core.release import CHECKSUMS, INDEX, ChecksumCache, read_release, verify_checksums
from clef_core.room import check_disk
from clef_core.schema import parse_request
from clef_core.weight_encoder import encode_weight
from clef_core.weight_files import StoredTensor, plan_shards
from worker.__main__ import app

BF16 = PROJECT / "checkpoints" / "random-bf16"
PLAIN = Recipe(algorithm="none")
MANY = Recipe(algorithm="none", min_shard_bytes=300_000)
"""The small release in five files."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("built") / "release"
    quantize(BF16, path, MANY)
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A BF16 release to be changed."""
    return Path(shutil.copytree(BF16, tmp_path / "source"))


def change_tensors(release: Path, **changes: torch.Tensor) -> None:
    (release / INDEX).unlink(missing_ok=True)
    save_file(load_file(release / "model.safetensors") | changes, release / "model.safetensors")


def all_tensors(release: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor for file in sorted(release.glob("model*.safetensors")) for name, tensor in load_file(file).items()
    }


def listing(release: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(release.iterdir())}


def test_every_linear_of_the_language_model_is_rounded_and_nothing_else(built):
    source, tensors = load_file(BF16 / "model.safetensors"), all_tensors(built)
    rounded = {name.removesuffix("_scale") for name in tensors if name.endswith(".weight_scale")}
    assert len(rounded) == 31
    for name, tensor in source.items():
        if name in rounded:
            codes, scales = encode_weight(tensor)
            assert torch.equal(tensors[name], codes)
            assert torch.equal(tensors[f"{name}_scale"], scales)
        else:
            assert torch.equal(tensors[name], tensor)
    assert tensors.keys() == source.keys() | {f"{name}_scale" for name in rounded}


def test_a_release_that_is_big_enough_gets_five_files_and_a_small_one_one_each_with_an_index(built, tmp_path):
    assert len(list(built.glob("model-0000?-of-00005.safetensors"))) == 5
    quantize(BF16, tmp_path / "small", PLAIN)
    assert [file.name for file in (tmp_path / "small").glob("model*.safetensors")] == ["model.safetensors"]
    for release in (built, tmp_path / "small"):
        assert read_release(release).kind == "mxfp4"  # holds the index against the files
        assert (release / INDEX).is_file()


def test_the_number_of_files_changes_no_tensor(built, tmp_path):
    quantize(BF16, tmp_path / "one", PLAIN)
    one, five = all_tensors(tmp_path / "one"), all_tensors(built)
    assert one.keys() == five.keys()
    assert all(torch.equal(one[name], five[name]) for name in one)


def test_head_tokenizer_and_marker_are_copied_byte_for_byte(built):
    names = ["joint_head.safetensors", "joint_head_config.json", "tokenizer.json", "tokenizer_config.json"]
    names += ["processor_config.json", "chat_template.jinja", "generation_config.json", "LICENSE", "RANDOM_WEIGHTS"]
    for name in names:
        assert (built / name).read_bytes() == (BF16 / name).read_bytes(), name


def test_the_checksums_cover_every_file(built, tmp_path):
    listed = (built / CHECKSUMS).read_text().splitlines()
    assert {line[66:] for line in listed} == {file.name for file in built.iterdir()} - {CHECKSUMS}
    verify_checksums(read_release(built), ChecksumCache(tmp_path / "cache"))


def test_recipe_and_card_say_how_it_was_made(built):
    facts = json.loads((built / "recipe.json").read_text())
    assert Recipe.from_json(facts["recipe"]) == MANY
    assert facts["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert facts["calibration"] is None
    card = (built / "README.md").read_text()
    assert card.startswith("---\nbase_model: random-bf16\nbase_model_relation: quantized\ntags:\n- mxfp4\n")
    weights = sum(tensor.numel() * tensor.element_size() for tensor in all_tensors(built).values())
    assert f"{weights / 1e6:.1f} MB" in card
    assert "No accuracy was measured" in card
    assert "random numbers" in card


def test_the_source_cards_licence_is_kept_and_its_base_replaced(source, tmp_path):
    (source / "README.md").write_text("---\nlicense: apache-2.0\nbase_model: other/one\n---\n# Source\n")
    quantize(source, tmp_path / "target", Recipe(algorithm="none", base_model="owner/name"))
    head = (tmp_path / "target" / "README.md").read_text().split("---")[1]
    assert "license: apache-2.0" in head
    assert "base_model: owner/name" in head
    assert "other/one" not in head


def test_the_engine_answers_with_it_as_with_its_expanded_weights(built):
    request = parse_request((PROJECT / "examples" / "card_example.json").read_text()).request
    answers = [
        Engine(load_release(built, linear_mode=mode)).decide([Record(request)])[0].log_probs
        for mode in ("packed", "expanded")
    ]
    assert answers[0] == answers[1]


def test_code_of_the_source_is_copied_and_never_run(source, tmp_path):
    witness = tmp_path / "ran"
    (source / "joint_schema_model.py").write_text(f"open({str(witness)!r}, 'w')\n")
    quantize(source, tmp_path / "target", PLAIN)
    assert (tmp_path / "target" / "joint_schema_model.py").is_file()
    assert not witness.exists()


def test_kept_linears_stay_bfloat16_and_are_excluded(tmp_path):
    plan = quantize(BF16, tmp_path / "mixed", Recipe(algorithm="none", keep_bf16=("in_proj_[ab]", "layers.0.*")))
    config = json.loads((tmp_path / "mixed" / "config.json").read_text())
    assert set(plan.kept) <= set(config["quantization_config"]["exclude"])
    assert len(plan.kept) == 8 + 2 * 2
    backbone = load_release(tmp_path / "mixed").backbone
    for name in plan.backbone.linears:
        assert isinstance(backbone.get_submodule(name), MXFP4Linear) == (name not in plan.kept)


def test_floats_of_other_kinds_become_bfloat16_but_mtp_tensors_stay_as_they_are(source, tmp_path):
    name, mtp = "model.language_model.layers.0.linear_attn.A_log", "mtp.layers.0.mlp.up_proj.weight"
    linear = "model.language_model.layers.1.mlp.down_proj.weight"
    tensors = load_file(source / "model.safetensors")
    extra = {mtp: torch.randn(4, 32), "mtp.norm.weight": torch.ones(4)}
    change_tensors(source, **{name: tensors[name].float(), linear: tensors[linear].float()}, **extra)
    quantize(source, tmp_path / "target", PLAIN)
    found = all_tensors(tmp_path / "target")
    assert torch.equal(found[name], tensors[name])
    assert torch.equal(found[linear], encode_weight(tensors[linear])[0])
    assert found[mtp].dtype == torch.float32
    assert torch.equal(found[mtp], extra[mtp])
    exclude = json.loads((tmp_path / "target" / "config.json").read_text())["quantization_config"]["exclude"]
    assert exclude[-2:] == ["mtp.layers.0.mlp.up_proj", "mtp.norm"]


def test_the_27b_release_gets_the_sizes_of_the_released_build():
    """54.7 GB in BF16 and 18.9 GB in MXFP4, both weights alone: planned from the configuration, no file is read."""
    text = {
        "vocab_size": 248_320, "hidden_size": 5_120, "intermediate_size": 17_408, "num_hidden_layers": 64,
        "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16,
        "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    }  # fmt: skip
    backbone = read_backbone({"text_config": text, "vision_config": {"out_hidden_size": 5_120}}, Path())
    source = {
        name: StoredTensor(Path(), "BF16", shape, 0, 2 * math.prod(shape)) for name, shape in backbone.shapes.items()
    }
    entries = planned_entries(source, backbone.linears)
    assert sum(stored.num_bytes for stored in source.values()) == pytest.approx(54.7e9, rel=0.003)
    assert sum(entry.num_bytes for entry in entries) == pytest.approx(18.9e9, rel=0.003)
    assert len(plan_shards(entries, 5, MIN_SHARD_BYTES)) == 5


# What stops a build


def test_an_existing_target_is_refused_and_untouched(tmp_path):
    (tmp_path / "target").mkdir()
    with pytest.raises(SettingsError, match="target exists"):
        quantize(BF16, tmp_path / "target", PLAIN)
    assert [entry.name for entry in tmp_path.iterdir()] == ["target"]


@pytest.mark.parametrize(
    ("source", "message"),
    [(PROJECT / "checkpoints" / "random-mxfp4", "is mxfp4 already"), (PROJECT / "examples", "not a Clef release")],
)
def test_what_is_no_bf16_release_is_refused_before_anything_is_written(source, message, tmp_path):
    with pytest.raises(ReleaseError, match=message):
        quantize(source, tmp_path / "target", PLAIN)
    assert list(tmp_path.iterdir()) == []


def test_a_weight_that_is_no_number_is_named(source, tmp_path):
    name = "model.language_model.layers.2.mlp.up_proj.weight"
    weight = load_file(source / "model.safetensors")[name]
    weight[3, 5] = torch.nan
    change_tensors(source, **{name: weight})
    with pytest.raises(ReleaseError, match=rf"{name}: only finite values"):
        quantize(source, tmp_path / "target", PLAIN)
    assert not (tmp_path / "target").exists()


def test_too_little_disk_is_said_beforehand(tmp_path):
    with pytest.raises(SettingsError, match=r"the build needs 1000000000\.0 GB of disk"):
        check_disk(tmp_path, 10**18, "the build")


def test_too_little_memory_is_said_beforehand(tmp_path):
    with pytest.raises(SettingsError, match=r"AWQ needs about .* of memory \(estimate\).*--algorithm none"):
        quantize(BF16, tmp_path / "target", Recipe(num_samples=10**9))
    assert list(tmp_path.iterdir()) == []


def test_quark_cannot_read_several_files_without_an_index(source, tmp_path):
    tensors = load_file(source / "model.safetensors")
    (source / INDEX).unlink()
    save_file({"lm_head.weight": tensors.pop("lm_head.weight")}, source / "other.safetensors")
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ReleaseError, match=f"has no {INDEX}, which Quark needs"):
        quantize(source, tmp_path / "target", Recipe())
    quantize(source, tmp_path / "target", PLAIN)


# Stopped and called again


class Stop(Exception):
    pass


def stop_at(step: str, number: int = 1) -> Callable[[Progress], None]:
    """A listener that raises at the nth event of a step."""
    left = [number]

    def listen(progress: Progress) -> None:
        left[0] -= progress.step == step
        if not left[0]:
            raise Stop

    return listen


def test_finished_files_are_not_made_again(built, tmp_path):
    with pytest.raises(Stop):
        quantize(BF16, tmp_path / "target", MANY, listener=stop_at("weights", 60))
    release = tmp_path / "target.partial" / "release"
    done = {file: file.stat().st_mtime_ns for file in release.glob("*.safetensors")}
    assert 0 < len(done) < 5
    seen: list[Progress] = []
    quantize(BF16, tmp_path / "target", MANY, listener=seen.append)
    times = {tmp_path / "target" / file.name: stamp for file, stamp in done.items()}
    assert {file: file.stat().st_mtime_ns for file in times} == times
    assert listing(tmp_path / "target") == listing(built)
    weights = [progress for progress in seen if progress.step == "weights"]
    assert weights[1].done > 300_000  # the first files at once
    assert weights[-1].done == weights[-1].total
    assert not (tmp_path / "target.partial").exists()


def test_work_on_another_recipe_is_not_gone_on_with_unless_fresh(built, tmp_path):
    with pytest.raises(Stop):
        quantize(BF16, tmp_path / "target", PLAIN, listener=stop_at("copies"))
    with pytest.raises(SettingsError, match="another source, recipe or set of versions"):
        quantize(BF16, tmp_path / "target", MANY)
    quantize(BF16, tmp_path / "target", MANY, fresh=True)
    assert listing(tmp_path / "target") == listing(built)


def test_work_on_another_source_is_not_gone_on_with(source, tmp_path):
    with pytest.raises(Stop):
        quantize(source, tmp_path / "target", PLAIN, listener=stop_at("copies"))
    name = "model.language_model.layers.2.mlp.up_proj.weight"
    change_tensors(source, **{name: torch.zeros(256, 128, dtype=torch.bfloat16)})
    with pytest.raises(SettingsError, match="--fresh"):
        quantize(source, tmp_path / "target", PLAIN)


def test_a_folder_that_no_build_made_is_left_alone(tmp_path):
    (tmp_path / "target.partial").mkdir()
    (tmp_path / "target.partial" / "thesis.txt").write_text("all of it")
    with pytest.raises(SettingsError, match="was not made by a build"):
        quantize(BF16, tmp_path / "target", PLAIN, fresh=True)
    assert (tmp_path / "target.partial" / "thesis.txt").read_text() == "all of it"


def test_two_builds_of_one_target_do_not_meet(tmp_path, monkeypatch):
    monkeypatch.setattr(work_folder, "LOCK_WAIT_S", 0.2)
    (tmp_path / "target.partial").mkdir()
    with (tmp_path / "target.partial" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SettingsError, match="another process is at work"):
            quantize(BF16, tmp_path / "target", PLAIN)
    quantize(BF16, tmp_path / "target", PLAIN)


class Killer:
    """A process that builds in forks of itself, each of which dies by SIGKILL before its nth change on the disk."""

    def __init__(self) -> None:
        command = [sys.executable, str(PROJECT / "tests" / "killed_build.py")]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, cwd=PROJECT, **pipes)

    def build(self, target: Path, number: int, *, fresh: bool) -> bool:
        """Whether the build was killed; it was not when it has fewer changes."""
        job = {"source": str(BF16), "target": str(target), "recipe": MANY.to_json(), "number": number, "fresh": fresh}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        status = int(self.process.stdout.readline())
        assert status in (0, -signal.SIGKILL)
        return status != 0


@pytest.fixture(scope="module")
def killer() -> Iterator[Killer]:
    killer = Killer()
    yield killer
    killer.process.stdin.close()
    killer.process.wait()
    killer.process.stdout.close()


@pytest.mark.slow
@pytest.mark.parametrize(("fresh", "last"), [(False, 200), (True, 30)], ids=["new", "fresh"])
def test_kill_9_before_any_change_on_the_disk_and_then_again_completes(built, tmp_path, killer, fresh, last):
    """`fresh`: the killed build first throws away an older one with another recipe; then it goes on like a new one."""
    wanted = listing(built)
    for number in range(1, last + 1):
        target = tmp_path / f"target-{number}"
        if fresh:
            with pytest.raises(Stop):
                quantize(BF16, target, PLAIN, listener=stop_at("copies"))
        if not killer.build(target, number, fresh=fresh):
            break
        half_made = target.with_name(f"{target.name}.partial") / "release"
        for release in (target, half_made):
            if (release / "config.json").exists():  # the last file to appear
                assert listing(release) == wanted, f"a bad release after change number {number}"
        if target.exists():
            with contextlib.suppress(SettingsError):  # it may say that the target exists, or clear up
                quantize(BF16, target, MANY)
        else:
            quantize(BF16, target, MANY, fresh=fresh)
        assert listing(target) == wanted, f"another release after change number {number}"
        shutil.rmtree(target)
    assert number >= 30  # a build without changes to die before would prove nothing


# The command line


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["quantize", *map(str, arguments)])
    return result.exit_code, result.output


def test_the_command_makes_a_release_and_says_what_it_made(tmp_path):
    code, output = run(BF16, tmp_path / "target", "--algorithm", "none", "--keep-bf16", "in_proj_[ab]")
    assert code == 0
    assert "25 linears in MXFP4, 6 kept in BF16" in output
    assert "weights: 3.5 MB of 3.5 MB" in output
    assert read_release(tmp_path / "target").kind == "mxfp4"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--keep-bf16", "nothing"], "matches no linear"),
        (["--keep-bf16", "in_proj_a"], "vLLM loads these as one linear"),
        (["--device", "abacus"], "no device has that name"),
        (["--device", "cuda:99"], "--device cuda:99"),
        (["--calibration", "absent.txt", "--algorithm", "awq"], "absent.txt: no such file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(options, message, tmp_path):
    code, output = run(BF16, tmp_path / "target", "--algorithm", "none", *options)
    assert code == 2
    assert message in output
    assert output.count("Error:") == 1
    assert not (tmp_path / "target").exists()


def test_the_command_refuses_an_existing_target(tmp_path):
    code, output = run(GOLDEN / "release-bf16", tmp_path, "--algorithm", "none")
    assert code == 2
    assert "exists; choose another target" in output
