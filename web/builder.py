"""The question builder's pure half: cards (what a person edits) to and from the questions of a request.

A card holds text only, as the form's fields do. Texts are chosen so that card → questions → card loses nothing: what
would be read differently when typed (a text that looks like JSON, a name with a colon) is written as a JSON string.
It knows nothing of Gradio; `web.cards` draws the fields. Surprises: a card always yields JSON, also when it is half
filled, since the JSON view must follow the form; whether the JSON is a valid request is `clef_core.schema`'s business.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Literal, get_args

from clef_core.errors import Problem, RequestError
from clef_core.schema import AnyQuestion, Json, parse_json

QuestionType = Literal["choice", "score", "noul"]
QUESTION_TYPES: tuple[QuestionType, ...] = get_args(QuestionType)

_uids = count(1)


@dataclass(frozen=True)
class Card:
    """One question as the form shows it.

    uid: names the card's fields in the page; a card with other content set by the program gets a new one.
    options: one option or level per line, see `parse_options`.
    """

    uid: int
    id: str
    type: QuestionType
    instructions: str = ""
    options: str = ""


Cards = tuple[Card, ...]


def new_card(id: str = "", type: QuestionType = "choice", instructions: str = "", options: str = "") -> Card:
    """A card with a fresh uid."""
    return Card(next(_uids), id, type, instructions, options)


# ---- values as text ------------------------------------------------------------------------------------------------


def read_value(text: str) -> Json:
    """The value that a typed text stands for: an object, array or quoted string if it is one as JSON, else itself."""
    if text[:1] in ("{", "[", '"'):
        try:
            return parse_json(text)
        except RequestError:
            return text
    return text


def write_value(value: Json) -> str:
    """The text that `read_value` turns into this value."""
    if isinstance(value, str) and read_value(value) == value:
        return value
    return json.dumps(value, ensure_ascii=False)


def _write_line(value: Json) -> str:
    """As `write_value`, but safe as the end of a line of options."""
    if isinstance(value, str) and (value != value.strip() or not value or len(value.splitlines()) > 1):
        return json.dumps(value)
    return write_value(value)


def parse_options(text: str) -> tuple[tuple[str, Json], ...]:
    """Read `name: description` lines; a line without a colon and space has no description. Empty lines are skipped.

    A name that holds `: ` itself, or starts or ends with a space, is written as a JSON string in quotes.
    """
    return tuple(_parse_line(line) for line in _lines(text))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _parse_line(line: str) -> tuple[str, Json]:
    if line.startswith('"'):
        try:
            name, end = json.JSONDecoder().raw_decode(line)
        except ValueError:
            name, end = "", 0
        if end and (end == len(line) or line[end] == ":"):
            return name, read_value(line[end + 1 :].strip()) if end < len(line) else None
    name, colon, description = line.partition(": ")
    if not colon:
        return line.removesuffix(":").rstrip() if line.endswith(":") else line, None
    return name.rstrip(), read_value(description.strip())


def write_options(criteria: Mapping[str, Json]) -> str:
    """The lines that `parse_options` turns into these names and descriptions."""
    return "\n".join(_write_option(name, description) for name, description in criteria.items())


def _write_option(name: str, description: Json) -> str:
    for written in (name, json.dumps(name)):
        line = written if description is None else f"{written}: {_write_line(description)}"
        if _lines(line) == [line] and _parse_line(line) == (name, description):
            return line
    raise AssertionError(f"option {name!r} cannot be written as a line")


# ---- cards and questions -------------------------------------------------------------------------------------------


def card_to_question(card: Card) -> dict[str, Json]:
    """The question as JSON. Empty fields are left out; nothing is checked."""
    question: dict[str, Json] = {"type": card.type}
    if card.instructions:
        question["instructions"] = read_value(card.instructions)
    if card.type == "score":
        question["criteria"] = [read_value(line) for line in _lines(card.options)]
    elif card.type == "choice" or card.options.strip():
        question["criteria"] = dict(parse_options(card.options))
    return question


def cards_to_questions(cards: Iterable[Card]) -> dict[str, Json]:
    """The questions map. Of two cards with one id the last counts: `card_problems` reports the clash."""
    return {card.id: card_to_question(card) for card in cards}


def cards_of(questions: Mapping[str, AnyQuestion]) -> list[Card]:
    """One new card per valid question."""
    return [card_of(question_id, question) for question_id, question in questions.items()]


def card_of(question_id: str, question: AnyQuestion) -> Card:
    """A new card that shows this question."""
    if question.type == "score":
        options = "\n".join(_write_line(level) for level in question.criteria)
    else:
        options = write_options(question.criteria or {})
    instructions = write_value(question.instructions) if question.instructions else ""
    return new_card(question_id, question.type, instructions, options)


def keep_uids(new: Sequence[Card], old: Sequence[Card]) -> list[Card]:
    """The new cards, each with the uid of an equal old card where one exists, so that the form keeps its place."""
    free = {replace(card, uid=0): card.uid for card in old}
    kept = []
    for card in new:
        uid = free.pop(replace(card, uid=0), None)
        kept.append(card if uid is None else replace(card, uid=uid))
    return kept


def summarize(card: Card) -> str:
    """The title of a folded card."""
    name = card.id or "unnamed question"
    if card.type == "noul":
        return f"{name} · noul · true or false"
    num = len(_lines(card.options))
    noun = "level" if card.type == "score" else "option"
    return f"{name} · {card.type} · {num} {noun}{'' if num == 1 else 's'}"


# ---- the list ------------------------------------------------------------------------------------------------------


def duplicated(cards: Cards, place: int) -> Cards:
    """With a copy below the card; its id gets a number, since two questions cannot share one."""
    card = cards[place]
    taken = {other.id for other in cards}
    number = next(n for n in range(2, len(cards) + 3) if f"{card.id}_{n}" not in taken)
    copy = new_card(f"{card.id}_{number}", card.type, card.instructions, card.options)
    return (*cards[: place + 1], copy, *cards[place + 1 :])


def moved_up(cards: Cards, place: int) -> Cards:
    return cards if place == 0 else (*cards[: place - 1], cards[place], cards[place - 1], *cards[place + 1 :])


def moved_down(cards: Cards, place: int) -> Cards:
    return cards if place == len(cards) - 1 else moved_up(cards, place + 1)


def removed(cards: Cards, place: int) -> Cards:
    return (*cards[:place], *cards[place + 1 :])


# ---- problems ------------------------------------------------------------------------------------------------------


def card_problems(cards: Sequence[Card]) -> list[tuple[int, Problem]]:
    """What the questions map cannot tell, as (uid, problem): an id used twice, an option named twice."""
    problems: list[tuple[int, Problem]] = []
    seen: set[str] = set()
    for card in cards:
        if card.id in seen:
            problem = Problem(("questions", card.id), f"the id {card.id!r} is used by two questions", "duplicate")
            problems.append((card.uid, problem))
        seen.add(card.id)
        names = [] if card.type == "score" else [name for name, _ in parse_options(card.options)]
        for name in sorted({name for name in names if names.count(name) > 1}):
            message = f"the option {name!r} is there twice"
            problems.append((card.uid, Problem(("questions", card.id, "criteria", name), message, "duplicate")))
    return problems


def place_problems(
    problems: Iterable[Problem], cards: Sequence[Card]
) -> tuple[dict[int, list[Problem]], list[Problem]]:
    """Sort problems to the card they belong to, by uid; the rest belongs to no card."""
    by_id = {card.id: card.uid for card in cards}
    placed: dict[int, list[Problem]] = {}
    rest = []
    for problem in problems:
        uid = by_id.get(str(problem.loc[1])) if problem.loc[:1] == ("questions",) and len(problem.loc) > 1 else None
        if uid is None:
            rest.append(problem)
        else:
            placed.setdefault(uid, []).append(problem)
    return placed, rest
