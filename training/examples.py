"""One labelled record to learn from, and how its options and state may be written."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from PIL import Image

from clef_core.encoding import Record
from clef_core.schema import Json, parse_request
from clef_core.tasks import humanise

CHANNELS = ("email", "chat", "phone", "form", "letter")


@dataclass(frozen=True)
class Example:
    """A record and the right option of each of its questions.

    `pool` names the set of labels that the record comes from, and its label there; options may show other ids.
    """

    record: Record
    labels: Mapping[str, str]
    pool: tuple[str, str] | None = None


@dataclass(frozen=True)
class Asked:
    """A question as it goes into a request, with the id of its right option."""

    question: dict[str, Json]
    label: str


def example_of(
    state: Json,
    asked: Mapping[str, Asked],
    rng: random.Random,
    images: Sequence[Image.Image] = (),
    pool: tuple[str, str] | None = None,
) -> Example:
    """Build a record; the order of its questions is drawn."""
    ids = rng.sample(list(asked), len(asked))
    body: dict[str, Json] = {"model": "clef", "state": state, "questions": {id: asked[id].question for id in ids}}
    return Example(Record(parse_request(body).request, images), {id: asked[id].label for id in ids}, pool)


def noul(question: str, *, is_true: bool) -> Asked:
    return Asked({"type": "noul", "instructions": question}, str(is_true).lower())


def choice(right: str, others: Sequence[str], descriptions: Mapping[str, str], instructions: str | None,
           rng: random.Random) -> Asked:  # fmt: skip
    """Ask which of `right` and `others` fits. Options are described, named only, lettered, or described as JSON."""
    names = rng.sample([right, *others], 1 + len(others))
    style = rng.choices(("described", "named", "lettered", "json"), (6, 2, 1, 1))[0]
    ids = {name: name for name in names}
    if style == "lettered":
        ids = {name: chr(ord("a") + place) if len(names) < 26 else f"o{place}" for place, name in enumerate(names)}
    shown: dict[str, Json] = {}
    for name in names:
        text = descriptions.get(name, humanise(name))
        shown[ids[name]] = None if style == "named" else {"means": text} if style == "json" else text
    question: dict[str, Json] = {"type": "choice", "criteria": shown}
    if instructions is not None:
        question["instructions"] = instructions
    return Asked(question, ids[right])


def wrapped(text: str, rng: random.Random) -> Json:
    """A message as a state: usually itself, sometimes a field of an object or a list."""
    match rng.randrange(10):
        case 0:
            return {"message": text}
        case 1:
            return {"channel": rng.choice(CHANNELS), "text": text}
        case 2:
            return {"customer": rng.randrange(100, 9_999), "body": text}
        case 3:
            return [{"role": "user", "content": text}]
    return text
