"""The plots of a comparison as small SVG drawings: scatter, |Δp| histogram, reliability, coverage.

Pure: numbers of a report in, an `<svg>` out, in the colours of the page's variables, so that both themes fit. Drawn at
the width of a phone and scaled up elsewhere, so that the text is never smaller than written here. Knows no Gradio and
no database. What surprises: points that carry no tooltip are one path with round ends, a few bytes each, because there
may be thousands of them.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from clef_core.comparison_report import CoverageCurve, DpHistogram, LabelledNumbers, QualityNumbers, Scatter

WIDTH, HEIGHT = 340, 290
LEFT, RIGHT, TOP, BOTTOM = 60, 12, 12, 46
MAX_TICKS = 5
SHARE_TICKS = tuple((quarter / 4, f"{quarter / 4:g}") for quarter in range(5))


@dataclass(frozen=True)
class Names:
    """What the two runs are called; plain text."""

    left: str
    right: str


@dataclass(frozen=True)
class Axis:
    """One direction of a plot. `label` names what is drawn and its unit; ticks are (value, text)."""

    label: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]

    def share(self, value: float) -> float:
        """Where a value lies between the ends, 0 to 1."""
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class Frame:
    """The rectangle between two axes, and where a value lies in it."""

    horizontal: Axis
    vertical: Axis

    def x(self, value: float) -> float:
        return LEFT + self.horizontal.share(value) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - self.vertical.share(value) * (HEIGHT - TOP - BOTTOM)

    def point(self, x: float, y: float) -> str:
        return f"{self.x(x):.1f} {self.y(y):.1f}"

    def svg(self, drawn: Iterable[str], words: str) -> str:
        """The whole drawing; `words` say what it shows to someone who cannot see it."""
        parts = [*self._grid(), *drawn, *self._texts()]
        return (
            f'<svg class="plot-svg" role="img" aria-label="{escape(words)}" viewBox="0 0 {WIDTH} {HEIGHT}">'
            f"{''.join(parts)}</svg>"
        )

    def _grid(self) -> list[str]:
        bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
        lines = [f"M{self.x(value):.1f} {TOP}V{bottom}" for value, _ in self.horizontal.ticks]
        lines += [f"M{LEFT} {self.y(value):.1f}H{right}" for value, _ in self.vertical.ticks]
        return [
            f'<path class="p-grid" d="{"".join(lines)}"/>',
            f'<path class="p-axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>',
        ]

    def _texts(self) -> list[str]:
        bottom = HEIGHT - BOTTOM
        texts = [_text(self.x(value), bottom + 16, text, "middle") for value, text in self.horizontal.ticks]
        texts += [_text(LEFT - 7, self.y(value) + 4, text, "end") for value, text in self.vertical.ticks]
        middle = TOP + (bottom - TOP) / 2
        texts.append(_text(LEFT + (WIDTH - LEFT - RIGHT) / 2, HEIGHT - 8, self.horizontal.label, "middle", "p-label"))
        turned = f' transform="rotate(-90 13 {middle:.0f})"'
        texts.append(_text(13, middle, self.vertical.label, "middle", "p-label", turned))
        return texts


def scatter_svg(scatter: Scatter, names: Names) -> str:
    """Top probability of each answer in both runs; answers whose option changed are diamonds."""
    frame = Frame(
        Axis(f"top probability, {names.left}", 0, 1, SHARE_TICKS),
        Axis(f"top probability, {names.right}", 0, 1, SHARE_TICKS),
    )
    points = list(zip(scatter.left, scatter.right, scatter.is_flip, strict=True))
    same = "".join(f"M{frame.point(x, y)}h0" for x, y, is_flip in points if not is_flip)
    flips = "".join(f"M{frame.point(x, y)}m0-4.5l4.5 4.5l-4.5 4.5l-4.5-4.5z" for x, y, is_flip in points if is_flip)
    drawn = [_diagonal(frame), f'<path class="p-dots" d="{same}"/>', f'<path class="p-flips" d="{flips}"/>']
    num_flips = sum(scatter.is_flip)
    words = (
        f"Scatter of the top probability of {len(points):,} answers, {names.left} across and {names.right} up; "
        f"{num_flips:,} of them changed their option"
    )
    return frame.svg(drawn, words)


def histogram_svg(histogram: DpHistogram, names: Names) -> str:
    """How many answers moved how far: bars for the pair, a line for the noise floor."""
    num_bins = len(histogram.pair)
    most = max(*histogram.pair, *(histogram.floor or (0,)), 1)
    frame = Frame(
        Axis("largest |Δp| of an answer (log scale)", 0, num_bins, _power_ticks(histogram.edges)),
        Axis("answers", 0, most * 1.04, count_ticks(most)),
    )
    bars = [
        _bar(frame, number, count, f"{_bin_words(histogram.edges, number)}: {count:,} answers")
        for number, count in enumerate(histogram.pair)
    ]
    drawn = [*bars]
    if histogram.floor is not None:
        steps = "".join(
            f"V{frame.y(count):.1f}H{frame.x(number + 1):.1f}" for number, count in enumerate(histogram.floor)
        )
        drawn.append(f'<path class="p-floor" d="M{frame.point(0, 0)}{steps}V{frame.y(0):.1f}"/>')
    words = f"Histogram of the largest change of a probability per answer, {names.left} against {names.right}"
    floor_words = "" if histogram.floor is None else f", with {names.left} against itself as a line"
    return frame.svg(drawn, words + floor_words)


def reliability_svg(labelled: LabelledNumbers, names: Names) -> str:
    """How often each run is right where it is how sure; the area of a dot is its number of answers."""
    frame = Frame(
        Axis("top probability, mean of the bin", 0, 1, SHARE_TICKS), Axis("share that is right", 0, 1, SHARE_TICKS)
    )
    most = max(one.n for quality in (labelled.left, labelled.right) for one in quality.reliability)
    drawn = [_diagonal(frame)]
    drawn += _reliability(frame, labelled.left, names.left, most, "p-left")
    drawn += _reliability(frame, labelled.right, names.right, most, "p-right")
    words = (
        f"Reliability diagram over {labelled.left.n:,} labelled answers: accuracy against top probability of "
        f"{names.left} and {names.right}; on the diagonal a run is as often right as it is sure"
    )
    return frame.svg(drawn, words)


def coverage_svg(curve: CoverageCurve, names: Names, threshold: float) -> str:
    """Share of answers acted on, and how many of these are right, by threshold; with a line at the chosen one."""
    frame = Frame(Axis("act only at or above this confidence", 0, 1, SHARE_TICKS), Axis("share", 0, 1, SHARE_TICKS))
    lines = [
        (curve.left_coverage, "p-left p-thin"),
        (curve.right_coverage, "p-right p-thin"),
        (curve.left_accuracy, "p-left"),
        (curve.right_accuracy, "p-right"),
    ]
    drawn = [f'<path class="p-line {style}" d="{_line(frame, curve.thresholds, ys)}"/>' for ys, style in lines]
    drawn.append(f'<path class="p-chosen" d="M{frame.x(threshold):.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
    words = f"Coverage and accuracy of {names.left} and {names.right} by the confidence from which one acts"
    return frame.svg(drawn, words)


def count_ticks(most: int) -> list[tuple[float, str]]:
    """A few round counts from 0 up to at most `most`."""
    steps = (lead * 10**power for power in range(12) for lead in (1, 2, 5))
    step = next(step for step in steps if most / step <= MAX_TICKS)
    return [(value, f"{value:,}") for value in range(0, most + 1, step)]


def _power_ticks(edges: Sequence[float]) -> list[tuple[float, str]]:
    """Every second power of ten among the edges, at the place of its edge."""
    ticks = []
    for place, edge in enumerate(edges):
        power = round(math.log10(edge)) if edge > 0 else 1
        if power % 2 == 0 and math.isclose(edge, 10**power, rel_tol=1e-6):
            ticks.append((float(place), _power_of_ten(power)))
    return ticks


def _power_of_ten(power: int) -> str:
    return "1" if power == 0 else f"10{str(power).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"


def _bin_words(edges: Sequence[float], number: int) -> str:
    low, high = edges[number], edges[number + 1]
    return f"|Δp| below {high:.2g}" if low == 0 else f"|Δp| {low:.2g} to {high:.2g}"


def _bar(frame: Frame, number: int, count: int, words: str) -> str:
    top = frame.y(count)
    return (
        f'<rect class="p-bar" x="{frame.x(number) + 1:.1f}" y="{top:.1f}" width="{frame.x(1) - frame.x(0) - 2:.1f}" '
        f'height="{frame.y(0) - top:.1f}"><title>{escape(words)}</title></rect>'
    )


def _reliability(frame: Frame, quality: QualityNumbers, name: str, most: int, style: str) -> list[str]:
    line = _line(frame, [one.confidence for one in quality.reliability], [one.accuracy for one in quality.reliability])
    dots = [
        f'<circle class="{style}" cx="{frame.x(one.confidence):.1f}" cy="{frame.y(one.accuracy):.1f}" '
        f'r="{2 + 5 * math.sqrt(one.n / most):.1f}"><title>'
        f"{escape(f'{name}: {one.accuracy:.1%} of {one.n:,} right, mean top probability {one.confidence:.3f}')}"
        "</title></circle>"
        for one in quality.reliability
    ]
    return [f'<path class="p-line p-thin {style}" d="{line}"/>', *dots]


def _line(frame: Frame, xs: Sequence[float], ys: Sequence[float | None]) -> str:
    """A path through the points; it breaks where there is none."""
    parts, command = [], "M"
    for x, y in zip(xs, ys, strict=True):
        if y is None:
            command = "M"
        else:
            parts.append(f"{command}{frame.point(x, y)}")
            command = "L"
    return "".join(parts)


def _diagonal(frame: Frame) -> str:
    return f'<path class="p-diagonal" d="M{frame.point(0, 0)}L{frame.point(1, 1)}"/>'


def _text(x: float, y: float, text: str, anchor: str, style: str = "p-tick", more: str = "") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'
