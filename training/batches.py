"""From examples to batches: a curriculum of growing option counts, and micro-batches of records of similar length."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from clef_core.encoding import EncodedRequest, Encoder
from clef_core.schema import Json
from clef_core.tasks import humanise
from clef_core.tokens import PromptTokenizer, render_value
from training.examples import Asked, Example, example_of, wrapped
from training.generator import Generator
from training.losses import SummaryTargets, targets_of
from training.pictures import Pictures
from training.word_records import Described

BATCH_TOKENS = 3_000
"""Padded tokens of a micro-batch."""

DRAWN_TOGETHER = 160
SUMMARY_BATCHES = 3
WORD_SUMMARY_BATCHES = 2
SUMMARIES_TOGETHER = 96
SUMMARY_OPTIONS = 12
WORDS_BESIDE = 400
"""Words that the descriptions of a batch are held against beside their own."""

PICTURE_BATCHES = 1
PICTURES_ALONE_UNTIL, PICTURES_ALONE = 0.35, 25
"""Once the tower can read, pictures come alone for this share of the steps, in groups of that many batches."""

OWN_SUMMARIES_FROM = 0.2
PICTURES_TOGETHER = 12


@dataclass(frozen=True)
class TrainingBatch:
    """Whole records. `targets`: from `targets_of`. `summary_targets`: None where summaries are not trained."""

    encoded: list[EncodedRequest]
    targets: Tensor
    summary_targets: SummaryTargets | None


@dataclass(frozen=True)
class SummaryBatch:
    """Records cut after their first question's instructions: the right option is to be told from there.

    input_ids: int64 (B, T), padded on the right; attention_mask: int64 (B, T).
    meanings: float32 (B, D), where the summaries should point, or None where only the right option is known.
    """

    input_ids: Tensor
    attention_mask: Tensor
    summary_targets: SummaryTargets
    meanings: Tensor | None


def max_options(progress: float) -> int:
    """Options of a choice at most, by the share of training that is done: many from the start teach nothing."""
    for until, options in ((0.06, 3), (0.15, 5), (0.3, 10), (0.55, 20)):
        if progress < until:
            return options
    return 30


def large_share(progress: float) -> float:
    """Share of the drawn records that show every label of their data set."""
    return 0.0 if progress < 0.25 else 0.03 if progress < 0.6 else 0.05


def own_share(progress: float) -> float:
    """Share of records of our own among the drawn; intents, which need the most learning, come first."""
    return 0.65 if progress < OWN_SUMMARIES_FROM else 0.8


class Batches:
    """An endless stream of batches, decided by the generators' seeds and the progress told to `next_batches`."""

    def __init__(
        self,
        generator: Generator,
        pictures: Pictures,
        encoder: Encoder,
        pools: Mapping[str, Mapping[str, tuple[int, ...]]],
        meanings: Callable[[Sequence[str]], Tensor],
    ) -> None:
        """`pools`: per data set the token ids of each label's option. `meanings`: of texts, float32 (texts, D)."""
        self.generator = generator
        self.pictures = pictures
        self.encoder = encoder
        self.pools = pools
        self.meanings = meanings

    def next_batches(self, progress: float) -> Iterator[TrainingBatch | SummaryBatch]:
        """Draw a group of examples and cut it into batches, in a drawn order; pictures get batches of their own."""
        rng = self.generator.rng
        examples = []
        for _ in range(DRAWN_TOGETHER):
            if rng.random() < large_share(progress):
                data = self.generator.intent_source()
                examples.append(self.generator.intent_among(data, self.generator.intent_row(data), len(data.labels)))
            else:
                examples.append(self.generator.draw(max_options(progress), own_share(progress)))
        batches: list[TrainingBatch | SummaryBatch] = [*self.cut(examples)]
        batches += [self.summaries(progress) for _ in range(SUMMARY_BATCHES)]
        batches += [self.word_summaries() for _ in range(WORD_SUMMARY_BATCHES)]
        for _ in range(PICTURE_BATCHES):
            batches.append(self.batch([self.pictures.draw() for _ in range(PICTURES_TOGETHER)]))
        rng.shuffle(batches)
        yield from batches

    def random_streams(self) -> tuple[random.Random, ...]:
        """What decides the stream, to be saved and restored between two groups."""
        return self.generator.rng, self.pictures.rng

    def cut(self, examples: Sequence[Example]) -> list[TrainingBatch]:
        """Batches of records of similar length, none over `BATCH_TOKENS` padded tokens unless it is a single record."""
        measured = [(self.encoder.encode(example.record), example) for example in examples]
        measured.sort(key=lambda pair: len(pair[0].input_ids))
        groups: list[list[tuple[EncodedRequest, Example]]] = [[]]
        for pair in measured:
            if groups[-1] and (len(groups[-1]) + 1) * len(pair[0].input_ids) > BATCH_TOKENS:
                groups.append([])
            groups[-1].append(pair)
        return [self._of(group) for group in groups if group]

    def batch(self, examples: Sequence[Example]) -> TrainingBatch:
        return self._of([(self.encoder.encode(example.record), example) for example in examples])

    def summaries(self, progress: float) -> SummaryBatch:
        """Records cut before the options: intents and, later on, all other kinds."""
        generator = self.generator
        num_own = SUMMARIES_TOGETHER // 2 if progress >= OWN_SUMMARIES_FROM else 0
        examples = [generator.intent(2) for _ in range(SUMMARIES_TOGETHER - num_own)]
        examples += [generator.draw_own(SUMMARY_OPTIONS) for _ in range(num_own)]
        encoded = [self.encoder.encode(example.record) for example in examples]
        return _cut(encoded, self._summary_targets(examples, encoded, is_whole=False), None)

    def word_summaries(self) -> SummaryBatch:
        """Descriptions held against several hundred words, and against what a sentence encoder makes of them."""
        words = self.generator.words
        drawn = [words.described() for _ in range(SUMMARIES_TOGETHER)]
        rng = self.generator.rng
        encoded = [self.encoder.encode(
            example_of(wrapped(one.text, rng), {"q1": _asked(one)}, rng).record) for one in drawn]  # fmt: skip
        pool = dict.fromkeys([*(one.word for one in drawn), *words.other_words(WORDS_BESIDE)])
        places = {word: place for place, word in enumerate(pool)}
        targets = SummaryTargets(
            rows=range(len(encoded)),
            spans=[one.questions[0].span for one in encoded],
            bags=[option_ids(word, self.encoder.tokenizer) for word in pool],
            index=torch.arange(len(pool)).expand(len(encoded), -1),
            places=torch.tensor([places[one.word] for one in drawn]),
            lengths=None,
        )
        return _cut(encoded, targets, self.meanings([one.text for one in drawn]))

    def _of(self, pairs: Sequence[tuple[EncodedRequest, Example]]) -> TrainingBatch:
        encoded = [one for one, _ in pairs]
        examples = [example for _, example in pairs]
        targets = targets_of(encoded, [example.labels for example in examples])
        return TrainingBatch(encoded, targets, self._summary_targets(examples, encoded, is_whole=True))

    def _summary_targets(
        self, examples: Sequence[Example], encoded: Sequence[EncodedRequest], *, is_whole: bool
    ) -> SummaryTargets:
        """Hold records of a pool against the whole pool, others against the options of their first question."""
        bags: dict[tuple[int, ...], int] = {}
        index, places = [], []
        for example, one in zip(examples, encoded, strict=True):
            question = one.questions[0]
            if example.pool is not None:
                options = self.pools[example.pool[0]]
                places.append(list(options).index(example.pool[1]))
                ids = list(options.values())
            else:
                places.append([option.id for option in question.options].index(example.labels[question.id]))
                ids = [one.input_ids[slice(*option.span)] for option in question.options]
            index.append(torch.tensor([bags.setdefault(bag, len(bags)) for bag in ids]))
        return SummaryTargets(
            rows=range(len(encoded)),
            spans=[one.questions[0].span for one in encoded],
            bags=list(bags),
            index=torch.nn.utils.rnn.pad_sequence(index, batch_first=True, padding_value=-1),
            places=torch.tensor(places),
            lengths=torch.tensor([len(one.input_ids) for one in encoded]) if is_whole else None,
        )


class PictureBatches:
    """Pictures with more questions about what is printed on them, and batches of everything, against forgetting it."""

    def __init__(self, everything: Batches, pictures: Pictures) -> None:
        self.everything = everything
        self.pictures = pictures

    def next_batches(self, progress: float) -> Iterator[TrainingBatch | SummaryBatch]:
        """Pictures alone at first; then a picture batch after each of a group as at the end of earlier training."""
        if progress < PICTURES_ALONE_UNTIL:
            yield from (self._drawn() for _ in range(PICTURES_ALONE))
            return
        for other in self.everything.next_batches(1.0):
            yield other
            yield self._drawn()

    def _drawn(self) -> TrainingBatch:
        examples = [self.pictures.draw(can_read=True) for _ in range(PICTURES_TOGETHER)]
        return replace(self.everything.batch(examples), summary_targets=None)

    def random_streams(self) -> tuple[random.Random, ...]:
        return (*self.everything.random_streams(), self.pictures.rng)


class Stream(Protocol):
    """An endless stream of batches that can be saved and restored between two groups."""

    def next_batches(self, progress: float) -> Iterator[TrainingBatch | SummaryBatch]: ...

    def random_streams(self) -> tuple[random.Random, ...]: ...


def _asked(described: Described) -> Asked:
    question: dict[str, Json] = {"type": "choice", "criteria": {described.word: None, "none": None}}
    if described.instructions is not None:
        question["instructions"] = described.instructions
    return Asked(question, described.word)


def option_ids(label: str, tokenizer: PromptTokenizer) -> tuple[int, ...]:
    """Token ids of the option that stands for a label of that name."""
    shown: dict[str, Json] = {"option_id": label, "description": humanise(label)}
    return tokenizer.encode_text(render_value(shown))


def _cut(encoded: Sequence[EncodedRequest], targets: SummaryTargets, meanings: Tensor | None) -> SummaryBatch:
    ends = [one.questions[0].span[1] for one in encoded]
    input_ids = torch.zeros(len(encoded), max(ends), dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    for row, (one, end) in enumerate(zip(encoded, ends, strict=True)):
        input_ids[row, :end] = torch.tensor(one.input_ids[:end])
        attention_mask[row, :end] = 1
    return SummaryBatch(input_ids, attention_mask, targets, meanings)
