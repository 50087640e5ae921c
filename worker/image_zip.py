"""The pictures of a table's rows: named in an image cell, lying in a zip archive beside the table.

Knows no rows and no questions. The archive comes from a stranger: it is refused when its directory is huge, when it has
too many files or too many bytes, and when an entry is a folder, a path, a link, encrypted or packed in an unusual way.
Nothing is ever unpacked to disk. Whether the bytes are an image is checked later, like those of any request.

Surprising: a declared size may lie, so no more than that is ever read. `__MACOSX/` and `.DS_Store`, which Macs add, are
skipped.
"""

from __future__ import annotations

import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from clef_core.errors import describe
from clef_core.images import MAX_IMAGE_BYTES
from worker.table_files import TableError

MAX_ZIP_FILES = 50_000
MAX_ZIP_BYTES = 2_000_000_000  # unpacked
MAX_DIRECTORY_BYTES = 32 * 1024 * 1024  # Python reads the whole directory of an archive before it tells its length

_END_RECORD = struct.Struct("<4s4H2LH")
_END_MAGIC = b"PK\x05\x06"
_MAX_COMMENT_BYTES = 65_535
_UNPACKED_BY_PYTHON = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_DATA_URL_OR_NAME = re.compile(r"\s*(?:(data:[^,]*,[^;]*)|([^;]*))(?:;|$)", re.IGNORECASE)


class ImageFileError(ValueError):
    """A picture that a row names is missing or cannot be unpacked; only that row is bad."""


class ImageZip:
    """An opened archive of pictures, read by name."""

    def __init__(self, path: Path | str, *, max_files: int = MAX_ZIP_FILES, max_bytes: int = MAX_ZIP_BYTES) -> None:
        """Open and check the archive.

        Raises:
            TableError: it is no zip archive, or breaks a rule above.
        """
        self.path = Path(path)
        _check_directory_size(self.path)
        try:
            self._archive = zipfile.ZipFile(self.path)
        except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
            raise TableError(f"{self.path.name} is not a readable zip archive: {error}") from error
        try:
            self._entries = _checked_entries(self.path.name, self._archive.infolist(), max_files, max_bytes)
        except TableError:
            self._archive.close()
            raise

    def __enter__(self) -> ImageZip:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._archive.close()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def read(self, name: str) -> bytes:
        """Unpack one picture.

        Raises:
            ImageFileError: there is none of that name, it is larger than an image may be, or it is damaged.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise ImageFileError(f"{self.path.name} holds no file {describe(name)}")
        if entry.file_size > MAX_IMAGE_BYTES:
            raise ImageFileError(f"{describe(name)} has {entry.file_size:,} bytes, the limit is {MAX_IMAGE_BYTES:,}")
        try:
            with self._archive.open(entry) as file:
                data = file.read(MAX_IMAGE_BYTES + 1)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError, struct.error) as error:
            raise ImageFileError(f"{describe(name)} in {self.path.name} is damaged: {error}") from error
        if len(data) != entry.file_size:
            raise ImageFileError(f"{describe(name)} in {self.path.name} is damaged: its declared size is wrong")
        return data


def split_image_cell(cell: str) -> Iterator[str]:
    """Split an image cell at its semicolons; those inside a data URL (`data:image/png;base64,…`) do not count."""
    for match in _DATA_URL_OR_NAME.finditer(cell):
        part = (match[1] or match[2]).strip()
        if part:
            yield part


def _check_directory_size(path: Path) -> None:
    """Refuse an archive whose directory would fill the memory, before Python's own reader loads it."""
    with path.open("rb") as file:
        num_bytes = file.seek(0, 2)
        file.seek(max(0, num_bytes - _END_RECORD.size - _MAX_COMMENT_BYTES))
        tail = file.read()
    at = tail.rfind(_END_MAGIC)
    if at < 0 or len(tail) - at < _END_RECORD.size:
        raise TableError(f"{path.name} is not a zip archive")
    directory_bytes = _END_RECORD.unpack_from(tail, at)[5]
    if directory_bytes > MAX_DIRECTORY_BYTES:  # also true of the marker 0xFFFFFFFF, which says zip64
        raise TableError(f"{path.name} has too many files in it: the limit is {MAX_ZIP_FILES:,}")


def _checked_entries(
    zip_name: str, entries: list[zipfile.ZipInfo], max_files: int, max_bytes: int
) -> dict[str, zipfile.ZipInfo]:
    if len(entries) > max_files:
        raise TableError(f"{zip_name} has {len(entries):,} files, the limit is {max_files:,}")
    kept: dict[str, zipfile.ZipInfo] = {}
    for entry in entries:
        name = entry.orig_filename  # Python's own `filename` has been tidied
        if name.startswith("__MACOSX/") or name == ".DS_Store":
            continue
        shown = describe(name)
        if "/" in name or "\\" in name or "\0" in name or name in ("", ".", ".."):
            raise TableError(
                f"{zip_name} has a folder or path in it ({shown}): zip the pictures alone, without folders"
            )
        if stat.S_ISLNK(entry.external_attr >> 16):
            raise TableError(f"{zip_name} has a link in it ({shown}), which is not allowed")
        if entry.flag_bits & 0x1:
            raise TableError(f"{zip_name} is encrypted ({shown})")
        if entry.compress_type not in _UNPACKED_BY_PYTHON:
            raise TableError(f"{zip_name} packs {shown} in a way that is not supported: use plain deflate")
        if name in kept:
            raise TableError(f"{zip_name} has two files named {shown}")
        kept[name] = entry
    num_bytes = sum(entry.file_size for entry in kept.values())
    if num_bytes > max_bytes:
        raise TableError(f"{zip_name} unpacks to {num_bytes:,} bytes, the limit is {max_bytes:,}")
    return kept
