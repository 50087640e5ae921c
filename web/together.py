"""Alone or together: a button under the answers that asks each question alone too, and what then moves.

The joint head lets the questions of a request influence each other. What is asked comes from the stored request, never
from the form, so that both ways are about the same thing. Every option and question of a user is escaped here or in
`web.bars`.
"""

from collections.abc import Sequence
from html import escape
from typing import Any

import gradio as gr

from clef_core.answers import build_answers
from clef_core.errors import ClefError, count
from clef_core.images import check_image
from clef_core.schema import Request, Submission, parse_questions
from db import store
from db.views import RequestView
from web.bars import Shown, answers_html, format_probability, variant_label
from web.frame import QUEUED, QUIET, error_html, panel, stored_id
from web.results import variant_order
from worker.submit import Submitter
from worker.together import Moved, Together, read_together, start_together

POLL_S = 0.5
MIN_QUESTIONS = 2


class TogetherPanel:
    """Draws and wires the button and its result; keeps nothing of a visitor."""

    def __init__(self, submitter: Submitter, request_id: gr.Textbox) -> None:
        self.submitter = submitter
        self.button = gr.Button(
            "Alone or together? Ask each question alone too", size="sm", visible=False, elem_id="together"
        )
        self.result = panel(elem_id="together-result")
        self.batch_id = gr.Textbox(visible=False)
        self.timer = gr.Timer(POLL_S, active=False)
        outputs = [self.button, self.result, self.batch_id, self.timer]
        request_id.change(self.offer, request_id, outputs, **QUIET)
        self.button.click(self.start, request_id, outputs, **QUEUED)
        self.timer.tick(self.show, self.batch_id, [self.result, self.timer], **QUIET)

    def offer(self, request_id: str) -> list[Any]:
        """For a newly shown request: the button if it has several questions, and no result of another one."""
        request = self.stored(request_id)
        is_useful = request is not None and request.input_error is None and len(request.questions) >= MIN_QUESTIONS
        return [gr.update(visible=is_useful), "", "", gr.Timer(active=False)]

    def start(self, request_id: str) -> list[Any]:
        """Queue the stored request whole and question by question, in the variants it was decided with."""
        request = self.stored(request_id)
        if request is None:
            return [gr.update(visible=False), "", "", gr.Timer(active=False)]
        with self.submitter.database.read() as session:
            asked = {decision.variant for decision in store.list_decisions(session, request.id)}
        variants = [variant for variant in variant_order(self.submitter.settings) if variant in asked]
        try:
            batch_id = start_together(self.submitter, self.submission_of(request), variants)
        except (OSError, ClefError) as error:  # an image is gone, or the request does not fit the rules any more
            return [gr.skip(), error_html(str(error)), "", gr.Timer(active=False)]
        return [gr.update(visible=False), *self.show(str(batch_id))[:1], str(batch_id), gr.Timer(active=True)]

    def show(self, batch_id: str) -> tuple[str, Any]:
        """What is known by now; the timer stops when all is."""
        number = stored_id(batch_id)
        if number is None:
            return "", gr.Timer(active=False)
        with self.submitter.database.read() as session:
            batch = store.get_batch(session, number)
        found = read_together(self.submitter.database, number)
        questions = {} if batch is None else batch.questions
        return together_html(found, questions), gr.Timer(active=not found.is_finished)

    def stored(self, request_id: str) -> RequestView | None:
        number = stored_id(request_id)
        if number is None:
            return None
        with self.submitter.database.read() as session:
            return store.get_request(session, number)

    def submission_of(self, request: RequestView) -> Submission:
        body = {"model": request.asked_model, "state": request.state, "questions": request.questions}
        if request.truncate:
            body["x_truncate"] = request.truncate
        images = tuple(check_image(self.submitter.images.get(sha256), ("images",)) for sha256 in request.images)
        return Submission(Request.model_validate(body), images, ())


def together_html(found: Together, questions: dict[str, Any]) -> str:
    """What moves, a table per variant, with the bars folded below it.

    Args:
        questions: question id to question as JSON, in the order of the request.
    """
    if not found.is_finished:
        done = sum(map(len, found.moved.values()))
        words = f"{done} of {len(found.variants) * found.num_questions} questions asked both ways"
        return f'<div class="pending"><i class="spinner"></i><b>Alone or together</b><span>{words}</span></div>'
    parts = "".join(_variant_html(variant, found.moved[variant], questions) for variant in found.variants)
    failures = "".join(
        error_html(f"{variant_label(variant)}, {reason}")
        for variant, reasons in found.failures.items()
        for reason in reasons
    )
    hint = "Nothing but its neighbours differs between the two ways: each forward holds one request."
    return (
        f'<section class="panel together"><h3 class="panel-title">Alone or together</h3>{parts}{failures}'
        f'<p class="hint">{hint}</p></section>'
    )


def _variant_html(variant: str, moved: Sequence[Moved], questions: dict[str, Any]) -> str:
    if not moved:
        return ""
    num_flips = sum(one.compared.is_flip for one in moved)
    asked = count(len(moved), "question")
    words = f"{num_flips} of {asked} {'gets' if num_flips == 1 else 'get'} another answer alone"
    if not num_flips:
        words = f"{asked}, each with the same answer alone"
    rows = "".join(_row_html(one) for one in moved)
    parsed = parse_questions({one.question_id: questions[one.question_id] for one in moved})
    shown = [
        Shown(way, log_probs, build_answers(parsed, log_probs))
        for way, log_probs in (
            ("together", {one.question_id: one.together for one in moved}),
            ("alone", {one.question_id: one.alone for one in moved}),
        )
    ]
    return (
        f'<div><p class="summary{" summary-differs" if num_flips else ""}">{escape(variant_label(variant))}: '
        f"{words}.</p>"
        '<div class="table-wrap" tabindex="0"><table class="plain"><thead><tr><th scope="col">Question</th>'
        '<th scope="col">Together</th><th scope="col">Alone</th><th scope="col">Largest |Δp|</th></tr></thead>'
        f'<tbody>{rows}</tbody></table></div><details class="more"><summary>All options</summary>'
        f"{answers_html(parsed, shown, 'top')}</details></div>"
    )


def _row_html(moved: Moved) -> str:
    one = moved.compared
    style = ' class="moved"' if one.is_flip else ""
    return (
        f'<tr><th scope="row">{escape(one.question_id)}</th>'
        f"<td>{_answer(one.left_option, one.left_confidence)}</td>"
        f"<td{style}>{_answer(one.right_option, one.right_confidence)}</td>"
        f"<td>{format_probability(one.max_abs_dp)}</td></tr>"
    )


def _answer(option: str, confidence: float) -> str:
    return f'{escape(option)} <span class="sure">{format_probability(confidence)}</span>'
