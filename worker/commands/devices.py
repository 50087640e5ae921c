"""What commands need that compute themselves: torch's environment and the device option.

Surprising: `prepare_torch` must be called before anything imports torch. By default its threads spin while they wait,
and beside another busy process a build was then ten times slower.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from clef_core.errors import SettingsError

if TYPE_CHECKING:
    import torch


def prepare_torch() -> None:
    """Let torch's threads sleep while they wait, and keep Transformers' remarks off the terminal."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def checked_device(name: str, option: str = "--device") -> torch.device:
    """The device of that name, given by `option`.

    Raises:
        SettingsError: there is no such device on this machine.
    """
    import torch

    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise SettingsError(f"{option} {name}: no device has that name; use cpu, cuda or cuda:1") from error
    if device.type not in ("cpu", "cuda"):
        raise SettingsError(f"{option} {name}: use cpu, cuda or cuda:1")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SettingsError(f"{option} {name}: this machine has {torch.cuda.device_count()} such devices")
    return device
