"""What stands in the Decide form, and the way from there to a request, a token count, and back.

The form holds texts and upload paths; nothing here draws anything. The state's text is a string or JSON: "auto" takes
an object or array for JSON when it is valid, and `describe_state` says which it was, so that the choice is not hidden.
"""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from clef_core.errors import Problem, RequestError, count
from clef_core.images import EncodedImage
from clef_core.schema import Json, Request, Submission, parse_json, parse_questions, parse_request
from clef_core.tokens import Piece, PromptTokenizer, TokenCount, render_value
from web.builder import Cards, card_problems, cards_of, cards_to_questions, keep_uids
from web.uploads import read_images
from worker.questions_file import QuestionsFileError, load_questions

ReadAs = Literal["auto", "text", "json"]


@dataclass(frozen=True)
class Draft:
    """The form's fields. `questions` is the JSON view's text if somebody edited it; then it counts, not the cards."""

    state: str
    read_as: ReadAs
    images: tuple[str, ...]
    cards: Cards
    questions: str | None = None
    truncate: bool = False


@dataclass(frozen=True)
class Filled:
    """What to put into the form so that it shows a request."""

    state: str
    read_as: ReadAs
    images: tuple[EncodedImage, ...]
    cards: Cards
    truncate: bool


class DraftError(Exception):
    """A draft that is no request yet: problems by place, `card_problems` by card uid."""

    def __init__(self, problems: Sequence[Problem], by_card: Sequence[tuple[int, Problem]] = ()) -> None:
        super().__init__(problems, by_card)
        self.problems = tuple(problems)
        self.by_card = tuple(by_card)


# ---- state ---------------------------------------------------------------------------------------------------------


def read_state(text: str, read_as: ReadAs) -> Json:
    """The state that the text stands for.

    Raises:
        RequestError: at `("state",)`; it was to be read as JSON and is none.
    """
    if read_as == "text" or (read_as == "auto" and not text.lstrip().startswith(("{", "["))):
        return text
    try:
        return parse_json(text)
    except RequestError as error:
        if read_as == "auto":
            return text
        raise RequestError(tuple(Problem(("state", *p.loc), p.msg, p.type) for p in error.problems)) from error


def describe_state(text: str, read_as: ReadAs) -> str:
    """One short sentence: what the state will be read as. Plain text, not escaped."""
    try:
        state = read_state(text, read_as)
    except RequestError as error:
        return f"Not JSON yet: {error.problems[0].msg}"
    if isinstance(state, dict):
        return f"Read as a JSON object with {count(len(state), 'key')}"
    if isinstance(state, list):
        return f"Read as a JSON array of {count(len(state), 'entry', 'entries')}"
    if read_as == "auto" and text.lstrip().startswith(("{", "[")):
        return "Read as plain text, since it is not valid JSON"
    return "Read as plain text" if isinstance(state, str) else "A state is text, an object or an array"


def write_state(state: Json) -> tuple[str, ReadAs]:
    """The text and the switch that `read_state` turns into this state."""
    if isinstance(state, str):
        return state, "auto" if read_state(state, "auto") == state else "text"
    return json.dumps(state, ensure_ascii=False, indent=2), "auto"


# ---- draft and request ---------------------------------------------------------------------------------------------


def submission_of(draft: Draft, model: str) -> Submission:
    """The checked request of a draft.

    Raises:
        DraftError: everything that is wrong with it.
    """
    problems: list[Problem] = []
    body: dict[str, Any] = {"model": model, "state": "", "questions": {}}
    if draft.truncate:
        body["x_truncate"] = "end"
    try:
        body["state"] = read_state(draft.state, draft.read_as)
    except RequestError as error:
        problems += error.problems
    by_card = card_problems(draft.cards) if draft.questions is None else []
    try:
        body["questions"] = draft_questions(draft)
    except RequestError as error:
        problems += error.problems
        raise DraftError(problems, by_card) from error
    try:
        body["images"] = [_data_url(image) for image in read_images(draft.images)]
    except RequestError as error:
        problems += error.problems
    try:
        submission = parse_request(body)
    except RequestError as error:
        problems += error.problems
    if problems or by_card:
        raise DraftError(problems, by_card)
    return submission


def draft_questions(draft: Draft) -> Json:
    """The questions map: of the cards as they are, of the JSON view in any spelling that a questions file may have.

    Raises:
        RequestError: the JSON view does not hold questions.
    """
    if draft.questions is None:
        return dict(cards_to_questions(draft.cards))
    try:
        return load_questions(draft.questions)
    except QuestionsFileError as error:
        raise RequestError.at(("questions",), str(error), "questions_text") from error


def draft_cards(draft: Draft) -> Cards:
    """The cards as they would be in the form: those of the JSON view if it is open.

    Raises:
        RequestError: the JSON view does not hold valid questions.
    """
    if draft.questions is None:
        return draft.cards
    return tuple(keep_uids(cards_of(parse_questions(draft_questions(draft))), draft.cards))


def whole_request(text: str) -> Submission | None:
    """The request that somebody pasted where questions are expected, or `None` if it is not one.

    Raises:
        RequestError: it is meant as a request, but breaks the rules.
    """
    try:
        body = parse_json(text)
    except RequestError:
        return None
    if not isinstance(body, dict) or "state" not in body or not isinstance(body.get("questions"), dict):
        return None
    return parse_request(body if "model" in body else {"model": "clef", **body})


def fill(request: Request, images: Sequence[EncodedImage]) -> Filled:
    """The form for a request."""
    state, read_as = write_state(request.state)
    cards = tuple(cards_of(request.questions))
    return Filled(state, read_as, tuple(images), cards, truncate=request.x_truncate is not None)


def _data_url(image: EncodedImage) -> str:
    return f"data:{image.media_type};base64,{base64.b64encode(image.data).decode()}"


# ---- tokens --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Meter:
    """Tokens of a draft. `count` is None while the questions are incomplete; then only the state is known."""

    state_tokens: int
    count: TokenCount | None


def measure(draft: Draft, tokenizer: PromptTokenizer) -> Meter:
    """Count what can be counted of an unfinished draft; never raises for what a user typed."""
    try:
        state = read_state(draft.state, draft.read_as)
    except RequestError:
        state = draft.state
    state_tokens = len(tokenizer.ids(Piece(render_value(state), "state", is_user=True)))
    try:
        questions = parse_questions(draft_questions(draft))
        sizes = [(image.width, image.height) for image in read_images(draft.images)]
        request = Request.model_validate({"model": "clef", "state": state, "questions": questions})
        return Meter(state_tokens, tokenizer.count(request, sizes))
    except RequestError:
        return Meter(state_tokens, None)
