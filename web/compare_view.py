"""Comparisons as HTML: the list of them, the head of an opened one, and how far it is.

Takes views; knows no Gradio and no database. Names of batches and variants are escaped here. What came out of a
comparison is drawn by `web.compare_report`.
"""

from collections.abc import Mapping, Sequence
from html import escape

from clef_core.errors import count
from db.comparison_views import ComparisonItem, ComparisonProgress, ComparisonView
from web.bars import variant_label
from web.frame import Fact, empty_html, facts_html, time_html
from web.plots import Names
from worker.comparison_tables import percent
from worker.progress import describe_duration

STATUS_WORDS = {"running": "running", "summarising": "adding up", "done": "done", "cancelled": "stopped early"}
EMPTY_LIST = empty_html(
    "No comparison yet",
    "Run a batch first, then compare its rows in two variants here: how often they agree, how far apart they are, and "
    "how much of that is rounding.",
)
NOTHING_COMPARED = empty_html(
    "Nothing to compare", "No record has an answer of both runs. Resume goes on with what was stopped or failed."
)


def run_names(view: ComparisonView) -> Names:
    """The variants' names as the page prints them, told apart where a variant is compared with itself."""
    left, right = variant_label(view.left_variant), variant_label(view.right_variant)
    return Names(left, f"{right} again" if left == right else right)


# ---- list ----------------------------------------------------------------------------------------------------------


def comparisons_html(items: Sequence[ComparisonItem], progress: Mapping[int, ComparisonProgress]) -> str:
    """The comparisons as links, newest first; a running one has its bar."""
    if not items:
        return EMPTY_LIST
    rows = "".join(_item_html(item, progress.get(item.id)) for item in items)
    return f'<ul class="links">{rows}</ul>'


def _item_html(item: ComparisonItem, progress: ComparisonProgress | None) -> str:
    left, right = variant_label(item.left_variant), variant_label(item.right_variant)
    result = "" if item.agreement is None else f"{percent(item.agreement)} the same"
    bar = ""
    if progress is not None:
        share = _share(progress)
        result = f"{share:.0f} %"
        bar = f'<i class="h-bar" aria-hidden="true"><i style="width:{share:.1f}%"></i></i>'
    return (
        f'<li><a href="/compare?comparison={item.id}"><span class="h-title">{escape(item.name)}</span>'
        f'<span class="h-variants">{escape(left)} · {escape(right)}</span>'
        f'<span class="h-meta">{count(item.num_rows, "record")}</span>{bar}<span class="h-result">{result}</span>'
        f'<span class="status status-{item.status}">{STATUS_WORDS[item.status]}</span>'
        f"{time_html(item.created_at)}</a></li>"
    )


# ---- head and progress ---------------------------------------------------------------------------------------------


def comparison_head_html(view: ComparisonView) -> str:
    """What is compared."""
    names = run_names(view)
    floor = " · no noise floor" if view.floor_variant is None else ""
    return (
        f'<div class="batch-head"><h2>{escape(view.name)}</h2><p>Comparison {view.id} · {escape(names.left)} and '
        f'{escape(names.right)}{floor} · rows of <a href="/batch?batch={view.batch_id}">batch {view.batch_id}</a> · '
        f'{time_html(view.created_at)} · <a href="/compare">all comparisons</a></p></div>'
    )


def comparison_progress_html(view: ComparisonView, progress: ComparisonProgress) -> str:
    """Bar and numbers of a running comparison; nothing for a finished one, but for what is missing in it."""
    if progress.is_finished:
        return _missing_html(progress)
    done = progress.done + progress.failed
    share = _share(progress)
    word, note = _stage(view, progress)
    speed = f"{progress.decisions_per_s:.3g}" if progress.decisions_per_s else "–"
    left = describe_duration(progress.eta_s) if progress.eta_s else "–"
    sides = f"{count(len(view.variants), 'run')} of {count(view.num_rows, 'record')}"
    tiles = facts_html(
        [
            Fact("Decisions", f"{done:,}", f"of {progress.num_decisions:,}: {sides}"),
            Fact("Speed", speed, "decisions per second"),
            Fact("Time left", left, "at this speed"),
            Fact("Failed", f"{progress.failed:,}", "decisions", is_alert=progress.failed > 0),
        ]
    )
    return (
        f'<section class="panel progress" aria-live="polite"><div class="progress-head"><strong>{word}</strong>'
        f"<span>{note}</span><b>{share:.0f} %</b></div>"
        f'<div class="progress-track" role="progressbar" aria-label="Decisions" aria-valuemin="0" '
        f'aria-valuemax="{progress.num_decisions}" aria-valuenow="{done}"><i style="width:{share:.2f}%"></i></div>'
        f"{tiles}</section>"
    )


def _share(progress: ComparisonProgress) -> float:
    return 100 * (progress.done + progress.failed) / progress.num_decisions if progress.num_decisions else 0.0


def _stage(view: ComparisonView, progress: ComparisonProgress) -> tuple[str, str]:
    if progress.is_cancelled:
        return "Stopping", "decisions under way are kept"
    if progress.is_decided:
        return "Adding up", "all decisions are there, the report is being made"
    if view.stored_at is None:
        return "Running", "records are still being queued"
    if not (progress.running or progress.done or progress.failed):
        return "Waiting", "no worker has taken a record yet"
    return "Running", ""


def _missing_html(progress: ComparisonProgress) -> str:
    if not progress.cancelled and not progress.failed:
        return ""
    parts = [f"{count(progress.cancelled, 'decision')} not made"] if progress.cancelled else []
    parts += [f"{count(progress.failed, 'decision')} failed"] if progress.failed else []
    words = f"{' and '.join(parts)}: this covers the records that both runs answered"
    return f'<p class="summary summary-differs">{words}.</p>'
