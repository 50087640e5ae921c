"""Statistics of two runs over the same records: agreement, divergence, accuracy, calibration.

Pure functions over log-probabilities and booleans; no torch, no database. The left run is the reference (BF16), the
right one is held against it (MXFP4). Log-probabilities are unrounded natural logarithms, so a Kullback-Leibler
divergence is finite where probabilities rounded to four decimals would make it infinite. scipy is imported where it is
needed: it takes a second, and who only reads a stored report does not wait for it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CONFIDENCE_LEVEL = 0.95
ECE_BINS = 15
"""Equal-width bins on the top probability; a value on an edge belongs to the lower bin."""

NEAR_TIE_MARGIN = 0.05
"""A flip whose two best left options are closer than this is called a near tie."""

LogProbs = Sequence[float]
"""Log-probabilities of the options of one question, in one fixed order."""


@dataclass(frozen=True)
class Interval:
    """A share with its 95 % Wilson interval."""

    successes: int
    n: int
    low: float
    high: float

    @property
    def share(self) -> float:
        return self.successes / self.n


@dataclass(frozen=True)
class Mean:
    """A mean with its standard error (NaN for a single value) over n values."""

    value: float
    standard_error: float
    n: int


def wilson(successes: int, n: int) -> Interval:
    """Wilson score interval of a share.

    Raises:
        ValueError: n is 0 or successes is not within 0 to n.

    Source: Wilson (1927); scipy's `binomtest(...).proportion_ci(method="wilson")`.
    """
    from scipy.stats import binomtest

    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"no share of {successes} in {n}")
    found = binomtest(successes, n).proportion_ci(CONFIDENCE_LEVEL, method="wilson")
    return Interval(successes, n, float(found.low), float(found.high))


def mean(values: Sequence[float]) -> Mean:
    """Arithmetic mean and the standard error of it (sample standard deviation divided by √n).

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("no values to average")
    array = np.asarray(values, dtype=np.float64)
    n = len(array)
    error = float(array.std(ddof=1) / math.sqrt(n)) if n > 1 else math.nan
    return Mean(float(array.mean()), error, n)


def kl_divergence(left: LogProbs, right: LogProbs) -> float:
    """KL(left‖right) = Σ p·(log p − log q) in nats, from log-probabilities. Never below 0."""
    p, q = _arrays(left, right)
    weights = np.exp(p)
    total = float(np.sum(np.where(weights > 0, weights * (p - q), 0.0)))
    return max(total, 0.0)


def total_variation(left: LogProbs, right: LogProbs) -> float:
    """½·Σ |p − q|, between 0 and 1."""
    p, q = _arrays(left, right)
    return float(np.abs(np.exp(p) - np.exp(q)).sum() / 2)


def max_abs_difference(left: LogProbs, right: LogProbs) -> float:
    """Largest |p − q| over the options."""
    p, q = _arrays(left, right)
    return float(np.abs(np.exp(p) - np.exp(q)).max())


def top(log_probs: LogProbs) -> int:
    """Index of the most probable option; the first of equals wins."""
    return int(np.argmax(np.asarray(log_probs)))


def margin(log_probs: LogProbs) -> float:
    """Difference of the two largest probabilities."""
    best = np.sort(np.exp(np.asarray(log_probs, dtype=np.float64)))[-2:]
    return float(best[1] - best[0])


def mcnemar_exact(broke: int, fixed: int) -> float:
    """Two-sided exact McNemar p-value of paired outcomes.

    Args:
        broke: records that only the left run answers rightly.
        fixed: records that only the right run answers rightly.

    Returns:
        1.0 when no record differs.

    Source: McNemar (1947); the binomial test of `broke` in `broke + fixed` at one half.
    """
    from scipy.stats import binomtest

    if broke + fixed == 0:
        return 1.0
    return float(binomtest(broke, broke + fixed, 0.5).pvalue)


def expected_calibration_error(confidences: Sequence[float], is_right: Sequence[bool]) -> float:
    """Σ over bins of (share of records in the bin)·|accuracy − mean confidence|.

    15 equal-width bins on the top probability: (0, 1/15], …, (14/15, 1].

    Raises:
        ValueError: there are no records, or the lengths differ.

    Source: Naeini et al. (2015), Guo et al. (2017).
    """
    bins = reliability(confidences, is_right)
    return sum(one.n * abs(one.accuracy - one.confidence) for one in bins) / len(confidences)


@dataclass(frozen=True)
class ReliabilityBin:
    """Records whose top probability lies in (low, high]: how many, how sure, how often right."""

    low: float
    high: float
    n: int
    confidence: float
    accuracy: float


def reliability(confidences: Sequence[float], is_right: Sequence[bool]) -> list[ReliabilityBin]:
    """The filled bins of a reliability diagram, as in `expected_calibration_error`."""
    if not confidences or len(confidences) != len(is_right):
        raise ValueError(f"{len(confidences)} confidences and {len(is_right)} outcomes")
    sure, right = np.asarray(confidences, dtype=np.float64), np.asarray(is_right, dtype=np.float64)
    index = np.clip(np.ceil(sure * ECE_BINS).astype(int) - 1, 0, ECE_BINS - 1)
    found = []
    for number in range(ECE_BINS):
        inside = index == number
        if inside.any():
            edges = (number / ECE_BINS, (number + 1) / ECE_BINS)
            found.append(
                ReliabilityBin(*edges, int(inside.sum()), float(sure[inside].mean()), float(right[inside].mean()))
            )
    return found


def brier(log_probs: LogProbs, label: int) -> float:
    """Σ over the options of (p − 1[option is the label])², between 0 and 2.

    Source: Brier (1950).
    """
    p = np.exp(np.asarray(log_probs, dtype=np.float64))
    p[label] -= 1
    return float(np.square(p).sum())


@dataclass(frozen=True)
class CoveragePoint:
    """Acting only at or above `threshold`: the share of records acted on and their accuracy (NaN when none)."""

    threshold: float
    coverage: float
    accuracy: float


def coverage_curve(
    confidences: Sequence[float], is_right: Sequence[bool], thresholds: Sequence[float]
) -> list[CoveragePoint]:
    """Coverage and accuracy for "act only above this confidence"."""
    sure, right = np.asarray(confidences, dtype=np.float64), np.asarray(is_right, dtype=np.float64)
    points = []
    for threshold in thresholds:
        acted = sure >= threshold
        accuracy = float(right[acted].mean()) if acted.any() else math.nan
        points.append(CoveragePoint(threshold, float(acted.mean()), accuracy))
    return points


def _arrays(left: LogProbs, right: LogProbs) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    if len(left) != len(right) or not left:
        raise ValueError(f"{len(left)} options on the left, {len(right)} on the right")
    return np.asarray(left, dtype=np.float64), np.asarray(right, dtype=np.float64)
