"""The plot of a sensitivity run as SVG: a row per part, with divergence, agreement and largest change side by side.

Drawn here and not by a plotting library: the program has none, and three columns of marks need none. Works on the JSON
of a stored run, without torch. What surprises: colours are the page's variables, with values of their own for a drawing
that stands alone; every text is escaped.
"""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

ROW = 20
TOP = 64
BOTTOM = 46
PANEL = 210
GAP = 48
CHAR = 7.0  # of a label, in the widest case
PARTS_WORDS = {"layer": "layer", "kind": "kind of linear", "linear": "linear"}

_STYLE = """
.sensitivity { font: 12px system-ui, sans-serif; background: var(--background-fill-primary, #fff); max-width: 100%;
  height: auto; }
.sensitivity text { fill: var(--body-text-color, #1d2330); }
.sensitivity .soft { fill: var(--soft, #667085); }
.sensitivity .grid { stroke: var(--track, #e4e7ec); }
.sensitivity .floor { stroke: var(--soft, #667085); stroke-dasharray: 3 3; }
.sensitivity .amount { fill: var(--fill, #3550a5); stroke: var(--fill, #3550a5); }
.sensitivity .all .amount { fill: var(--amber, #b45309); stroke: var(--amber, #b45309); }
.sensitivity .whisker { stroke: var(--tick, #16161a); }
"""

Json = Mapping[str, Any]
Scale = Callable[[float], float]


def sensitivity_svg(results: Json, parts: str, title: str) -> str:
    """Draw a run.

    Args:
        results: `Sensitivity.to_json()`.
        parts: `layer`, `kind` or `linear`.
        title: what was measured on what, plain text.

    Returns:
        an `<svg>` element.
    """
    floor: Json = results["noise_floor"]
    rows: list[Json] = [results["everything"], *results["effects"]]
    drawn_too = [*rows, floor]
    label_width = CHAR * max(len(str(row["part"])) for row in rows) + 30
    lefts = [label_width + number * (PANEL + GAP) for number in range(3)]
    bottom = TOP + ROW * len(rows)
    lowest = min(row["agreement"][1] for row in drawn_too)
    panels = (
        ("mean KL, nats", lefts[0], 0.0, max(row["kl"] + _error(row) for row in drawn_too), floor["kl"]),
        ("top-1 agreement", lefts[1], lowest, 1.0, floor["agreement"][0]),
        ("max |Δp|", lefts[2], 0.0, max(row["max_abs_dp"] for row in drawn_too), floor["max_abs_dp"]),
    )
    words = f"one {PARTS_WORDS[parts]} in MXFP4 at a time, held against BF16; dashed: noise floor"
    drawn = [_text(16, 22, title, "font-weight='600'"), _text(16, 42, words, "class='soft'")]
    scales: list[Scale] = []
    for name, left, low, high, at_floor in panels:
        scale = _scale(left, low, high)
        scales.append(scale)
        drawn += _axis(scale, [low, (low + high) / 2, high] if high > low else [low], bottom)
        drawn.append(f"<path class='floor' d='M{scale(at_floor):.1f} {TOP}V{bottom}'/>")
        drawn.append(_text(left, bottom + 34, name, "class='soft'"))
    for number, row in enumerate(rows):
        drawn += _row(row, TOP + ROW * number + ROW / 2, scales, is_all=number == 0)
    worst = max(results["effects"], key=lambda row: float(row["kl"]))["part"]
    size = f"{lefts[2] + PANEL + 60:.0f} {bottom + BOTTOM:.0f}"
    width, height = size.split()
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' class='sensitivity' role='img' "
        f"aria-label='{escape(f'{title}. The largest divergence is that of {worst}.')}' "
        f"width='{width}' height='{height}' viewBox='0 0 {size}'><style>{_STYLE}</style>{''.join(drawn)}</svg>"
    )


def _row(row: Json, y: float, scales: Sequence[Scale], *, is_all: bool) -> list[str]:
    kl, agreement, change = scales
    share, low, high = row["agreement"]
    tooltip = (
        f"{row['part']}: KL {row['kl']:.3g}, agreement {share:.1%} ({low:.1%} to {high:.1%}, "
        f"n = {row['num_answers']}), max |Δp| {row['max_abs_dp']:.3g}, {row['num_linears']} linears"
    )
    whisker = f"M{kl(max(0.0, row['kl'] - _error(row))):.1f} {y}H{kl(row['kl'] + _error(row)):.1f}"
    return [
        f"<g class='{'all' if is_all else 'part'}'><title>{escape(tooltip)}</title>",
        _text(kl(0.0) - 10, y + 4, str(row["part"]), "text-anchor='end'"),
        _bar(kl, row["kl"], y),
        f"<path class='whisker' d='{whisker}'/>",
        f"<path class='amount' d='M{agreement(low):.1f} {y}H{agreement(high):.1f}'/>",
        f"<circle class='amount' cx='{agreement(share):.1f}' cy='{y}' r='4'/>",
        _bar(change, row["max_abs_dp"], y),
        _text(change(row["max_abs_dp"]) + 6, y + 4, f"{row['max_abs_dp']:.3f}", "class='soft'"),
        "</g>",
    ]


def _axis(scale: Scale, ticks: Sequence[float], bottom: float) -> list[str]:
    drawn = []
    for tick, anchor in zip(ticks, ("start", "middle", "end"), strict=False):
        drawn.append(f"<path class='grid' d='M{scale(tick):.1f} {TOP}V{bottom}'/>")
        drawn.append(_text(scale(tick), bottom + 16, f"{tick:.3g}", f"class='soft' text-anchor='{anchor}'"))
    return drawn


def _scale(left: float, low: float, high: float) -> Scale:
    span = (high - low) or 1.0
    return lambda value: left + PANEL * (value - low) / span


def _bar(scale: Scale, value: float, y: float) -> str:
    start = scale(0.0)
    return f"<rect class='amount' x='{start:.1f}' y='{y - 5}' width='{scale(value) - start:.1f}' height='10'/>"


def _text(x: float, y: float, text: str, attributes: str) -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' {attributes}>{escape(text)}</text>"


def _error(row: Json) -> float:
    return float(row["kl_standard_error"] or 0.0)
