"""From compared answers to the report of a comparison. Pure: no database, no torch.

What surprises: the scatter is a random sample when there are many answers; everything else covers all of them.
"""

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from clef_core.comparison import OVERALL, Compared, Comparison, Divergence, Labelled, Quality, Summary, headline
from clef_core.comparison_report import (
    DEFINITIONS,
    DP_EDGES,
    THRESHOLDS,
    BinNumbers,
    Confusion,
    CoverageCurve,
    DivergenceNumbers,
    DpHistogram,
    LabelledNumbers,
    QualityNumbers,
    Report,
    Scatter,
    SummaryNumbers,
)
from clef_core.stats import Interval, coverage_curve

MAX_SCATTER_POINTS = 2_000
MAX_CONFUSIONS = 100
SCATTER_SEED = 0


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
