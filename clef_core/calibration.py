"""Calibration blocks for AWQ: equal pieces of text as token ids, drawn from a file or from the hub.

Knows no torch. The draw depends on the seed and the file alone, reads the file once, and holds about as much text as it
needs. What surprises: at most one block's worth of each document is used, so that a single long one does not become the
whole set; and documents are joined, so a block may hold the end of one and the start of the next.
"""

import hashlib
import heapq
import io
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from tokenizers import Tokenizer

from clef_core.errors import SettingsError
from clef_core.recipe import PILE_VAL, Recipe

PILE_VAL_FILE = "val.jsonl.zst"
CHARS_PER_TOKEN = 16
"""Text held per wanted token. Real tokenizers need 3 to 5 characters, so this leaves room for short documents."""


@dataclass(frozen=True)
class Calibration:
    """Blocks of token ids, all of one length, and where they come from.

    file_sha256: of the file that the text was read from. checksum: SHA-256 of the token ids.
    """

    source: str
    file_sha256: str
    num_documents: int
    checksum: str
    blocks: tuple[tuple[int, ...], ...]

    def facts(self) -> dict[str, object]:
        """What the recipe file says of it: everything but the tokens."""
        return {
            "source": self.source,
            "file_sha256": self.file_sha256,
            "num_documents": self.num_documents,
            "num_blocks": len(self.blocks),
            "block_tokens": len(self.blocks[0]),
            "tokens_sha256": self.checksum,
        }


def draw_calibration(recipe: Recipe, tokenizer_file: Path) -> Calibration:
    """Draw the recipe's calibration blocks.

    Raises:
        SettingsError: the file cannot be read or has too little text, or the hub's set cannot be had.
    """
    file = _calibration_file(recipe.calibration)
    wanted = recipe.num_samples * recipe.sample_tokens
    documents = _draw(_documents(file), recipe.seed, wanted * CHARS_PER_TOKEN, recipe.sample_tokens * CHARS_PER_TOKEN)
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    ids: list[int] = []
    used = 0
    for text in documents:
        if len(ids) >= wanted:
            break
        ids += tokenizer.encode(text, add_special_tokens=False).ids[: recipe.sample_tokens]
        used += 1
    if len(ids) < wanted:
        raise SettingsError(
            f"{file}: gives {len(ids):,} tokens of calibration text, {recipe.num_samples} samples of "
            f"{recipe.sample_tokens} need {wanted:,}"
        )
    size = recipe.sample_tokens
    blocks = tuple(tuple(ids[start : start + size]) for start in range(0, wanted, size))
    with file.open("rb") as stream:
        file_sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    source = recipe.calibration if recipe.calibration == PILE_VAL else file.name
    checksum = hashlib.sha256(json.dumps(blocks).encode()).hexdigest()
    return Calibration(source, file_sha256, used, checksum, blocks)


def _calibration_file(name: str) -> Path:
    if name != PILE_VAL:
        path = Path(name).expanduser()
        if not path.is_file():
            raise SettingsError(f"calibration file {name}: no such file")
        if path.suffix not in (".jsonl", ".txt"):
            raise SettingsError(f"calibration file {name}: must be .jsonl (objects with a text) or .txt (paragraphs)")
        return path
    from huggingface_hub import hf_hub_download  # imports slowly, and a file of one's own does not need it
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(PILE_VAL, PILE_VAL_FILE, repo_type="dataset"))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise SettingsError(
            f"the calibration set {PILE_VAL} cannot be had from the hub ({reason}); "
            "go online once, or give text of your own: --calibration FILE.jsonl or FILE.txt"
        ) from error


def _documents(file: Path) -> Iterator[str]:
    """The texts of a file: `text` of each JSON line, or the paragraphs of a text file."""
    try:
        with _open_text(file) as stream:
            if file.suffix == ".txt":
                yield from _paragraphs(stream)
                return
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield _text_of(line, f"{file}, line {number}")
    except UnicodeDecodeError as error:
        raise SettingsError(f"{file}: not UTF-8: {error}") from error


def _text_of(line: str, place: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise SettingsError(f"{place}: not JSON: {error}") from error
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise SettingsError(f'{place}: needs a string, or an object with a string as "text"')
    return text


def _paragraphs(stream: TextIO) -> Iterator[str]:
    lines: list[str] = []
    for line in stream:
        if line.strip():
            lines.append(line)
        elif lines:
            yield "".join(lines)
            lines = []
    if lines:
        yield "".join(lines)


@contextmanager
def _open_text(file: Path) -> Iterator[TextIO]:
    if file.suffix != ".zst":
        with file.open(encoding="utf-8") as stream:
            yield stream
        return
    try:
        import zstandard  # comes with amd-quark, which a calibration is for
    except ImportError as error:
        raise SettingsError("reading the calibration set needs zstandard: pip install zstandard") from error
    with file.open("rb") as raw, zstandard.ZstdDecompressor().stream_reader(raw) as binary:
        yield io.TextIOWrapper(binary, encoding="utf-8")


def _draw(documents: Iterator[str], seed: int, max_chars: int, max_document_chars: int) -> list[str]:
    """Documents in random order, of which those first in it with `max_chars` characters are kept.

    Each document gets a random number as it comes; the largest numbers are dropped while the rest has text enough.
    """
    numbers = random.Random(seed)
    kept: list[tuple[float, str]] = []  # a heap, the largest number first
    chars = 0
    for document in documents:
        text = document.strip()[:max_document_chars]
        if not text:
            continue
        heapq.heappush(kept, (-numbers.random(), text))
        chars += len(text)
        while chars - len(kept[0][1]) >= max_chars:
            chars -= len(heapq.heappop(kept)[1])
    return [text for _, text in sorted(kept, reverse=True)]
