"""The laws of an MXFP4 release that need no other release: one function each, its docstring the law.

A law returns what is broken, in words that name the culprit, and what was measured; it raises `Unchecked` when another
broken part keeps it from looking. Knows no terminal and no order.
"""

import hashlib
import math
from collections import Counter
from dataclasses import dataclass, field

from clef_core.errors import ReleaseError
from clef_core.inspected import Inspected, Unchecked
from clef_core.mxfp4 import BLOCK, E8M0_NAN
from clef_core.progress import Count, Listener
from clef_core.quantize_files import FLOATS, MTP_PREFIX, rows
from clef_core.recipe import config_problems
from clef_core.release import ARCHITECTURE, CHECKSUMS, INDEX, JOINT_HEAD, REQUIRED
from clef_core.room import gigabytes
from clef_core.weight_compare import LayerError, is_finite
from clef_core.weight_files import locate

BITS_PER_WEIGHT = 4 + 8 / BLOCK
_HASH_BYTES = 1 << 22


@dataclass(frozen=True)
class Case:
    """What the laws look at. `errors` is filled by the law about them."""

    release: Inspected
    source: Inspected | None
    listener: Listener
    errors: list[LayerError] = field(default_factory=list)


@dataclass(frozen=True)
class Finding:
    """What a law found: the broken cases, and what was measured."""

    problems: list[str]
    detail: str


def files(case: Case) -> Finding:
    """A release has these files, and each can be read."""
    release = case.release
    problems = [f"{name} is missing" for name in REQUIRED if not (release.path / name).is_file()]
    if not any((release.path / f"{kind}processor_config.json").is_file() for kind in ("", "pre")):
        problems.append("processor_config.json is missing")
    if not release.weight_files:
        problems.append("there are no weight files")
    for name in ("config.json", "joint_head_config.json", "tokenizer.json"):
        if (release.path / name).is_file():
            try:
                release.json(name)
            except Unchecked as unreadable:
                problems.append(str(unreadable))
    for file in [*release.weight_files, release.path / JOINT_HEAD]:
        if file.is_file():
            try:
                locate(file)
            except ReleaseError as error:
                problems.append(str(error))
    return Finding(problems, f"{len(release.weight_files)} weight files")


def checksums(case: Case) -> Finding:
    """SHA256SUMS lists every other file with its checksum."""
    release = case.release
    if not (release.path / CHECKSUMS).is_file():
        return Finding([f"{CHECKSUMS} is missing"], "")
    listed = {}
    for line in (release.path / CHECKSUMS).read_text(encoding="utf-8", errors="replace").splitlines():
        if line.strip():
            listed[line[64:].removeprefix(" ").lstrip(" *")] = line[:64]
    found = {file.name: file for file in sorted(release.path.iterdir()) if file.name != CHECKSUMS and file.is_file()}
    problems = [f"{name} is not listed" for name in found if name not in listed]
    problems += [f"{name} is listed but missing" for name in listed if name not in found]
    count = Count(case.listener, "checksums", sum(file.stat().st_size for file in found.values()), "bytes")
    for name in sorted(listed.keys() & found.keys()):
        digest = hashlib.sha256()
        with found[name].open("rb") as stream:
            while piece := stream.read(_HASH_BYTES):
                digest.update(piece)
                count.add(len(piece))
        if digest.hexdigest() != listed[name]:
            problems.append(f"{name} is not the file that is listed")
    return Finding(problems, f"{len(listed)} files")


def index(case: Case) -> Finding:
    """The index names every tensor with its file, no tensor is in two files, the total is right."""
    release = case.release
    times = Counter(name for header in release.headers.values() for name in header)
    problems = [f"{name} is in {number} files" for name, number in times.items() if number > 1]
    if not (release.path / INDEX).is_file():
        return Finding([*problems, f"{INDEX} is missing: vLLM would read the joint head's tensors too"], "")
    weight_map = release.index.get("weight_map")
    if not isinstance(weight_map, dict):
        return Finding([*problems, f"{INDEX} has no weight_map"], "")
    for name in sorted(times.keys() - weight_map.keys()):
        problems.append(f"{name} is not in the index")
    for name, file in weight_map.items():
        if name not in release.headers.get(file, {}):
            problems.append(f"{name} is not in {file}, where the index has it")
    total = (release.index.get("metadata") or {}).get("total_size")
    real = sum(stored.num_bytes for header in release.headers.values() for stored in header.values())
    if total != real:
        problems.append(f"total_size is {total}, the tensors have {real} bytes")
    return Finding(problems, f"{len(weight_map)} tensors in {len(set(weight_map.values()))} files")


def config(case: Case) -> Finding:
    """config.json is the backbone's and what vLLM's reader of Quark configurations takes."""
    release = case.release
    problems = []
    if ARCHITECTURE not in (release.config.get("architectures") or ()):
        problems.append(f"the architecture is not {ARCHITECTURE}")
    problems += config_problems(release.config, release.backbone.linears)
    return Finding(problems, "algo_config null, exact names, no joined linears torn apart" if not problems else "")


def linears(case: Case) -> Finding:
    """Every linear of the language model is MXFP4 but those in `exclude`, and nothing else is."""
    release = case.release
    coded = {name.removesuffix(".weight_scale") for name in release.tensors if name.endswith(".weight_scale")}
    exclude = release.exclude
    problems = []
    for name in release.backbone.linears:
        if name in exclude and name in coded:
            problems.append(f"{name} is MXFP4, but config.json excludes it")
        elif name not in exclude and name not in coded:
            problems.append(f"{name} is not MXFP4, and config.json does not exclude it")
    problems += [
        f"{name} is MXFP4, but no linear of the language model" for name in sorted(coded - {*release.backbone.linears})
    ]
    problems += [
        f"{name} is BF16, but config.json does not exclude it"
        for name in release.backbone.others
        if name not in exclude
    ]
    kept = [name for name in release.backbone.linears if name in exclude]
    return Finding(problems, f"{len(coded)} linears are MXFP4, {len(kept)} are kept in BF16")


def tensors(case: Case) -> Finding:
    """The weight files hold the tensors that config.json asks for, each of its dtype and shape, and no others."""
    release = case.release
    wanted = release.wanted_shapes()
    if release.backbone.is_tied and "lm_head.weight" not in release.tensors:
        del wanted["lm_head.weight"]
    problems = [f"{name} is missing" for name in wanted if name not in release.tensors]
    for name, stored in release.tensors.items():
        if name not in wanted:
            if not name.startswith(MTP_PREFIX):
                problems.append(f"{name} belongs to no part of the backbone")
        elif (stored.dtype, stored.shape) != wanted[name]:
            dtype, shape = wanted[name]
            problems.append(f"{name} is {stored.dtype} {list(stored.shape)}, not {dtype} {list(shape)}")
    return Finding(problems, f"{len(release.tensors)} tensors")


def numbers(case: Case) -> Finding:
    """No tensor holds NaN or infinity, and no scale is the NaN byte."""
    release = case.release
    problems = []
    count = Count(case.listener, "numbers", sum(stored.num_bytes for stored in release.tensors.values()), "bytes")
    for name, stored in release.tensors.items():
        if name.endswith(".weight_scale") and stored.dtype == "U8":
            if any(bool((piece == E8M0_NAN).any()) for piece in rows(stored)):
                problems.append(f"{name} has a scale that is NaN")
        elif stored.dtype in FLOATS and not is_finite(stored):
            problems.append(f"{name} has NaN or infinity")
        count.add(stored.num_bytes)
    return Finding(problems, "all finite" if not problems else "")


def sizes(case: Case) -> Finding:
    """An MXFP4 linear takes 4.25 bits per weight."""
    release = case.release
    problems = []
    elements = coded_bytes = 0
    for name in release.backbone.linears:
        parts = [release.tensors.get(f"{name}.{part}") for part in ("weight", "weight_scale")]
        if parts[1] is None:
            continue
        num_bytes = sum(part.num_bytes for part in parts if part is not None)
        num_elements = math.prod(release.backbone.shapes[f"{name}.weight"])
        if num_bytes * 8 != BITS_PER_WEIGHT * num_elements:
            problems.append(f"{name} takes {num_bytes * 8 / num_elements:.3f} bits per weight")
        elements, coded_bytes = elements + num_elements, coded_bytes + num_bytes
    total = sum(stored.num_bytes for stored in release.tensors.values())
    bf16 = total - coded_bytes + 2 * elements
    weights = elements + (total - coded_bytes) // 2
    detail = (
        f"{gigabytes(total)} of weights, {total / max(1, bf16):.1%} of {gigabytes(bf16)} in BF16; "
        f"{8 * total / max(1, weights):.2f} bits per weight over all"
    )
    return Finding(problems, detail)
