"""What a comparison found, ready to be stored, shown, drawn and exported: one value that is small whatever its size.

`clef_core.comparison_build` makes it; it becomes JSON and comes back as the same value. Knows no database, no page and
no torch. What surprises: the scatter is a random sample when there are many answers (its `num_answers` says
of how many), everything else covers all of them; and a value that cannot be known (an error of one record, an accuracy
over nothing) is None, never NaN, because JSON has none.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, PlainSerializer

from clef_core.stats import ECE_BINS

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
