"""A release directory without loading it: its files, kind, sizes and checksums.

Knows no torch, so the page and the command line can look at a release. What surprises: vLLM-style loaders read every
`*.safetensors`, a release that we read may lack an index, and hashing 55 GB takes minutes, so checksums of files are
remembered by size and modification time.
"""

import hashlib
import json
import logging
import os
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from clef_core.errors import ReleaseError

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
CHECKSUMS = "SHA256SUMS"
RANDOM_MARKER = "RANDOM_WEIGHTS"
"""A file that says: these weights are random, the answers mean nothing."""

JOINT_HEAD = "joint_head.safetensors"
ARCHITECTURE = "Qwen3_5ForConditionalGeneration"
REQUIRED = ("config.json", JOINT_HEAD, "joint_head_config.json", "tokenizer.json")
PINNED_REVISIONS = {"Cloudflare/clef": "2f3de3d"}
"""Hub releases whose revision we know; another one is pinned by writing `name@revision`."""

FETCHED = (
    "*.safetensors", "*.json", "*.json.*", "*.jinja", "*.txt", "*.md", "*.py", "LICENSE*", "NOTICE*", CHECKSUMS,
    RANDOM_MARKER,
)  # fmt: skip
"""What is fetched of a hub release: all that its checksums list. The code among it is never run."""

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w.-]+)?")
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_CHUNK_BYTES = 1 << 22

Kind = Literal["bf16", "mxfp4"]


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a safetensors file: dtype as the file writes it (`BF16`, `U8`), shape, file name."""

    dtype: str
    shape: tuple[int, ...]
    file: str


@dataclass(frozen=True)
class ReleaseFiles:
    """What a release directory holds.

    weight_bytes: size of all weight files in bytes, the joint head included.
    tensors: the backbone's tensors by name.
    """

    path: Path
    kind: Kind
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    weight_bytes: int
    is_random: bool

    @property
    def weight_files(self) -> tuple[str, ...]:
        return tuple(sorted({info.file for info in self.tensors.values()}))


def resolve_release(source: str) -> Path:
    """Find a release on this machine, or fetch it from the hub.

    Args:
        source: a directory, or a hub id `owner/name` or `owner/name@revision`.

    Returns:
        the directory.

    Raises:
        ReleaseError: there is no such directory and the hub does not give it.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists() or path.is_absolute() or source.startswith((".", "~")) or not HUB_ID.fullmatch(source):
        raise ReleaseError(f"{source}: no such release directory")
    from huggingface_hub import snapshot_download  # imports slowly, and only a hub id needs it
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    name, _, revision = source.partition("@")
    try:
        found = snapshot_download(
            name,
            revision=revision or PINNED_REVISIONS.get(name),
            allow_patterns=list(FETCHED),
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ReleaseError(f"{source}: neither a directory here nor a release that the hub gives: {reason}") from error
    return Path(found)


def read_release(path: Path | str) -> ReleaseFiles:
    """Look at a release directory: files, index, configuration. Reads no weights.

    Raises:
        ReleaseError: it is not a Clef release, or a file is missing or contradicts another.
    """
    path = Path(path)
    if not path.is_dir():
        raise ReleaseError(f"{path}: no such release directory")
    missing = [name for name in REQUIRED if not (path / name).is_file()]
    if not (path / "processor_config.json").is_file() and not (path / "preprocessor_config.json").is_file():
        missing.append("processor_config.json")
    if missing:
        raise ReleaseError(f"{path}: not a Clef release: {', '.join(missing)} missing")
    config = _read_json(path / "config.json")
    kind = _kind(path, config)
    files = _weight_files(path)
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for name, info in read_header(path / file).items():
            if name in tensors:
                raise ReleaseError(f"{path}: tensor {name} is in {tensors[name].file} and in {file}")
            tensors[name] = info
    _check_index(path, tensors)
    has_codes = any(name.endswith(".weight_scale") for name in tensors)
    if has_codes != (kind == "mxfp4"):
        raise ReleaseError(
            f"{path}: config.json says {kind}, but the weights {'are' if has_codes else 'are not'} MXFP4"
        )
    weight_bytes = sum((path / file).stat().st_size for file in (*files, JOINT_HEAD))
    return ReleaseFiles(path, kind, config, tensors, weight_bytes, (path / RANDOM_MARKER).is_file())


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Names, dtypes and shapes of a safetensors file.

    Raises:
        ReleaseError: it is not a safetensors file, or is cut off.
    """
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _MAX_HEADER_BYTES:
                raise ReleaseError(f"{file}: not a safetensors file")
            header = json.loads(stream.read(length))
        size = file.stat().st_size
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if 8 + length + end != size:
            raise ReleaseError(f"{file}: {size} bytes, but its header promises {8 + length + end}; the file is damaged")
        return {name: TensorInfo(e["dtype"], tuple(e["shape"]), file.name) for name, e in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ReleaseError(f"{file}: not a safetensors file: {error}") from error


def verify_checksums(release: ReleaseFiles, cache: "ChecksumCache | None" = None) -> str:
    """Hash every file of a release and hold the hashes against `SHA256SUMS` where there is one.

    Returns:
        the release's checksum: SHA-256 over the sorted `hash  name` lines of all its files.

    Raises:
        ReleaseError: a listed file is missing or another than listed.
    """
    path = release.path
    hash_of = (cache or ChecksumCache()).sha256
    names = sorted(file.name for file in path.iterdir() if file.is_file() and file.name != CHECKSUMS)
    hashes = {name: hash_of(path / name) for name in names}
    if (path / CHECKSUMS).is_file():
        for line in (path / CHECKSUMS).read_text(encoding="utf-8").splitlines():
            if not line.strip():
                continue
            expected, name = line[:64], line[64:].removeprefix(" ").lstrip(" *")
            if name not in hashes:
                raise ReleaseError(f"{path}: {name} is listed in {CHECKSUMS} but missing")
            if hashes[name] != expected:
                raise ReleaseError(f"{path}: {name} is not the file that {CHECKSUMS} lists (its SHA-256 differs)")
    listing = "".join(f"{hashes[name]}  {name}\n" for name in names)
    return hashlib.sha256(listing.encode()).hexdigest()


class ChecksumCache:
    """SHA-256 of files, remembered by path, size and modification time in one JSON file."""

    def __init__(self, file: Path | None = None) -> None:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self.file = file or Path(base) / "clef" / "checksums.json"

    def sha256(self, file: Path, progress: Callable[[int], None] | None = None) -> str:
        """Hash a file, or recall its hash. `progress` is called with the bytes read since the last call."""
        stat = file.stat()
        key, stamp = str(file.resolve()), [stat.st_size, stat.st_mtime_ns]
        known = self._load()
        if key in known and known[key][:2] == stamp:
            return str(known[key][2])
        digest = hashlib.sha256()
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
                if progress:
                    progress(len(chunk))
        self._store(key, [*stamp, digest.hexdigest()])
        return digest.hexdigest()

    def _load(self) -> dict[str, list[Any]]:
        try:
            loaded = json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return loaded if isinstance(loaded, dict) else {}

    def _store(self, key: str, entry: list[Any]) -> None:
        known = self._load() | {key: entry}
        temporary = self.file.with_suffix(f".{os.getpid()}.tmp")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(known), encoding="utf-8")
            temporary.replace(self.file)
        except OSError as error:
            logger.warning("checksums cannot be remembered in %s: %s", self.file, error)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReleaseError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ReleaseError(f"{file}: must hold a JSON object")
    return loaded


def _kind(path: Path, config: Mapping[str, Any]) -> Kind:
    if ARCHITECTURE not in config.get("architectures", ()):
        found = ", ".join(config.get("architectures") or ["none"])
        raise ReleaseError(f"{path}: not a Clef release: architecture {found} instead of {ARCHITECTURE}")
    quantization = config.get("quantization_config")
    if quantization is None:
        return "bf16"
    if quantization.get("quant_method") != "quark":
        raise ReleaseError(f"{path}: quantised by {quantization.get('quant_method')}; only Quark's MXFP4 can be read")
    wanted = {"dtype": "fp4", "group_size": 32, "scale_format": "e8m0", "scale_calculation_mode": "even"}
    weight = (quantization.get("global_quant_config") or {}).get("weight") or {}
    wrong = [f"{key} {weight.get(key)}" for key, value in wanted.items() if weight.get(key) != value]
    if wrong:
        raise ReleaseError(f"{path}: not MXFP4: the weights have {', '.join(wrong)}")
    return "mxfp4"


def _weight_files(path: Path) -> tuple[str, ...]:
    if (path / INDEX).is_file():
        files = sorted(set(_read_json(path / INDEX).get("weight_map", {}).values()))
        if any(Path(file).name != file for file in files):
            raise ReleaseError(f"{path / INDEX}: names a file outside the release")
        missing = [file for file in files if not (path / file).is_file()]
        if missing:
            raise ReleaseError(f"{path}: {', '.join(missing)} named in {INDEX} but missing")
    else:
        files = sorted(file.name for file in path.glob("*.safetensors") if file.name != JOINT_HEAD)
    if not files:
        raise ReleaseError(f"{path}: not a Clef release: no weights (*.safetensors)")
    return tuple(files)


def _check_index(path: Path, tensors: Mapping[str, TensorInfo]) -> None:
    if not (path / INDEX).is_file():
        return
    listed: dict[str, str] = _read_json(path / INDEX)["weight_map"]
    wrong = [name for name, file in listed.items() if name not in tensors or tensors[name].file != file]
    wrong += [name for name in tensors if name not in listed]
    if wrong:
        raise ReleaseError(f"{path}: {INDEX} does not fit the weight files, first at {wrong[0]}")
