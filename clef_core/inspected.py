"""A release directory as it is found, whole or not: what `verify` looks at.

Nothing in it is trusted and nothing repaired. What surprises: what cannot be read raises `Unchecked`, because one
broken part must not hide what the laws say of the others.
"""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from clef_core.errors import ReleaseError
from clef_core.linears import Backbone, read_backbone
from clef_core.mxfp4 import BLOCK
from clef_core.recipe import ORIGINAL_CONFIG, RECIPE_FILE, Algorithm
from clef_core.release import INDEX, JOINT_HEAD
from clef_core.weight_files import StoredTensor, locate


class Unchecked(Exception):
    """A law cannot be looked at; the message says why. Caught by `verify`, never seen outside."""


class Inspected:
    """A release directory as it is found, whole or not. Nothing in it is trusted."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def config(self) -> dict[str, Any]:
        return self.json("config.json")

    @cached_property
    def index(self) -> dict[str, Any]:
        return self.json(INDEX)

    @cached_property
    def weight_files(self) -> list[Path]:
        return sorted(file for file in self.path.glob("*.safetensors") if file.name != JOINT_HEAD)

    @cached_property
    def headers(self) -> dict[str, dict[str, StoredTensor]]:
        """File name → its tensors. Files that are not safetensors files are left out."""
        found = {}
        for file in self.weight_files:
            try:
                found[file.name] = locate(file)
            except ReleaseError:
                continue
        return found

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """Every tensor, from the file that the index names where there is more than one."""
        found = {name: stored for header in self.headers.values() for name, stored in header.items()}
        weight_map = self._json_or_empty(INDEX).get("weight_map")
        for name, file in weight_map.items() if isinstance(weight_map, dict) else ():
            if name in self.headers.get(file, {}):
                found[name] = self.headers[file][name]
        return found

    @cached_property
    def backbone(self) -> Backbone:
        try:
            return read_backbone(self.config, self.path)
        except ReleaseError as error:
            raise Unchecked(str(error)) from error

    @cached_property
    def exclude(self) -> set[str]:
        quantization = self.config.get("quantization_config")
        exclude = quantization.get("exclude") if isinstance(quantization, dict) else None
        if not isinstance(exclude, list):
            raise Unchecked("config.json has no list of excluded modules")
        return set(map(str, exclude))

    @cached_property
    def algorithm(self) -> Algorithm | None:
        """How the release says it was made; None where it says nothing."""
        recipe = (self._json_or_empty(RECIPE_FILE).get("recipe") or {}).get("algorithm")
        if recipe in ("awq", "none"):
            return "awq" if recipe == "awq" else "none"
        original = self._json_or_empty(ORIGINAL_CONFIG).get("quantization_config") or {}
        names = [one.get("name") for one in original.get("algo_config") or () if isinstance(one, dict)]
        return "awq" if "awq" in names else None

    def wanted_shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of every tensor, from config.json: codes and scales, or bfloat16."""
        quantised = {name for name in self.backbone.linears if name not in self.exclude}
        wanted: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name, shape in self.backbone.shapes.items():
            if name.removesuffix(".weight") in quantised and name.endswith(".weight"):
                wanted[name] = ("U8", (shape[0], shape[1] // 2))
                wanted[f"{name}_scale"] = ("U8", (shape[0], shape[1] // BLOCK))
            else:
                wanted[name] = ("BF16", shape)
        return wanted

    def fitting_linears(self) -> list[str]:
        """The linears whose codes and scales are there, of the shapes that config.json asks for."""
        wanted = self.wanted_shapes()
        found = {name: (stored.dtype, stored.shape) for name, stored in self.tensors.items()}
        return [
            name
            for name in self.backbone.linears
            if f"{name}.weight_scale" in wanted
            and all(found.get(f"{name}.{part}") == wanted[f"{name}.{part}"] for part in ("weight", "weight_scale"))
        ]

    def json(self, name: str) -> dict[str, Any]:
        """One file's JSON object.

        Raises:
            Unchecked: it cannot be read or is none.
        """
        try:
            loaded = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise Unchecked(f"{name} cannot be read") from error
        if not isinstance(loaded, dict):
            raise Unchecked(f"{name} holds no object")
        return loaded

    def _json_or_empty(self, name: str) -> dict[str, Any]:
        try:
            return self.json(name)
        except Unchecked:
            return {}
