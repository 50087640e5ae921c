"""The device option of commands that compute themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clef_core.errors import SettingsError

if TYPE_CHECKING:
    import torch


def checked_device(name: str) -> torch.device:
    """The device of that name.

    Raises:
        SettingsError: there is no such device on this machine.
    """
    import torch

    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise SettingsError(f"--device {name}: no device has that name; use cpu, cuda or cuda:1") from error
    if device.type not in ("cpu", "cuda"):
        raise SettingsError(f"--device {name}: use cpu, cuda or cuda:1")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SettingsError(f"--device {name}: this machine has {torch.cuda.device_count()} such devices")
    return device
