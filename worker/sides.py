"""Which variants a comparison runs: configured ones, or release directories that are given a name for the occasion.

Imports no torch. What surprises: a directory that is a configured variant's becomes that variant, so that its worker is
used; any other is named after the folder and its checksum, so that two states of one folder are two variants.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from clef_core.errors import ReleaseError
from clef_core.release import read_release, resolve_release, verify_checksums
from db.views import Json
from worker.settings import Settings

Dtype = Literal["bfloat16", "float32"]

_MAX_FOLDER_CHARS = 20  # with checksum, dtype and device a name stays within the 50 that a variant may have
_CHECKSUM_CHARS = 8


@dataclass(frozen=True)
class Sides:
    """What runs where. `settings` know every variant; the floor has settings of its own when its dtype or
    device is another."""

    left: str
    right: str
    floor: str | None
    settings: Settings
    floor_settings: Settings

    @property
    def variants(self) -> tuple[str, ...]:
        """The variants that run with `settings`."""
        floor = [self.floor] if self.floor is not None and self.floor_settings is self.settings else []
        return tuple(dict.fromkeys([self.left, self.right, *floor]))

    @property
    def floor_variants(self) -> tuple[str, ...]:
        """The variants that run with `floor_settings` alone."""
        return () if self.floor is None or self.floor in self.variants else (self.floor,)

    def to_parameters(self) -> dict[str, Json]:
        """What a comparison remembers, so that it can go on later with the same releases."""
        names = (*self.variants, *self.floor_variants)
        sources = {name: self.floor_settings.variants[name] for name in names}
        return {
            "releases": sources,
            "random_releases": [name for name, source in sources.items() if _is_random(source)],
            "floor_dtype": self._of_floor("dtype"),
            "floor_device": self._of_floor("device"),
        }

    def _of_floor(self, name: str) -> str | None:
        """A setting of the floor where it is another than that of the sides."""
        value = getattr(self.floor_settings, name)
        return None if value == getattr(self.settings, name) else str(value)


def choose_sides(
    settings: Settings,
    left: str,
    right: str,
    *,
    has_floor: bool = True,
    floor_dtype: Dtype | None = None,
    floor_device: str | None = None,
) -> Sides:
    """Find the variants or releases that the names mean.

    Args:
        floor_dtype, floor_device: run the floor in this dtype, on this device, in a worker of its own; neither: in the
            left variant's worker.

    Raises:
        ReleaseError: a name is neither a variant nor a release.
    """
    settings, left = with_variant(settings, left)
    settings, right = with_variant(settings, right)
    changes = _floor_changes(floor_dtype, floor_device)
    if not has_floor or not changes:
        return Sides(left, right, left if has_floor else None, settings, settings)
    floor = "-".join([left, *(value.replace(":", "") for value in changes.values())])
    settings = _add(settings, floor, settings.variants[left])
    return Sides(left, right, floor, settings, settings.model_copy(update=changes))


def sides_from_parameters(
    settings: Settings, left: str, right: str, floor: str | None, parameters: Mapping[str, Json]
) -> Sides:
    """The sides of a stored comparison, with the releases it began with."""
    for name, source in parameters.get("releases", {}).items():
        settings = _add(settings, name, source)
    missing = [name for name in (left, right, floor) if name is not None and name not in settings.variants]
    if missing:
        raise ReleaseError(f"the variant {missing[0]} of this comparison is not configured any more")
    changes = _floor_changes(parameters.get("floor_dtype"), parameters.get("floor_device"))
    return Sides(left, right, floor, settings, settings.model_copy(update=changes) if changes else settings)


def _floor_changes(dtype: str | None, device: str | None) -> dict[str, str]:
    given = {"dtype": dtype, "device": device}
    return {name: value for name, value in given.items() if value is not None}


def with_variant(settings: Settings, name: str) -> tuple[Settings, str]:
    """The variant that a name or a release directory means, and settings that know it.

    Raises:
        ReleaseError: it is neither a variant nor a release.
    """
    if name in settings.variants:
        return settings, name
    try:
        path = resolve_release(name)
    except ReleaseError as error:
        known = ", ".join(settings.variants)
        raise ReleaseError(f"{name} is no variant (there are {known}) and no release: {error}") from error
    for variant, source in settings.variants.items():
        if Path(source) == path:
            return settings, variant
    checksum = verify_checksums(read_release(path))
    folder = re.sub(r"[^A-Za-z0-9_.-]+", "-", path.name).strip("-._")[:_MAX_FOLDER_CHARS] or "release"
    variant = f"{folder}-{checksum[:_CHECKSUM_CHARS]}"
    return _add(settings, variant, str(path)), variant


def _add(settings: Settings, name: str, source: str) -> Settings:
    return settings.model_copy(update={"variants": {**settings.variants, name: source}})


def _is_random(source: str) -> bool:
    return read_release(resolve_release(source)).is_random
