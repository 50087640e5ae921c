"""What a build will make, worked out from the source's configuration and file headers before it starts.

Knows no step. Everything that would stop a build is found here: a source that is none, patterns that match nothing, no
room on the disk.
"""

import fnmatch
import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from clef_core.errors import ReleaseError, SettingsError
from clef_core.linears import Backbone, read_backbone
from clef_core.quantize_files import MTP_PREFIX, planned_entries
from clef_core.quark_process import check_quark
from clef_core.recipe import PILE_VAL, Recipe, kept_linears, program_versions
from clef_core.release import INDEX, JOINT_HEAD, RANDOM_MARKER, ReleaseFiles, read_release, resolve_release
from clef_core.room import check_disk, check_memory
from clef_core.weight_files import Entry, StoredTensor, locate, plan_shards

COPIED = (
    JOINT_HEAD, "joint_head_config.json", "joint_schema_model.py", "tokenizer*.json", "vocab.json", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "chat_template.*", "processor_config.json",
    "preprocessor_config.json", "video_preprocessor_config.json", "generation_config.json", "LICENSE*", "NOTICE*",
    RANDOM_MARKER,
)  # fmt: skip
"""Files that go into the release as they are. The code among them is copied and never run."""


@dataclass(frozen=True)
class BuildPlan:
    """A build, worked out.

    base_model: what the model card names.
    kept: linears that the recipe keeps in BF16.
    linears: those that become MXFP4.
    exclude: exact names of all modules that stay BF16, in the order in which Quark lists them.
    tensors: where each tensor of the source lies.
    shards: weight file → the tensors it will hold.
    copied: files to copy.
    """

    recipe: Recipe
    base_model: str
    source: ReleaseFiles
    backbone: Backbone
    kept: tuple[str, ...]
    linears: tuple[str, ...]
    exclude: tuple[str, ...]
    tensors: dict[str, StoredTensor]
    shards: dict[str, list[Entry]]
    copied: tuple[Path, ...]

    @property
    def source_bytes(self) -> int:
        return sum(stored.num_bytes for stored in self.tensors.values())

    @property
    def weight_bytes(self) -> int:
        return sum(entry.num_bytes for entries in self.shards.values() for entry in entries)

    @cached_property
    def fingerprint(self) -> str:
        """Changes with anything that would change the result; files are told apart by size and time."""
        files = [self.source.path / file for file in self.source.weight_files]
        stamps = {file.name: _stamp(file) for file in (*files, *self.copied)}
        calibration = None
        if self.recipe.algorithm == "awq" and self.recipe.calibration != PILE_VAL:
            calibration = _stamp(Path(self.recipe.calibration).expanduser())
        parts = [
            self.recipe.to_json(),
            stamps,
            dict(self.source.config),
            calibration,
            program_versions(self.recipe.algorithm),
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def check_room(self, parent: Path, there_bytes: int, device: torch.device) -> None:
        """Say what this machine lacks for the build.

        Args:
            there_bytes: what an earlier attempt wrote already.

        Raises:
            SettingsError: disk or memory do not suffice, or Quark is needed and missing.
        """
        if not parent.is_dir():
            raise SettingsError(f"{parent}: no such directory")
        if self.recipe.algorithm == "awq":
            check_quark()
        rounds = 1 if self.recipe.algorithm == "none" else 2  # what Quark exports, and the release
        copies = sum(file.stat().st_size for file in self.copied)
        check_disk(parent, rounds * self.weight_bytes + copies - there_bytes, "the build")
        check_memory(self.recipe, self.source.config, self.source_bytes, device)


def plan_build(source: str, recipe: Recipe) -> BuildPlan:
    """Work out the build of `source` (a directory or hub id).

    Raises:
        ReleaseError: it is no BF16 release.
        SettingsError: the recipe does not fit it.
    """
    files = read_release(resolve_release(source))
    if files.kind != "bf16":
        raise ReleaseError(f"{files.path} is {files.kind} already; a BF16 release is needed")
    if recipe.algorithm == "awq" and len(files.weight_files) > 1 and not (files.path / INDEX).is_file():
        raise ReleaseError(f"{files.path} has no {INDEX}, which Quark needs; --algorithm none does not")
    backbone = read_backbone(files.config, files.path)
    kept = kept_linears(backbone.linears, recipe.keep_bf16)
    linears = tuple(name for name in backbone.linears if name not in kept)
    tensors = {name: stored for file in files.weight_files for name, stored in locate(files.path / file).items()}
    entries = planned_entries(tensors, linears)
    return BuildPlan(
        recipe=recipe,
        base_model=recipe.base_model or _base_model(source),
        source=files,
        backbone=backbone,
        kept=kept,
        linears=linears,
        exclude=_exclude(backbone, kept, files),
        tensors=tensors,
        shards=plan_shards(entries, recipe.shards, recipe.min_shard_bytes),
        copied=tuple(
            file
            for file in sorted(files.path.iterdir())
            if file.is_file() and any(fnmatch.fnmatchcase(file.name, pattern) for pattern in COPIED)
        ),
    )


def _exclude(backbone: Backbone, kept: tuple[str, ...], files: ReleaseFiles) -> tuple[str, ...]:
    bf16 = {*kept, *backbone.others}
    mtp = {
        name.removesuffix(".weight").removesuffix(".bias")
        for name in files.tensors
        if name.startswith(MTP_PREFIX) and name.endswith((".weight", ".bias"))
    }
    return (*(name for name in backbone.modules if name in bf16), *sorted(mtp))


def _base_model(source: str) -> str:
    path = Path(source).expanduser()
    return path.resolve().name if path.is_dir() else source.partition("@")[0]


def _stamp(file: Path) -> list[int]:
    if not file.is_file():
        raise SettingsError(f"{file}: no such file")
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns]
