"""A stored request and its decisions as the right half of the Decide screen: waiting, failed or answered.

Reads the database, draws with `web.bars`. Knows no form and no Gradio.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from clef_core.answers import build_answers, build_response
from clef_core.errors import Problem, count
from clef_core.schema import AnyQuestion, parse_questions
from db import store
from db.views import DecisionView, RequestView, WorkerView
from web.bars import CONFIDENCE_MEANING, Shown, answers_html, num_differing, variant_label
from web.frame import Fact, empty_html, facts_html, problems_html, time_html
from web.status import variant_facts, variant_state
from worker.settings import Settings
from worker.submit import Submitter

EMPTY = empty_html(
    "No decision yet",
    "Pick an example or write a state and a question, then press Decide. The probability of every allowed option "
    "appears here as a bar, for both variants at once.",
)


@dataclass(frozen=True)
class Snapshot:
    """One request as the database has it now. `decisions` stand in the order of the configured variants.

    waiting: decision id to the number of rows that come before it, while it is queued.
    """

    request: RequestView
    decisions: tuple[DecisionView, ...]
    waiting: dict[int, int]
    workers: tuple[WorkerView, ...]

    @property
    def is_finished(self) -> bool:
        return all(decision.is_finished for decision in self.decisions)


def load_snapshot(submitter: Submitter, request_id: int) -> Snapshot | None:
    """What is known of a request, or `None` if there is none of this id."""
    order = variant_order(submitter.settings)
    with submitter.database.read() as session:
        request = store.get_request(session, request_id)
        if request is None:
            return None
        decisions = store.list_decisions(session, request_id)
        waiting = {}
        for decision in decisions:
            if decision.status == "queued":
                waiting[decision.id] = store.queue_position(session, decision.id) or 0
        workers = store.live_workers(session)
    decisions.sort(key=lambda decision: order.index(decision.variant) if decision.variant in order else len(order))
    return Snapshot(request, tuple(decisions), waiting, tuple(workers))


def variant_order(settings: Settings) -> list[str]:
    """The default variant first, which fills the bars; then the others as configured."""
    others = [variant for variant in settings.variants if variant != settings.default_variant]
    return [settings.default_variant, *others]


def results_html(snapshot: Snapshot, settings: Settings) -> str:
    """Everything the page says about a request: facts, what is still awaited, what failed, the answers."""
    done = [decision for decision in snapshot.decisions if decision.status == "done"]
    parts = []
    if done:
        parts.append(_facts(snapshot, done, settings))
    parts += [_pending(snapshot, decision) for decision in snapshot.decisions if not decision.is_finished]
    parts += [_failed(decision) for decision in snapshot.decisions if decision.status in ("failed", "cancelled")]
    if done:
        questions = parse_questions(snapshot.request.questions)
        shown = [_shown(decision, questions, settings) for decision in done]
        parts.append(_agreement(questions, shown))
        parts.append(answers_html(questions, shown, settings.confidence))
        parts.append(f'<p class="hint">Confidence: {escape(CONFIDENCE_MEANING[settings.confidence])}.</p>')
    return f'<div class="results" data-request="{snapshot.request.id}">{"".join(parts)}</div>'


def responses(snapshot: Snapshot, settings: Settings) -> dict[str, str]:
    """Per finished variant the SystemOne response as indented JSON, as `GET /v1/decisions/{id}` gives it."""
    done = [decision for decision in snapshot.decisions if decision.status == "done"]
    questions = parse_questions(snapshot.request.questions) if done else {}
    return {
        decision.variant: json.dumps(
            build_response(
                snapshot.request.asked_model,
                decision.variant,
                questions,
                decision.log_probs or {},
                decision.input_tokens or 0,
                decision.truncated_tokens or 0,
                settings.confidence,
            ),
            ensure_ascii=False,
            indent=2,
        )
        for decision in done
    }


def _shown(decision: DecisionView, questions: dict[str, AnyQuestion], settings: Settings) -> Shown:
    log_probs = decision.log_probs or {}
    return Shown(decision.variant, log_probs, build_answers(questions, log_probs, settings.confidence))


def _facts(snapshot: Snapshot, done: Sequence[DecisionView], settings: Settings) -> str:
    request = snapshot.request
    facts = [Fact(variant_label(decision.variant), _latency(decision), _run_words(decision)) for decision in done]
    facts.append(Fact("Tokens", f"{done[0].input_tokens or 0:,}", f"of {settings.max_tokens:,} allowed"))
    cut = done[0].truncated_tokens
    note = f'<p class="cut">{cut:,} tokens were cut from the end of the state, as you allowed.</p>' if cut else ""
    return (
        f'<div class="saved"><a href="/?request={request.id}">Decision {request.id}</a>'
        f"<span>{time_html(request.created_at)}</span></div>"
        f"{facts_html(facts)}{note}"
    )


def _latency(decision: DecisionView) -> str:
    return "–" if decision.latency_ms is None else f"{decision.latency_ms:,.0f} ms"


def _run_words(decision: DecisionView) -> str:
    run = decision.run
    if run is None:
        return ""
    mode = run.linear_mode if run.linear_mode != run.variant else None
    return " · ".join(filter(None, [run.device, run.dtype, mode]))


def _agreement(questions: dict[str, AnyQuestion], shown: Sequence[Shown]) -> str:
    if len(shown) < 2:
        return ""
    num, total = num_differing(questions, shown), count(len(questions), "question")
    if num == 0:
        return f'<p class="summary">The variants give the same answer to {total}.</p>'
    return f'<p class="summary summary-differs">The variants differ in {num} of {total}.</p>'


def _pending(snapshot: Snapshot, decision: DecisionView) -> str:
    state = variant_state(decision.variant, snapshot.workers)["state"]
    before = snapshot.waiting.get(decision.id, 0)
    if decision.status == "running":
        words = "running"
    elif state == "absent":
        words = "waiting: no worker is running for this variant; the row is saved and starts when one comes"
    elif state == "failed":
        message = variant_facts(decision.variant, snapshot.workers)["message"]
        words = f"waiting: the worker failed ({message}) and is started again"
    elif state == "loading":
        words = "waiting: the worker is loading the model"
    else:
        words = "queued, next in line" if before == 0 else f"queued at position {before + 1}"
    return (
        f'<div class="pending"><i class="spinner"></i><b>{escape(variant_label(decision.variant))}</b>'
        f"<span>{escape(words)}</span></div>"
    )


def _failed(decision: DecisionView) -> str:
    label = escape(variant_label(decision.variant))
    if decision.status == "cancelled":
        return f'<div class="failed"><b>{label}</b> was cancelled.</div>'
    problems = [problem_of(item) for item in decision.error or []]
    return f'<div class="failed"><b>{label}</b> gave no answer.{problems_html(problems)}</div>'


def problem_of(stored: dict[str, Any]) -> Problem:
    """A problem as it was stored."""
    return Problem(tuple(stored["loc"]), stored["msg"], stored["type"])
