"""WordNet 3.0 as a source of words: common senses with their meaning, kinds, field and opposites, from local files.

Princeton's WordNet licence allows any use. Nothing is fetched: Debian's package `wordnet-base` installs the files.
The format is that of wndb(5): offsets are keys, `@` points to a kind, `;c` to a field, `!` to an opposite.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path("/usr/share/wordnet")
PARTS = ("noun", "verb", "adj", "adv")
PART_NUMBERS = {"n": "1", "v": "2", "a": "3", "s": "5", "r": "4"}
CONCRETE = frozenset((5, 6, 8, 13, 17, 20, 27))
"""Lexicographer files of animals, artifacts, body, food, natural objects, plants and substances."""

KIND_SIZES = range(6, 1_500)
"""How many common senses a kind holds: "thing" holds too many to say anything, "spaniel" too few."""

MIN_FIELD_SIZE = 6
MAX_CHARACTERS = 90
"""Longer glosses and examples are left out: a batch is as long as its longest record."""

_PLAIN = re.compile(r"[a-z]{2,}( [a-z]{2,})?")
_Key = tuple[str, str]


@dataclass(frozen=True)
class Sense:
    """One meaning. `kinds`: what it is a kind of, nearest first. `field`: its topic, such as "law", or None."""

    words: tuple[str, ...]
    gloss: str
    examples: tuple[str, ...]
    kinds: tuple[str, ...]
    field: str | None
    is_concrete: bool


@dataclass(frozen=True)
class WordNet:
    """`senses` are common ones; `fields` holds the senses of each field; `opposites` are pairs of adjectives."""

    senses: tuple[Sense, ...]
    fields: Mapping[str, tuple[Sense, ...]]
    kinds: tuple[str, ...]
    opposites: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class _Line:
    part: str
    file: int
    words: tuple[str, ...]
    count: int
    pointers: tuple[tuple[str, _Key, str], ...]
    gloss: str
    examples: tuple[str, ...]


def read_wordnet(folder: Path) -> WordNet:
    """Read the senses that WordNet's authors met in texts, and all senses of a field.

    Raises:
        FileNotFoundError: no WordNet is there; `apt-get install wordnet-base`.
    """
    if not (folder / "data.noun").is_file():
        raise FileNotFoundError(f"{folder} has no WordNet: apt-get install wordnet-base, or name its folder")
    counts = _counts(folder / "cntlist.rev")
    lines: dict[_Key, _Line] = {}
    for part in PARTS:
        for text in (folder / f"data.{part}").read_text(encoding="utf-8").splitlines():
            if not text.startswith("  "):  # the licence
                line = _parse(text, counts)
                lines[line.part, text[:8]] = line
    common = {key: line for key, line in lines.items() if line.count and _is_short(line)}
    kinds = {key: _kinds(line, lines) for key, line in common.items()}
    sizes = Counter(kind for names in kinds.values() for kind in names)
    known = {name for name, size in sizes.items() if size in KIND_SIZES}
    senses = tuple(_sense(line, [k for k in kinds[key] if k in known], lines) for key, line in common.items())
    fields: dict[str, list[Sense]] = defaultdict(list)
    for line in lines.values():
        sense = _sense(line, (), lines)
        if sense.field is not None and _is_short(line):
            fields[sense.field].append(sense)
    large = {field: tuple(found) for field, found in fields.items() if len(found) >= MIN_FIELD_SIZE}
    return WordNet(senses, large, tuple(sorted(known)), tuple(_opposites(common, lines)))


def _counts(file: Path) -> dict[str, int]:
    """Times that each sense was met: the part of its key up to the second colon identifies it."""
    counts = {}
    for row in file.read_text(encoding="utf-8").splitlines():
        key, _, count = row.split()
        counts[":".join(key.split(":")[:3])] = int(count)
    return counts


def _parse(text: str, counts: Mapping[str, int]) -> _Line:
    head, gloss = text.split(" | ", 1)
    fields = head.split()
    file, part, num_words = int(fields[1]), fields[2], int(fields[3], 16)
    named = list(zip(fields[4 : 4 + 2 * num_words : 2], fields[5 : 5 + 2 * num_words : 2], strict=True))
    at = 4 + 2 * num_words
    pointers = []
    for start in range(at + 1, at + 1 + 4 * int(fields[at]), 4):
        symbol, offset, to_part, places = fields[start : start + 4]
        pointers.append((symbol, ("a" if to_part == "s" else to_part, offset), places))
    names = [re.sub(r"\(\w+\)$", "", word).replace("_", " ") for word, _ in named]
    keys = [f"{n.lower().replace(' ', '_')}%{PART_NUMBERS[part]}:{file:02}:{int(named[i][1], 16):02}"
            for i, n in enumerate(names)]  # fmt: skip
    met = [counts.get(key, 0) for key in keys]
    order = sorted(range(num_words), key=lambda place: -met[place])
    examples = tuple(one for one in re.findall(r'"([^"]{12,})"', gloss) if len(one) <= MAX_CHARACTERS)
    plain = re.sub(r'"[^"]*"?|\([^)]*\)', " ", gloss)
    return _Line(
        part="a" if part == "s" else part,
        file=file,
        words=tuple(names[place] for place in order if _PLAIN.fullmatch(names[place])),
        count=sum(met),
        pointers=tuple(pointers),
        gloss=" ".join(plain.replace(" ;", ";").split()).strip(" ;:,"),
        examples=examples,
    )


def _is_short(line: _Line) -> bool:
    return bool(line.words) and len(line.gloss) <= MAX_CHARACTERS


def _kinds(line: _Line, lines: Mapping[_Key, _Line]) -> list[str]:
    """The first word of each kind above a sense, nearest first."""
    found: list[str] = []
    while (above := next((key for symbol, key, _ in line.pointers if symbol in ("@", "@i")), None)) is not None:
        line = lines[above]
        if line.words and line.words[0] not in found:
            found.append(line.words[0])
        if len(found) > 20:
            break
    return found


def _sense(line: _Line, kinds: Iterable[str], lines: Mapping[_Key, _Line]) -> Sense:
    field = next((lines[key].words[0] for symbol, key, _ in line.pointers if symbol == ";c" and lines[key].words), None)
    return Sense(line.words, line.gloss, line.examples, tuple(kinds), field, line.part == "n" and line.file in CONCRETE)


def _opposites(common: Mapping[_Key, _Line], lines: Mapping[_Key, _Line]) -> Iterable[tuple[str, str]]:
    for line in common.values():
        for symbol, key, _ in line.pointers:
            other = lines[key]
            if symbol == "!" and line.part == "a" and other.words and other.count:
                yield line.words[0], other.words[0]
