"""Safetensors files by the piece: where each tensor lies, reading it in ranges, writing a file out of order.

Knows no torch. A tensor may be larger than the memory one wants to spend, so nothing here holds a whole one. What is
written is byte for byte what the safetensors library writes for the same tensors. What surprises: a file appears under
its name only when every byte of it is on the disk; until then it is called `….part`.
"""

import json
import math
import os
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from clef_core.errors import ReleaseError
from clef_core.release import read_header

PIECE_BYTES = 1 << 22
"""Bytes read at a time where a tensor is only copied or compared."""

DTYPE_BYTES = {
    "U64": 8, "I64": 8, "F64": 8, "F32": 4, "U32": 4, "I32": 4, "BF16": 2, "F16": 2, "U16": 2, "I16": 2,
    "F8_E8M0": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of an element. Within a file tensors stand in this order of their dtypes, then by name."""


@dataclass(frozen=True)
class Entry:
    """A tensor to write."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: `num_bytes` from byte `start` on."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int

    def pieces(self, piece_bytes: int = PIECE_BYTES) -> Iterator[bytearray]:
        """Read the tensor from its first to its last byte, `piece_bytes` at a time.

        Raises:
            ReleaseError: the file ends early or cannot be read.
        """
        try:
            with self.file.open("rb", buffering=0) as stream:
                stream.seek(self.start)
                left = self.num_bytes
                while left:
                    piece = bytearray(min(piece_bytes, left))
                    if stream.readinto(piece) != len(piece):
                        raise ReleaseError(f"{self.file}: ends before its header says")
                    left -= len(piece)
                    yield piece
        except OSError as error:
            raise ReleaseError(f"{self.file}: cannot be read: {error}") from error


def locate(file: Path) -> dict[str, StoredTensor]:
    """Where each tensor of a safetensors file lies.

    Raises:
        ReleaseError: it is not a safetensors file, or is cut off, or holds an unknown dtype.
    """
    infos = read_header(file)
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    found = {}
    for name, info in infos.items():
        start, end = header[name]["data_offsets"]
        if info.dtype not in DTYPE_BYTES or end - start != Entry(name, info.dtype, info.shape).num_bytes:
            raise ReleaseError(
                f"{file}: tensor {name} has dtype {info.dtype} and {end - start} bytes, which do not fit"
            )
        found[name] = StoredTensor(file, info.dtype, info.shape, 8 + length + start, end - start)
    return found


class ShardWriter:
    """Writes one safetensors file whose tensors are known beforehand; their bytes may come in any order of tensors.

    A context manager: the file gets its name at the end, when all bytes were written and are on the disk.
    """

    def __init__(self, path: Path, entries: Sequence[Entry]) -> None:
        self.path = path
        self._part = path.with_name(path.name + ".part")
        ordered = sorted(entries, key=lambda one: (list(DTYPE_BYTES).index(one.dtype), one.name))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._at: dict[str, int] = {}
        self._end: dict[str, int] = {}
        start = 0
        for entry in ordered:
            end = start + entry.num_bytes
            header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [start, end]}
            self._at[entry.name], self._end[entry.name] = start, end
            start = end
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._header = struct.pack("<Q", len(text)) + text
        self.num_bytes = len(self._header) + start

    def __enter__(self) -> "ShardWriter":
        self._stream = self._part.open("wb", buffering=0)
        self._stream.write(self._header)
        self._stream.truncate(self.num_bytes)
        return self

    def append(self, name: str, data: bytes | bytearray | memoryview) -> None:
        """Write the next bytes of a tensor."""
        if self._at[name] + len(data) > self._end[name]:
            raise ValueError(f"{name} gets more bytes than its shape has")
        os.pwrite(self._stream.fileno(), data, len(self._header) + self._at[name])
        self._at[name] += len(data)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stream:
            os.fsync(self._stream.fileno())
        if kind is not None:
            return
        unfinished = [name for name, at in self._at.items() if at != self._end[name]]
        if unfinished:
            raise ValueError(f"{self.path}: {unfinished[0]} is not whole")
        self._part.replace(self.path)


def is_whole(file: Path, entries: Sequence[Entry]) -> bool:
    """Whether a weight file holds exactly these tensors, by its header and size."""
    if not file.is_file():
        return False
    try:
        found = {name: (info.dtype, info.shape) for name, info in read_header(file).items()}
    except ReleaseError:
        return False
    return found == {entry.name: (entry.dtype, entry.shape) for entry in entries}


def plan_shards(entries: Sequence[Entry], shards: int, min_bytes: int) -> dict[str, list[Entry]]:
    """Spread tensors over weight files of about equal size, in the order of the layers, codes beside their scales.

    Args:
        shards: files to fill; fewer when they would be smaller than `min_bytes`.

    Returns:
        file name → its tensors.
    """
    groups: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=lambda one: natural(one.name)):
        groups.setdefault(entry.name.removesuffix("_scale"), []).append(entry)
    total = sum(entry.num_bytes for entry in entries)
    number = max(1, min(shards, total // min_bytes, len(groups)))
    names = [f"model-{n:05d}-of-{number:05d}.safetensors" for n in range(1, number + 1)]
    if number == 1:
        names = ["model.safetensors"]
    plan: dict[str, list[Entry]] = {name: [] for name in names}
    shard, filled = 0, 0
    for left, group in zip(range(len(groups), 0, -1), groups.values(), strict=True):
        size = sum(entry.num_bytes for entry in group)
        is_full = filled + size / 2 > (shard + 1) * total / number
        must_leave = left == number - shard - 1  # one group for each file that is still empty
        if plan[names[shard]] and shard + 1 < number and (is_full or must_leave):
            shard += 1
        plan[names[shard]] += group
        filled += size
    return plan


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """Sort key that puts `layers.2` before `layers.10`."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name))


def index_text(plan: dict[str, list[Entry]]) -> str:
    """The content of `model.safetensors.index.json`."""
    weight_map = {entry.name: file for file, entries in plan.items() for entry in entries}
    total = sum(entry.num_bytes for entries in plan.values() for entry in entries)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=2) + "\n"


def write_whole(file: Path, content: str | bytes) -> None:
    """Write a small file so that it is there completely or not at all."""
    part = file.with_name(file.name + ".part")
    with part.open("wb") as stream:
        stream.write(content.encode() if isinstance(content, str) else content)
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(file)
