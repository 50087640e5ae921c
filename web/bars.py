"""Draw answers as HTML: one card per question, one bar per option.

The first shown variant fills the bar, each further variant is a tick on the same bar, so that a difference is a gap
between the two. A score keeps the order of its levels and carries a scale with the expected level; a noul is one bar
from false to true. It knows nothing of Gradio, the database or who asked. Everything a user wrote goes through
`html.escape`: this module is the only place where answers become markup.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from clef_core.answers import Confidence
from clef_core.schema import AnyQuestion, Json, options

MAX_OPEN_OPTIONS = 8
"""A longer choice shows this many options; the rest is folded away below them."""

CONFIDENCE_MEANING: dict[Confidence, str] = {
    "top": "probability of the most likely option",
    "typesafe": "TypeSafe's definition: 0 for an even spread, 1 for certainty",
}


@dataclass(frozen=True)
class Shown:
    """What one variant said to every question."""

    variant: str
    log_probs: Mapping[str, Mapping[str, float]]
    answers: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Bar:
    """One option with the probability each variant gave it, in the order of the variants shown."""

    id: str
    description: Json
    probabilities: tuple[float, ...]


def variant_label(variant: str) -> str:
    """The name of a variant as the page prints it; not escaped."""
    return variant.upper()


def format_probability(value: float) -> str:
    """Three decimals; a positive value that would print as zero says so."""
    return "&lt;.001" if 0 < value < 0.0005 else f"{value:.3f}"


def render_text(value: Json) -> str:
    """A text as itself, anything else as compact JSON; escaped, line breaks kept by the stylesheet."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return escape(text)


def bars_of(question_id: str, question: AnyQuestion, shown: Sequence[Shown]) -> list[Bar]:
    """The options in the order of the request, each with its probability in every variant."""
    descriptions = {option.id: option.description for option in options(question)}
    return [
        Bar(
            option,
            descriptions[option],
            tuple(math.exp(variant.log_probs[question_id][option]) for variant in shown),
        )
        for option in shown[0].log_probs[question_id]
    ]


def chosen(bars: Sequence[Bar], variant: int) -> Bar:
    """The most likely option of one variant; the first of equals wins, as in the answer."""
    return max(bars, key=lambda bar: bar.probabilities[variant])


def differs(bars: Sequence[Bar]) -> bool:
    """Whether the variants choose different options."""
    return len({chosen(bars, variant).id for variant in range(len(bars[0].probabilities))}) > 1


def num_differing(questions: Mapping[str, AnyQuestion], shown: Sequence[Shown]) -> int:
    """How many questions the variants answer differently."""
    return sum(differs(bars_of(question_id, question, shown)) for question_id, question in questions.items())


def answers_html(questions: Mapping[str, AnyQuestion], shown: Sequence[Shown], confidence: Confidence) -> str:
    """All question cards under one legend.

    Args:
        questions: question id to question, in the order of the request.
        shown: at least one variant; the first fills the bars, the others are ticks.
        confidence: which definition the answers' confidence follows.
    """
    cards = "".join(_card(question_id, question, shown, confidence) for question_id, question in questions.items())
    return f'{_legend(shown)}<div class="answers">{cards}</div>'


def _legend(shown: Sequence[Shown]) -> str:
    keys = [f'<span class="key"><i class="key-fill"></i>{escape(variant_label(shown[0].variant))}</span>']
    keys += [
        f'<span class="key"><i class="key-tick tick-{place}"></i>{escape(variant_label(variant.variant))}</span>'
        for place, variant in enumerate(shown[1:], start=1)
    ]
    return f'<div class="legend">{"".join(keys)}<span class="legend-note">bar = probability, 0 to 1</span></div>'


def _card(question_id: str, question: AnyQuestion, shown: Sequence[Shown], confidence: Confidence) -> str:
    bars = bars_of(question_id, question, shown)
    is_differing = differs(bars)
    instructions = ""
    if question.instructions:
        instructions = f'<p class="q-instructions">{render_text(question.instructions)}</p>'
    body = {"choice": _choice, "score": _score, "noul": _noul}[question.type](question_id, bars, shown)
    return (
        f'<section class="q{" q-differs" if is_differing else ""}">'
        f'<header class="q-head"><h3 class="q-id">{escape(question_id)}</h3>'
        f'<span class="q-type">{question.type}</span>{_agreement(bars, is_differing)}</header>{instructions}'
        f"{_verdict(question_id, bars, shown, confidence, is_differing=is_differing)}{body}</section>"
    )


def _agreement(bars: Sequence[Bar], is_differing: bool) -> str:
    if len(bars[0].probabilities) == 1:
        return ""
    gap = max(max(bar.probabilities) - min(bar.probabilities) for bar in bars)
    word = '<strong class="flag">answers differ</strong>' if is_differing else "same answer"
    return f'<span class="q-agree">{word}<span class="q-gap">max Δ {gap:.3f}</span></span>'


def _verdict(
    question_id: str, bars: Sequence[Bar], shown: Sequence[Shown], confidence: Confidence, *, is_differing: bool
) -> str:
    """The answer in words: once if the variants agree, else once per variant with its name."""
    parts = []
    for place, variant in enumerate(shown[:1] if not is_differing else shown):
        name = f'<span class="v-name">{escape(variant_label(variant.variant))}</span>' if is_differing else ""
        answer = variant.answers[question_id]
        sure = ""
        if "confidence" in answer:
            sure = (
                f'<span class="v-extra" title="{escape(CONFIDENCE_MEANING[confidence])}">'
                f"confidence {answer['confidence']:.3f}</span>"
            )
        option = chosen(bars, place)
        level = f'<span class="level">{escape(option.id)}</span>' if "score" in answer else ""
        text = render_text(option.description) if "score" in answer else escape(option.id)
        parts.append(f'<div class="verdict">{name}<span class="v-answer">{level}{text}</span>{sure}</div>')
    return "".join(parts)


def _choice(question_id: str, bars: Sequence[Bar], shown: Sequence[Shown]) -> str:
    ranked = sorted(bars, key=lambda bar: -bar.probabilities[0])
    best = {chosen(bars, place).id for place in range(len(shown))}
    top, rest = ranked[:MAX_OPEN_OPTIONS], ranked[MAX_OPEN_OPTIONS:]
    if len(rest) < 2:
        top, rest = ranked, []
    # An option that another variant chose must not hide in the folded part.
    top += [bar for bar in rest if bar.id in best]
    rest = [bar for bar in rest if bar.id not in best]
    table = _table(question_id, [_row(bar, bars, escape(bar.id), bar.description) for bar in top], shown)
    if not rest:
        return table
    together = format_probability(sum(bar.probabilities[0] for bar in rest))
    folded = _table(question_id, [_row(bar, bars, escape(bar.id), bar.description) for bar in rest], shown)
    return (
        f'{table}<details class="more"><summary>{len(rest)} more options, together {together}</summary>'
        f"{folded}</details>"
    )


def _score(question_id: str, bars: Sequence[Bar], shown: Sequence[Shown]) -> str:
    rows = [_scale_row(question_id, len(bars), shown)]
    for bar in bars:
        name = f'<span class="level">{escape(bar.id)}</span>{render_text(bar.description)}'
        rows.append(_row(bar, bars, name, None))
    return _table(question_id, rows, shown)


def _scale_row(question_id: str, num_levels: int, shown: Sequence[Shown]) -> str:
    """The ordered levels as stops on a line, with each variant's expected level marked."""
    last = num_levels - 1
    scores = [variant.answers[question_id]["score"] for variant in shown]
    stops = "".join(
        f'<span class="scale-stop" style="left:{100 * level / last:.2f}%">{level}</span>' for level in range(num_levels)
    )
    marks = "".join(
        f'<i class="mark mark-{place} tick-{place}" style="left:{100 * score / last:.2f}%"></i>'
        for place, score in enumerate(scores)
    )
    numbers = "".join(
        f'<td class="p{" p-fill" if place == 0 else ""}">{score:.2f}</td>' for place, score in enumerate(scores)
    )
    return (
        f'<tr class="o o-scale"><th scope="row"><span class="o-id">expected level</span></th>'
        f'<td class="track-cell" aria-hidden="true"><div class="scale-line">{stops}{marks}</div></td>{numbers}</tr>'
    )


def _noul(question_id: str, bars: Sequence[Bar], shown: Sequence[Shown]) -> str:
    true = next(bar for bar in bars if bar.id == "true")
    return _table(question_id, [_row(true, bars, "probability of true", None, is_noul=True)], shown)


def _row(bar: Bar, bars: Sequence[Bar], name: str, description: Json, *, is_noul: bool = False) -> str:
    """One table row. `name` is markup already; the description is escaped here."""
    note = "" if description is None else f'<span class="o-note">{render_text(description)}</span>'
    ticks = "".join(
        f'<i class="tick tick-{place}" style="left:{100 * probability:.2f}%"></i>'
        for place, probability in enumerate(bar.probabilities[1:], start=1)
    )
    fill = f'<i class="fill" style="width:{100 * bar.probabilities[0]:.2f}%"></i>'
    middle = '<i class="middle"></i>' if is_noul else ""
    ends = '<div class="ends"><span>false</span><span>true</span></div>' if is_noul else ""
    is_best = [chosen(bars, place).id == bar.id for place in range(len(bar.probabilities))]
    numbers = "".join(
        f'<td class="p{" p-fill" if place == 0 else ""}{" p-best" if is_best[place] else ""}">'
        f"{format_probability(probability)}</td>"
        for place, probability in enumerate(bar.probabilities)
    )
    classes = f"o{' noul' if is_noul else ''}{' o-chosen' if is_best[0] else ''}"
    return (
        f'<tr class="{classes}"><th scope="row"><span class="o-id">{name}</span>{note}</th>'
        f'<td class="track-cell" aria-hidden="true"><div class="track">{fill}{middle}{ticks}</div>{ends}</td>'
        f"{numbers}</tr>"
    )


def _table(question_id: str, rows: Sequence[str], shown: Sequence[Shown]) -> str:
    heads = "".join(f'<th scope="col" class="p">{escape(variant_label(variant.variant))}</th>' for variant in shown)
    return (
        f'<table class="bars" style="--variants:{len(shown)}"><caption>Probabilities of {escape(question_id)}</caption>'
        f'<thead><tr><th scope="col"><span>Option</span></th><th scope="col"><span>Bar</span></th>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )
