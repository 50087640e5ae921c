"""Two runs over the same requests, side by side: from paired answers to the statistics that are shown.

The left run is the reference. An *answer* is one question of one record; a pair holds both runs' log-probabilities for
the same options, and a third run's where a noise floor was measured (the left variant again, in another batch shape).
Pure and streaming: what is kept per pair is a handful of numbers, not its options. Knows no torch and no database.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from clef_core.stats import (
    NEAR_TIE_MARGIN,
    Interval,
    Mean,
    ReliabilityBin,
    brier,
    expected_calibration_error,
    kl_divergence,
    margin,
    max_abs_difference,
    mcnemar_exact,
    mean,
    reliability,
    top,
    total_variation,
    wilson,
)

NOISE_ERRORS = 3.0
"""Two standard errors of a difference of two equally noisy means, 2·√2, rounded up."""

OVERALL = ""
"""Key of the statistics over all questions; a question id is never empty."""

Effect = Literal["broke", "fixed", "other"]
"""What a flip did where a label is known: the right answer was lost, won, or neither was right."""


@dataclass(frozen=True)
class Pair:
    """One answer of both runs. `left`, `right` and `floor` are log-probabilities in the order of `options`.

    label: the right option's id, or None where none is known.
    """

    request_id: int
    question_id: str
    options: tuple[str, ...]
    left: tuple[float, ...]
    right: tuple[float, ...]
    floor: tuple[float, ...] | None = None
    label: str | None = None


@dataclass(frozen=True)
class Compared:
    """A pair boiled down to the numbers that are listed, filtered and drawn.

    margin: how far the left run's two best options are apart. left_confidence, right_confidence: top probabilities.
    """

    request_id: int
    question_id: str
    left_option: str
    right_option: str
    left_confidence: float
    right_confidence: float
    margin: float
    kl: float
    total_variation: float
    max_abs_dp: float
    label: str | None
    left_brier: float | None
    right_brier: float | None
    floor_option: str | None
    floor_kl: float | None
    floor_total_variation: float | None
    floor_max_abs_dp: float | None

    @property
    def is_flip(self) -> bool:
        return self.left_option != self.right_option

    @property
    def is_near_tie(self) -> bool:
        return self.margin < NEAR_TIE_MARGIN

    @property
    def effect(self) -> Effect | None:
        """What the flip did; None where there is no flip or no label."""
        if not self.is_flip or self.label is None:
            return None
        if self.left_option == self.label:
            return "broke"
        return "fixed" if self.right_option == self.label else "other"


def compare_pair(pair: Pair) -> Compared:
    """Boil a pair down.

    Raises:
        ValueError: the label is none of the options, or the runs have not the same number of options.
    """
    label = None if pair.label is None else pair.options.index(pair.label)
    floor = pair.floor
    return Compared(
        request_id=pair.request_id,
        question_id=pair.question_id,
        left_option=pair.options[top(pair.left)],
        right_option=pair.options[top(pair.right)],
        left_confidence=math.exp(max(pair.left)),
        right_confidence=math.exp(max(pair.right)),
        margin=margin(pair.left),
        kl=kl_divergence(pair.left, pair.right),
        total_variation=total_variation(pair.left, pair.right),
        max_abs_dp=max_abs_difference(pair.left, pair.right),
        label=pair.label,
        left_brier=None if label is None else brier(pair.left, label),
        right_brier=None if label is None else brier(pair.right, label),
        floor_option=None if floor is None else pair.options[top(floor)],
        floor_kl=None if floor is None else kl_divergence(pair.left, floor),
        floor_total_variation=None if floor is None else total_variation(pair.left, floor),
        floor_max_abs_dp=None if floor is None else max_abs_difference(pair.left, floor),
    )


@dataclass(frozen=True)
class Divergence:
    """How far one run is from the left one: on how many answers they agree, and by how much they differ.

    kl: KL(left‖other) in nats. tv: mean total variation. max_abs_dp: largest |Δp| of any option of any answer.
    """

    agreement: Interval
    kl: Mean
    tv: Mean
    max_abs_dp: float


@dataclass(frozen=True)
class Quality:
    """How well a run does where labels are known, over n labelled answers."""

    accuracy: Interval
    ece: float
    brier: float
    reliability: tuple[ReliabilityBin, ...]


@dataclass(frozen=True)
class Labelled:
    """Both runs against the labels. broke, fixed: answers that only the left, only the right run has right."""

    left: Quality
    right: Quality
    broke: int
    fixed: int
    mcnemar_p: float


@dataclass(frozen=True)
class Summary:
    """Statistics over the answers of one question, or over all of them."""

    n: int
    divergence: Divergence
    num_flips: int
    num_near_ties: int
    floor: Divergence | None
    labelled: Labelled | None

    @property
    def is_within_floor(self) -> bool | None:
        """Whether the runs differ by no more than the left run differs from itself; None without a floor.

        The interval of the agreement reaches that of the floor, and the mean KL is no larger than the floor's plus
        `NOISE_ERRORS` of the floor's standard errors: were both runs noise alone, their means would differ by less.
        """
        if self.floor is None:
            return None
        ours, floor = self.divergence, self.floor
        limit = floor.kl.value + NOISE_ERRORS * _or_zero(floor.kl.standard_error)
        return ours.agreement.high >= floor.agreement.low and ours.kl.value <= limit


def _or_zero(value: float) -> float:
    return 0.0 if math.isnan(value) else value


class Comparison:
    """Collects compared answers and summarises them per question and overall."""

    def __init__(self) -> None:
        self._by_question: defaultdict[str, list[Compared]] = defaultdict(list)

    def add(self, compared: Compared) -> None:
        self._by_question[compared.question_id].append(compared)

    def summaries(self) -> dict[str, Summary]:
        """`OVERALL` first, then each question in the order in which it was first met.

        Raises:
            ValueError: nothing was added.
        """
        everything = [one for rows in self._by_question.values() for one in rows]
        return {OVERALL: summarise(everything)} | {name: summarise(rows) for name, rows in self._by_question.items()}


def summarise(rows: Sequence[Compared]) -> Summary:
    """Statistics of compared answers.

    Raises:
        ValueError: there are none.
    """
    floors = [one for one in rows if one.floor_option is not None]
    labelled = [one for one in rows if one.label is not None]
    return Summary(
        n=len(rows),
        divergence=Divergence(
            agreement=wilson(sum(not one.is_flip for one in rows), len(rows)),
            kl=mean([one.kl for one in rows]),
            tv=mean([one.total_variation for one in rows]),
            max_abs_dp=max(one.max_abs_dp for one in rows),
        ),
        num_flips=sum(one.is_flip for one in rows),
        num_near_ties=sum(one.is_flip and one.is_near_tie for one in rows),
        floor=_floor(floors) if floors else None,
        labelled=_labelled(labelled) if labelled else None,
    )


def _floor(rows: Sequence[Compared]) -> Divergence:
    return Divergence(
        agreement=wilson(sum(one.floor_option == one.left_option for one in rows), len(rows)),
        kl=mean(_known(one.floor_kl for one in rows)),
        tv=mean(_known(one.floor_total_variation for one in rows)),
        max_abs_dp=max(_known(one.floor_max_abs_dp for one in rows)),
    )


def _labelled(rows: Sequence[Compared]) -> Labelled:
    broke = sum(one.left_option == one.label != one.right_option for one in rows)
    fixed = sum(one.right_option == one.label != one.left_option for one in rows)
    return Labelled(
        left=_quality(
            [one.left_option == one.label for one in rows],
            [one.left_confidence for one in rows],
            _known(one.left_brier for one in rows),
        ),
        right=_quality(
            [one.right_option == one.label for one in rows],
            [one.right_confidence for one in rows],
            _known(one.right_brier for one in rows),
        ),
        broke=broke,
        fixed=fixed,
        mcnemar_p=mcnemar_exact(broke, fixed),
    )


def _quality(is_right: Sequence[bool], confidences: Sequence[float], briers: Sequence[float]) -> Quality:
    return Quality(
        accuracy=wilson(sum(is_right), len(is_right)),
        ece=expected_calibration_error(confidences, is_right),
        brier=mean(briers).value,
        reliability=tuple(reliability(confidences, is_right)),
    )


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def headline(
    summary: Summary, left: str, right: str, *, num_questions: int, floor_shape: str = "in another batch shape"
) -> str:
    """The result in one sentence of plain words."""
    agreement = summary.divergence.agreement
    what = "records" if num_questions == 1 else "answers"
    text = (
        f"{right} picked the same option as {left} for {agreement.successes:,} of {agreement.n:,} {what} "
        f"({agreement.share:.1%}, 95 % CI {100 * agreement.low:.1f}–{100 * agreement.high:.1f})"
    )
    if summary.floor is None:
        return f"{text}; no noise floor was measured."
    if summary.is_within_floor:
        verdict = "so the difference is within the noise"
    elif agreement.share < summary.floor.agreement.share:
        verdict = "so the difference is larger than the noise"
    else:
        verdict = "yet the probabilities move by more than the noise"
    return f"{text}; {left} against itself {floor_shape}: {summary.floor.agreement.share:.1%}, {verdict}."
