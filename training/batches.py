"""From examples to batches: a curriculum of growing option counts, and micro-batches of records of similar length."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clef_core.encoding import EncodedRequest, Encoder
from training.examples import Example
from training.generator import Generator
from training.losses import SummaryTargets, targets_of
from training.pictures import Pictures

BATCH_TOKENS = 3_000
"""Padded tokens of a micro-batch."""

DRAWN_TOGETHER = 128
SUMMARY_BATCHES = 3
SUMMARIES_TOGETHER = 96
SUMMARY_OPTIONS = 12
OWN_SUMMARIES_FROM = 0.2
PICTURES_TOGETHER = 8


@dataclass(frozen=True)
class TrainingBatch:
    """Whole records. `targets`: from `targets_of`."""

    encoded: list[EncodedRequest]
    targets: Tensor
    summary_targets: SummaryTargets


@dataclass(frozen=True)
class SummaryBatch:
    """Records cut after their first question's instructions: the right option is to be told from there.

    input_ids: int64 (B, T), padded on the right; attention_mask: int64 (B, T).
    """

    input_ids: Tensor
    attention_mask: Tensor
    summary_targets: SummaryTargets


def max_options(progress: float) -> int:
    """Options of a choice at most, by the share of training that is done: many from the start teach nothing."""
    for until, options in ((0.06, 3), (0.15, 5), (0.3, 10), (0.55, 20)):
        if progress < until:
            return options
    return 30


def large_share(progress: float) -> float:
    """Share of the drawn records that show every label of their data set."""
    return 0.0 if progress < 0.25 else 0.02 if progress < 0.6 else 0.04


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
    ) -> None:
        self.generator = generator
        self.pictures = pictures
        self.encoder = encoder
        self.pools = pools

    def next_batches(self, progress: float) -> Iterator[TrainingBatch | SummaryBatch]:
        """Draw a group of examples and cut it into batches, in a drawn order; pictures get batches of their own."""
        rng = self.generator.rng
        examples = []
        for _ in range(DRAWN_TOGETHER):
            if rng.random() < large_share(progress):
                data = rng.choice(self.generator.intent_data)
                examples.append(self.generator.intent_among(data, rng.choice(data.train), len(data.labels)))
            else:
                examples.append(self.generator.draw(max_options(progress), own_share(progress)))
        batches: list[TrainingBatch | SummaryBatch] = [*self.cut(examples)]
        batches += [self.summaries(progress) for _ in range(SUMMARY_BATCHES)]
        batches.append(self.batch([self.pictures.draw() for _ in range(PICTURES_TOGETHER)]))
        rng.shuffle(batches)
        yield from batches

    def random_streams(self) -> tuple[random.Random, random.Random]:
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
        ends = [one.questions[0].span[1] for one in encoded]
        input_ids = torch.zeros(len(encoded), max(ends), dtype=torch.int64)
        attention_mask = torch.zeros_like(input_ids)
        for row, (one, end) in enumerate(zip(encoded, ends, strict=True)):
            input_ids[row, :end] = torch.tensor(one.input_ids[:end])
            attention_mask[row, :end] = 1
        return SummaryBatch(input_ids, attention_mask, self._summary_targets(examples, encoded, is_whole=False))

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
