"""JSON as this program accepts it: what RFC 8259 allows, minus what later breaks a tokenizer, a database or an answer.

Refused, each with its place: duplicate keys, NaN and Infinity (also as `1e999`), integers of more than 4,300 digits,
lone surrogates, NUL characters, nesting over 100, and in Python values everything that is not JSON at all.
Knows nothing of requests. The walk is a loop, not a recursion, so a hostile body cannot exhaust the stack.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from clef_core.errors import Loc, Problem, RequestError, describe

MAX_NESTING = 100
MAX_INTEGER_DIGITS = 4300  # Python's own limit: it could neither read nor write a longer one
MAX_VALUES = 200_000  # in one document: far beyond what any model here reads; a YAML alias can stand for billions
MAX_PROBLEMS = 100  # of one document; who sends more mistakes needs no complete list

_INTEGER_LIMIT = 10**MAX_INTEGER_DIGITS
_NESTING_MESSAGE = f"Objects and arrays nest deeper than {MAX_NESTING} here, which is the limit."

Json: TypeAlias = bool | int | float | str | list[Any] | dict[str, Any] | None

# Where a value stands: its container's place and its key there. Linked, because most places are never named.
_Place: TypeAlias = tuple[Any, str | int] | None


def parse_json(text: str | bytes) -> Json:
    """Read one JSON document strictly.

    Raises:
        RequestError: it is not JSON, or breaks a rule above; names every place.
    """
    value, problems = read_json(text)
    if problems:
        raise RequestError(tuple(problems))
    return value


def check_json(value: object, loc: Loc = (), max_nesting: int = MAX_NESTING) -> None:
    """Hold an already parsed Python value to the same rules.

    Raises:
        RequestError: names every place, each below `loc`.
    """
    problems = json_problems(value, loc, max_nesting)
    if problems:
        raise RequestError(tuple(problems))


def read_json(text: str | bytes, max_nesting: int = MAX_NESTING) -> tuple[Json, list[Problem]]:
    """Read a JSON document and list what is wrong inside it, so that other mistakes can be reported beside.

    A byte order mark is allowed.

    Raises:
        RequestError: the text is no JSON document at all.
    """
    text = (_decode_utf8(text) if isinstance(text, bytes) else text).removeprefix("\ufeff")
    duplicates = _DuplicateKeys()
    try:
        value: Json = json.loads(text, object_pairs_hook=duplicates.make_object, parse_int=_parse_integer)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        found = f"{error.msg.removesuffix(' at')} at {where}" if text.strip() else "it is empty"
        raise RequestError.at((), f"This is not valid JSON: {found}.", "json_invalid") from None
    except RecursionError:
        raise RequestError.at((), _NESTING_MESSAGE, "json_nesting") from None
    return value, json_problems(value, (), max_nesting, duplicates.of_object)


def json_problems(
    value: object,
    loc: Loc = (),
    max_nesting: int = MAX_NESTING,
    duplicate_keys: Mapping[int, Sequence[str]] | None = None,
) -> list[Problem]:
    """List what is wrong in a parsed value, in document order, at most `MAX_PROBLEMS`.

    `duplicate_keys` goes by the `id()` of the object that has them.
    """
    problems: list[Problem] = []
    for index, (item, place, nesting) in enumerate(_walk(value, max_nesting)):
        if index >= MAX_VALUES:
            msg = f"There are more than {MAX_VALUES:,} values in here, which is the limit."
            return [*problems, Problem(loc, msg, "json_size")]
        for sub_path, msg, type in _item_problems(item):
            problems.append(Problem(loc + _path(place) + sub_path, msg, type))
        if nesting > max_nesting and isinstance(item, dict | list):
            field = (loc + _path(place))[:1]  # a path of a hundred steps helps nobody
            problems.append(Problem(field, _NESTING_MESSAGE, "json_nesting"))
        for key in duplicate_keys.get(id(item), ()) if duplicate_keys else ():
            msg = f"The key {describe(key)} occurs more than once in this object."
            problems.append(Problem((*loc, *_path(place), key), msg, "duplicate_key"))
        if len(problems) >= MAX_PROBLEMS:
            break
    return list(dict.fromkeys(problems))


def _walk(value: object, max_nesting: int) -> Iterator[tuple[object, _Place, int]]:
    """Yield every value with its place and, for an object or array, how deep it nests; enters none that is too deep."""
    yield value, None, 1
    entered: list[tuple[_Place, Iterator[tuple[str | int, object]]]] = [(None, _children(value))]
    while entered:
        place, children = entered[-1]
        for key, child in children:
            nesting = len(entered) + 1
            yield child, (place, key), nesting
            if isinstance(child, dict | list) and nesting <= max_nesting:
                entered.append(((place, key), _children(child)))
                break
        else:
            entered.pop()


def _children(value: object) -> Iterator[tuple[str | int, object]]:
    if isinstance(value, dict):
        return iter(value.items())
    return enumerate(value) if isinstance(value, list) else iter(())


def _item_problems(item: object) -> Iterator[tuple[Loc, str, str]]:
    """Yield path below the item, message and type for each mistake of this one value and its keys."""
    if isinstance(item, str):
        if fault := _text_fault(item):
            yield (), f"The text has {fault}", "string_unicode"
    elif isinstance(item, dict):
        for key in item:
            if not isinstance(key, str):
                yield (), f"The key {describe(key)} is not a string, as JSON demands.", "json_key"
            elif fault := _text_fault(key):
                yield (key,), f"The key {describe(key)} has {fault}", "string_unicode"
    elif isinstance(item, float):
        if not math.isfinite(item):
            msg = "NaN, Infinity and numbers beyond a 64-bit float (such as 1e999) are not allowed."
            yield (), msg, "finite_number"
    elif isinstance(item, int):
        if not -_INTEGER_LIMIT < item < _INTEGER_LIMIT:
            yield (), f"An integer may have at most {MAX_INTEGER_DIGITS:,} digits.", "int_too_long"
    elif item is not None and not isinstance(item, list):
        yield (), f"JSON has nothing for {describe(item)}.", "json_type"


def _text_fault(text: str) -> str | None:
    if "\0" in text:
        return f"a NUL character (at character {text.index(chr(0)) + 1:,}), which is not allowed."
    if text.isascii():
        return None
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"half of a surrogate pair (at character {error.start + 1:,}), which is not a Unicode character."
    return None


class _DuplicateKeys:
    """Builds the objects of a document and remembers which had a key more than once."""

    def __init__(self) -> None:
        self.of_object: dict[int, list[str]] = {}
        self._alive: list[dict[str, Any]] = []  # an id is unique only while its object lives

    def make_object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            times = Counter(key for key, _ in pairs)
            self.of_object[id(result)] = [key for key, number in times.items() if number > 1]
            self._alive.append(result)
        return result


def _parse_integer(digits: str) -> int:
    return int(digits) if len(digits.lstrip("-")) <= MAX_INTEGER_DIGITS else _INTEGER_LIMIT


def _decode_utf8(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        msg = f"This is not UTF-8 text: byte 0x{data[error.start]:02x} at position {error.start:,}."
        raise RequestError.at((), msg, "json_invalid") from None


def _path(place: _Place) -> Loc:
    path: list[str | int] = []
    while place is not None:
        place, key = place
        path.append(key if isinstance(key, str | int) else describe(key))
    return tuple(reversed(path))
