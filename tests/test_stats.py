"""Every statistic against a second route: by hand, by scipy, or by brute force."""

import math
from itertools import product

import numpy as np
import pytest
from scipy.special import log_softmax, rel_entr

from clef_core.stats import (
    brier,
    coverage_curve,
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


def logs(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


def test_wilson_equals_the_formula():
    z, n, share = 1.959963984540054, 300, 294 / 300
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    found = wilson(294, 300)
    assert (found.low, found.high) == pytest.approx((centre - half, centre + half), abs=1e-12)
    assert (round(found.low, 3), round(found.high, 3)) == (0.957, 0.991)
    assert found.share == 0.98


def test_wilson_at_the_ends_stays_within_0_and_1():
    assert wilson(0, 5).low == 0
    assert wilson(5, 5).high == 1
    with pytest.raises(ValueError, match="no share"):
        wilson(0, 0)


def test_mean_and_standard_error_by_hand():
    found = mean([1.0, 2.0, 3.0, 4.0])
    assert found.value == 2.5
    assert found.standard_error == pytest.approx(math.sqrt(5 / 3) / 2)
    assert math.isnan(mean([1.0]).standard_error)


def test_kl_by_hand_and_by_scipy():
    assert kl_divergence(logs(0.5, 0.5), logs(0.25, 0.75)) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    rng = np.random.default_rng(0)
    for _ in range(20):
        p, q = log_softmax(rng.normal(size=77) * 4), log_softmax(rng.normal(size=77) * 4)
        assert kl_divergence(list(p), list(q)) == pytest.approx(rel_entr(np.exp(p), np.exp(q)).sum(), rel=1e-9)


def test_kl_of_151_options_is_finite_where_rounding_would_make_it_infinite():
    p = log_softmax(np.linspace(0, -20, 151))
    q = log_softmax(np.linspace(0, -24, 151))
    rounded = np.round(np.exp(q), 4)
    assert (rounded == 0).any()
    assert (
        math.isinf(rel_entr(np.round(np.exp(p), 4), rounded).sum()) or (np.round(np.exp(p), 4)[rounded == 0] == 0).all()
    )
    exact = sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))
    assert kl_divergence(list(p), list(q)) == pytest.approx(exact, rel=1e-12)


def test_a_run_against_itself_differs_by_exactly_nothing():
    p = list(log_softmax(np.random.default_rng(1).normal(size=9)))
    assert kl_divergence(p, p) == 0
    assert total_variation(p, p) == 0
    assert max_abs_difference(p, p) == 0


def test_total_variation_is_the_largest_difference_over_sets_of_options():
    p, q = (0.5, 0.2, 0.3), (0.1, 0.6, 0.3)
    best = max(
        abs(sum(a for a, x in zip(p, chosen, strict=True) if x) - sum(b for b, x in zip(q, chosen, strict=True) if x))
        for chosen in product((0, 1), repeat=3)
    )
    assert total_variation(logs(*p), logs(*q)) == pytest.approx(best)
    assert max_abs_difference(logs(*p), logs(*q)) == pytest.approx(0.4)


def test_top_takes_the_first_of_equals_and_margin_is_between_the_two_best():
    assert top(logs(0.25, 0.375, 0.375)) == 1
    assert margin(logs(0.1, 0.6, 0.3)) == pytest.approx(0.3)


@pytest.mark.parametrize(("broke", "fixed"), [(0, 0), (1, 0), (5, 1), (3, 9), (10, 10)])
def test_mcnemar_equals_the_sum_of_binomial_tails(broke, fixed):
    n = broke + fixed
    tail = sum(math.comb(n, k) for k in range(min(broke, fixed) + 1)) / 2**n
    assert mcnemar_exact(broke, fixed) == pytest.approx(min(1.0, 2 * tail))


def test_calibration_error_by_hand():
    confidences = [0.95, 0.95, 0.95, 0.95, 0.5, 0.5]
    is_right = [True, True, True, False, True, False]
    assert expected_calibration_error(confidences, is_right) == pytest.approx(4 / 6 * abs(0.75 - 0.95))
    first, second = reliability(confidences, is_right)
    assert (first.n, first.accuracy, second.n, second.accuracy) == (2, 0.5, 4, 0.75)


def test_a_confidence_on_an_edge_belongs_to_the_lower_bin():
    (only,) = reliability([1.0], [True])
    assert only.high == 1.0
    (edge,) = reliability([1 / 15], [True])
    assert edge.low == 0.0


def test_brier_by_hand():
    assert brier(logs(0.7, 0.2, 0.1), 0) == pytest.approx(0.09 + 0.04 + 0.01)
    assert brier(logs(0.7, 0.2, 0.1), 2) == pytest.approx(0.49 + 0.04 + 0.81)


def test_coverage_falls_and_accuracy_is_that_of_the_acted_on():
    points = coverage_curve([0.9, 0.8, 0.4], [True, False, False], [0.0, 0.5, 0.85, 0.95])
    assert [point.coverage for point in points] == pytest.approx([1, 2 / 3, 1 / 3, 0])
    assert [point.accuracy for point in points[:3]] == pytest.approx([1 / 3, 1 / 2, 1])
    assert math.isnan(points[3].accuracy)


def test_runs_with_other_options_cannot_be_compared():
    with pytest.raises(ValueError, match="3 options on the left, 2 on the right"):
        kl_divergence(logs(0.2, 0.3, 0.5), logs(0.5, 0.5))
