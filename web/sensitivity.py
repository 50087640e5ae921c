"""Stored sensitivity runs as HTML: the list of them, and one with its plot.

The plot is that of `clef_core.sensitivity_plot`, as `sensitivity --plot` writes it. Knows no Gradio and no database;
names of releases and files are escaped here.
"""

from collections.abc import Sequence
from html import escape

from clef_core.errors import count
from clef_core.sensitivity_plot import PARTS_WORDS, sensitivity_svg
from db.store_sensitivity import SensitivityRunView
from web.frame import time_html

COMMAND = "python -m worker sensitivity BF16_DIR --requests FILE"


def sensitivity_list_html(runs: Sequence[SensitivityRunView], opened_id: int | None = None) -> str:
    """The stored runs as links; one line that says how to make the first."""
    what = "Which part of the model minds 4 bits: one part is rounded at a time and its answers are held against BF16."
    head = f'<h2 class="section">Sensitivity runs</h2><p class="hint">{what}</p>'
    if not runs:
        return f'{head}<p class="hint">None is stored yet. <code>{COMMAND}</code> makes one; its plot appears here.</p>'
    rows = "".join(
        f'<li><a href="/compare?sensitivity={run.id}"{_current(run.id == opened_id)}><span class="h-title">'
        f'{escape(_file_name(run.release))}</span><span class="h-meta">{escape(run.requests)}, '
        f"{count(run.results['num_requests'], 'request')}</span>"
        f'<span class="h-variants">one {PARTS_WORDS[run.parts]} at a time</span>{time_html(run.created_at)}</a></li>'
        for run in runs
    )
    return f'{head}<ul class="links">{rows}</ul>'


def sensitivity_html(run: SensitivityRunView) -> str:
    """One run with its plot."""
    requests = count(run.results["num_requests"], "request")
    title = f"{_file_name(run.release)}, {requests} of {run.requests}"
    made = ", ".join(f"{name} {run.provenance[name]}" for name in ("device", "dtype") if run.provenance.get(name))
    return (
        f'<section class="panel"><h3 class="panel-title">Sensitivity run {run.id}</h3>'
        f'<p class="hint">{escape(run.release)} · release {escape(run.release_checksum[:12])} · {escape(made)} · '
        f"{time_html(run.created_at)}</p>"
        f'<div class="wide-plot" tabindex="0">{sensitivity_svg(run.results, run.parts, title)}</div></section>'
    )


def _current(is_current: bool) -> str:
    return ' aria-current="page"' if is_current else ""


def _file_name(release: str) -> str:
    return release.rstrip("/").rsplit("/", 1)[-1]
