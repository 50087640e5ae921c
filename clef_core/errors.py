"""The errors of the library, in one tree.

    ClefError
    ├── RequestError        the user's fault: one `Problem` per mistake, all mistakes of a request at once
    │   └── TooLongError    the request has more tokens than the model may read
    ├── ReleaseError        the checkpoint's fault
    ├── SettingsError       the operator's fault
    └── EngineError         the model answered something unusable

Every message is fit to show to a person. Knows nothing of HTTP: the web layer puts `"body"` before each `loc`.

Surprising: a `Problem` escapes NUL characters and lone surrogates in its texts and shortens long keys in its
`loc`, because it goes into JSON answers and database columns that cannot hold them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_QUOTED_CHARS = 60
MAX_LOC_CHARS = 120

Loc = tuple[str | int, ...]


@dataclass(frozen=True)
class Problem:
    """One mistake of a request, in the shape of FastAPI's 422 without the leading `"body"`."""

    loc: Loc
    msg: str
    type: str = "value_error"

    def __post_init__(self) -> None:
        safe_loc = tuple(part if isinstance(part, int) else _printable(part, MAX_LOC_CHARS) for part in self.loc)
        object.__setattr__(self, "loc", safe_loc)
        object.__setattr__(self, "msg", _printable(self.msg))

    def to_json(self) -> dict[str, Any]:
        return {"loc": list(self.loc), "msg": self.msg, "type": self.type}

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.loc))}: {self.msg}" if self.loc else self.msg


class ClefError(Exception):
    """Whatever this program raises on purpose."""


class RequestError(ClefError):
    """A request that breaks the rules; `problems` names every broken rule."""

    problems: tuple[Problem, ...]

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__(problems)
        self.problems = problems

    @classmethod
    def at(cls, loc: Loc, msg: str, type: str = "value_error") -> RequestError:
        return RequestError((Problem(loc, msg, type),))

    def __str__(self) -> str:
        return "\n".join(map(str, self.problems))


class TooLongError(RequestError):
    """The request has `num_tokens`, the model may read `max_tokens`; `uses` says what uses them."""

    def __init__(self, num_tokens: int, max_tokens: int, uses: Mapping[str, int]) -> None:
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens
        self.uses = dict(uses)
        super().__init__((_too_long_problem(num_tokens, max_tokens, self.uses),))
        self.args = (num_tokens, max_tokens, self.uses)  # what pickle hands to __init__


class ReleaseError(ClefError):
    """A release directory that cannot be used as it is."""


class SettingsError(ClefError):
    """A setting that is missing or wrong."""


class EngineError(ClefError):
    """The model answered something unusable: not a number, or no answer at all."""


def describe(value: object) -> str:
    """Name a value of a request in a message, short whatever its size."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        cut = value if len(value) <= MAX_QUOTED_CHARS else value[:MAX_QUOTED_CHARS] + "…"
        return json.dumps(cut, ensure_ascii=False)
    if isinstance(value, dict):
        return f"an object with {count(len(value), 'key')}"
    if isinstance(value, list):
        return f"an array of {count(len(value), 'entry', 'entries')}"
    if isinstance(value, float) or (isinstance(value, int) and value.bit_length() <= 64):
        return str(value)
    if isinstance(value, int):
        return "a very long integer"
    return f"a Python {type(value).__name__}"


def count(number: int, noun: str, plural: str | None = None) -> str:
    """`1 key`, `2 keys`, `1,000 keys`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def _printable(text: str, max_chars: int | None = None) -> str:
    if max_chars is not None and len(text) > max_chars:
        text = text[:max_chars] + "…"
    return text.replace("\0", "\\u0000").encode("utf-8", "backslashreplace").decode("utf-8")


def _too_long_problem(num_tokens: int, max_tokens: int, uses: Mapping[str, int]) -> Problem:
    used_by = ", ".join(f"{name} {tokens:,}" for name, tokens in uses.items())
    facts = f"The request has {count(num_tokens, 'token')}, the limit is {max_tokens:,} ({used_by})."
    if num_tokens - uses.get("state", 0) < max_tokens:
        advice = 'Shorten the state, or send "x_truncate": "end" to have its end cut off.'
        return Problem(("state",), f"{facts} {advice}", "too_many_tokens")
    culprit = "images" if uses.get("media", 0) > uses.get("questions", 0) else "questions"
    advice = f"Cutting the state would not be enough: send fewer or shorter {culprit}."
    return Problem((culprit,), f"{facts} {advice}", "too_many_tokens")
