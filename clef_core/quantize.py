"""From a BF16 release to an MXFP4 release, in steps that survive a crash.

Work goes on in `TARGET.partial`. A step that was finished is not repeated, every file appears only when it is whole,
config.json comes last of all, and one rename gives the release its name: nothing half-made looks like one. A second
call goes on where the first was stopped, if source and recipe are the same.

Two routes make the weights. `none` rounds file by file with our own encoder (`quantize_files`); `awq` has Quark
calibrate, scale and export in a process of its own (`quark_build`), and then only the tensors' places change.
"""

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from clef_core.build_plan import BuildPlan, plan_build
from clef_core.calibration import draw_calibration
from clef_core.errors import EngineError, SettingsError
from clef_core.model_card import front_matter_of, model_card
from clef_core.progress import Count, Listener, Progress, silent
from clef_core.quantize_files import write_shards
from clef_core.quark_process import run_quark
from clef_core.recipe import ORIGINAL_CONFIG, RECIPE_FILE, Recipe, program_versions, quantization_config
from clef_core.release import CHECKSUMS, INDEX
from clef_core.weight_files import StoredTensor, index_text, locate, write_whole
from clef_core.work_folder import WorkFolder

logger = logging.getLogger(__name__)

CARD = "README.md"
CONFIG = "config.json"
_HASH_BYTES = 1 << 22


def quantize(
    source: str | Path,
    target: str | Path,
    recipe: Recipe,
    *,
    device: str | torch.device = "cpu",
    fresh: bool = False,
    listener: Listener = silent,
) -> BuildPlan:
    """Make an MXFP4 release.

    Args:
        source: a BF16 release directory or hub id.
        target: the directory to make.
        device: where weights are rounded (`none`) or Quark runs (`awq`).
        fresh: throw away what an earlier call left in `TARGET.partial`.
        listener: is told how far each step is.

    Returns:
        what was built.

    Raises:
        ReleaseError: the source is no BF16 release or cannot be read.
        SettingsError: the target exists, the recipe does not fit the source, disk or memory do not suffice, or
            `TARGET.partial` belongs to another recipe or source.
        EngineError: Quark failed.
    """
    target = Path(target).expanduser().absolute()
    folder = WorkFolder(target)
    if target.exists():
        if not _is_published(folder):
            raise SettingsError(f"{target} exists; choose another target, or remove it first")
        folder.remove()  # an earlier call was stopped between the rename and the end
        return plan_build(str(source), recipe)
    plan = plan_build(str(source), recipe)
    plan.check_room(target.parent, 0 if fresh else folder.num_bytes(), torch.device(device))
    with folder.opened(plan.fingerprint, fresh=fresh):
        _Build(plan, folder, target, torch.device(device), listener).run()
        folder.remove()
    return plan


def _is_published(folder: WorkFolder) -> bool:
    return "checksums" in (folder.done or ()) and not folder.release.exists()


@dataclass(frozen=True)
class _Build:
    """The steps. Each may be stopped at any moment and called again."""

    plan: BuildPlan
    folder: WorkFolder
    target: Path
    device: torch.device
    listener: Listener

    def run(self) -> None:
        done = self.folder.done or []
        by_quark: list[Callable[[], None]] = [self.calibration, self.quark, self.reshard]
        made = by_quark if self.plan.recipe.algorithm == "awq" else [self.weights]
        for step in (*made, self.index, self.copies, self.card, self.checksums, self.publish):
            name = step.__name__
            if name not in done:
                started = time.perf_counter()
                step()
                done.append(name)
                self.folder.write_done(self.plan.fingerprint, done)
                logger.info("%s: %s took %.1f s", self.target, name, time.perf_counter() - started)

    def weights(self) -> None:
        """Round the source's weight files to MXFP4, file by file."""
        self._write_shards("weights", self.plan.tensors)

    def calibration(self) -> None:
        """Draw the calibration blocks, once, so that a second call uses the same."""
        drawn = draw_calibration(self.plan.recipe, self.plan.source.path / "tokenizer.json")
        write_whole(self._calibration_file, json.dumps({"facts": drawn.facts(), "blocks": drawn.blocks}))

    def quark(self) -> None:
        """Have Quark load, calibrate, quantise and export the backbone."""
        if self._exported.is_dir():
            return
        job = {
            "source": str(self.plan.source.path),
            "exported": str(self._exported),
            "recipe": self.plan.recipe.to_json(),
            "exclude": [*self.plan.backbone.others, *self.plan.kept],
            "blocks": self._calibration()["blocks"],
            "device": str(self.device),
        }

        def report(step: str, done: int, total: int) -> None:
            self.listener(Progress(step, done, total, "layers" if step == "calibrate" else "steps"))

        run_quark(job, self.folder.path, report)

    def reshard(self) -> None:
        """Spread what Quark exported over the release's files; the tensors stay as they are."""
        exported = {
            name: stored
            for file in sorted(self._exported.glob("*.safetensors"))
            for name, stored in locate(file).items()
        }
        wanted = {entry.name: (entry.dtype, entry.shape) for entries in self.plan.shards.values() for entry in entries}
        found = {name: (stored.dtype, stored.shape) for name, stored in exported.items()}
        wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        if wrong:
            raise EngineError(f"Quark exported {wrong[0]} as {found.get(wrong[0])} and not as {wanted.get(wrong[0])}")
        self._write_shards("reshard", exported)

    def index(self) -> None:
        """Write the index, also where there is one file: vLLM would read the joint head's otherwise."""
        write_whole(self.folder.release / INDEX, index_text(self.plan.shards))

    def copies(self) -> None:
        """Copy head, tokenizer, processor and licence."""
        count = Count(self.listener, "copies", len(self.plan.copied), "files")
        for file in self.plan.copied:
            part = self.folder.release / f"{file.name}.part"
            shutil.copyfile(file, part)
            _sync(part)
            part.replace(self.folder.release / file.name)
            count.add(1)

    def card(self) -> None:
        """Write recipe and model card, and beside them the config as Quark exported it."""
        plan, release = self.plan, self.folder.release
        calibration = None
        if plan.recipe.algorithm == "awq":
            calibration = self._calibration()["facts"]
            write_whole(release / ORIGINAL_CONFIG, (self._exported / CONFIG).read_bytes())
        measured = {
            "num_linears": len(plan.linears),
            "source_bytes": plan.source_bytes,
            "weight_bytes": plan.weight_bytes,
            "calibration": calibration,
            "versions": program_versions(plan.recipe.algorithm),
        }
        card = model_card(plan, front_matter_of(plan.source.path / CARD), measured)
        write_whole(release / CARD, card)
        facts = {"recipe": plan.recipe.to_json(), "base_model": plan.base_model, "kept_linears": plan.kept, **measured}
        write_whole(release / RECIPE_FILE, json.dumps(facts, indent=2, ensure_ascii=False) + "\n")

    def checksums(self) -> None:
        """Write SHA256SUMS, and then config.json, which makes the directory a release."""
        release = self.folder.release
        for left in release.glob("*.part"):  # of an attempt that was stopped while it wrote
            left.unlink()
        config = json.dumps(self._config(), indent=2, ensure_ascii=False).encode() + b"\n"
        hashes = {CONFIG: hashlib.sha256(config).hexdigest()}
        files = [file for file in sorted(release.iterdir()) if file.name not in (CHECKSUMS, CONFIG)]
        count = Count(self.listener, "checksums", sum(file.stat().st_size for file in files), "bytes")
        for file in files:
            digest = hashlib.sha256()
            with file.open("rb") as stream:
                while piece := stream.read(_HASH_BYTES):
                    digest.update(piece)
                    count.add(len(piece))
            hashes[file.name] = digest.hexdigest()
        write_whole(release / CHECKSUMS, "".join(f"{hashes[name]}  {name}\n" for name in sorted(hashes)))
        write_whole(release / CONFIG, config)

    def publish(self) -> None:
        """Give the release its name."""
        count = Count(self.listener, "publish", 1, "steps")
        _sync(self.folder.release)
        os.rename(self.folder.release, self.target)
        _sync(self.target.parent)
        count.add(1)

    @property
    def _exported(self) -> Path:
        return self.folder.path / "exported"

    @property
    def _calibration_file(self) -> Path:
        return self.folder.path / "calibration.json"

    def _calibration(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads(self._calibration_file.read_text(encoding="utf-8"))
        return loaded

    def _config(self) -> dict[str, Any]:
        """The source's config with what Quark would say of the weights, or Quark's own with `algo_config` null."""
        if self.plan.recipe.algorithm == "none":
            return {**self.plan.source.config, "quantization_config": quantization_config(self.plan.exclude)}
        config: dict[str, Any] = json.loads((self.folder.release / ORIGINAL_CONFIG).read_text(encoding="utf-8"))
        config["quantization_config"]["algo_config"] = None
        return config

    def _write_shards(self, step: str, sources: Mapping[str, StoredTensor]) -> None:
        count = Count(self.listener, step, sum(stored.num_bytes for stored in sources.values()), "bytes")
        write_shards(sources, self.plan.shards, self.folder.release, self.device, count.add)


def _sync(path: Path) -> None:
    """Wait until a file or directory is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
