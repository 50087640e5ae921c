"""The Compare screen: two variants over the rows of a batch, side by side, with a noise floor.

This module is the list of comparisons and the form that starts one; `web.compare_opened` shows the one that the address
names. Stored sensitivity runs are listed below it. Requests are queued by a thread of their own, which goes on when the
tab closes.
"""

import logging
from queue import SimpleQueue
from threading import Thread
from typing import Any

import gradio as gr

from clef_core.errors import ClefError
from db import store
from db.comparison_views import ComparisonItem
from db.store_comparison_reads import comparison_progress, list_comparisons
from db.store_sensitivity import get_sensitivity_run, list_sensitivity_runs
from db.views import HistoryItem
from web.bars import variant_label
from web.compare_opened import FIRST_THRESHOLD, OpenedView
from web.compare_view import comparisons_html
from web.frame import QUIET, draw_frame, error_html, panel, stored_id
from web.results import variant_order
from web.sensitivity import sensitivity_html, sensitivity_list_html
from worker.compare import start_comparison
from worker.sides import choose_sides
from worker.submit import Submitter

logger = logging.getLogger(__name__)

LIST_POLL_S = 2.0
NUM_BATCHES = 50
REFERENCE = "bf16"
SENTENCE = "How far two variants are apart on your own rows, and how much of that is rounding noise."


class CompareScreen:
    """Builds the screen and holds what its handlers share; it keeps nothing of a visitor."""

    def __init__(self, submitter: Submitter, page: gr.Blocks) -> None:
        self.submitter = submitter
        self.database = submitter.database
        self.variants = variant_order(submitter.settings)
        draw_frame(submitter, page, "Compare", SENTENCE)
        self.problems = panel(elem_id="compare-problems")
        with gr.Column(elem_id="compare-setup") as setup:
            self.draw_form()
            panel('<h2 class="section">Comparisons</h2>')
            self.list = panel(elem_id="comparisons")
            self.plot = panel(elem_id="sensitivity-plot")
            self.sensitivity = panel(elem_id="sensitivity-runs")
            self.timer = gr.Timer(LIST_POLL_S, active=False)
        self.opened = OpenedView(submitter, setup, self.problems)
        self.wire(page)

    def draw_form(self) -> None:
        left = REFERENCE if REFERENCE in self.variants else self.variants[-1]
        with gr.Row(elem_classes=["compare-form"]):
            self.batch = gr.Dropdown(
                [],
                label="Rows of this finished batch",
                elem_id="compare-batch",
                interactive=True,
                scale=3,
                min_width=240,
            )
            self.left = self.draw_side("Reference", left, "compare-left")
            self.right = self.draw_side("Held against it", self.variants[0], "compare-right")
            self.floor = gr.Checkbox(
                True,
                label="Measure the noise floor",
                info="runs the reference once more",
                elem_id="compare-floor",
                interactive=True,
                min_width=160,
            )
            self.start = gr.Button("Compare", variant="primary", elem_id="compare-start", min_width=110, scale=0)
        panel(
            '<p class="hint">Every row is decided anew, alone in its forward, so that nothing but the variant moves a '
            "number. The noise floor is the reference in another batch shape: a difference inside it is rounding. "
            "The same variant on both sides must agree everywhere.</p>"
        )

    def draw_side(self, label: str, value: str, elem_id: str) -> gr.Dropdown:
        choices = [(variant_label(variant), variant) for variant in self.variants]
        return gr.Dropdown(choices, value=value, label=label, elem_id=elem_id, interactive=True, min_width=120)

    def wire(self, page: gr.Blocks) -> None:
        self.timer.tick(self.look, None, [self.list, self.timer], **QUIET)
        started = self.start.click(
            self.start_run,
            [self.batch, self.left, self.right, self.floor],
            [self.problems, self.opened.comparison_id],
            api_visibility="private",
            show_progress="minimal",
            show_progress_on=self.start,
            concurrency_limit=None,
        )
        self.opened.open_after(started)
        setup = [self.batch, self.list, self.timer, self.sensitivity, self.plot]
        page.load(self.restore, None, [self.opened.comparison_id, *setup, *self.opened.shown], **QUIET)

    # ---- handlers ----

    def restore(self, http: gr.Request) -> list[Any]:
        """At page load: what the address names, all in one answer, so that it is seen as soon as can be."""
        comparison_id, problem = self.asked(http, "comparison")
        batch_id, no_batch = self.asked(http, "batch")
        run_id, no_run = self.asked(http, "sensitivity")
        if comparison_id:
            return [comparison_id, *[gr.skip()] * 5, *self.opened.show(comparison_id, FIRST_THRESHOLD)]
        with self.database.read() as session:
            runs = list_sensitivity_runs(session)
            run = get_sensitivity_run(session, int(run_id)) if run_id else None
        problem = problem or no_batch or no_run
        return [
            "",
            self.batch_choices(int(batch_id) if batch_id else None),
            *self.look(),
            sensitivity_list_html(runs, None if run is None else run.id),
            "" if run is None else sensitivity_html(run),
            *self.opened.show_nothing(error_html(problem) if problem else ""),
        ]

    def asked(self, http: gr.Request, name: str) -> tuple[str, str]:
        """The id that the address gives for a name if there is such a thing, and else what is wrong with it."""
        text = http.query_params.get(name, "")
        if not text:
            return "", ""
        number = stored_id(text)
        if number is not None and self.exists(name, number):
            return text, ""
        return "", f"There is no {name}{' run' if name == 'sensitivity' else ''} {text[:20]!r} here."

    def exists(self, name: str, number: int) -> bool:
        with self.database.read() as session:
            if name == "batch":
                return store.get_batch(session, number) is not None
            if name == "sensitivity":
                return get_sensitivity_run(session, number) is not None
            try:
                comparison_progress(session, number)
            except LookupError:
                return False
            return True

    def batch_choices(self, chosen: int | None) -> Any:
        """The finished batches, newest first; the one that the address names is chosen, else the newest."""
        with self.database.read() as session:
            batches = store.list_history(session, kind="batch", limit=NUM_BATCHES)
            asked = None if chosen is None else store.get_batch(session, chosen)
        choices = [(_batch_words(item), str(item.id)) for item in batches if item.status == "done"]
        values = [value for _, value in choices]
        if asked is not None and str(asked.id) not in values:
            choices.insert(0, (f"{asked.name} (batch {asked.id}, {asked.num_rows:,} rows)", str(asked.id)))
        value = str(chosen) if chosen is not None else next(iter(values), None)
        info = None if choices else "There is none yet: run one on the Batch screen."
        return gr.update(choices=choices, value=value, info=info)

    def look(self) -> tuple[str, Any]:
        """The list now; the timer goes on while one of them runs."""
        with self.database.read() as session:
            items: list[ComparisonItem] = list_comparisons(session)
            running = [item.id for item in items if item.status in ("running", "summarising")]
            progress = {number: comparison_progress(session, number) for number in running}
        return comparisons_html(items, progress), gr.Timer(active=bool(running))

    def start_run(self, batch_id: str | None, left: str, right: str, floor: bool) -> tuple[str, Any]:
        """Queue everything in a thread; the page turns to the comparison as soon as it has an id."""
        if not batch_id:
            return error_html("Choose a finished batch first; the Batch screen makes one."), gr.skip()
        news: SimpleQueue[int | ClefError] = SimpleQueue()
        args = (int(batch_id), left, right, floor, news)
        Thread(target=self.store_run, args=args, name="store-comparison").start()
        first = news.get()
        return ("", str(first)) if isinstance(first, int) else (error_html(str(first)), gr.skip())

    def store_run(
        self, batch_id: int, left: str, right: str, floor: bool, news: "SimpleQueue[int | ClefError]"
    ) -> None:
        """Runs in the thread; says the comparison's id, or why there is none."""
        try:
            sides = choose_sides(self.submitter.settings, left, right, has_floor=floor)
            start_comparison(
                self.submitter,
                batch_id,
                left=sides.left,
                right=sides.right,
                floor=sides.floor,
                parameters=sides.to_parameters(),
                on_created=news.put,
            )
        except ClefError as error:
            logger.warning("comparing batch %d stopped: %s", batch_id, error)
            news.put(error)


def _batch_words(item: HistoryItem) -> str:
    return f"{item.title} (batch {item.id}, {item.summary.split(',')[0]})"
