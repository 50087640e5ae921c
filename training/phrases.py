"""The sentences that records are made of: written for this project, with slots such as `{thing}` to be filled."""

import json
import random
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

PHRASES = Path(__file__).parent / "phrases"
_SLOT = re.compile(r"\{(\w+)\}")


@cache
def load(name: str) -> Any:
    """One file of phrases; its values may not be changed."""
    return json.loads((PHRASES / f"{name}.json").read_text(encoding="utf-8"))


def fill(template: str, rng: random.Random, chosen: dict[str, str] | None = None) -> str:
    """Fill the slots of a template. `chosen` remembers the words, so that sentences of one record agree."""
    chosen = {} if chosen is None else chosen

    def word(match: re.Match[str]) -> str:
        if match[1] not in chosen:
            chosen[match[1]] = _word(match[1], rng)
        return chosen[match[1]]

    return _SLOT.sub(word, template)


def _word(slot: str, rng: random.Random) -> str:
    match slot:
        case "number":
            return str(rng.randrange(1_000, 99_999))
        case "amount":
            amount = rng.choice((f"{rng.randrange(5, 400)}", f"{rng.randrange(2, 90)}.{rng.randrange(10, 99)}"))
            return rng.choice((f"{amount} euros", f"${amount}", f"EUR {amount}", f"£{amount}"))
        case "count":
            return str(rng.randrange(2, 60))
    return str(rng.choice(load("slots")[slot]))


def all_texts() -> Iterator[str]:
    """Every string of every file, for the tokenizer."""
    for file in sorted(PHRASES.glob("*.json")):
        yield from _strings(load(file.stem))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield _SLOT.sub("", value)
    elif isinstance(value, dict):
        yield from (key.replace("_", " ") for key in value)
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
