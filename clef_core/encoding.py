"""From a request, its images and videos to token ids, spans and pixel tensors.

Each request is encoded alone, so a bad one fails alone; `collate` pads encoded ones on the right into a micro-batch.
Knows no model. What surprises: the processor speaks only for the media; all text is tokenised piece by piece by
`tokens`, and the media's tokens are laid between the prefix and a line break.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from clef_core.errors import RequestError
from clef_core.schema import Request
from clef_core.tokens import (
    IMAGE,
    MAX_TOKENS,
    VIDEO,
    PromptTokenizer,
    QuestionType,
    TokenCount,
    prompt_pieces,
    tokens_to_cut,
)

Span = tuple[int, int]
"""Half-open range of token positions."""

Video = Sequence[Image.Image] | np.ndarray[Any, Any]
"""Frames: Pillow images, or an RGB uint8 array (frames, height, width, 3)."""

PIXELS = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")


@dataclass(frozen=True)
class Record:
    """One request with its opened media: upright RGB images and lists of video frames."""

    request: Request
    images: Sequence[Image.Image] = ()
    videos: Sequence[Video] = ()


@dataclass(frozen=True)
class Media:
    """What the processor made of a record's images and videos.

    `input_ids` and `mm_token_type_ids` have one entry per media token (0 text, 1 image, 2 video); `pixels` holds the
    tensors named in `PIXELS` that the record has.
    """

    input_ids: tuple[int, ...]
    mm_token_type_ids: tuple[int, ...]
    pixels: dict[str, Tensor]


@dataclass(frozen=True)
class EncodedOption:
    id: str
    span: Span


@dataclass(frozen=True)
class EncodedQuestion:
    id: str
    type: QuestionType
    span: Span
    options: tuple[EncodedOption, ...]


@dataclass(frozen=True)
class EncodedRequest:
    """A request as one token sequence. `media_offset` is where the media's tokens begin."""

    input_ids: tuple[int, ...]
    questions: tuple[EncodedQuestion, ...]
    media: Media | None
    media_offset: int
    truncated_tokens: int


class Encoder:
    """Encodes records for one release.

    `processor` is a `Qwen3VLProcessor` (or None: then a record with media is a RequestError).
    """

    def __init__(self, tokenizer: PromptTokenizer, processor: Any, max_tokens: int = MAX_TOKENS) -> None:
        self.tokenizer = tokenizer
        self.processor = processor
        self.max_tokens = max_tokens

    def encode(self, record: Record) -> EncodedRequest:
        """Encode one record.

        Raises:
            TooLongError: the request does not fit into `max_tokens` and may not be cut.
            RequestError: an image cannot be processed.
        """
        media = self._media(record)
        pieces = list(prompt_pieces(record.request, has_media=media is not None))
        piece_ids = [self.tokenizer.ids(piece) for piece in pieces]
        sizes = {"state": 0, "protocol": 0, "questions": 0}
        for piece, ids in zip(pieces, piece_ids, strict=True):
            sizes[piece.part if piece.part in ("state", "protocol") else "questions"] += len(ids)
        count = TokenCount(media=len(media.input_ids) if media else 0, **sizes)
        cut = tokens_to_cut(count, self.max_tokens, record.request.x_truncate)

        input_ids: list[int] = []
        questions: list[EncodedQuestion] = []
        media_offset = 0
        for piece, ids in zip(pieces, piece_ids, strict=True):
            start = len(input_ids)
            if piece.part == "media" and media is not None:
                media_offset = start
                ids = media.input_ids
            elif piece.part == "state" and cut:
                ids = ids[:-cut]
            input_ids.extend(ids)
            span = (start, len(input_ids))
            if piece.part == "instructions" and piece.question_type is not None:
                questions.append(EncodedQuestion(piece.question_id, piece.question_type, span, ()))
            elif piece.part == "option":
                question = questions[-1]
                found = (*question.options, EncodedOption(piece.option_id, span))
                questions[-1] = EncodedQuestion(question.id, question.type, question.span, found)
        return EncodedRequest(tuple(input_ids), tuple(questions), media, media_offset, cut)

    def _media(self, record: Record) -> Media | None:
        if not record.images and not record.videos:
            return None
        if self.processor is None:
            raise RequestError.at(("images",), "this release has no image processor, so it cannot take images")
        for number, image in enumerate(record.images):
            self.tokenizer.image_limits.num_tokens(image.width, image.height, number)
        made = self.processor(
            text=[IMAGE * len(record.images) + VIDEO * len(record.videos)],
            images=list(record.images) or None,
            videos=[_frames(video) for video in record.videos] or None,
            return_tensors="pt",
        )
        pixels = {name: made[name] for name in PIXELS if name in made}
        return Media(tuple(made["input_ids"][0].tolist()), tuple(made["mm_token_type_ids"][0].tolist()), pixels)


def _frames(video: Video) -> np.ndarray[Any, Any]:
    if isinstance(video, np.ndarray):
        return video
    return np.stack([np.asarray(frame.convert("RGB")) for frame in video])


@dataclass(frozen=True)
class Batch:
    """A padded micro-batch.

    input_ids, attention_mask, mm_token_type_ids: int64 (B, T), padded on the right; `mm_token_type_ids` and the
    tensors of `pixels` exist only when a record has media.
    """

    input_ids: Tensor
    attention_mask: Tensor
    mm_token_type_ids: Tensor | None
    pixels: dict[str, Tensor]
    lengths: Tensor


def collate(encoded: Sequence[EncodedRequest], pad_id: int, pad_to: int = 0) -> Batch:
    """Pad encoded requests on the right to the longest of them, or to `pad_to` tokens when that is more."""
    lengths = torch.tensor([len(one.input_ids) for one in encoded])
    width = max(int(lengths.max()), pad_to)
    input_ids = torch.full((len(encoded), width), pad_id, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    token_types = torch.zeros_like(input_ids)
    for row, one in enumerate(encoded):
        input_ids[row, : len(one.input_ids)] = torch.tensor(one.input_ids)
        attention_mask[row, : len(one.input_ids)] = 1
        if one.media is not None:
            end = one.media_offset + len(one.media.input_ids)
            token_types[row, one.media_offset : end] = torch.tensor(one.media.mm_token_type_ids)
    media = [one.media for one in encoded if one.media is not None]
    pixels = {
        name: torch.cat([one.pixels[name] for one in media if name in one.pixels])
        for name in PIXELS
        if any(name in one.pixels for one in media)
    }
    return Batch(input_ids, attention_mask, token_types if media else None, pixels, lengths)
