"""The half of the Compare screen that shows one comparison: progress, report, flips, a threshold to try, downloads.

Everything is read from the database by the id in the address, so that a reload, another tab or a restarted server show
the same. A timer asks once a second while it runs; what is decided and not yet added up is added up here, a piece per
tick, if nobody else has done it.
"""

import json
import time
from typing import Any

import gradio as gr

from clef_core.comparison_report import Report
from db.comparison_views import ComparisonView
from web.compare_flips import FlipsView
from web.compare_report import report_html, threshold_html
from web.compare_view import NOTHING_COMPARED, comparison_head_html, comparison_progress_html, run_names
from web.frame import QUEUED, QUIET, error_html, panel, stored_id
from web.uploads import new_download
from worker.compare import ComparisonError, continue_comparison, look_at_progress, open_comparison, stop_comparison
from worker.comparison_export import ComparisonFormat, comparison_json, write_comparison_csv, write_comparison_jevl
from worker.comparison_summary import summarise_comparison
from worker.comparison_tables import comparison_markdown
from worker.submit import Submitter

POLL_S = 1.0
SUMMARY_BUDGET_S = 1.0
FIRST_THRESHOLD = 0.8
DOWNLOADS: tuple[tuple[ComparisonFormat, str, str], ...] = (
    ("json", "JSON", "json"),
    ("markdown", "Markdown", "md"),
    ("csv", "CSV", "csv"),
    ("jevl", ".jevl", "jevl"),
)
SHOW_IN_ADDRESS = """(id) => {
    const url = new URL(window.location);
    url.search = '';
    if (id) url.searchParams.set('comparison', id);
    window.history.replaceState(null, '', url);
}"""
CLICK_DOWNLOAD = "(link) => link && setTimeout(() => document.querySelector('#download-file')?.click(), 150)"


class OpenedView:
    """Draws and wires the view; it keeps nothing of a visitor."""

    def __init__(self, submitter: Submitter, setup: gr.Column, problems: gr.HTML) -> None:
        self.submitter = submitter
        self.database = submitter.database
        self.setup = setup
        self.problems = problems
        with gr.Column(elem_id="comparison", visible=False) as self.frame:
            self.draw()
        self.wire()

    def draw(self) -> None:
        with gr.Row(elem_classes=["run-bar"]):
            self.head = panel(elem_id="comparison-head")
            with gr.Row(elem_classes=["run-actions"]):
                self.cancel = gr.Button("Cancel", variant="stop", elem_id="cancel", min_width=0)
                self.resume = gr.Button("Resume", variant="primary", elem_id="resume", min_width=0)
                self.buttons = [
                    gr.Button(words, elem_id=f"download-{kind}", min_width=0, size="md") for kind, words, _ in DOWNLOADS
                ]
        self.progress = panel(elem_id="progress")
        self.report = panel(elem_id="report")
        with gr.Column(elem_id="explore", elem_classes=["explore"], visible=False) as self.explore:
            panel('<h2 class="section">Act only when it is sure</h2>')
            self.threshold = gr.Slider(
                0,
                1,
                FIRST_THRESHOLD,
                step=0.01,
                label="Act only above confidence",
                interactive=True,
                elem_id="threshold",
            )
            self.coverage = panel(elem_id="coverage")
            panel('<h2 class="section">Answer by answer</h2>')
            self.flips = FlipsView(self.database, self.submitter.settings)
        self.file = gr.DownloadButton("File", visible="hidden", elem_id="download-file")
        # In the browser, not in the session: a restarted server still learns which comparison the page shows.
        self.comparison_id = gr.Textbox(visible=False, elem_id="comparison-id")
        self.timer = gr.Timer(POLL_S, active=False)

    @property
    def shown(self) -> list[gr.components.Component]:
        """Outputs of `show`."""
        frame = [self.timer, self.setup, self.frame, self.cancel, self.resume, *self.buttons]
        texts = [self.problems, self.head, self.progress, self.report]
        return [*frame, *texts, self.explore, self.coverage, self.flips.question, *self.flips.shown]

    def wire(self) -> None:
        reads: dict[str, Any] = {"inputs": [self.comparison_id, self.threshold], "outputs": self.shown, **QUIET}
        self.timer.tick(self.show, **reads)
        self.cancel.click(self.stop, **reads)
        self.resume.click(self.go_on, **reads)
        self.threshold.change(
            self.try_threshold,
            [self.comparison_id, self.threshold],
            self.coverage,
            trigger_mode="always_last",
            **QUIET,
        )
        self.flips.wire(self.comparison_id, QUEUED)
        for button, (kind, _, suffix) in zip(self.buttons, DOWNLOADS, strict=True):
            button.click(
                lambda comparison_id, kind=kind, suffix=suffix: self.export(comparison_id, kind, suffix),
                self.comparison_id,
                [self.file, self.problems],
                api_visibility="private",
                show_progress="minimal",
                show_progress_on=button,
                concurrency_limit=2,
            ).success(None, self.file, None, js=CLICK_DOWNLOAD, api_visibility="private")

    def open_after(self, event: Any) -> None:
        """Show the comparison whose id an event has set, and put it into the address."""
        event.success(self.show, [self.comparison_id, self.threshold], self.shown, **QUIET).then(
            None, self.comparison_id, None, js=SHOW_IN_ADDRESS, api_visibility="private"
        )

    # ---- handlers ----

    def show(self, comparison_id: str, threshold: float) -> list[Any]:
        """What the page shows of a comparison now; the timer stops when nothing more will come."""
        number = stored_id(comparison_id)
        if number is None:
            return self.show_nothing(gr.skip())
        progress = look_at_progress(self.database, number)
        if progress.is_decided and not progress.is_finished:
            summarise_comparison(self.database, number, deadline=time.monotonic() + SUMMARY_BUDGET_S)
            progress = look_at_progress(self.database, number)
        view, report = open_comparison(self.database, number)
        can_resume = progress.is_finished and progress.cancelled > 0 and self.is_configured(view)
        body = NOTHING_COMPARED if report is None and progress.is_finished else ""
        return [
            gr.Timer(active=not progress.is_finished),
            gr.update(visible=False),
            gr.update(visible=True),
            gr.update(visible=not progress.is_decided and not progress.is_cancelled),
            gr.update(visible=can_resume),
            *[gr.update(visible=report is not None)] * len(self.buttons),
            gr.skip(),
            comparison_head_html(view),
            comparison_progress_html(view, progress),
            body if report is None else report_html(view, report),
            *self.show_parts(view, report, threshold),
        ]

    def show_nothing(self, problem: Any) -> list[Any]:
        """Values for `shown` while no comparison is opened."""
        shown = dict.fromkeys(self.shown, gr.skip())
        shown |= {self.timer: gr.Timer(active=False), self.problems: problem}
        shown |= {self.setup: gr.update(visible=True), self.frame: gr.update(visible=False)}
        return list(shown.values())

    def show_parts(self, view: ComparisonView, report: Report | None, threshold: float) -> list[Any]:
        """What one can play with: the threshold and the list of answers, from their beginning."""
        if report is None:
            return [gr.update(visible=False), "", gr.skip(), *self.flips.show_nothing()]
        questions = [("every question", ""), *((name, name) for name in report.questions)]
        return [
            gr.update(visible=True),
            threshold_html(report.coverage, run_names(view), threshold),
            gr.update(choices=questions, value="", visible=len(questions) > 2),
            *self.flips.show(str(view.id), "all", "", "margin", page_number=0),
        ]

    def is_configured(self, view: ComparisonView) -> bool:
        """Whether the workers of this app can go on with it; one of other releases goes on in the command line."""
        return set(view.variants.values()) <= set(self.submitter.settings.variants)

    def stop(self, comparison_id: str, threshold: float) -> list[Any]:
        stop_comparison(self.database, int(comparison_id))
        return self.show(comparison_id, threshold)

    def go_on(self, comparison_id: str, threshold: float) -> list[Any]:
        continue_comparison(self.submitter, int(comparison_id))
        return self.show(comparison_id, threshold)

    def try_threshold(self, comparison_id: str, threshold: float) -> str:
        number = stored_id(comparison_id)
        if number is None:
            return ""
        view, report = open_comparison(self.database, number)
        return "" if report is None else threshold_html(report.coverage, run_names(view), threshold)

    def export(self, comparison_id: str, kind: ComparisonFormat, suffix: str) -> tuple[Any, str]:
        """Write a comparison into a file."""
        try:
            view, report = open_comparison(self.database, int(comparison_id))
        except ComparisonError as error:
            return None, error_html(str(error))
        if report is None:
            return None, error_html("There is nothing to download yet.")
        path = new_download(f"comparison-{view.id}.{suffix}")
        with path.open("w", encoding="utf-8", newline="") as out:
            match kind:
                case "json":
                    json.dump(comparison_json(view, report), out, ensure_ascii=False, indent=2)
                case "markdown":
                    out.write(comparison_markdown(view, report))
                case "csv":
                    write_comparison_csv(self.database, view.id, out)
                case "jevl":
                    write_comparison_jevl(self.database, view, out)
        return str(path), ""
