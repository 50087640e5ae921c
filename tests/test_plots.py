"""The plots: values stand where the axes say, texts are escaped, nothing is drawn that is not there."""

import re
from xml.etree import ElementTree

import pytest

from clef_core.comparison_report import (
    DP_EDGES,
    BinNumbers,
    CoverageCurve,
    DpHistogram,
    LabelledNumbers,
    QualityNumbers,
    Scatter,
)
from web.plots import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Names,
    count_ticks,
    coverage_svg,
    histogram_svg,
    reliability_svg,
    scatter_svg,
)

NAMES = Names("BF16", "MXFP4")
MARKUP = '<img src=x onerror="x">'
BINS = len(DP_EDGES) - 1


def scatter(points: list[tuple[float, float, bool]], num_answers: int = 2) -> Scatter:
    left, right, is_flip = zip(*points, strict=True)
    count = len(points)
    return Scatter(
        num_answers=num_answers,
        request_ids=tuple(range(count)),
        question_ids=("q",) * count,
        left=left,
        right=right,
        is_flip=is_flip,
    )


def quality(*bins: BinNumbers) -> QualityNumbers:
    return QualityNumbers(
        n=10,
        num_right=5,
        accuracy=0.5,
        accuracy_low=0.2,
        accuracy_high=0.8,
        ece=0.1,
        brier=0.5,
        reliability=bins,
    )


def labelled(left: QualityNumbers, right: QualityNumbers) -> LabelledNumbers:
    return LabelledNumbers(left=left, right=right, broke=1, fixed=2, mcnemar_p=1.0)


def curve(accuracy: tuple[float | None, ...]) -> CoverageCurve:
    return CoverageCurve(
        n=4,
        is_labelled=True,
        thresholds=(0.0, 0.5, 1.0),
        left_coverage=(1.0, 0.5, 0.0),
        right_coverage=(1.0, 0.5, 0.0),
        left_accuracy=accuracy,
        right_accuracy=accuracy,
    )


def path(svg: str, style: str) -> str:
    found = re.search(rf'<path class="{style}" d="([^"]*)"', svg)
    assert found is not None, svg
    return found[1]


def test_a_point_stands_where_the_axes_say() -> None:
    svg = scatter_svg(scatter([(0.0, 0.0, False), (1.0, 1.0, False), (0.5, 1.0, False)]), NAMES)
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    assert path(svg, "p-dots") == (
        f"M{LEFT}.0 {HEIGHT - BOTTOM}.0h0M{WIDTH - RIGHT}.0 {TOP}.0h0M{middle:.1f} {TOP}.0h0"
    )


def test_flips_are_drawn_in_another_shape() -> None:
    svg = scatter_svg(scatter([(0.5, 0.5, True), (0.9, 0.9, False)]), NAMES)
    assert path(svg, "p-flips").count("z") == 1
    assert path(svg, "p-dots").count("h0") == 1


def test_thousands_of_points_stay_small() -> None:
    svg = scatter_svg(scatter([(0.123456, 0.654321, False)] * 2_000), NAMES)
    assert len(svg) < 40_000


def test_a_bar_is_as_high_as_its_count_and_the_floor_is_a_line() -> None:
    counts = (10, 5, *[0] * (BINS - 2))
    svg = histogram_svg(DpHistogram(edges=DP_EDGES, pair=counts, floor=(20, *[0] * (BINS - 1))), NAMES)
    heights = [float(height) for height in re.findall(r'<rect class="p-bar"[^>]* height="([\d.]+)"', svg)]
    assert len(heights) == BINS
    assert heights[0] == pytest.approx(2 * heights[1], abs=0.2)
    assert heights[0] == pytest.approx((HEIGHT - TOP - BOTTOM) * 10 / 20.8, abs=0.1)
    assert heights[2:] == [0.0] * (BINS - 2)
    assert path(svg, "p-floor").count("H") == BINS
    assert "|Δp| below 1e-06: 10 answers" in svg


def test_without_a_floor_there_is_no_line() -> None:
    svg = histogram_svg(DpHistogram(edges=DP_EDGES, pair=(1,) * BINS, floor=None), NAMES)
    assert "p-floor" not in svg


def test_the_histogram_names_every_second_power_of_ten_at_its_edge() -> None:
    svg = histogram_svg(DpHistogram(edges=DP_EDGES, pair=(1,) * BINS, floor=None), NAMES)
    ticks = re.findall(r'<text class="p-tick" x="([\d.]+)"[^>]*middle">([^<]+)<', svg)
    assert [text for _, text in ticks] == ["10⁻⁶", "10⁻⁴", "10⁻²", "1"]
    assert float(ticks[-1][0]) == WIDTH - RIGHT
    assert float(ticks[0][0]) == pytest.approx(LEFT + (WIDTH - LEFT - RIGHT) / BINS, abs=0.1)


def test_a_reliability_dot_says_how_many_answers_it_stands_for() -> None:
    few = BinNumbers(low=0.4, high=0.5, n=1, confidence=0.45, accuracy=0.0)
    many = BinNumbers(low=0.9, high=1.0, n=100, confidence=0.95, accuracy=0.9)
    svg = reliability_svg(labelled(quality(few, many), quality(many)), NAMES)
    circles = [float(radius) for radius in re.findall(r'<circle class="p-left"[^>]* r="([\d.]+)"', svg)]
    assert circles == [2.5, 7.0]
    assert "BF16: 90.0% of 100 right, mean top probability 0.950" in svg


def test_a_curve_breaks_where_nothing_is_acted_on() -> None:
    svg = coverage_svg(curve((0.5, None, 1.0)), NAMES, 0.5)
    assert path(svg, "p-line p-left").count("M") == 2
    assert path(svg, "p-line p-left").count("L") == 0


def test_the_chosen_threshold_is_a_line_at_its_place() -> None:
    svg = coverage_svg(curve((0.5, 0.5, 0.5)), NAMES, 0.5)
    assert path(svg, "p-chosen").startswith(f"M{LEFT + (WIDTH - LEFT - RIGHT) / 2:.1f} {TOP}V")


@pytest.mark.parametrize(
    ("most", "texts"),
    [
        (1, ["0", "1"]),
        (5, ["0", "1", "2", "3", "4", "5"]),
        (7, ["0", "2", "4", "6"]),
        (3_999, ["0", "1,000", "2,000", "3,000"]),
    ],
)
def test_counts_have_a_few_round_ticks(most: int, texts: list[str]) -> None:
    assert [text for _, text in count_ticks(most)] == texts


def test_every_plot_is_well_formed_names_its_axes_and_escapes_names() -> None:
    names = Names(MARKUP, MARKUP)
    one = BinNumbers(low=0.4, high=0.5, n=1, confidence=0.45, accuracy=0.0)
    svgs = [
        scatter_svg(scatter([(0.5, 0.5, True)]), names),
        histogram_svg(DpHistogram(edges=DP_EDGES, pair=(1,) * BINS, floor=(1,) * BINS), names),
        reliability_svg(labelled(quality(one), quality(one)), names),
        coverage_svg(curve((0.5, 0.5, None)), names, 0.8),
    ]
    for svg in svgs:
        assert "<img" not in svg
        root = ElementTree.fromstring(svg)
        assert MARKUP in root.attrib["aria-label"]
        assert len([text for text in root.iter("text") if text.get("class") == "p-label" and text.text]) == 2
