"""What a decision request is: its questions, and how a body becomes a checked `Submission`.

A `Request` that exists keeps the rules: building one that breaks them raises one `RequestError` that lists every
broken rule with its place, whether it comes from a body (`parse_request`) or from Python. Knows nothing of tokens
(a request may still be too long) or of configured models (`model` may name an unknown one).

Surprising: images leave the state. An `image_url` part in one of its arrays becomes `{"image": n, "type": "image"}`,
where n counts all images of the request in the order in which the model sees them: first those of `images`, then
those of `assets`, then the parts. The same object outside an array, or without its `image_url`, stays data. Unknown
fields of the body and of questions are ignored, and listed in `unknown_fields` for who wants to warn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from clef_core.errors import Loc, Problem, RequestError, describe
from clef_core.images import EncodedImage, encode_images
from clef_core.rules import question_problems, questions_problems, request_problems
from clef_core.strict_json import MAX_NESTING, MAX_PROBLEMS, Json, check_json, parse_json, read_json

__all__ = [
    "AnyQuestion",
    "ChoiceQuestion",
    "Json",
    "NoulQuestion",
    "Option",
    "Question",
    "Request",
    "ScoreQuestion",
    "Submission",
    "check_json",
    "options",
    "parse_json",
    "parse_questions",
    "parse_request",
]

KNOWN_FIELDS = frozenset({"model", "state", "questions", "images", "assets", "videos", "x_truncate"})
MAX_BODY_NESTING = MAX_NESTING + 1  # each field of a body may nest MAX_NESTING deep
QUESTION_FIELDS = ("type", "instructions", "criteria")
NOUL_DESCRIPTIONS: dict[str, Json] = {
    "true": "The proposition is true or the answer is yes.",
    "false": "The proposition is false or the answer is no.",
}

Text: TypeAlias = str | dict[str, Any] | list[Any]


@dataclass(frozen=True)
class Option:
    """One allowed answer as the model reads it; a `None` description is left out of the prompt."""

    id: str
    description: Json


class _Question(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    instructions: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        if not isinstance(data, cls):
            check_json(data)
            _raise_if_any(question_problems(data, ()))
        return data

    def to_json(self) -> dict[str, Json]:
        """The question as it was asked: what was absent stays absent."""
        return {name: getattr(self, name) for name in QUESTION_FIELDS if name in self.model_fields_set}


class ChoiceQuestion(_Question):
    """Which one of 2 to 255 options; `criteria` maps option ids to descriptions."""

    type: Literal["choice"]
    criteria: dict[str, Text | None]


class ScoreQuestion(_Question):
    """Which one of 2 to 10 levels, lowest first; their ids are "0", "1", …"""

    type: Literal["score"]
    criteria: list[Text]


class NoulQuestion(_Question):
    """Is it true; `criteria` may override what "true" and "false" mean."""

    type: Literal["noul"]
    criteria: dict[str, Text | None] | None = None


AnyQuestion: TypeAlias = ChoiceQuestion | ScoreQuestion | NoulQuestion
Question = Annotated[AnyQuestion, Field(discriminator="type")]


class Request(BaseModel):
    """What is asked of the model; images travel beside it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    model: str
    state: Text
    questions: dict[str, Question]
    x_truncate: Literal["end"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        if isinstance(data, cls):
            return data
        body = {name: data[name] for name in cls.model_fields if name in data} if isinstance(data, dict) else data
        if isinstance(body, dict) and isinstance(body.get("questions"), dict):
            body["questions"] = {id: _plain_question(question) for id, question in body["questions"].items()}
        check_json(body, (), MAX_BODY_NESTING)
        _raise_if_any(request_problems(body))
        return body

    def to_json(self) -> dict[str, Json]:
        """The body to store: exactly the asked values, but images in the state are placeholders.

        `parse_request` makes the same request of it (without the images).
        """
        questions: dict[str, Json] = {id: question.to_json() for id, question in self.questions.items()}
        body: dict[str, Json] = {"model": self.model, "state": self.state, "questions": questions}
        return body if self.x_truncate is None else {**body, "x_truncate": self.x_truncate}


@dataclass(frozen=True)
class Submission:
    """A checked body: the request, its images in the order in which the model sees them, and what was ignored.

    An unknown field of a question is written `questions.<id>.<field>`.
    """

    request: Request
    images: tuple[EncodedImage, ...] = ()
    unknown_fields: tuple[str, ...] = ()


_QUESTIONS: TypeAdapter[dict[str, AnyQuestion]] = TypeAdapter(dict[str, Question])


def options(question: AnyQuestion) -> tuple[Option, ...]:
    """The options of a question in the order in which the model sees them (a choice's are sorted by id as text)."""
    if isinstance(question, ChoiceQuestion):
        return tuple(Option(id, question.criteria[id]) for id in sorted(question.criteria))
    if isinstance(question, ScoreQuestion):
        return tuple(Option(str(index), level) for index, level in enumerate(question.criteria))
    descriptions = {**NOUL_DESCRIPTIONS, **(question.criteria or {})}
    return tuple(Option(id, descriptions[id]) for id in NOUL_DESCRIPTIONS)


def parse_questions(value: object) -> dict[str, AnyQuestion]:
    """Check a map of questions alone, as the page and question files have it.

    Raises:
        RequestError: every mistake, each below `"questions"`.
    """
    loc = ("questions",)
    check_json(value, loc)
    _raise_if_any(questions_problems(value, loc))
    return _QUESTIONS.validate_python(value)


def parse_request(body: str | bytes | dict[str, Any]) -> Submission:
    """Check a body by every rule for requests except the length in tokens.

    Raises:
        RequestError: with all mistakes of the body.
    """
    problems: list[Problem] = []
    value: Any = body
    if isinstance(body, str | bytes):
        value, problems = read_json(body, MAX_BODY_NESTING)
    else:
        check_json(body, (), MAX_BODY_NESTING)
    is_sound = not problems
    problems.extend(request_problems(value))
    if not isinstance(value, dict):
        raise RequestError(tuple(problems))
    sources, image_problems = _listed_images(value)
    state = value.get("state")
    if is_sound:  # else it may nest too deep to be searched for images
        state = _take_images(state, ("state",), sources)
    images: tuple[EncodedImage, ...] = ()
    try:
        images = encode_images(sources)
    except RequestError as error:
        image_problems.extend(error.problems)
    _raise_if_any([*problems, *image_problems])
    request = Request.model_validate({**value, "state": state})
    return Submission(request, images, tuple(_unknown_fields(value)))


def _listed_images(body: dict[str, Any]) -> tuple[list[tuple[Loc, object]], list[Problem]]:
    """The images of `images` and `assets`, each with its place, and what is wrong with these fields and `videos`."""
    sources: list[tuple[Loc, object]] = []
    problems: list[Problem] = []
    images, assets, videos = body.get("images"), body.get("assets"), body.get("videos")
    if isinstance(images, list):
        sources.extend((("images", index), image) for index, image in enumerate(images))
    elif images is not None:
        problems.append(Problem(("images",), f"images must be an array; this is {describe(images)}.", "list_type"))
    if isinstance(assets, dict):
        sources.extend((("assets", name), asset) for name, asset in assets.items())
    elif assets is not None:
        msg = f"assets must be an object of names and images; this is {describe(assets)}."
        problems.append(Problem(("assets",), msg, "dict_type"))
    if videos not in (None, []):
        msg = "Videos are for the Python library, which takes lists of frames. Here, send single frames as images."
        problems.append(Problem(("videos",), msg, "videos"))
    return sources, problems


def _take_images(value: Any, loc: Loc, sources: list[tuple[Loc, object]]) -> Any:
    """Move the image_url parts of a state's arrays, at any depth, to `sources`; a placeholder stays for each."""
    if isinstance(value, dict):
        return {key: _take_images(item, (*loc, key), sources) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    result: list[Any] = []
    for index, item in enumerate(value):
        if isinstance(item, dict) and item.get("type") == "image_url" and "image_url" in item:
            sources.append(((*loc, index), item))
            result.append({"image": len(sources), "type": "image"})
        else:
            result.append(_take_images(item, (*loc, index), sources))
    return result


def _unknown_fields(body: dict[str, Any]) -> Iterator[str]:
    yield from (name for name in body if name not in KNOWN_FIELDS)
    for id, question in body["questions"].items():
        yield from (f"questions.{id}.{name}" for name in question if name not in QUESTION_FIELDS)


def _plain_question(question: object) -> object:
    return question.to_json() if isinstance(question, _Question) else question


def _raise_if_any(problems: Iterable[Problem]) -> None:
    found = list(islice(dict.fromkeys(problems), MAX_PROBLEMS + 1))
    if len(found) > MAX_PROBLEMS:
        found[MAX_PROBLEMS] = Problem((), f"There are more problems; these are the first {MAX_PROBLEMS}.")
    if found:
        raise RequestError(tuple(found))
