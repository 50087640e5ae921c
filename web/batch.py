"""The Batch screen: a table in, progress, the same table with answers out.

This module is the form: a table, its columns, the questions, and beside it a dry run. `web.batch_run` shows the batch
that comes of it. Rows are stored by a thread of their own, which goes on when the tab closes.
"""

import logging
from collections.abc import Iterator, Mapping
from queue import SimpleQueue
from threading import Thread
from typing import Any

import gradio as gr

from clef_core.errors import ClefError
from clef_core.tokens import PromptTokenizer
from web.batch_form import BatchDraft, CheckedBatch, check_draft, dry_run, first_rows, guess_columns, open_table
from web.batch_run import RunView
from web.batch_view import EMPTY_PREVIEW, plan_html, preview_html, table_html
from web.examples import BATCH_FILE, BATCH_QUESTIONS
from web.frame import QUEUED, draw_frame, error_html, panel, remembered_questions, variants_radio
from web.results import variant_order
from web.uploads import publish_file, uploaded
from worker.progress import tokens_per_s
from worker.questions_file import load_questions
from worker.submit import Submitter

logger = logging.getLogger(__name__)

AUTO_DRY_RUN_ROWS = 2_000
"""A longer table waits for the button: going through 50,000 rows takes half a minute."""

SENTENCE = "Ask the same questions about every row of a table, and get the table back with the answers beside the rows."


class BatchScreen:
    """Builds the screen and holds what its handlers share; it keeps nothing of a visitor."""

    def __init__(self, submitter: Submitter, tokenizers: Mapping[str, PromptTokenizer], page: gr.Blocks) -> None:
        self.submitter = submitter
        self.settings = submitter.settings
        self.variants = variant_order(submitter.settings)
        self.tokenizers = tokenizers
        draw_frame(submitter, page, "Batch", SENTENCE)
        run_problems = panel(elem_id="run-problems")
        with gr.Column(elem_id="setup") as setup, gr.Row(equal_height=False, elem_classes=["screen"]):
            with gr.Column(scale=6, min_width=300, elem_classes=["inputs"]):
                self.draw_table()
                self.draw_questions()
            with gr.Column(scale=5, min_width=300, elem_classes=["outputs"]):
                self.draw_check()
        self.view = RunView(submitter, page, setup, run_problems)
        self.wire()

    # ---- layout ----

    def draw_table(self) -> None:
        panel('<h2 class="step"><span>1</span>Table</h2>')
        with gr.Row(elem_classes=["files"]):
            self.file = gr.File(
                label="CSV or JSONL, in UTF-8",
                file_types=[".csv", ".jsonl", ".ndjson", ".txt"],
                elem_id="batch-file",
                height=130,
                min_width=200,
            )
            self.zip = gr.File(
                label="Zip of images, if a column names them",
                file_types=[".zip"],
                elem_id="batch-zip",
                height=130,
                min_width=200,
            )
        with gr.Row(elem_classes=["examples"]):
            self.example = gr.Button(
                "Take the example: 40 messages", size="sm", elem_id="batch-example", elem_classes=["pill"]
            )
            self.table_line = panel(elem_id="table-line")
        panel('<h2 class="step"><span>2</span>Columns</h2>')
        with gr.Group(elem_classes=["columns-form"]):
            self.state = _columns("State: one column is a text, several become an object", "map-state", many=True)
            with gr.Row():
                self.id = _columns("Row id (optional)", "map-id", many=False)
                self.images = _columns("Images (optional)", "map-images", many=False)
            self.labels = _columns(
                "Right answers (optional): columns label or label:<question>", "map-labels", many=True
            )

    def draw_questions(self) -> None:
        panel('<h2 class="step"><span>3</span>Questions</h2>')
        with gr.Row(elem_classes=["examples"]):
            self.upload_questions = gr.UploadButton(
                "Upload a questions file",
                file_types=[".json", ".yaml", ".yml"],
                size="sm",
                elem_id="upload-questions",
                elem_classes=["pill"],
            )
            self.take_questions = gr.Button(
                "Take those of the Decide screen", size="sm", elem_id="take-questions", elem_classes=["pill"]
            )
        self.questions = gr.Code(
            language="json",
            label="Questions as JSON or YAML",
            interactive=True,
            lines=8,
            max_lines=24,
            elem_id="batch-questions",
            wrap_lines=True,
        )
        self.questions_note = panel(elem_id="questions-note")
        self.remembered = remembered_questions()

    def draw_check(self) -> None:
        with gr.Row(elem_classes=["decide-bar"]):
            self.chosen = variants_radio(self.variants, "batch-variants")
            self.run = gr.Button("Run", variant="primary", elem_id="run", min_width=120, scale=0)
        self.problems = panel(elem_id="batch-problems")
        self.plan = panel(elem_id="plan")
        self.check_all = gr.Button("Check all rows", size="md", visible=False, elem_id="check-all")
        self.preview = panel(EMPTY_PREVIEW, elem_id="preview")

    # ---- wiring ----

    @property
    def fields(self) -> list[gr.components.Component]:
        """Inputs of `draft_of`."""
        return [self.file, self.zip, self.questions, self.state, self.id, self.images, self.labels, self.chosen]

    def wire(self) -> None:
        mapped = [self.state, self.id, self.images, self.labels]
        guess: dict[str, Any] = {
            "fn": self.guess,
            "inputs": [self.file, self.questions],
            "outputs": [self.table_line, *mapped],
            **QUEUED,
        }
        guess_labels: dict[str, Any] = {
            "fn": self.guess_labels,
            "inputs": [self.file, self.questions, self.labels],
            "outputs": [self.labels, self.questions_note],
            **QUEUED,
        }
        check: dict[str, Any] = {
            "fn": self.check,
            "inputs": self.fields,
            "outputs": [self.problems, self.plan, self.check_all, self.preview],
            "trigger_mode": "always_last",
            "concurrency_limit": 2,
            **QUEUED,
        }
        gr.on([self.file.upload, self.file.clear], **guess).then(**check)
        self.example.click(self.take_example, None, [self.file, self.questions], **QUEUED).then(**guess).then(**check)
        for event, inputs in (
            (self.upload_questions.upload, self.upload_questions),
            (self.take_questions.click, self.remembered),
        ):
            fn = self.read_questions if inputs is self.upload_questions else self.take_remembered
            event(fn, inputs, [self.questions, self.questions_note], **QUEUED).success(**guess_labels).then(**check)
        self.questions.blur(**guess_labels).then(**check)
        gr.on([*(part.input for part in mapped), self.zip.upload, self.zip.clear, self.chosen.input], **check)
        self.check_all.click(
            self.check_everything,
            self.fields,
            [self.problems, self.plan, self.check_all],
            api_visibility="private",
            show_progress="minimal",
        )
        self.run.click(
            self.start,
            self.fields,
            [self.problems, self.view.batch_id],
            api_visibility="private",
            show_progress="minimal",
            show_progress_on=self.run,
            concurrency_limit=None,
        )

    # ---- handlers ----

    @property
    def tokenizer(self) -> PromptTokenizer | None:
        """Any variant's: they share their vocabulary. That of a hub release arrives after the start."""
        return next((self.tokenizers[name] for name in self.variants if name in self.tokenizers), None)

    def guess(self, file: str | None, questions: str | None) -> list[Any]:
        """After an upload: what the file is, and what its columns seem to mean."""
        if file is None:
            return ["", *[gr.update(choices=[], value=None)] * 4]
        try:
            table = open_table(file, self.settings)
        except ClefError as error:
            return [error_html(str(error)), *[gr.update(choices=[], value=None)] * 4]
        mapping = guess_columns(table, questions or "")
        columns = list(table.columns)
        optional = [("–", ""), *((name, name) for name in columns)]
        return [
            table_html(table),
            gr.update(choices=columns, value=list(mapping.state)),
            gr.update(choices=optional, value=mapping.id or ""),
            gr.update(choices=optional, value=mapping.images or ""),
            gr.update(choices=columns, value=list(mapping.labels.values())),
        ]

    def guess_labels(self, file: str | None, questions: str | None, labels: list[str] | None) -> tuple[Any, str]:
        """After a change of the questions: their label columns, unless some are chosen; and whether they are valid."""
        note = ""
        try:
            if questions and questions.strip():
                load_questions(questions)
            if file is not None and not labels:
                mapping = guess_columns(open_table(file, self.settings), questions or "")
                return gr.update(value=list(mapping.labels.values())), note
        except ClefError as error:
            note = error_html(str(error))
        return gr.skip(), note

    def take_example(self) -> tuple[str, str]:
        return publish_file(BATCH_FILE), BATCH_QUESTIONS.read_text(encoding="utf-8")

    def read_questions(self, path: str) -> tuple[Any, str]:
        """The text of an uploaded questions file."""
        try:
            file = uploaded(path, ("questions",))
            load_questions(file)
        except ClefError as error:
            return gr.skip(), error_html(str(error))
        return file.read_text(encoding="utf-8-sig"), ""

    def take_remembered(self, questions: str) -> tuple[Any, str]:
        """The questions that the Decide screen had last in this browser."""
        if not questions:
            return gr.skip(), error_html("The Decide screen has not been used in this browser yet.")
        return questions, ""

    def check(self, *values: Any) -> Iterator[list[Any]]:
        """Show the first rows at once, then the dry run, unless the table is long."""
        draft = draft_of(values)
        if draft.file is None:
            yield ["", "", gr.update(visible=False), EMPTY_PREVIEW]
            return
        try:
            batch = check_draft(draft, self.settings)
            preview = preview_html(first_rows(batch, self.tokenizer), batch.table)
            is_long = batch.table.num_rows > AUTO_DRY_RUN_ROWS
            label = f"Check all {batch.table.num_rows:,} rows"
            yield ["", "", gr.update(visible=is_long and self.tokenizer is not None, value=label), preview]
            if not is_long:
                yield ["", self.dry_run_html(batch, draft), gr.skip(), gr.skip()]
        except ClefError as error:
            yield [error_html(str(error)), "", gr.update(visible=False), ""]

    def check_everything(self, *values: Any) -> tuple[str, str, Any]:
        draft = draft_of(values)
        try:
            return "", self.dry_run_html(check_draft(draft, self.settings), draft), gr.update(visible=False)
        except ClefError as error:
            return error_html(str(error)), "", gr.skip()

    def dry_run_html(self, batch: CheckedBatch, draft: BatchDraft) -> str:
        if self.tokenizer is None:
            return ""
        speed = tokens_per_s(self.submitter.database, draft.variants)
        return plan_html(*dry_run(batch, self.tokenizer, self.settings.max_tokens, speed))

    def start(self, *values: Any) -> Iterator[tuple[str, Any]]:
        """Store the rows in a thread; the page turns to the batch as soon as it has an id."""
        draft = draft_of(values)
        try:
            batch = check_draft(draft, self.settings)
        except ClefError as error:
            yield error_html(str(error)), gr.skip()
            return
        news: SimpleQueue[int | str] = SimpleQueue()
        # Ending the program must not wait for a million rows; what is stored by then can be resumed.
        Thread(target=self.store_rows, args=(batch, draft, news), name="store-rows", daemon=True).start()
        first = news.get()
        yield ("", str(first)) if isinstance(first, int) else (error_html(first), gr.skip())

    def store_rows(self, batch: CheckedBatch, draft: BatchDraft, news: "SimpleQueue[int | str]") -> None:
        """Runs in the thread; says the batch's id, or why there is none. Only the first word is heard."""
        try:
            with batch.rows() as rows:
                self.submitter.submit_batch(
                    batch.table.path.name,
                    batch.questions,
                    rows,
                    draft.variants,
                    source="page",
                    columns=batch.table.columns,
                    mapping=batch.mapping.to_json(),
                    on_created=news.put,
                )
        except ClefError as error:
            logger.warning("storing %s stopped: %s", batch.table.path.name, error)
            news.put(str(error))
        finally:
            news.put("The rows could not be stored; the log says why.")


def draft_of(values: tuple[Any, ...]) -> BatchDraft:
    """A draft from the values of `BatchScreen.fields`."""
    file, images_zip, questions, state, row_id, images, labels, variants = values
    return BatchDraft(
        file=file,
        images_zip=images_zip,
        questions=questions or "",
        state=tuple(state or ()),
        id=row_id or None,
        images=images or None,
        labels=tuple(labels or ()),
        variants=tuple(variants.split(",")),
    )


def _columns(label: str, elem_id: str, *, many: bool) -> gr.Dropdown:
    return gr.Dropdown([], label=label, multiselect=many, interactive=True, elem_id=elem_id, min_width=140)
