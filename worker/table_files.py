"""Read CSV and JSONL files row by row, and refuse what is neither.

A file is read twice: `read_table` goes through all of it once (columns, number of rows, checksum, encoding), so that
trouble at row 900,000 is known before anything starts; `Table.rows` then streams. At most one line is in memory.
Knows no questions and no images: a row is a map from column to value, text in a CSV, any JSON value in JSONL.

Surprising: a ragged or unreadable row does not stop the file, it becomes a row with a `problem`. What stops it is what
makes every row doubtful: another encoding or separator, a quote that never closes, two columns of one name.
"""

from __future__ import annotations

import csv
import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count, zip_longest
from pathlib import Path
from typing import Literal

from clef_core.errors import ClefError, RequestError
from clef_core.strict_json import Json, parse_json

MAX_TABLE_BYTES = 200_000_000
MAX_TABLE_ROWS = 1_000_000
MAX_COLUMNS = 1_000
MAX_FIELD_CHARS = 16 * 1024 * 1024  # four images of a request, as base64, with room
MAX_LINE_CHARS = 2 * MAX_FIELD_CHARS
MAX_QUOTED_CHARS = 80

_BINARY_STARTS = {
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
    b"PK\x03\x04": "an Excel workbook or a zip archive",
    b"\xd0\xcf\x11\xe0": "an old Excel workbook",
    b"\x1f\x8b": "a gzip archive",
    b"%PDF": "a PDF",
    b"PAR1": "a Parquet file",
}
_OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}
_QUOTED = re.compile(r'"(?:[^"]|"")*"')
_UNDECODED = re.compile("[\udc80-\udcff]")


class TableError(ClefError):
    """The table as a whole cannot be used; the message says why and what helps."""


@dataclass(frozen=True)
class TableRow:
    """One row. `number` counts rows from 1, `line` is where it starts in the file, `problem` why it is unusable."""

    number: int
    line: int
    values: Mapping[str, Json]
    problem: str | None = None


@dataclass(frozen=True)
class Table:
    """A checked file. `columns` stand in file order; for JSONL they are the keys in the order of first appearance."""

    path: Path
    kind: Literal["csv", "jsonl"]
    columns: tuple[str, ...]
    num_rows: int
    num_bad_rows: int
    sha256: str

    def rows(self) -> Iterator[TableRow]:
        """Stream the rows in order."""
        return _csv_rows(self.path) if self.kind == "csv" else _jsonl_rows(self.path)


def read_table(path: Path | str, *, max_bytes: int = MAX_TABLE_BYTES, max_rows: int = MAX_TABLE_ROWS) -> Table:
    """Check a CSV or JSONL file from beginning to end.

    Raises:
        TableError: the file is too big, empty, not UTF-8, not comma-separated, has no rows, or no readable one.
    """
    path = Path(path)
    num_bytes = path.stat().st_size
    if num_bytes > max_bytes:
        raise TableError(f"{path.name} has {num_bytes:,} bytes, the limit is {max_bytes:,}")
    kind = _kind_of(path)
    columns = _csv_columns(path) if kind == "csv" else ()
    seen = dict.fromkeys(columns)
    num_rows = num_bad_rows = 0
    first_problem = ""
    for row in _csv_rows(path) if kind == "csv" else _jsonl_rows(path):
        num_rows += 1
        if num_rows > max_rows:
            raise TableError(f"{path.name} has more than {max_rows:,} rows, which is the limit")
        if row.problem is not None:
            num_bad_rows += 1
            first_problem = first_problem or row.problem
        elif kind == "jsonl":
            seen.update(dict.fromkeys(row.values))
            if len(seen) > MAX_COLUMNS:
                raise TableError(f"line {row.line}: more than {MAX_COLUMNS:,} different keys, which is the limit")
    if num_rows == 0:
        raise TableError(f"{path.name} has a header but no rows" if kind == "csv" else f"{path.name} has no rows")
    if num_bad_rows == num_rows:
        raise TableError(f"no row of {path.name} can be read; the first problem: {first_problem}")
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return Table(path, kind, tuple(seen), num_rows, num_bad_rows, sha256)


def _kind_of(path: Path) -> Literal["csv", "jsonl"]:
    """Tell CSV from JSONL by the first character, and name files that are neither."""
    with path.open("rb") as file:
        start = file.read(4096)
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not text:
        raise TableError(f"{path.name} is empty")
    for magic, what in _BINARY_STARTS.items():
        if start.startswith(magic):
            raise TableError(f"{path.name} is {what}: save it as CSV (comma-separated, UTF-8)")
    if b"\0" in start:
        raise TableError(f"{path.name} has NUL bytes: it is UTF-16 or no text at all; save it as CSV in UTF-8")
    if text.startswith(b"["):
        raise TableError(f"{path.name} is one JSON array: JSONL has one object per line, without brackets around them")
    return "jsonl" if text.startswith(b"{") else "csv"


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines with their ends (LF, CRLF or CR).

    Raises:
        TableError: a line is not UTF-8, or absurdly long.
    """
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        for number in count(1):
            line = file.readline(MAX_LINE_CHARS)
            if not line:
                return
            if len(line) == MAX_LINE_CHARS:
                raise TableError(f"line {number} has more than {MAX_LINE_CHARS:,} characters, which is the limit")
            if not line.isascii() and (found := _UNDECODED.search(line)):
                byte = ord(found.group()) - 0xDC00
                shown = bytes([byte]).decode("cp1252", "replace")
                raise TableError(
                    f'line {number} is not UTF-8: byte 0x{byte:02X} ("{shown}" in Latin-1 or Windows-1252); '
                    "save the file as UTF-8"
                )
            yield line


def _csv_records(path: Path) -> Iterator[tuple[int, list[str] | str]]:
    """Yield (line, cells) for every record, the header first; instead of cells the text of what is wrong."""
    csv.field_size_limit(MAX_FIELD_CHARS)
    reader = csv.reader(_lines(path), strict=True)
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end of data" in str(error) or "field larger" in str(error):
                raise TableError(f"line {line}: a quote is opened here and not closed again") from None
            yield line, f"line {line}: text after a closing quote (a quote inside a cell is written twice)"
            continue
        if cells and (len(cells) > 1 or cells[0].strip()):
            yield line, cells


def _csv_columns(path: Path) -> tuple[str, ...]:
    first_line = next(line for line in _lines(path) if line.strip())
    bare = _QUOTED.sub("", first_line)
    for separator, name in _OTHER_SEPARATORS.items():
        if bare.count(separator) > bare.count(","):
            raise TableError(f"the columns of {path.name} are separated by {name}: save it with commas")
    line, cells = next(_csv_records(path))
    if isinstance(cells, str):
        raise TableError(f"the header cannot be read: {cells}")
    if len(cells) > MAX_COLUMNS:
        raise TableError(f"the header has {len(cells):,} columns, the limit is {MAX_COLUMNS:,}")
    twice = [name for name, times in Counter(cells).items() if times > 1]
    if twice:
        where = {name: [n for n, cell in enumerate(cells, 1) if cell == name] for name in twice}
        listed = "; ".join(f'"{name}" (columns {", ".join(map(str, numbers))})' for name, numbers in where.items())
        raise TableError(f"line {line}: two columns have the same name: {listed}")
    return tuple(cells)


def _csv_rows(path: Path) -> Iterator[TableRow]:
    records = _csv_records(path)
    header = next(records)[1]
    for number, (line, cells) in enumerate(records, start=1):
        if isinstance(cells, str):
            yield TableRow(number, line, dict.fromkeys(header, ""), cells)
            continue
        values = dict(zip_longest(header, cells[: len(header)], fillvalue=""))
        yield TableRow(number, line, values, _cells_problem(line, cells, len(header)))


def _cells_problem(line: int, cells: list[str], num_columns: int) -> str | None:
    if len(cells) < num_columns:
        return f"line {line}: {_cells(len(cells))}, the header has {num_columns}"
    if len(cells) > num_columns:
        extra = ", ".join(cells[num_columns:])
        shown = extra if len(extra) <= MAX_QUOTED_CHARS else extra[:MAX_QUOTED_CHARS] + "…"
        return f'line {line}: {_cells(len(cells))}, the header has {num_columns} (too many: "{shown}")'
    if any("\0" in cell for cell in cells):
        return f"line {line}: a NUL character"
    return None


def _cells(number: int) -> str:
    return f"{number} cell" if number == 1 else f"{number} cells"


def _jsonl_rows(path: Path) -> Iterator[TableRow]:
    number = 0
    for line, text in enumerate(_lines(path), start=1):
        if not text.strip():
            continue
        number += 1
        try:
            value = parse_json(text.strip())
        except RequestError as error:
            message = str(error.problems[0]).replace(" at line 1 column ", " at column ")  # a row is one line
            yield TableRow(number, line, {}, f"line {line}: {message}")
            continue
        if isinstance(value, dict):
            yield TableRow(number, line, value)
        else:
            yield TableRow(number, line, {}, f"line {line}: a row must be a JSON object")
