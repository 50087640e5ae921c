"""The laws that hold an MXFP4 release against its BF16 source: one function each, its docstring the law.

What surprises: AWQ moves two kinds of tensors on purpose, and only in a build that says it is one; see
`weight_compare`.
"""

import fnmatch
from pathlib import Path

from clef_core.build_plan import COPIED
from clef_core.inspected import Inspected, Unchecked
from clef_core.laws import Case, Finding
from clef_core.linears import LANGUAGE_MODEL
from clef_core.progress import Count
from clef_core.release import RANDOM_MARKER
from clef_core.weight_compare import (
    MLP,
    NORM,
    Scales,
    has_scaled_rows,
    is_same,
    linear_error,
    norm_scales,
    undone_scales,
)
from clef_core.weight_files import PIECE_BYTES

MAX_RELATIVE_ERROR = 0.5
"""Weights further from the source than this are not its weights. Rounding gives 0.12 for a normal distribution."""


def copies(case: Case) -> Finding:
    """Head, tokenizer, processor and licence are the source's, byte for byte."""
    source = _source(case)
    problems = []
    files = [
        file
        for file in sorted(source.path.iterdir())
        if file.is_file() and any(fnmatch.fnmatchcase(file.name, pattern) for pattern in COPIED)
    ]
    for file in files:
        copy = case.release.path / file.name
        if not copy.is_file():
            problems.append(f"{file.name} is missing")
        elif not _same_bytes(file, copy):
            problems.append(f"{file.name} differs from the source's")
    if (case.release.path / RANDOM_MARKER).is_file() and not (source.path / RANDOM_MARKER).is_file():
        problems.append(f"{RANDOM_MARKER} is not in the source")
    return Finding(problems, f"{len(files)} files")


def unchanged(case: Case) -> Finding:
    """What is BF16 is the source's, but for what AWQ folds its scales into."""
    release, source = case.release, _source(case)
    is_awq = release.algorithm == "awq"
    coded = {name.removesuffix("_scale") for name in release.tensors if name.endswith(".weight_scale")}
    compared = [name for name in release.tensors if name not in coded and not name.endswith(".weight_scale")]
    problems = [f"{name} is not in the source" for name in compared if name not in source.tensors]
    problems += [f"{name} of the source is missing" for name in source.tensors if name not in release.tensors]
    count = Count(case.listener, "unchanged", sum(release.tensors[name].num_bytes for name in compared), "bytes")
    num_same = num_scaled = 0
    for name in compared:
        built, theirs = release.tensors[name], source.tensors.get(name)
        if theirs is not None:
            if is_same(built, theirs):
                num_same += 1
            elif is_awq and _is_scaled(case, name):
                num_scaled += 1
            else:
                problems.append(f"{name} differs from the source's")
        count.add(built.num_bytes)
    return Finding(problems, f"{num_same} tensors identical, {num_scaled} changed by AWQ's scales alone")


def errors(case: Case) -> Finding:
    """Each MXFP4 linear is the source's, rounded to nearest; by AWQ: near it once AWQ's scales are undone."""
    release, source = case.release, _source(case)
    names = [name for name in release.fitting_linears() if _has_shape(source, release, f"{name}.weight")]
    count = Count(case.listener, "errors", len(names), "linears")
    problems = []
    scales: dict[str, Scales] = {}
    for name in names:
        layer = _layer_of(name)
        if release.algorithm == "awq" and name not in scales and name.removeprefix(layer) in MLP:
            needed = [f"{layer}{part}.weight" for part in (NORM, *MLP)]
            if any(part not in release.tensors or not _has_shape(source, release, part) for part in needed):
                raise Unchecked(f"the MLP of {layer.rstrip('.')} is not whole, so AWQ's scales cannot be undone")
            scales |= undone_scales(release.tensors, source.tensors, layer)
        error = linear_error(release.tensors, source.tensors, name, scales.pop(name, Scales()))
        case.errors.append(error)
        if release.algorithm == "none" and not error.is_rounded:
            problems.append(f"{name} is not the source's, rounded to nearest (relative error {error.relative:.3f})")
        elif not error.relative <= MAX_RELATIVE_ERROR:
            problems.append(f"{name} is no rounding of the source's (relative error {error.relative:.3f})")
        count.add(1)
    if not names:
        raise Unchecked("no linear can be compared")
    mean = sum(error.relative for error in case.errors) / len(names)
    worst = max(case.errors, key=lambda error: error.relative)
    how = {"awq": "AWQ's scales undone", "none": "plain rounding", None: "unknown how it was made"}[release.algorithm]
    return Finding(
        problems, f"{how}: relative error {mean:.4f} on average, {worst.relative:.4f} at most ({worst.name})"
    )


def _source(case: Case) -> Inspected:
    if case.source is None:
        raise Unchecked("no source was given")
    return case.source


def _has_shape(source: Inspected, release: Inspected, name: str) -> bool:
    """Whether the source has a tensor of the shape that the release's configuration gives it."""
    return name in source.tensors and source.tensors[name].shape == release.backbone.shapes.get(name)


def _layer_of(name: str) -> str:
    """`model.language_model.layers.3.` of a tensor or linear of layer 3."""
    parts = name.removeprefix(LANGUAGE_MODEL).split(".")
    return f"{LANGUAGE_MODEL}{parts[0]}.{parts[1]}."


def _is_scaled(case: Case, name: str) -> bool:
    """Whether AWQ's scales explain that a BF16 tensor differs."""
    release, source = case.release, _source(case)
    if release.tensors[name].shape != source.tensors[name].shape:
        return False
    if name.endswith(f".{NORM}.weight"):
        scales = norm_scales(release.tensors[name], source.tensors[name])
        return bool((scales.isfinite() & (scales > 0)).all())
    if name.endswith(f".{MLP[1]}.weight"):
        return has_scaled_rows(release.tensors, source.tensors, name.removesuffix(".weight"))
    return False


def _same_bytes(one: Path, other: Path) -> bool:
    if one.stat().st_size != other.stat().st_size:
        return False
    with one.open("rb") as left, other.open("rb") as right:
        while piece := left.read(PIECE_BYTES):
            if piece != right.read(PIECE_BYTES):
                return False
    return True
