"""What every screen shares: navigation, the line that says what this is, the workers' state, problems as a list.

It reads the workers' rows to say in plain words when a release carries random weights or when nothing would answer.
It knows nothing of the screens.
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path

import gradio as gr

from clef_core.errors import Problem, ReleaseError
from clef_core.release import read_release, resolve_release
from db import store
from db.views import WorkerView
from web.bars import variant_label
from web.status import VariantState, describe_variant
from worker.submit import Submitter

MARK = (
    '<svg viewBox="0 0 34 34" role="img" aria-label="Clef workbench">'
    '<rect class="m-track" x="3" y="6" width="28" height="5" rx="2.5"/><rect class="m-fill" x="3" y="6" width="21" height="5" rx="2.5"/>'
    '<rect class="m-track" x="3" y="15" width="28" height="5" rx="2.5"/><rect class="m-fill" x="3" y="15" width="12" height="5" rx="2.5"/>'
    '<rect class="m-track" x="3" y="24" width="28" height="5" rx="2.5"/><rect class="m-fill" x="3" y="24" width="7" height="5" rx="2.5"/>'
    '<path class="m-tick" d="M22 3.5v10M17 12.5v10M9 21.5v10"/></svg>'
)
WORKER_POLL_S = 5.0
WORKER_WORDS: dict[VariantState, str] = {
    "ready": "ready",
    "loading": "loading the model",
    "failed": "failed to load",
    "absent": "no worker",
}


def panel(value: str = "", **options: object) -> gr.HTML:
    """A piece of our own markup, without Gradio's prose styles and click handler."""
    return gr.HTML(value, apply_default_css=False, js_on_load=None, **options)


def draw_frame(submitter: Submitter, page: gr.Blocks, title: str, sentence: str) -> None:
    """Navigation, masthead, workers and the notice about random weights; call it first on each page."""
    gr.Navbar(main_page_name="Decide")
    panel(
        f'<header class="masthead">{MARK}<div class="words"><h1>{escape(title)}</h1><p>{escape(sentence)}</p></div></header>',
        elem_id="masthead",
    )
    notice = panel(elem_id="notice", visible=False)
    workers = panel(elem_id="workers")

    def look() -> tuple[object, str]:
        with submitter.database.read() as session:
            live = store.live_workers(session)
        text = random_notice(submitter, live)
        return gr.update(value=text, visible=bool(text)), workers_html(submitter, live)

    shown = {"outputs": [notice, workers], "show_progress": "hidden", "queue": False, "api_visibility": "private"}
    page.load(look, **shown)
    gr.Timer(WORKER_POLL_S).tick(look, **shown)


def random_notice(submitter: Submitter, live: Sequence[WorkerView]) -> str:
    """A banner that names the variants whose weights are random, or nothing."""
    facts = {variant: release for worker in live for variant, release in worker.releases.items()}
    random = [
        variant
        for variant, source in submitter.settings.variants.items()
        if (facts[variant].get("is_random") if variant in facts else _is_random(source))
    ]
    if not random:
        return ""
    names = " and ".join(escape(variant_label(variant)) for variant in random)
    settings = " and ".join(f"<code>CLEF_{escape(variant.upper())}</code>" for variant in random)
    return (
        f'<div class="banner" role="note"><strong>These answers mean nothing.</strong> {names} '
        f"{'runs' if len(random) == 1 else 'run'} on random weights, which only show that the machinery works. "
        f"Point {settings} at a real release to get decisions.</div>"
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
        facts = describe_variant(variant, list(live))
        words = WORKER_WORDS[facts["state"]]
        tooltip = f' title="{escape(facts["message"])}"' if facts["message"] else ""
        chips.append(
            f'<span class="chip chip-{facts["state"]}"{tooltip}><i></i><b>{escape(variant_label(variant))}</b> {words}</span>'
        )
    return f'<div class="chips" role="status" aria-label="Workers">{"".join(chips)}</div>'


def problems_html(problems: Iterable[Problem], *, skip: int = 0) -> str:
    """Problems as a list, each with its place; `skip` leaves out the first parts of the place."""
    items = "".join(f"<li>{_place(problem.loc[skip:])}{escape(problem.msg)}</li>" for problem in problems)
    return f'<ul class="problems" role="alert">{items}</ul>' if items else ""


def _place(loc: tuple[str | int, ...]) -> str:
    return f"<b>{escape(' › '.join(map(str, loc)))}</b> " if loc else ""


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
