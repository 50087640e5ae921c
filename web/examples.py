"""The page's worked examples, read from `examples/`: whole requests for Decide, a table with questions for Batch."""

import json
from dataclasses import dataclass
from pathlib import Path

from clef_core.schema import Submission, parse_request

EXAMPLES = Path(__file__).parent.parent / "examples"
BATCH_FILE = EXAMPLES / "messages.csv"
BATCH_QUESTIONS = EXAMPLES / "questions.json"

INTENT_STATE = "Hi, order 20431 was sent a week ago and nothing has come yet. Can you tell me where the parcel is?"


@dataclass(frozen=True)
class Example:
    """A button above the form."""

    name: str
    submission: Submission


def decide_examples() -> list[Example]:
    """A message with three kinds of questions, a receipt image, an intent with many options."""
    intents = json.loads((EXAMPLES / "intents.json").read_text(encoding="utf-8"))
    return [
        Example("Support message", parse_request((EXAMPLES / "card_example.json").read_bytes())),
        Example("Receipt image", parse_request((EXAMPLES / "receipt_request.json").read_bytes())),
        Example("Intent, 12 options", parse_request({"model": "clef", "state": INTENT_STATE, "questions": intents})),
    ]
