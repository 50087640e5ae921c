"""The answers on which two runs differ: a list with filters and pages; a click unfolds both decisions' bars.

The list is read page by page from the database and drawn as buttons of our own. A click sends the request and the
question it stands for; what a browser sends is only ever looked up within the opened comparison.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

import gradio as gr

from clef_core.answers import build_answers
from clef_core.errors import count
from clef_core.schema import parse_questions
from clef_core.stats import NEAR_TIE_MARGIN
from clef_core.tokens import render_value
from db import store
from db.comparison_views import AnswerFilter, AnswerOrder, AnswerPage, ListedAnswer, SideDecisions
from db.session import Database
from db.store_comparison_answers import list_answers, side_decisions
from db.store_comparison_reads import get_comparison
from db.views import RequestView, Side
from web.bars import Shown, answers_html, format_probability
from web.compare_view import run_names
from web.frame import empty_html, stored_id
from web.plots import Names
from worker.settings import Settings

PAGE_ANSWERS = 20
MAX_STATE_CHARS = 6_000
FILTERS: Mapping[str, AnswerFilter] = {
    "all": AnswerFilter(is_flip=True),
    "near": AnswerFilter(is_flip=True, max_margin=NEAR_TIE_MARGIN),
    "broke": AnswerFilter(is_flip=True, effect="broke"),
    "fixed": AnswerFilter(is_flip=True, effect="fixed"),
    "same": AnswerFilter(is_flip=False),
}
FILTER_WORDS = (
    ("All flips", "all"),
    ("Near ties", "near"),
    ("Broke", "broke"),
    ("Fixed", "fixed"),
    ("No flip", "same"),
)
ORDER_WORDS = (("closest calls first", "margin"), ("largest KL first", "divergence"), ("in the order of rows", "row"))
EFFECT_WORDS = {"broke": "broke", "fixed": "fixed", "other": "both wrong"}

SEND_CLICK = """element.addEventListener('click', (event) => {
    const row = event.target.closest('button[data-request]');
    if (row) trigger('click', {request: row.dataset.request, question: row.dataset.question});
});"""


@dataclass(frozen=True)
class Unfolded:
    """The answer whose bars are shown: its request and question, both decisions."""

    request: RequestView
    question_id: str
    decisions: SideDecisions


def filter_of(kind: str, question_id: str) -> AnswerFilter:
    """The filter that the radio and the question's menu mean together."""
    chosen = FILTERS[kind]
    return AnswerFilter(question_id or None, chosen.is_flip, chosen.effect, chosen.max_margin)


def load_unfolded(database: Database, comparison_id: int, request_id: int, question_id: str) -> Unfolded | None:
    """Both decisions of an answer; None where the comparison has no such answer."""
    with database.read() as session:
        request = store.get_request(session, request_id)
        decisions = side_decisions(session, comparison_id, request_id)
    sides = decisions.decisions
    if request is None or question_id not in request.questions or not {"left", "right"} <= sides.keys():
        return None
    if any(sides[side].log_probs is None for side in ("left", "right")):
        return None
    return Unfolded(request, question_id, decisions)


# ---- as HTML -------------------------------------------------------------------------------------------------------


def answers_list_html(
    found: AnswerPage, page_number: int, names: Names, unfolded: Unfolded | None, settings: Settings
) -> str:
    """A page of answers; the unfolded one has its bars below it."""
    if not found.rows:
        return empty_html("None of these", "No answer fits this filter. Those where both runs agree are under No flip.")
    first = page_number * PAGE_ANSWERS + 1
    items = "".join(_answer_html(listed, names, unfolded, settings) for listed in found.rows)
    return (
        f'<p class="hint">{first:,} to {first + len(found.rows) - 1:,} of {count(found.total, "answer")}</p>'
        f'<ul class="links flips">{items}</ul>'
    )


def _answer_html(listed: ListedAnswer, names: Names, unfolded: Unfolded | None, settings: Settings) -> str:
    answer = listed.answer
    is_open = unfolded is not None and (unfolded.request.id, unfolded.question_id) == (
        answer.request_id,
        answer.question_id,
    )
    row = f"Row {listed.row_number}" if listed.row_number is not None else ""
    own = f' <span class="row-id">{escape(listed.external_id)}</span>' if listed.external_id else ""
    label = "" if answer.label is None else f'<span class="f-label">right: <b>{escape(answer.label)}</b></span>'
    effect = (
        f'<span class="effect effect-{answer.effect}">{EFFECT_WORDS[answer.effect]}</span>'
        if answer.effect is not None
        else ""
    )
    head = (
        f'<button type="button" aria-expanded="{"true" if is_open else "false"}" data-request="{answer.request_id}" '
        f'data-question="{escape(answer.question_id)}"><span class="f-row"><b>{row}</b>{own}</span>'
        f'<span class="f-state">{escape(listed.title) or "(empty state)"}</span>'
        f'<span class="f-question">{escape(answer.question_id)}</span>'
        f'<span class="f-answers">{_side(names.left, "left", answer.left_option, answer.left_confidence)}'
        f"{_side(names.right, 'right', answer.right_option, answer.right_confidence)}</span>"
        f'<span class="f-facts"><span>margin {format_probability(answer.margin)}</span>'
        f"<span>max Δ {format_probability(answer.max_abs_dp)}</span>{label}{effect}</span></button>"
    )
    body = _unfolded_html(unfolded, names, settings) if is_open and unfolded is not None else ""
    return f"<li>{head}{body}</li>"


def _side(name: str, style: str, option: str, confidence: float) -> str:
    return (
        f'<span class="f-side"><i class="k-{style}" title="{escape(name)}"></i><b>{escape(option)}</b> '
        f'<span class="sure">{format_probability(confidence)}</span></span>'
    )


def _unfolded_html(unfolded: Unfolded, names: Names, settings: Settings) -> str:
    request = unfolded.request
    state = "" if request.state is None else render_value(request.state)
    if len(state) > MAX_STATE_CHARS:
        state = f"{state[:MAX_STATE_CHARS]}…"
    images = f" · {count(len(request.images), 'image')}" if request.images else ""
    questions = parse_questions({unfolded.question_id: request.questions[unfolded.question_id]})
    shown = []
    called: tuple[tuple[Side, str], ...] = (("right", names.right), ("left", names.left), ("floor", "floor"))
    for side, name in called:
        decision = unfolded.decisions.decisions.get(side)
        if decision is not None and decision.log_probs is not None:
            answers = build_answers(questions, decision.log_probs, settings.confidence)
            shown.append(Shown(name, decision.log_probs, answers))
    return (
        f'<div class="unfolded"><pre class="f-prompt">{escape(state)}</pre>'
        f'<p class="hint"><a href="/?request={request.id}">Open the whole request</a>{images}</p>'
        f"{answers_html(questions, shown, settings.confidence)}</div>"
    )


# ---- on the page ---------------------------------------------------------------------------------------------------


class FlipsView:
    """Draws and wires the list; the comparison is the one whose id stands in a hidden field of the screen."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self.database = database
        self.settings = settings
        bare: dict[str, Any] = {"show_label": False, "container": False, "interactive": True, "min_width": 0}
        with gr.Row(elem_classes=["filters"]):
            self.kind = gr.Radio(
                list(FILTER_WORDS),
                value="all",
                label="Which answers",
                elem_id="flip-kind",
                elem_classes=["segmented"],
                **bare,
            )
            self.question = gr.Dropdown(
                [("every question", "")], value="", label="Question", elem_id="flip-question", **bare
            )
            self.order = gr.Dropdown(list(ORDER_WORDS), value="margin", label="Order", elem_id="flip-order", **bare)
        self.list = gr.HTML("", apply_default_css=False, js_on_load=SEND_CLICK, elem_id="flips")
        with gr.Row(elem_classes=["pager"]):
            self.previous = gr.Button("Previous", size="sm", min_width=0, elem_id="flips-previous", visible=False)
            self.next = gr.Button("Next", size="sm", min_width=0, elem_id="flips-next", visible=False)
        # In the browser, as the comparison's id: a restarted server still knows what is shown.
        self.page_number = gr.Textbox("0", visible=False, elem_id="flips-page")
        self.unfolded = gr.Textbox("", visible=False)

    @property
    def shown(self) -> list[gr.components.Component]:
        """Outputs of `show`."""
        return [self.list, self.previous, self.next, self.page_number, self.unfolded]

    def wire(self, comparison_id: gr.Textbox, quiet: Mapping[str, Any]) -> None:
        chosen = [comparison_id, self.kind, self.question, self.order]
        gr.on(
            [self.kind.input, self.question.input, self.order.input],
            lambda *values: self.show(*values, page_number=0),
            chosen,
            self.shown,
            trigger_mode="always_last",
            **quiet,
        )
        for button, step in ((self.previous, -1), (self.next, 1)):
            button.click(
                lambda *values, step=step: self.show(*values[:-1], page_number=_number(values[-1]) + step),
                [*chosen, self.page_number],
                self.shown,
                **quiet,
            )
        self.list.click(self.unfold, [*chosen, self.page_number, self.unfolded], self.shown, **quiet)

    def unfold(self, event: gr.EventData, comparison_id: str, *values: Any) -> list[Any]:
        """Show the bars of the clicked answer, or hide them when they are shown already."""
        kind, question, order, page, before = values
        request_id, question_id = str(event.request), str(event.question)
        key = f"{request_id} {question_id}"
        number, request_number = stored_id(comparison_id), stored_id(request_id)
        found = None
        if key != before and number is not None and request_number is not None:
            found = load_unfolded(self.database, number, request_number, question_id)
        parts = self.show(comparison_id, kind, question, order, page_number=_number(page), unfolded=found)
        return [*parts[:-1], key if found is not None else ""]

    def show(
        self,
        comparison_id: str,
        kind: str,
        question: str,
        order: AnswerOrder,
        *,
        page_number: int,
        unfolded: Unfolded | None = None,
    ) -> list[Any]:
        """Values for `shown`."""
        number = stored_id(comparison_id)
        if number is None:
            return self.show_nothing()
        page_number = max(page_number, 0)
        with self.database.read() as session:
            view = get_comparison(session, number)
            found = list_answers(
                session,
                number,
                filter_of(kind, question or ""),
                order=order,
                offset=page_number * PAGE_ANSWERS,
                limit=PAGE_ANSWERS,
            )
        if view is None:
            return self.show_nothing()
        html = answers_list_html(found, page_number, run_names(view), unfolded, self.settings)
        has_more = (page_number + 1) * PAGE_ANSWERS < found.total
        return [html, gr.update(visible=page_number > 0), gr.update(visible=has_more), str(page_number), ""]

    def show_nothing(self) -> list[Any]:
        return ["", gr.update(visible=False), gr.update(visible=False), "0", ""]


def _number(text: str) -> int:
    return stored_id(text) or 0
