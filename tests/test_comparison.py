"""Paired answers to statistics, by hand on few pairs; the single statistics are in test_stats."""

import math

import pytest

from clef_core.comparison import OVERALL, Comparison, Pair, compare_pair, headline, summarise


def logs(*probabilities: float) -> tuple[float, ...]:
    return tuple(math.log(p) for p in probabilities)


def pair(left, right, *, label=None, floor=None, question="q", request=1) -> Pair:
    return Pair(
        request, question, ("a", "b"), logs(*left), logs(*right), None if floor is None else logs(*floor), label
    )


PAIRS = [
    pair((0.9, 0.1), (0.8, 0.2), label="a", floor=(0.9, 0.1)),
    pair((0.52, 0.48), (0.49, 0.51), label="a", floor=(0.52, 0.48)),
    pair((0.6, 0.4), (0.3, 0.7), label="b", floor=(0.6, 0.4)),
    pair((0.2, 0.8), (0.1, 0.9), label="a", floor=(0.2, 0.8)),
]


def test_a_flip_is_named_by_what_it_did_to_the_label():
    compared = [compare_pair(one) for one in PAIRS]
    assert [one.effect for one in compared] == [None, "broke", "fixed", None]
    assert [one.is_near_tie for one in compared] == [False, True, False, False]
    assert compared[1].margin == pytest.approx(0.04)
    assert compare_pair(pair((0.6, 0.4), (0.3, 0.7))).effect is None


def test_a_summary_by_hand():
    found = summarise([compare_pair(one) for one in PAIRS])
    assert (found.n, found.num_flips, found.num_near_ties) == (4, 2, 1)
    assert found.divergence.agreement.share == 0.5
    assert found.divergence.max_abs_dp == pytest.approx(0.3)
    assert found.divergence.tv.value == pytest.approx((0.1 + 0.03 + 0.3 + 0.1) / 4)
    kls = [
        0.9 * math.log(9 / 8) + 0.1 * math.log(1 / 2), 0.52 * math.log(52 / 49) + 0.48 * math.log(48 / 51),
        0.6 * math.log(2) + 0.4 * math.log(4 / 7), 0.2 * math.log(2) + 0.8 * math.log(8 / 9),
    ]  # fmt: skip
    assert found.divergence.kl.value == pytest.approx(sum(kls) / 4)
    assert found.labelled is not None
    assert (found.labelled.broke, found.labelled.fixed, found.labelled.mcnemar_p) == (1, 1, 1.0)
    assert (found.labelled.left.accuracy.successes, found.labelled.right.accuracy.successes) == (2, 2)
    assert found.labelled.left.brier == pytest.approx((0.02 + 2 * 0.48**2 + 2 * 0.6**2 + 2 * 0.8**2) / 4)


def test_a_difference_beyond_a_still_floor_is_outside_it():
    found = summarise([compare_pair(one) for one in PAIRS])
    assert found.floor is not None
    assert found.floor.kl.value == 0
    assert found.floor.agreement.share == 1
    many = summarise([compare_pair(one) for one in PAIRS * 25])
    assert many.is_within_floor is False


def test_few_records_do_not_widen_a_narrow_floor():
    """Three records that differ a thousand times more than the noise: their own spread is no excuse."""
    floor = (0.9001, 0.0999)
    found = summarise([compare_pair(pair((0.9, 0.1), (p, 1 - p), floor=floor)) for p in (0.85, 0.8, 0.6)])
    assert found.is_within_floor is False


def test_noise_like_that_of_the_floor_is_within_it():
    shifts = [1e-4, -2e-4, 3e-4, -1e-4]
    found = summarise(
        [
            compare_pair(pair((0.9, 0.1), (0.9 + a, 0.1 - a), floor=(0.9 + b, 0.1 - b)))
            for a, b in zip(shifts, shifts[::-1], strict=True)
        ]
    )
    assert found.is_within_floor is True


def test_a_run_against_itself_is_within_any_floor():
    same = summarise([compare_pair(pair(p, p, floor=p)) for p in ((0.9, 0.1), (0.3, 0.7))])
    assert same.divergence.agreement.share == 1
    assert same.divergence.kl.value == 0
    assert same.is_within_floor is True


def test_without_floor_or_labels_nothing_is_claimed_of_them():
    found = summarise([compare_pair(pair((0.6, 0.4), (0.6, 0.4)))])
    assert (found.floor, found.labelled, found.is_within_floor) == (None, None, None)


def test_questions_are_summarised_apart_and_together():
    comparison = Comparison()
    for question in ("later", "first"):
        for one in PAIRS[:2]:
            comparison.add(compare_pair(Pair(1, question, one.options, one.left, one.right)))
    found = comparison.summaries()
    assert list(found) == [OVERALL, "later", "first"]
    assert [found[name].n for name in found] == [4, 2, 2]


def test_the_headline_says_it_in_plain_words():
    found = summarise([compare_pair(one) for one in PAIRS * 25])
    assert headline(found, "bf16", "mxfp4", num_questions=1) == (
        "mxfp4 picked the same option as bf16 for 50 of 100 records (50.0%, 95 % CI 40.4–59.6); "
        "bf16 against itself in another batch shape: 100.0%, so the difference is larger than the noise."
    )


def test_the_headline_of_runs_that_agree_speaks_of_the_probabilities():
    found = summarise([compare_pair(pair((0.6, 0.4), (0.7, 0.3), floor=(0.6, 0.4)))] * 100)
    assert headline(found, "bf16", "mxfp4", num_questions=1).endswith(
        "against itself in another batch shape: 100.0%, yet the probabilities move by more than the noise."
    )


def test_a_label_that_is_no_option_is_refused():
    with pytest.raises(ValueError, match="not in"):
        compare_pair(pair((0.6, 0.4), (0.6, 0.4), label="c"))
