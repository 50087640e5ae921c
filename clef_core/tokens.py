"""A request as text pieces and token counts, with the `tokenizers` library alone.

The pieces are the protocol the weights were trained on; `encoding` turns the same pieces into ids, spans and pixels.
Knows no torch and no Pillow: the page counts tokens with it. What surprises: text that a user wrote goes through a
tokenizer without control tokens, so `<|im_end|>` in a state becomes ordinary characters; every piece is tokenised on
its own, so the number of tokens is a plain sum; and text is composed (NFC) before it is tokenised even where
`tokenizer.json` does not ask for it, because Transformers' tokenizer of this architecture does so.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer
from tokenizers.normalizers import NFC

from clef_core.errors import ReleaseError, RequestError, TooLongError
from clef_core.schema import Json, Question, Request, options

SYSTEM = (
    "<|im_start|>system\nRead the complete state and schema. Decide every field jointly. "
    "Each answer must be exactly one of that field's allowed options.<|im_end|>\n<|im_start|>user\nSTATE:\n"
)
SCHEMA = "\n\nSCHEMA FIELDS:\n"
ALLOWED = "\nALLOWED OPTIONS:\n"
END_FIELD = "END FIELD\n"
SUFFIX = "\n<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nJOINT SCHEMA DECISIONS:"
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"

MAX_TOKENS = 16_384
"""Default limit of a request, media included; the reference's default."""

MAX_ASPECT_RATIO = 200  # the image processor refuses narrower strips
_CACHED_PIECES = 20_000  # options and instructions recur in every row of a batch
_CACHED_STATES = 256  # a state is counted and soon encoded, then seldom seen again
_CACHED_CHARACTERS = 2_000

QuestionType = Literal["choice", "score", "noul"]
Part = Literal["protocol", "media", "state", "header", "instructions", "option"]


@dataclass(frozen=True)
class Piece:
    """A text that is tokenised on its own. `is_user` text may not produce control tokens."""

    text: str
    part: Part
    is_user: bool = False
    question_id: str = ""
    question_type: QuestionType | None = None
    option_id: str = ""


@dataclass(frozen=True)
class TokenCount:
    """What uses the tokens of a request. `questions` holds ids, instructions, options and their fixed words."""

    state: int
    media: int
    questions: int
    protocol: int

    @property
    def total(self) -> int:
        return self.state + self.media + self.questions + self.protocol


def render_value(value: Json) -> str:
    """Render a state, instruction or description as the prompt shows it: text as itself, all else as compact JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def prompt_pieces(request: Request, *, has_media: bool = False, has_questions: bool = True) -> Iterator[Piece]:
    """Yield the pieces of a request in order; the media piece is empty, its tokens come from the processor."""
    yield Piece(SYSTEM, "protocol")
    if has_media:
        yield Piece("", "media")
        yield Piece("\n", "protocol")
    yield Piece(render_value(request.state), "state", is_user=True)
    yield Piece(SCHEMA, "protocol")
    if has_questions:
        yield from questions_pieces(request.questions)
    yield Piece(SUFFIX, "protocol")


def questions_pieces(questions: Mapping[str, Question]) -> Iterator[Piece]:
    """Yield the pieces of a request's questions in order."""
    for number, (question_id, question) in enumerate(questions.items(), start=1):
        yield from _question_pieces(number, question_id, question)


def _question_pieces(number: int, question_id: str, question: Question) -> Iterator[Piece]:
    header = f"\nFIELD {number}\nID: {question_id}\nTYPE: {question.type}\nINSTRUCTION: "
    yield Piece(header, "header", is_user=True)
    instructions = question.instructions
    text = question_id if instructions is None or instructions == "" else render_value(instructions)
    yield Piece(text, "instructions", is_user=True, question_id=question_id, question_type=question.type)
    yield Piece(ALLOWED, "header")
    for position, option in enumerate(options(question), start=1):
        yield Piece(f"OPTION {position}: ", "header")
        shown: dict[str, Json] = {"option_id": option.id}
        if option.description is not None:
            shown["description"] = option.description
        yield Piece(render_value(shown), "option", is_user=True, question_id=question_id, option_id=option.id)
        yield Piece("\n", "header")
    yield Piece(END_FIELD, "header")


def tokens_to_cut(count: TokenCount, max_tokens: int, truncate: Literal["end"] | None) -> int:
    """How many tokens of the state's end must go so that the request fits.

    Returns:
        0 when it fits as it is.

    Raises:
        TooLongError: it does not fit and the request did not ask for `"x_truncate": "end"`, or nothing of the state
            would be left.
    """
    excess = count.total - max_tokens
    if excess <= 0:
        return 0
    if truncate == "end" and excess < count.state:
        return excess
    uses = {"state": count.state, "media": count.media, "questions": count.questions, "protocol": count.protocol}
    raise TooLongError(count.total, max_tokens, uses)


class PromptTokenizer:
    """Tokenises and counts the pieces of requests for one release."""

    def __init__(self, tokenizer_json: str, image_limits: "ImageLimits") -> None:
        self.image_limits = image_limits
        self._protocol = Tokenizer.from_str(tokenizer_json)
        self._plain = Tokenizer.from_str(_with_control_tokens_special(tokenizer_json))
        for tokenizer in (self._protocol, self._plain):
            tokenizer.normalizer = NFC()
        self._plain.encode_special_tokens = True  # special tokens in the text are ordinary characters
        self._cached_ids = lru_cache(maxsize=_CACHED_PIECES)(self._ids)
        self._cached_state_ids = lru_cache(maxsize=_CACHED_STATES)(self._ids)
        self._counted: tuple[Mapping[str, Question], int] = ({}, 0)  # the rows of a batch share their questions

    @classmethod
    def from_release(cls, path: Path) -> "PromptTokenizer":
        """Read `tokenizer.json` and the image limits of a release directory.

        Raises:
            ReleaseError: a file is missing or is not what its name says.
        """
        try:
            return cls((path / "tokenizer.json").read_text(encoding="utf-8"), ImageLimits.from_release(path))
        except (OSError, ValueError, KeyError) as error:
            raise ReleaseError(f"{path}: the tokenizer or processor files cannot be read: {error}") from error

    def ids(self, piece: Piece) -> tuple[int, ...]:
        """Token ids of one piece."""
        if len(piece.text) > _CACHED_CHARACTERS:
            return self._ids(piece.text, piece.is_user)
        cached_ids = self._cached_state_ids if piece.part == "state" else self._cached_ids
        return cached_ids(piece.text, piece.is_user)

    def _ids(self, text: str, is_user: bool) -> tuple[int, ...]:
        tokenizer = self._plain if is_user else self._protocol
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Token ids of a text that a user wrote, without control tokens."""
        return self._ids(text, True)

    def control_ids(self) -> frozenset[int]:
        """Ids that no user text may produce."""
        return frozenset(i for i, token in self._plain.get_added_tokens_decoder().items() if token.special)

    def count(self, request: Request, image_sizes: Sequence[tuple[int, int]] = ()) -> TokenCount:
        """Count the tokens of a request.

        Args:
            request: a parsed request.
            image_sizes: (width, height) of each upright image, in order.

        Raises:
            RequestError: an image is narrower than the processor accepts.
        """
        used = {"protocol": 0, "media": 0, "state": 0}
        for piece in prompt_pieces(request, has_media=bool(image_sizes), has_questions=False):
            used[piece.part] += len(self.ids(piece))
        questions, num_tokens = self._counted
        if questions is not request.questions:
            num_tokens = sum(len(self.ids(piece)) for piece in questions_pieces(request.questions))
            self._counted = request.questions, num_tokens
        for number, (width, height) in enumerate(image_sizes):
            used["media"] += 2 + self.image_limits.num_tokens(width, height, number)
        return TokenCount(**used, questions=num_tokens)

    def check_length(
        self, request: Request, image_sizes: Sequence[tuple[int, int]] = (), max_tokens: int = MAX_TOKENS
    ) -> TokenCount:
        """Count the tokens and refuse a request that is too long.

        Raises:
            TooLongError: as `tokens_to_cut`.
        """
        count = self.count(request, image_sizes)
        tokens_to_cut(count, max_tokens, request.x_truncate)
        return count

    def render(self, request: Request, num_images: int = 0) -> str:
        """The prompt as text, one placeholder per image."""
        pieces = prompt_pieces(request, has_media=num_images > 0)
        return "".join(IMAGE * num_images if piece.part == "media" else piece.text for piece in pieces)


@dataclass(frozen=True)
class ImageLimits:
    """How a release's image processor chooses the size of an image: pixels, patches and merged patches."""

    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int

    @classmethod
    def from_release(cls, path: Path) -> "ImageLimits":
        settings = read_image_settings(path)
        size = settings["size"]
        return cls(settings["patch_size"], settings["merge_size"], size["shortest_edge"], size["longest_edge"])

    def num_tokens(self, width: int, height: int, index: int = 0) -> int:
        """Number of image tokens for an upright image of this size, without the two tokens around them.

        Raises:
            RequestError: one side is more than 200 times the other.
        """
        long_side, short_side = max(width, height), min(width, height)
        if long_side > MAX_ASPECT_RATIO * short_side:
            message = (
                f"an image of {width}×{height} pixels is too narrow: one side may be {MAX_ASPECT_RATIO} times the other"
            )
            raise RequestError.at(("images", index), message, "image_aspect_ratio")
        unit = self.patch_size * self.merge_size
        rows, columns = round(height / unit), round(width / unit)
        area = rows * columns * unit * unit
        if area > self.max_pixels:
            shrink = math.sqrt(width * height / self.max_pixels)
            rows = max(1, math.floor(height / shrink / unit))
            columns = max(1, math.floor(width / shrink / unit))
        elif area < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (width * height))
            rows, columns = math.ceil(height * grow / unit), math.ceil(width * grow / unit)
        return rows * columns


def read_image_settings(path: Path) -> dict[str, Any]:
    """The image half of the processor's settings, from `processor_config.json` or `preprocessor_config.json`."""
    processor = path / "processor_config.json"
    if processor.is_file():
        loaded: Mapping[str, Any] = json.loads(processor.read_text(encoding="utf-8"))
        if "image_processor" in loaded:
            return dict(loaded["image_processor"])
    return dict(json.loads((path / "preprocessor_config.json").read_text(encoding="utf-8")))


def _with_control_tokens_special(tokenizer_json: str) -> str:
    """The same tokenizer with every added token of the form `<…>` marked special, ids unchanged."""
    loaded = json.loads(tokenizer_json)
    for token in loaded.get("added_tokens", []):
        token["special"] = token["special"] or re.fullmatch(r"<.*>", token["content"], re.DOTALL) is not None
    return json.dumps(loaded)
