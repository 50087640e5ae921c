"""What every screen shares: navigation, the line that says what this is, the workers' state, problems as a list.

It reads the workers' rows to say in plain words when a release is small or random or when nothing would answer.
It knows nothing of the screens.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from clef_core.errors import Problem, ReleaseError
from clef_core.release import read_release, resolve_release
from db import store
from db.views import WorkerView
from web.bars import variant_label
from web.status import VariantState, variant_facts, variant_state
from worker.settings import PROJECT_DIR
from worker.submit import Submitter

_MARK_BARS = ((6, 21, 22), (15, 12, 17), (24, 7, 9))  # y, width, tick
MARK = (
    '<svg viewBox="0 0 34 34" aria-hidden="true">'
    + "".join(
        f'<rect class="m-track" x="3" y="{y}" width="28" height="5" rx="2.5"/>'
        f'<rect class="m-fill" x="3" y="{y}" width="{width}" height="5" rx="2.5"/>'
        f'<path class="m-tick" d="M{tick} {y - 2.5}v10"/>'
        for y, width, tick in _MARK_BARS
    )
    + "</svg>"
)
FIELD_WORDS = {"criteria": "Options", "instructions": "Instructions", "type": "Type"}
WORKER_POLL_S = 5.0
NANO_RELEASES = {PROJECT_DIR / "checkpoints" / f"nano-{kind}" for kind in ("bf16", "mxfp4")}
WORKER_WORDS: dict[VariantState, str] = {
    "ready": "ready",
    "loading": "loading the model",
    "failed": "failed to load",
    "absent": "no worker",
}


QUIET: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden", "queue": False}
"""For events that answer at once and should not be seen working."""
QUEUED = QUIET | {"queue": True}
"""The same for events that set a `gr.State`: only queued ones tell the page that it changed. Or that take a while."""


def stored_id(text: str) -> int | None:
    """The id that somebody wrote into an address, or `None` if no database could hold it."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else None


def panel(value: str = "", **options: object) -> gr.HTML:
    """A piece of our own markup, without Gradio's prose styles and click handler."""
    return gr.HTML(value, apply_default_css=False, js_on_load=None, **options)


def draw_frame(submitter: Submitter, page: gr.Blocks, title: str, sentence: str) -> None:
    """Navigation, masthead, workers and the notice about small or random weights; call it first on each page."""
    gr.Navbar(main_page_name="Decide")
    words = f'<div class="words"><h1>{escape(title)}</h1><p>{escape(sentence)}</p></div>'
    with gr.Row(elem_classes=["top"]):
        panel(f'<header class="masthead">{MARK}{words}</header>', elem_id="masthead")
        workers = panel(elem_id="workers")
    notice = panel(elem_id="notice", visible=False)

    def look() -> tuple[object, str]:
        with submitter.database.read() as session:
            live = store.live_workers(session)
        text = random_notice(submitter, live) + nano_notice(submitter.settings.variants)
        return gr.update(value=text, visible=bool(text)), workers_html(submitter, live)

    page.load(look, None, [notice, workers], **QUIET)
    gr.Timer(WORKER_POLL_S).tick(look, None, [notice, workers], **QUIET)


def variants_radio(variants: Sequence[str], elem_id: str) -> gr.Radio:
    """Which variants to ask: all or one. Its value is their names, joined by commas."""
    choices = [(variant_label(variant), variant) for variant in variants]
    if len(variants) > 1:
        choices = [("Both" if len(variants) == 2 else "All", ",".join(variants)), *choices]
    return gr.Radio(
        choices,
        value=choices[0][1],
        label="Decide with",
        show_label=False,
        container=False,
        elem_id=elem_id,
        elem_classes=["segmented"],
        min_width=0,
        interactive=True,
    )


def remembered_questions() -> gr.BrowserState:
    """The questions that this browser had on the Decide screen; never on the server. The secret hides nothing."""
    return gr.BrowserState("", storage_key="clef-questions", secret="clef-workbench")


def random_notice(submitter: Submitter, live: Sequence[WorkerView]) -> str:
    """A banner that names the variants whose weights are random, or nothing."""
    facts = {variant: release for worker in live for variant, release in worker.releases.items()}
    random = [
        variant
        for variant, source in submitter.settings.variants.items()
        if (facts[variant].get("is_random") if variant in facts else _is_random(source))
    ]
    what = "random weights, which only show that the machinery works"
    return _notice("random-notice", "These answers mean nothing.", random, what, "to get decisions")


def nano_notice(variants: Mapping[str, str]) -> str:
    """A line that names the variants that run the small releases shipped with the project, or nothing."""
    nano = [variant for variant, source in variants.items() if Path(source) in NANO_RELEASES]
    what = "a model of 14 million parameters that is often wrong"
    return _notice("nano-notice", "This is clef-nano, not Clef.", nano, what, "for decisions that matter")


def _notice(css_class: str, headline: str, variants: Sequence[str], what: str, purpose: str) -> str:
    """What the variants run on, and which settings change that; nothing where there are none."""
    if not variants:
        return ""
    names = " and ".join(escape(variant_label(variant)) for variant in variants)
    settings = " and ".join(f"<code>CLEF_{escape(variant.upper())}</code>" for variant in variants)
    return (
        f'<div class="{css_class}" role="note"><strong>{headline}</strong> {names} '
        f"{'runs' if len(variants) == 1 else 'run'} on {what}. Point {settings} at a real release {purpose}.</div>"
    )


def _is_random(source: str) -> bool:
    if not Path(source).is_dir():  # a hub id: its worker will say
        return False
    try:
        return read_release(resolve_release(source)).is_random
    except ReleaseError:
        return False


def workers_html(submitter: Submitter, live: Sequence[WorkerView]) -> str:
    """One chip per variant: what its worker is doing."""
    chips = []
    for variant in submitter.settings.variants:
        state = variant_state(variant, live)["state"]
        message = variant_facts(variant, live)["message"]
        tooltip = f' title="{escape(message)}"' if message else ""
        label = escape(variant_label(variant))
        chips.append(f'<span class="chip chip-{state}"{tooltip}><i></i><b>{label}</b> {WORKER_WORDS[state]}</span>')
    return f'<div class="chips" role="status" aria-label="Workers">{"".join(chips)}</div>'


def problems_html(problems: Iterable[Problem], *, skip: int = 0) -> str:
    """Problems as a list, each with its place; `skip` leaves out the first parts of the place."""
    items = "".join(f"<li>{_place(problem.loc[skip:])}{escape(problem.msg)}</li>" for problem in problems)
    return f'<ul class="problems" role="alert">{items}</ul>' if items else ""


def _place(loc: tuple[str | int, ...]) -> str:
    if not loc:
        return ""
    first, *rest = loc
    if first == "images" and rest and isinstance(rest[0], int):
        first, rest = f"Image {rest[0] + 1}", rest[1:]
    words = [FIELD_WORDS.get(str(first), str(first)), *map(str, rest)]
    return f"<b>{escape(' › '.join(words))}</b> "


def error_html(message: str) -> str:
    """One message in the shape of a problem; its lines stay lines."""
    return problems_html(Problem((), line, "error") for line in message.splitlines())


@dataclass(frozen=True)
class Fact:
    """A number with its name and a small remark; plain text."""

    name: str
    value: str
    note: str = ""
    is_alert: bool = False


def facts_html(facts: Iterable[Fact]) -> str:
    """Facts side by side."""
    cells = "".join(
        f'<div class="fact{" fact-alert" if fact.is_alert else ""}"><dt>{escape(fact.name)}</dt>'
        f'<dd>{escape(fact.value)}</dd><dd class="fact-note">{escape(fact.note)}</dd></div>'
        for fact in facts
    )
    return f'<dl class="facts">{cells}</dl>'


def empty_html(title: str, text: str) -> str:
    """What stands where nothing is yet. Plain text."""
    return f'<div class="empty"><h3>{escape(title)}</h3><p>{escape(text)}</p></div>'


def time_html(moment: datetime) -> str:
    """A moment as the page prints it: UTC with its offset in the tooltip, relative in the text when it is near."""
    age_s = (datetime.now(UTC) - moment).total_seconds()
    if age_s < 60:
        words = "just now"
    elif age_s < 3600:
        words = f"{int(age_s // 60)} min ago"
    elif age_s < 86400:
        words = f"{int(age_s // 3600)} h ago"
    else:
        words = f"{moment:%d %b %Y}"
    return f'<time datetime="{moment.isoformat()}" title="{moment:%Y-%m-%d %H:%M:%S} UTC">{words}</time>'
