"""The Clef decision model: request schema, prompt encoding, MXFP4 arithmetic, joint head, engine.

Shape letters used in every docstring below:
    B batch, T tokens, D hidden size, W head width, Q questions, O options, N out features, K in features.

Importing this package imports no torch. `schema`, `images`, `answers`, `tokens`, `release` and `stats` never do;
the names below load the model code on first use.
"""

from importlib import import_module
from typing import Any

_LAZY = {
    "Engine": "clef_core.engine",
    "load_release": "clef_core.model",
    "load_release_model": "clef_core.model",
    "systemone": "clef_core.engine",
}

__all__ = ["Engine", "load_release", "load_release_model", "systemone"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
