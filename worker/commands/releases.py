"""Releases loaded inside a command, one after the other, for what does not go through the queue."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from worker.commands.terminal import say, stderr

if TYPE_CHECKING:
    from clef_core.engine import Engine


def loaded(names: Sequence[str]) -> Iterator[tuple[str, Engine]]:
    """Load variants or release directories in turn, each once; the one before may be forgotten by then.

    Raises:
        ReleaseError: a name is neither a variant nor a release, or a release cannot be loaded.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from worker.serve import load_engine
    from worker.settings import load_settings
    from worker.sides import with_variant

    settings = load_settings()
    variants = []
    for name in names:
        settings, variant = with_variant(settings, name)
        variants.append(variant)
    for variant in dict.fromkeys(variants):
        with stderr().status(f"loading {variant}", spinner="dots"):
            engine = load_engine(settings, variant)
        if engine.release.files.is_random:
            say(f"note: the release of {variant} has random weights, what it says means nothing")
        yield variant, engine


def describe_engine(engine: Engine) -> str:
    """The facts that a figure from this engine needs beside it."""
    facts = engine.provenance()
    checksum = f"{facts['release_checksum']}"[:12]
    return f"release {checksum}, linears {facts['linear_mode']}, {facts['dtype']}, {facts['device']}"
