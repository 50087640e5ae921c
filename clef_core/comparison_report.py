"""What a comparison found, ready to be stored, shown, drawn and exported: one value that is small whatever its size.

`build_report` makes it from compared answers; it becomes JSON and comes back as the same value. Knows no database, no
page and no torch. What surprises: the scatter is a random sample when there are many answers (its `num_answers` says
of how many), everything else covers all of them; and a value that cannot be known (an error of one record, an accuracy
over nothing) is None, never NaN, because JSON has none.
"""

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, PlainSerializer

from clef_core.comparison import OVERALL, Compared, Comparison, Divergence, Labelled, Quality, Summary, headline
from clef_core.stats import ECE_BINS, Interval, coverage_curve

MAX_SCATTER_POINTS = 2_000
MAX_CONFUSIONS = 100
SCATTER_SEED = 0
THRESHOLDS = tuple(number / 100 for number in range(101))
"""Of the coverage curve: act only at or above this confidence."""

DP_EDGES = (0.0, *(10 ** (half / 2) for half in range(-12, 1)))
"""Bins of the |Δp| histogram: below 10⁻⁶, then two per power of ten up to 1; a value on an edge belongs above it."""

DEFINITIONS = {
    "agreement": "share of answers for which both runs pick the same option, with its 95 % Wilson interval",
    "kl": "KL(left‖right) in nats from unrounded log-probabilities, mean ± standard error over the answers",
    "tv": "total variation ½·Σ|p − q|, mean over the answers",
    "max_abs_dp": "largest |p − q| of any option of any answer",
    "ece": f"expected calibration error, {ECE_BINS} equal-width bins on the top probability",
    "brier": "Σ over the options of (p − 1[option is the label])², mean over the labelled answers",
    "mcnemar_p": "two-sided exact McNemar test of the answers that one run has right and the other wrong",
    "floor": "the left variant against itself, run again in another shape: what differs there is rounding",
}

Short = Annotated[float, PlainSerializer(lambda value: round(value, 5), return_type=float, when_used="json")]
"""A value that is only drawn."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DivergenceNumbers(_Frozen):
    """How far a run is from the left one, over n answers."""

    n: int
    num_agree: int
    agreement: float
    agreement_low: float
    agreement_high: float
    kl_mean: float
    kl_se: float | None
    tv_mean: float
    tv_se: float | None
    max_abs_dp: float


class BinNumbers(_Frozen):
    """One filled bin of a reliability diagram: top probabilities in (low, high]."""

    low: float
    high: float
    n: int
    confidence: float
    accuracy: float


class QualityNumbers(_Frozen):
    """How well a run does over n labelled answers."""

    n: int
    num_right: int
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    ece: float
    brier: float
    reliability: tuple[BinNumbers, ...]


class LabelledNumbers(_Frozen):
    """Both runs against the labels. broke, fixed: answers that only the left, only the right run has right."""

    left: QualityNumbers
    right: QualityNumbers
    broke: int
    fixed: int
    mcnemar_p: float


class SummaryNumbers(DivergenceNumbers):
    """The right run against the left one, with the noise floor and the labels where there are any."""

    num_flips: int
    num_near_ties: int
    is_within_floor: bool | None
    floor: DivergenceNumbers | None
    labelled: LabelledNumbers | None


class DpHistogram(_Frozen):
    """How many answers have their largest |Δp| in each bin; `edges` has one entry more than the counts."""

    edges: tuple[float, ...]
    pair: tuple[int, ...]
    floor: tuple[int, ...] | None


class Scatter(_Frozen):
    """Top probabilities of both runs, as parallel lists; a sample of `num_answers`."""

    num_answers: int
    request_ids: tuple[int, ...]
    question_ids: tuple[str, ...]
    left: tuple[Short, ...]
    right: tuple[Short, ...]
    is_flip: tuple[bool, ...]


class CoverageCurve(_Frozen):
    """Acting only at or above each threshold: share of answers acted on, and how many of these are right.

    Over the labelled answers where there are any, else over all, and then without accuracies. None: nothing acted on.
    """

    n: int
    is_labelled: bool
    thresholds: tuple[float, ...]
    left_coverage: tuple[Short, ...]
    right_coverage: tuple[Short, ...]
    left_accuracy: tuple[Short | None, ...]
    right_accuracy: tuple[Short | None, ...]


class Confusion(_Frozen):
    """How often the runs disagree in this way."""

    question_id: str
    left_option: str
    right_option: str
    count: int


class Report(_Frozen):
    """A finished comparison.

    num_skipped: records left out because a run has no answer to them.
    confusions: the most frequent ones; `num_other_flips` are in none of them.
    """

    headline: str
    overall: SummaryNumbers
    questions: dict[str, SummaryNumbers]
    num_records: int
    num_skipped: int
    histogram: DpHistogram
    scatter: Scatter
    coverage: CoverageCurve
    confusions: tuple[Confusion, ...]
    num_other_flips: int
    definitions: dict[str, str]


def build_report(
    answers: Sequence[Compared],
    names: tuple[str, str],
    question_order: Sequence[str],
    *,
    num_skipped: int = 0,
    floor_shape: str = "in another batch shape",
) -> Report:
    """Summarise compared answers.

    Args:
        answers: of all questions of all records.
        names: what the left and the right run are called in the headline.
        question_order: the order of `questions`; one that is missing here comes last.
        floor_shape: how the left run was run again, in words.

    Raises:
        ValueError: there are no answers.
    """
    rank = {question_id: number for number, question_id in enumerate(question_order)}
    comparison = Comparison()
    for answer in sorted(answers, key=lambda answer: rank.get(answer.question_id, len(rank))):
        comparison.add(answer)
    summaries = comparison.summaries()
    overall = summaries.pop(OVERALL)
    confusions = _confusions(answers)
    left, right = names
    return Report(
        headline=headline(
            overall,
            left,
            f"{right} run again" if left == right else right,
            num_questions=len(summaries),
            floor_shape=floor_shape,
        ),
        overall=_summary(overall),
        questions={name: _summary(found) for name, found in summaries.items()},
        num_records=len({answer.request_id for answer in answers}),
        num_skipped=num_skipped,
        histogram=_histogram(answers),
        scatter=_scatter(answers),
        coverage=_coverage(answers),
        confusions=tuple(confusions[:MAX_CONFUSIONS]),
        num_other_flips=sum(one.count for one in confusions[MAX_CONFUSIONS:]),
        definitions=DEFINITIONS,
    )


def _summary(found: Summary) -> SummaryNumbers:
    return SummaryNumbers(
        **_divergence(found.divergence).model_dump(),
        num_flips=found.num_flips,
        num_near_ties=found.num_near_ties,
        is_within_floor=found.is_within_floor,
        floor=None if found.floor is None else _divergence(found.floor),
        labelled=None if found.labelled is None else _labelled(found.labelled),
    )


def _divergence(found: Divergence) -> DivergenceNumbers:
    agreement: Interval = found.agreement
    return DivergenceNumbers(
        n=agreement.n,
        num_agree=agreement.successes,
        agreement=agreement.share,
        agreement_low=agreement.low,
        agreement_high=agreement.high,
        kl_mean=found.kl.value,
        kl_se=_known(found.kl.standard_error),
        tv_mean=found.tv.value,
        tv_se=_known(found.tv.standard_error),
        max_abs_dp=found.max_abs_dp,
    )


def _labelled(found: Labelled) -> LabelledNumbers:
    return LabelledNumbers(
        left=_quality(found.left),
        right=_quality(found.right),
        broke=found.broke,
        fixed=found.fixed,
        mcnemar_p=found.mcnemar_p,
    )


def _quality(found: Quality) -> QualityNumbers:
    return QualityNumbers(
        n=found.accuracy.n,
        num_right=found.accuracy.successes,
        accuracy=found.accuracy.share,
        accuracy_low=found.accuracy.low,
        accuracy_high=found.accuracy.high,
        ece=found.ece,
        brier=found.brier,
        reliability=tuple(BinNumbers(**vars(one)) for one in found.reliability),
    )


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _histogram(answers: Sequence[Compared]) -> DpHistogram:
    floors = [answer.floor_max_abs_dp for answer in answers if answer.floor_max_abs_dp is not None]
    return DpHistogram(
        edges=DP_EDGES,
        pair=_counts([answer.max_abs_dp for answer in answers]),
        floor=_counts(floors) if floors else None,
    )


def _counts(values: Sequence[float]) -> tuple[int, ...]:
    counts, _ = np.histogram(np.minimum(np.asarray(values), 1.0), bins=np.asarray(DP_EDGES))
    return tuple(int(count) for count in counts)


def _scatter(answers: Sequence[Compared]) -> Scatter:
    drawn = answers
    if len(answers) > MAX_SCATTER_POINTS:
        chosen = random.Random(SCATTER_SEED).sample(range(len(answers)), MAX_SCATTER_POINTS)
        drawn = [answers[index] for index in sorted(chosen)]
    return Scatter(
        num_answers=len(answers),
        request_ids=tuple(one.request_id for one in drawn),
        question_ids=tuple(one.question_id for one in drawn),
        left=tuple(one.left_confidence for one in drawn),
        right=tuple(one.right_confidence for one in drawn),
        is_flip=tuple(one.is_flip for one in drawn),
    )


def _coverage(answers: Sequence[Compared]) -> CoverageCurve:
    labelled = [answer for answer in answers if answer.label is not None]
    used = labelled or answers
    left = coverage_curve(
        [one.left_confidence for one in used], [one.left_option == one.label for one in used], THRESHOLDS
    )
    right = coverage_curve(
        [one.right_confidence for one in used], [one.right_option == one.label for one in used], THRESHOLDS
    )
    return CoverageCurve(
        n=len(used),
        is_labelled=bool(labelled),
        thresholds=THRESHOLDS,
        left_coverage=tuple(point.coverage for point in left),
        right_coverage=tuple(point.coverage for point in right),
        left_accuracy=tuple(_known(point.accuracy) if labelled else None for point in left),
        right_accuracy=tuple(_known(point.accuracy) if labelled else None for point in right),
    )


def _confusions(answers: Sequence[Compared]) -> list[Confusion]:
    """Every way in which the runs disagree, the most frequent first."""
    counts: Mapping[tuple[str, str, str], int] = Counter(
        (answer.question_id, answer.left_option, answer.right_option) for answer in answers if answer.is_flip
    )
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [Confusion(question_id=q, left_option=a, right_option=b, count=count) for (q, a, b), count in ranked]
