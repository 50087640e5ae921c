"""Which variants a comparison runs: configured names, release directories, a floor with a dtype of its own."""

from pathlib import Path
from shutil import copytree

import pytest
from lab import settings_of

from clef_core.errors import ReleaseError
from worker.settings import PROJECT_DIR, Settings, load_settings
from worker.sides import choose_sides, sides_from_parameters

SMALL = PROJECT_DIR / "checkpoints" / "random-bf16"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_of(tmp_path)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A release whose folder's name could not be a variant's."""
    path = tmp_path / "my (new) release, which has a very long name indeed"
    copytree(SMALL, path)
    return path


def test_configured_variants_are_taken_as_they_are(settings: Settings) -> None:
    sides = choose_sides(settings, "bf16", "mxfp4")
    assert (sides.left, sides.right, sides.floor) == ("bf16", "mxfp4", "bf16")
    assert (sides.variants, sides.floor_variants) == (("bf16", "mxfp4"), ())
    assert sides.settings == settings
    assert choose_sides(settings, "bf16", "bf16", has_floor=False).floor is None


def test_the_folder_of_a_configured_variant_is_that_variant(settings: Settings) -> None:
    assert choose_sides(settings, str(SMALL), "mxfp4").left == "bf16"


def test_another_folder_gets_a_name_that_a_worker_process_accepts(settings: Settings, copied: Path) -> None:
    sides = choose_sides(settings, "bf16", str(copied))
    folder, checksum = sides.right[:-9], sides.right[-8:]
    assert folder == "my-new-release-which"
    assert int(checksum, 16) >= 0
    assert sides.settings.variants[sides.right] == str(copied)
    assert settings.variants.keys() == {"bf16", "mxfp4"}

    (copied / "NOTE").write_text("another state of the folder is another variant")
    assert not (copied / "SHA256SUMS").read_text().count("NOTE")
    assert choose_sides(settings, "bf16", str(copied)).right != sides.right


def test_the_settings_of_a_named_release_reach_a_child_process(
    settings: Settings, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = choose_sides(settings, str(copied), "bf16", floor_dtype="float32")
    for name, value in sides.floor_settings.to_environment().items():
        monkeypatch.setenv(name, value)
    child = load_settings()
    assert child.variants == sides.floor_settings.variants
    assert child.dtype == "float32"


def test_a_floor_of_another_dtype_is_a_variant_with_settings_of_its_own(settings: Settings) -> None:
    sides = choose_sides(settings, "bf16", "mxfp4", floor_dtype="float32")
    assert (sides.floor, sides.floor_variants, sides.variants) == ("bf16-float32", ("bf16-float32",), ("bf16", "mxfp4"))
    assert sides.floor_settings.variants["bf16-float32"] == settings.variants["bf16"]
    assert (sides.settings.dtype, sides.floor_settings.dtype) == (None, "float32")


def test_a_floor_on_another_device_is_a_variant_with_settings_of_its_own(settings: Settings) -> None:
    sides = choose_sides(settings, "bf16", "mxfp4", floor_dtype="float32", floor_device="cuda:1")
    assert (sides.floor, sides.floor_settings.device) == ("bf16-float32-cuda1", "cuda:1")
    assert sides.to_parameters()["floor_device"] == "cuda:1"
    assert choose_sides(settings, "bf16", "mxfp4", floor_device="cpu").floor == "bf16-cpu"


def test_a_stored_comparison_finds_its_releases_again(settings: Settings, copied: Path) -> None:
    for dtype, device in ((None, None), ("float32", None), (None, "cuda:1"), ("float32", "cpu")):
        sides = choose_sides(settings, "bf16", str(copied), floor_dtype=dtype, floor_device=device)
        parameters = sides.to_parameters()
        assert parameters["random_releases"] == list(parameters["releases"])
        again = sides_from_parameters(settings, sides.left, sides.right, sides.floor, parameters)
        assert again == sides


def test_a_variant_that_is_gone_is_named(settings: Settings) -> None:
    with pytest.raises(ReleaseError, match="the variant int8 of this comparison is not configured any more"):
        sides_from_parameters(settings, "bf16", "int8", None, {})


def test_what_is_neither_variant_nor_release_is_refused(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match=r"nope is no variant \(there are bf16, mxfp4\) and no release"):
        choose_sides(settings, "nope", "mxfp4")
    with pytest.raises(ReleaseError, match="not a Clef release"):
        choose_sides(settings, "bf16", str(tmp_path))
