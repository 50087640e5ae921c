"""The engine: plan micro-batches, run them, record what came out.

A request that cannot be answered gets its own error; its neighbours are answered. Knows no queue and no database.
What surprises: results come in the order in which micro-batches finish, each with the index of its record; and the
log-probabilities are unrounded, rounding happens only in the response.
"""

import dataclasses
import logging
import math
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

import torch
from PIL import Image

from clef_core.answers import Confidence, build_response
from clef_core.encoding import EncodedRequest, Encoder, Record, collate
from clef_core.errors import ClefError, EngineError, RequestError
from clef_core.images import open_image
from clef_core.joint_head import HeadInputs, option_log_probs
from clef_core.model import Release
from clef_core.schema import ChoiceQuestion, Json, Question, options, parse_request
from clef_core.tokens import MAX_TOKENS, tokens_to_cut

logger = logging.getLogger(__name__)

DEFAULT_MAX_BATCH_TOKENS = {"cpu": 4_096, "cuda": 32_768}
"""Padded tokens per micro-batch. On a CPU a larger one is no faster, it only answers later."""

VERSIONED = ("torch", "transformers", "tokenizers", "safetensors", "pillow")

PADDED_TO = 128
"""In `padded` batching, lengths are rounded up to a multiple of this many tokens."""

Batching = Literal["fast", "single", "padded"]
"""How records share a forward. `fast`: micro-batches by padded tokens. `single`: one record per forward, unpadded, so
that a decision is bit-identical whatever else is in the queue. `padded`: micro-batches with extra padding, a shape that
neither of the others has; what moves between it and `single` is noise."""

LogProbs = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Decision:
    """What one request got.

    log_probs: natural logarithms, question id → option id → value, options in the order of the request.
    latency_ms: duration of the micro-batch that the record was in, in milliseconds.
    """

    log_probs: LogProbs
    response: dict[str, Json]
    input_tokens: int
    truncated_tokens: int
    latency_ms: float
    batch_rows: int
    padded_tokens: int


Outcome = Decision | ClefError


@dataclass(frozen=True)
class _Planned:
    """A record that fits, with its number of tokens."""

    index: int
    record: Record
    num_tokens: int

    @property
    def has_media(self) -> bool:
        return bool(self.record.images or self.record.videos)


class Engine:
    """Answers requests with one loaded release.

    Args:
        release: from `load_release`.
        max_tokens: longest request, media included.
        max_batch_tokens: padded tokens per micro-batch; None takes the device's default. A longer request runs alone.
        confidence: which definition of `confidence` the responses use.
        variant: the configured name that responses carry as `x_variant`.
    """

    def __init__(
        self,
        release: Release,
        *,
        max_tokens: int = MAX_TOKENS,
        max_batch_tokens: int | None = None,
        confidence: Confidence = "top",
        variant: str | None = None,
    ) -> None:
        self.release = release
        self.max_tokens = max_tokens
        self.max_batch_tokens = max_batch_tokens or DEFAULT_MAX_BATCH_TOKENS.get(release.device.type, 4_096)
        self.confidence = confidence
        self.variant = variant
        self._encoder = Encoder(release.tokenizer, release.processor, max_tokens)

    def provenance(self, batching: Batching = "fast") -> dict[str, Json]:
        """How decisions of this engine are made: what a run's row records."""
        release = self.release
        limits: dict[str, Json] = {"mode": batching, "max_tokens": self.max_tokens}
        if batching != "single":
            limits["max_batch_tokens"] = self.max_batch_tokens
        device_name = platform.processor() or platform.machine()
        if release.device.type == "cuda":
            device_name = torch.cuda.get_device_name(release.device)
        return {
            "release_checksum": release.checksum,
            "linear_mode": release.linears,
            "dtype": str(release.dtype).removeprefix("torch."),
            "head_dtype": str(next(release.head.parameters()).dtype).removeprefix("torch."),
            "device": f"{release.device.type} ({device_name})",
            "threads": torch.get_num_threads(),
            "batching": limits,
            "versions": {name: version(name) for name in VERSIONED},
        }

    def decide(self, records: Sequence[Record], batching: Batching = "fast") -> list[Outcome]:
        """Answer every record; the result has the order and the length of the input."""
        outcomes: dict[int, Outcome] = {}
        for finished in self.run(records, batching):
            outcomes.update(finished)
        if len(outcomes) != len(records):
            raise EngineError(f"{len(records)} records went in, {len(outcomes)} outcomes came out")
        return [outcomes[index] for index in range(len(records))]

    def run(self, records: Sequence[Record], batching: Batching = "fast") -> Iterator[list[tuple[int, Outcome]]]:
        """Answer records micro-batch by micro-batch, encoding the next one while this one runs.

        Yields:
            after each micro-batch (index into `records`, outcome); refused records come first.
        """
        batches, refused = self._plan(records, batching)
        if refused:
            yield refused
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="encode") as executor:
            upcoming = executor.submit(self._encode, batches[0]) if batches else None
            for number, batch in enumerate(batches):
                assert upcoming is not None
                encoded = upcoming.result()
                upcoming = self._submit_next(executor, batches, number + 1)
                yield self._decide_batch(batch, encoded, PADDED_TO if batching == "padded" else 1)

    def _submit_next(
        self, executor: ThreadPoolExecutor, batches: Sequence[Sequence[_Planned]], number: int
    ) -> "Future[list[EncodedRequest | ClefError]] | None":
        return executor.submit(self._encode, batches[number]) if number < len(batches) else None

    def _plan(
        self, records: Sequence[Record], batching: Batching
    ) -> tuple[list[list[_Planned]], list[tuple[int, Outcome]]]:
        """Sort what fits by length and cut it into micro-batches, records with media apart from the others."""
        planned: list[_Planned] = []
        refused: list[tuple[int, Outcome]] = []
        for index, record in enumerate(records):
            try:
                planned.append(_Planned(index, record, self._num_tokens(record)))
            except RequestError as error:
                refused.append((index, error))
        planned.sort(key=lambda one: (one.has_media, one.num_tokens))
        batches: list[list[_Planned]] = []
        for one in planned:
            last = batches[-1] if batches else []
            fits = (len(last) + 1) * one.num_tokens <= self.max_batch_tokens  # `one` is the longest so far
            if last and last[0].has_media == one.has_media and fits and batching != "single":
                last.append(one)
            else:
                batches.append([one])
        return batches, refused

    def _num_tokens(self, record: Record) -> int:
        """Tokens of a record. One with videos counts as full: only the processor knows how many frames it keeps."""
        sizes = [image.size for image in record.images]
        count = self.release.tokenizer.count(record.request, sizes)
        cut = tokens_to_cut(count, self.max_tokens, record.request.x_truncate)
        return self.max_tokens if record.videos else count.total - cut

    def _encode(self, batch: Sequence[_Planned]) -> list[EncodedRequest | ClefError]:
        encoded: list[EncodedRequest | ClefError] = []
        for one in batch:
            try:
                encoded.append(self._encoder.encode(one.record))
            except ClefError as error:
                encoded.append(error)
        return encoded

    def _decide_batch(
        self, batch: Sequence[_Planned], encoded: Sequence[EncodedRequest | ClefError], multiple: int
    ) -> list[tuple[int, Outcome]]:
        good = [(one, e) for one, e in zip(batch, encoded, strict=True) if isinstance(e, EncodedRequest)]
        outcomes: list[tuple[int, Outcome]] = [
            (one.index, e) for one, e in zip(batch, encoded, strict=True) if isinstance(e, ClefError)
        ]
        if good:
            decided = self._forward([one for one, _ in good], [e for _, e in good], multiple)
            outcomes += zip([one.index for one, _ in good], decided, strict=True)
        return outcomes

    def _forward(self, batch: Sequence[_Planned], encoded: Sequence[EncodedRequest], multiple: int) -> list[Outcome]:
        """Run one micro-batch; when memory does not suffice, its halves."""
        started = time.perf_counter()
        try:
            rows, padded_tokens = self._log_probs(encoded, multiple)
        except torch.OutOfMemoryError as error:
            if len(batch) == 1:
                return [EngineError(f"out of memory at one request of {len(encoded[0].input_ids)} tokens: {error}")]
            torch.cuda.empty_cache()
            half = len(batch) // 2
            logger.warning("out of memory at %d rows, going on with halves", len(batch))
            first = self._forward(batch[:half], encoded[:half], multiple)
            return first + self._forward(batch[half:], encoded[half:], multiple)
        latency_ms = (time.perf_counter() - started) * 1e3
        logger.info("%s: %d rows, %d padded tokens, %.1f ms", self.variant, len(batch), padded_tokens, latency_ms)
        return [
            self._record(one, e, row, (latency_ms, len(batch), padded_tokens))
            for one, e, row in zip(batch, encoded, rows, strict=True)
        ]

    @torch.inference_mode()
    def _log_probs(self, encoded: Sequence[EncodedRequest], multiple: int) -> tuple[list[list[float]], int]:
        """Unrounded log-probabilities per record, options in the order the model sees them, and the padded tokens.

        The tokens are padded to a multiple of `multiple`.
        """
        release = self.release
        longest = max(len(one.input_ids) for one in encoded)
        batch = collate(encoded, release.pad_id, pad_to=math.ceil(longest / multiple) * multiple)
        inputs = HeadInputs.from_encoded(encoded, release.device)
        logits = release.head(release.hidden_states(batch), release.output_embeddings(batch), inputs)
        return option_log_probs(logits, inputs).tolist(), batch.input_ids.numel()

    def _record(
        self, one: _Planned, encoded: EncodedRequest, row: Sequence[float], measured: tuple[float, int, int]
    ) -> Outcome:
        request = one.record.request
        values = iter(row)
        seen = {q.id: {option.id: next(values) for option in q.options} for q in encoded.questions}
        if not all(math.isfinite(value) for options in seen.values() for value in options.values()):
            return EngineError("the model answered with a value that is not a number; the release may be damaged")
        log_probs = {
            question_id: {option_id: seen[question_id][option_id] for option_id in _asked_order(question)}
            for question_id, question in request.questions.items()
        }
        response = build_response(
            request.model,
            self.variant,
            request.questions,
            log_probs,
            len(encoded.input_ids),
            encoded.truncated_tokens,
            self.confidence,
        )
        return Decision(log_probs, response, len(encoded.input_ids), encoded.truncated_tokens, *measured)


def _asked_order(question: Question) -> list[str]:
    """Option ids as the request has them; the model sees a choice's options sorted."""
    if isinstance(question, ChoiceQuestion):
        return list(question.criteria)
    return [option.id for option in options(question)]


def systemone(model: Release, processor: Any, request: Mapping[str, Any]) -> dict[str, Json]:
    """Answer one request as the model card's snippet does.

    Args:
        model: from `load_release_model`.
        processor: the same call's second value.
        request: a SystemOne request. `images` may also be Pillow images, and `videos` lists of frames.

    Returns:
        the SystemOne response.

    Raises:
        RequestError: the request breaks a rule.
    """
    body = dict(request)
    videos = tuple(body.pop("videos", ()) or ())
    given = body.get("images") or ()
    opened = [image.convert("RGB") for image in given if isinstance(image, Image.Image)]
    if opened and len(opened) != len(given):
        raise RequestError.at(("images",), "give all images as Pillow images or none")
    if opened:
        del body["images"]
    submission = parse_request(body)
    if opened and submission.images:
        raise RequestError.at(("images",), "give all images as Pillow images or none; the state holds others")
    images = opened or [open_image(image.data) for image in submission.images]
    engine = Engine(dataclasses.replace(model, processor=processor))
    (outcome,) = engine.decide([Record(submission.request, images, videos)])
    if isinstance(outcome, ClefError):
        raise outcome
    return outcome.response
