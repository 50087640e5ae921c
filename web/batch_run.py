"""The half of the Batch screen that shows a batch: progress, cancel and resume, failures, first answers, downloads.

Everything is read from the database by the id in the address, so that a reload, another tab or a restarted server show
the same. A timer asks once a second while the batch is unfinished.
"""

from itertools import islice
from typing import Any

import gradio as gr

from clef_core.errors import ClefError
from db import store
from db.store_failures import first_failures
from web.batch_view import answers_table_html, batch_head_html, failures_html, progress_html, recent_html
from web.frame import QUEUED, QUIET, error_html, panel, stored_id
from web.uploads import new_download
from worker.submit import Submitter
from worker.tables import ExportFormat, export_batch

POLL_S = 1.0
NUM_SHOWN_ROWS = 20
NUM_SHOWN_FAILURES = 10
NUM_RECENT = 12

SHOW_IN_ADDRESS = """(id) => {
    const url = new URL(window.location);
    if (id) url.searchParams.set('batch', id);
    window.history.replaceState(null, '', url);
}"""
CLICK_DOWNLOAD = "(link) => link && setTimeout(() => document.querySelector('#download-file')?.click(), 150)"


class RunView:
    """Draws and wires the view; it keeps nothing of a visitor."""

    def __init__(self, submitter: Submitter, page: gr.Blocks, setup: gr.Column, problems: gr.HTML) -> None:
        self.submitter = submitter
        self.setup = setup
        self.problems = problems
        with gr.Column(elem_id="run-view", visible=False) as self.frame:
            self.draw()
        self.recent = panel(elem_id="recent-batches")
        self.wire(page)

    def draw(self) -> None:
        with gr.Row(elem_classes=["run-bar"]):
            self.head = panel(elem_id="batch-head")
            with gr.Row(elem_classes=["run-actions"]):
                self.cancel = gr.Button("Cancel", variant="stop", elem_id="cancel", min_width=0)
                self.resume = gr.Button("Resume", variant="primary", elem_id="resume", min_width=0)
                self.compare = gr.Button("Compare", elem_id="compare", min_width=0)
                self.csv = gr.Button("Download CSV", elem_id="download-csv", min_width=0)
                self.jsonl = gr.Button("Download JSONL", elem_id="download-jsonl", min_width=0)
        self.progress = panel(elem_id="progress")
        self.failures = panel(elem_id="failures")
        self.answers = panel(elem_id="first-answers")
        self.file = gr.DownloadButton("File", visible="hidden", elem_id="download-file")
        # In the browser, not in the session: a restarted server still learns which batch the page shows.
        self.batch_id = gr.Textbox(visible=False, elem_id="batch-id")
        self.timer = gr.Timer(POLL_S, active=False)

    @property
    def shown(self) -> list[gr.components.Component]:
        """Outputs of `show`."""
        texts = [self.problems, self.head, self.progress, self.failures, self.answers, self.recent]
        return [self.timer, self.setup, self.frame, self.cancel, self.resume, self.compare, *texts]

    def wire(self, page: gr.Blocks) -> None:
        reads: dict[str, Any] = {"inputs": self.batch_id, "outputs": self.shown, **QUIET}
        self.timer.tick(self.show, **reads)
        self.batch_id.change(self.show, **reads).then(
            None, self.batch_id, None, js=SHOW_IN_ADDRESS, api_visibility="private"
        )
        self.cancel.click(self.cancel_run, **reads)
        self.resume.click(self.resume_run, **reads)
        page.load(self.restore, None, [self.batch_id, self.problems, self.recent], **QUEUED)
        self.wire_download(self.csv, "csv")
        self.wire_download(self.jsonl, "jsonl")

    def wire_download(self, button: gr.Button, kind: ExportFormat) -> None:
        button.click(
            lambda batch_id: self.export(batch_id, kind),
            self.batch_id,
            [self.file, self.problems],
            api_visibility="private",
            show_progress="minimal",
            show_progress_on=button,
            concurrency_limit=2,
        ).success(None, self.file, None, js=CLICK_DOWNLOAD, api_visibility="private")

    # ---- handlers ----

    def restore(self, http: gr.Request) -> tuple[str, str, str]:
        """At page load: the batch that the address names; setting its id shows it."""
        asked = http.query_params.get("batch", "")
        number = stored_id(asked)
        known = number is not None and self.exists(number)
        problem = error_html(f"There is no batch {asked[:20]!r} here.") if asked and not known else ""
        return asked if known else "", problem, self.recent_batches()

    def exists(self, batch_id: int) -> bool:
        with self.submitter.database.read() as session:
            return store.get_batch(session, batch_id) is not None

    def recent_batches(self) -> str:
        with self.submitter.database.read() as session:
            return recent_html(store.list_history(session, kind="batch", limit=NUM_RECENT))

    def show(self, batch_id: str) -> list[Any]:
        """What the page shows of a batch now; the timer stops when nothing more will come."""
        number = stored_id(batch_id)
        with self.submitter.database.read() as session:
            batch = None if number is None else store.get_batch(session, number)
            if batch is None or number is None:
                return [gr.Timer(active=False), gr.update(visible=True), gr.update(visible=False), *[gr.skip()] * 9]
            progress = store.batch_progress(session, number)
            failures = first_failures(session, number, NUM_SHOWN_FAILURES)
            rows = list(islice(store.iter_results(session, number, chunk=NUM_SHOWN_ROWS), NUM_SHOWN_ROWS))
            recent = store.list_history(session, kind="batch", limit=NUM_RECENT)
        is_over = progress.is_finished and not progress.running
        return [
            gr.Timer(active=not is_over),
            gr.update(visible=False),
            gr.update(visible=True),
            gr.update(visible=not progress.is_finished and not progress.is_cancelled),
            gr.update(visible=progress.cancelled > 0 and not progress.queued),
            gr.update(visible=is_over, link=f"/compare?batch={number}", link_target="_self"),
            gr.skip(),
            batch_head_html(batch),
            progress_html(batch, progress),
            failures_html(failures, progress.failed),
            answers_table_html(rows, batch.variants),
            recent_html(recent),
        ]

    def cancel_run(self, batch_id: str) -> list[Any]:
        self.submitter.cancel_batch(int(batch_id))
        return self.show(batch_id)

    def resume_run(self, batch_id: str) -> list[Any]:
        self.submitter.resume_batch(int(batch_id))
        return self.show(batch_id)

    def export(self, batch_id: str, kind: ExportFormat) -> tuple[Any, str]:
        """Write what there is of a batch into a file; unfinished rows say so."""
        path = new_download(f"batch-{int(batch_id)}.{kind}")
        try:
            with path.open("w", encoding="utf-8", newline="") as out:
                export_batch(
                    self.submitter.database, int(batch_id), kind, out, confidence=self.submitter.settings.confidence
                )
        except ClefError as error:
            return None, error_html(str(error))
        return str(path), ""
