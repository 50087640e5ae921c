"""Looking at release directories: what is accepted, and that each defect is named."""

import fnmatch
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from paths import GOLDEN, PROJECT
from safetensors.torch import load_file, save_file

from clef_core.errors import ReleaseError
from clef_core.release import (
    CHECKSUMS,
    FETCHED,
    INDEX,
    ChecksumCache,
    ReleaseFiles,
    read_release,
    resolve_release,
    verify_checksums,
)

SMALL = PROJECT / "checkpoints"


@pytest.fixture
def release(tmp_path) -> Path:
    return Path(shutil.copytree(SMALL / "random-mxfp4", tmp_path / "release"))


@pytest.fixture
def cache(tmp_path) -> ChecksumCache:
    return ChecksumCache(tmp_path / "checksums.json")


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("kind", ["bf16", "mxfp4"])
def test_shipped_releases_are_whole(kind, cache):
    files = read_release(SMALL / f"random-{kind}")
    assert isinstance(files, ReleaseFiles)
    assert files.kind == kind
    assert files.is_random
    assert len(verify_checksums(files, cache)) == 64


def test_a_release_may_lack_index_checksums_and_licence(cache):
    files = read_release(GOLDEN / "release-bf16")
    assert files.weight_files == ("model.safetensors",)
    assert not files.is_random
    assert verify_checksums(files, cache) != verify_checksums(read_release(GOLDEN / "release-mxfp4"), cache)


@pytest.mark.parametrize("name", ["config.json", "joint_head.safetensors", "joint_head_config.json", "tokenizer.json"])
def test_a_missing_file_is_named(release, name):
    (release / name).unlink()
    with pytest.raises(ReleaseError, match=name):
        read_release(release)


def test_a_directory_of_something_else_is_no_release(tmp_path):
    with pytest.raises(ReleaseError, match="not a Clef release"):
        read_release(tmp_path)
    with pytest.raises(ReleaseError, match="no such release directory"):
        read_release(tmp_path / "absent")


def test_another_architecture_is_named(release):
    edit_json(release / "config.json", architectures=["LlamaForCausalLM"])
    with pytest.raises(ReleaseError, match="LlamaForCausalLM"):
        read_release(release)


def test_another_quantisation_is_named(release):
    edit_json(release / "config.json", quantization_config={"quant_method": "gptq"})
    with pytest.raises(ReleaseError, match="gptq"):
        read_release(release)


def test_a_config_that_contradicts_the_weights_is_refused(release):
    config = json.loads((release / "config.json").read_text())
    del config["quantization_config"]
    (release / "config.json").write_text(json.dumps(config))
    with pytest.raises(ReleaseError, match="says bf16, but the weights are MXFP4"):
        read_release(release)


def test_broken_json_is_named(release):
    (release / "config.json").write_text("{")
    with pytest.raises(ReleaseError, match=r"config\.json"):
        read_release(release)


def test_a_cut_off_weight_file_is_seen_without_reading_it(release):
    file = release / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ReleaseError, match="damaged"):
        read_release(release)


@pytest.mark.parametrize("content", [b"", b"\x00" * 7, b"\xff" * 64, b"\x02\x00\x00\x00\x00\x00\x00\x00[]"])
def test_what_is_no_safetensors_file_is_named(release, content):
    (release / "model.safetensors").write_bytes(content)
    with pytest.raises(ReleaseError, match=r"model\.safetensors"):
        read_release(release)


def test_an_index_with_a_missing_shard_is_refused(release):
    index = json.loads((release / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = "model-00002-of-00002.safetensors"
    (release / INDEX).write_text(json.dumps(index))
    with pytest.raises(ReleaseError, match="model-00002-of-00002"):
        read_release(release)


def test_an_index_may_not_leave_the_release(release):
    index = json.loads((release / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = "../other/model.safetensors"
    (release / INDEX).write_text(json.dumps(index))
    with pytest.raises(ReleaseError, match="outside the release"):
        read_release(release)


def test_an_index_that_names_another_tensor_is_refused(release):
    index = json.loads((release / INDEX).read_text())
    index["weight_map"]["surplus"] = "model.safetensors"
    (release / INDEX).write_text(json.dumps(index))
    with pytest.raises(ReleaseError, match="surplus"):
        read_release(release)


def test_a_tensor_in_two_shards_is_refused(release):
    tensors = load_file(release / "model.safetensors")
    save_file({"lm_head.weight": tensors["lm_head.weight"]}, release / "more.safetensors")
    (release / INDEX).unlink()
    with pytest.raises(ReleaseError, match=r"lm_head\.weight is in"):
        read_release(release)


def test_a_changed_file_fails_its_checksum(release, cache):
    (release / "LICENSE").write_text("changed")
    with pytest.raises(ReleaseError, match="LICENSE is not the file"):
        verify_checksums(read_release(release), cache)


def test_a_listed_but_missing_file_fails(release, cache):
    (release / "LICENSE").unlink()
    with pytest.raises(ReleaseError, match="LICENSE is listed"):
        verify_checksums(read_release(release), cache)


def test_checksum_files_of_sha256sum_are_understood(release, cache):
    """`sha256sum` writes two spaces, or a space and a star in binary mode."""
    lines = (release / CHECKSUMS).read_text().splitlines()
    (release / CHECKSUMS).write_text("\n".join(line.replace("  ", " *") for line in lines) + "\n\n")
    verify_checksums(read_release(release), cache)
    subprocess.run(["sha256sum", "--check", "--quiet", CHECKSUMS], cwd=SMALL / "random-mxfp4", check=True)


def test_a_hash_is_remembered_until_the_file_changes(tmp_path, cache):
    file = tmp_path / "f"
    file.write_bytes(b"one")
    read: list[int] = []
    assert cache.sha256(file, read.append) == hashlib.sha256(b"one").hexdigest()
    cache.sha256(file, read.append)
    assert read == [3]
    file.write_bytes(b"three")
    assert cache.sha256(file, read.append) == hashlib.sha256(b"three").hexdigest()
    cache.file.write_text("not JSON")
    assert cache.sha256(file) == hashlib.sha256(b"three").hexdigest()


@pytest.mark.parametrize("source", ["/no/such/dir", "./absent", "not a hub id", "a/b/c"])
def test_a_source_that_is_neither_directory_nor_hub_id_is_refused(source):
    with pytest.raises(ReleaseError, match="no such release directory"):
        resolve_release(source)


def test_a_hub_id_that_cannot_be_had_is_one_clear_error(tmp_path):
    """In a process of its own: the hub client reads its settings at import. Offline mode asks no network."""
    script = (
        "from clef_core.errors import ReleaseError\n"
        "from clef_core.release import resolve_release\n"
        "try: resolve_release('owner/absent')\n"
        "except ReleaseError as error: print(error)"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=PROJECT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("owner/absent: neither a directory here nor a release that the hub gives")


def test_everything_that_checksums_list_is_fetched_from_the_hub():
    released = ["joint_schema_model.py", "config.json.orig_with_algo_config", "README.md", "preprocessor_config.json"]
    for name in [*released, *(file.name for file in (SMALL / "random-mxfp4").iterdir())]:
        assert any(fnmatch.fnmatchcase(name, pattern) for pattern in FETCHED), name


def test_a_directory_resolves_to_itself(release):
    assert resolve_release(str(release)) == release.resolve()
