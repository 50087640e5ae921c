"""The rules of a request, as functions that yield what breaks them. Each problem names its place and its value.

Works on plain JSON values, before anything is built from them, so that all mistakes of a body are found at once.
Knows nothing of images or of JSON's own rules (`strict_json`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from clef_core.errors import Loc, Problem, describe

MAX_QUESTIONS = 64
MAX_ID_CHARS = 100
MIN_OPTIONS, MAX_OPTIONS = 2, 255
MIN_LEVELS, MAX_LEVELS = 2, 10
NOUL_OPTIONS = ("true", "false")

_TYPES = '"choice", "score" or "noul"'
_NAMES_OF_NOUL = frozenset({"boolean", "bool", "binary", "yes_no", "yesno"})


def request_problems(body: object) -> Iterator[Problem]:
    """Yield what is wrong with the `model`, `state`, `questions` and `x_truncate` of a body."""
    if not isinstance(body, dict):
        yield Problem((), f"A request must be a JSON object; this is {describe(body)}.", "dict_type")
        return
    if "model" not in body:
        yield Problem(("model",), 'A request needs a model, for example "clef".', "missing")
    elif not isinstance(body["model"], str):
        yield Problem(("model",), f"The model must be a string; this is {describe(body['model'])}.", "string_type")
    if "state" not in body:
        yield Problem(("state",), "A request needs a state: a string, an object or an array.", "missing")
    elif not isinstance(body["state"], str | dict | list):
        msg = f"The state must be a string, an object or an array; this is {describe(body['state'])}."
        yield Problem(("state",), msg, "state_type")
    if "questions" not in body:
        yield Problem(("questions",), f"A request needs 1 to {MAX_QUESTIONS} questions.", "missing")
    else:
        yield from questions_problems(body["questions"], ("questions",))
    if body.get("x_truncate") not in (None, "end"):
        msg = (
            f'x_truncate must be "end" (cut the end of a long state) or absent; this is {describe(body["x_truncate"])}.'
        )
        yield Problem(("x_truncate",), msg, "literal_error")


def questions_problems(questions: object, loc: Loc) -> Iterator[Problem]:
    """Yield what is wrong with a map of question ids to questions."""
    if not isinstance(questions, dict):
        msg = f"The questions must be an object of question ids and questions; this is {describe(questions)}."
        yield Problem(loc, msg, "dict_type")
        return
    if not 1 <= len(questions) <= MAX_QUESTIONS:
        yield Problem(
            loc, f"A request has 1 to {MAX_QUESTIONS} questions; this one has {len(questions):,}.", "too_many"
        )
        return
    for question_id, question in questions.items():
        here = (*loc, question_id)
        if question_id == "":
            yield Problem(here, "A question id must not be empty.", "string_too_short")
        elif len(question_id) > MAX_ID_CHARS:
            msg = f"A question id may have {MAX_ID_CHARS} characters; this one has {len(question_id):,}."
            yield Problem(here, msg, "string_too_long")
        yield from question_problems(question, here)


def question_problems(question: object, loc: Loc) -> Iterator[Problem]:
    """Yield what is wrong with one question."""
    if not isinstance(question, dict):
        msg = f'A question must be an object with a "type"; this is {describe(question)}.'
        yield Problem(loc, msg, "dict_type")
        return
    if not isinstance(question.get("instructions"), str | dict | list | None):
        msg = f"Instructions must be a string, an object or an array; this is {describe(question['instructions'])}."
        yield Problem((*loc, "instructions"), msg, "instructions_type")
    here = (*loc, "criteria")
    match question.get("type"):
        case "choice":
            yield from _choice_problems(question, here)
        case "score":
            yield from _score_problems(question, here)
        case "noul":
            yield from _noul_problems(question.get("criteria"), here)
        case _ if "type" not in question:
            yield Problem((*loc, "type"), f"A question needs a type: {_TYPES}.", "missing")
        case other:
            is_boolean = isinstance(other, str) and other.lower() in _NAMES_OF_NOUL
            hint = ' A yes-or-no question has the type "noul".' if is_boolean else ""
            msg = f"The type of a question must be {_TYPES}; this is {describe(other)}.{hint}"
            yield Problem((*loc, "type"), msg, "literal_error")


def _choice_problems(question: dict[str, Any], loc: Loc) -> Iterator[Problem]:
    rule = f"The criteria of a choice question must be an object with {MIN_OPTIONS} to {MAX_OPTIONS} options"
    if "criteria" not in question:
        yield Problem(loc, f"{rule}; there are none.", "missing")
        return
    criteria = question["criteria"]
    if not isinstance(criteria, dict):
        yield Problem(loc, f"{rule} (option id and description); this is {describe(criteria)}.", "dict_type")
    elif not MIN_OPTIONS <= len(criteria) <= MAX_OPTIONS:
        yield Problem(loc, f"{rule}; this one has {len(criteria):,}.", "options_count")
    else:
        yield from _description_problems(criteria, loc)


def _score_problems(question: dict[str, Any], loc: Loc) -> Iterator[Problem]:
    rule = f"The criteria of a score question must be an array of {MIN_LEVELS} to {MAX_LEVELS} levels, lowest first"
    if "criteria" not in question:
        yield Problem(loc, f"{rule}; there are none.", "missing")
        return
    criteria = question["criteria"]
    if not isinstance(criteria, list):
        yield Problem(loc, f"{rule}; this is {describe(criteria)}.", "list_type")
        return
    if not MIN_LEVELS <= len(criteria) <= MAX_LEVELS:
        yield Problem(loc, f"{rule}; this one has {len(criteria):,}.", "levels_count")
        return
    for index, level in enumerate(criteria):
        if not isinstance(level, str | dict | list):
            msg = f"A level must be a string, an object or an array; this is {describe(level)}."
            yield Problem((*loc, index), msg, "level_type")


def _noul_problems(criteria: object, loc: Loc) -> Iterator[Problem]:
    if criteria is None:
        return
    rule = 'The criteria of a noul question must be absent or an object with "true", "false" or both'
    if not isinstance(criteria, dict):
        yield Problem(loc, f"{rule}; this is {describe(criteria)}.", "dict_type")
        return
    if not criteria:
        yield Problem(loc, f"{rule}; this one is empty.", "options_count")
    unknown = [key for key in criteria if key not in NOUL_OPTIONS]
    for key in unknown[:MAX_OPTIONS]:
        yield Problem((*loc, key), f"{rule}; {describe(key)} is neither.", "extra_forbidden")
    yield from _description_problems({key: criteria[key] for key in NOUL_OPTIONS if key in criteria}, loc)


def _description_problems(criteria: dict[str, Any], loc: Loc) -> Iterator[Problem]:
    for option_id, description in criteria.items():
        if not isinstance(description, str | dict | list | None):
            msg = f"A description must be a string, an object, an array or null; this is {describe(description)}."
            yield Problem((*loc, option_id), msg, "description_type")
