"""The Decide screen: a form on the left, what the variants answered on the right.

`web.decide_form` is the form; this module submits and shows. After submitting, the page only asks the database, by a
timer that runs while the request in the address bar is unfinished, so that a reload or a restart loses nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import gradio as gr

from clef_core.errors import ClefError, Problem, RequestError
from clef_core.images import check_image
from clef_core.schema import Request
from clef_core.tokens import PromptTokenizer
from db.views import RequestView
from web.bars import variant_label
from web.builder import Cards, place_problems
from web.cards import DrawnCard
from web.decide_form import (
    FORM_PLACES,
    DecideForm,
    draft_of,
    questions_json,
    show_card_problems,
    show_filled,
    show_form_problems,
)
from web.draft import Draft, DraftError, Filled, fill, submission_of
from web.examples import decide_examples
from web.frame import QUEUED, QUIET, draw_frame, error_html, panel, problems_html, stored_id, variants_radio
from web.results import EMPTY, Snapshot, load_snapshot, responses, results_html, variant_order
from web.together import TogetherPanel
from worker.submit import Submitter

POLL_S = 0.3
TITLE = "Clef workbench"
SENTENCE = (
    "Ask typed questions about a text and its images; the model gives every allowed answer a probability, "
    "in two weight formats side by side."
)
LOOK_LEFT = "Something in the form needs a change; see the marked places."
SHOW_IN_ADDRESS = """(id) => {
    const url = new URL(window.location);
    id ? url.searchParams.set('request', id) : url.searchParams.delete('request');
    window.history.replaceState(null, '', url);
}"""


class DecideScreen:
    """Builds the screen and holds what its handlers share; it keeps nothing of a visitor."""

    def __init__(self, submitter: Submitter, tokenizers: Mapping[str, PromptTokenizer], page: gr.Blocks) -> None:
        self.submitter = submitter
        self.settings = submitter.settings
        self.variants = variant_order(submitter.settings)
        self.tokenizers = tokenizers
        self.page = page
        self.examples = [
            (example.name, fill(example.submission.request, example.submission.images)) for example in decide_examples()
        ]
        self.draw()

    # ---- layout ----

    def draw(self) -> None:
        first = self.examples[0][1]
        draw_frame(self.submitter, self.page, TITLE, SENTENCE)
        with gr.Row(elem_classes=["examples"]):
            panel('<span class="examples-label">Try</span>')
            buttons = [
                gr.Button(name, size="sm", elem_id=f"example-{number}", min_width=0, elem_classes=["pill"])
                for number, (name, _) in enumerate(self.examples)
            ]
            clear = gr.Button("Clear", size="sm", elem_id="clear", min_width=0, elem_classes=["pill", "quiet"])
        with gr.Row(equal_height=False, elem_classes=["screen"]):
            with gr.Column(scale=6, min_width=300, elem_classes=["inputs"]):
                self.form = DecideForm(
                    self.page, first, lambda: self.tokenizer, self.settings.max_tokens, self.wire_decide
                )
            with gr.Column(scale=5, min_width=300, elem_classes=["outputs"]):
                self.draw_outputs()
        for button, (_, filled) in zip(buttons, self.examples, strict=True):
            self.wire_fill(button, filled)
        self.wire_fill(clear, Filled("", "auto", (), (), truncate=False))
        self.wire_results()

    def draw_outputs(self) -> None:
        with gr.Row(elem_classes=["decide-bar"]):
            self.chosen = variants_radio(self.variants, "variants")
            self.decide = gr.Button("Decide", variant="primary", elem_id="decide", min_width=120, scale=0)
        self.general_problems = panel(elem_id="problems")
        self.results = panel(EMPTY, elem_id="results", elem_classes=["live"])
        with gr.Accordion("Response as JSON", open=False, visible=False, elem_id="raw") as self.raw:
            self.raw_views = []
            for variant in self.variants:
                view = gr.Code(
                    language="json",
                    label=variant_label(variant),
                    interactive=False,
                    visible=False,
                    elem_classes=["raw"],
                )
                self.raw_views.append(view)
        # In the browser, not in the session: a restarted server still learns which request the page shows.
        self.request_id = gr.Textbox(visible=False, elem_id="request-id")
        self.timer = gr.Timer(POLL_S, active=False)
        TogetherPanel(self.submitter, self.request_id)

    # ---- wiring ----

    def wire_fill(self, button: gr.Button, filled: Filled) -> None:
        """Let a button put a request into the form and empty the results."""
        button.click(
            lambda: [*show_filled(filled), "", *self.show_nothing(), *self.show_problems(())],
            None,
            [*self.form.filled, self.request_id, *self.shown, *self.problem_panels],
            **QUEUED,
        ).then(None, self.request_id, None, js=SHOW_IN_ADDRESS, api_visibility="private")

    def wire_decide(self, cards: Cards, drawn: list[DrawnCard]) -> None:
        """Let the button read the fields; called at each drawing of the cards."""
        self.decide.click(
            lambda variants, *values: self.submit(variants, draft_of(cards, values)),
            [self.chosen, *self.form.fields_of(drawn)],
            [self.request_id, self.timer, *self.problem_panels, *self.form.card_panels(drawn)],
            api_visibility="private",
            show_progress="minimal",
            show_progress_on=self.decide,
            concurrency_limit=None,
        ).then(None, self.request_id, None, js=SHOW_IN_ADDRESS, api_visibility="private")

    def wire_results(self) -> None:
        self.timer.tick(self.refresh, self.request_id, [self.timer, *self.shown], **QUIET)
        self.request_id.change(self.refresh, self.request_id, [self.timer, *self.shown], **QUIET)
        self.page.load(
            self.restore,
            None,
            [*self.form.filled, self.request_id, self.general_problems],
            **QUEUED,
        )

    @property
    def shown(self) -> list[gr.components.Component]:
        """Outputs of `show`."""
        return [self.results, self.raw, *self.raw_views]

    @property
    def problem_panels(self) -> list[gr.components.Component]:
        """Outputs of `show_problems`."""
        return [self.general_problems, *self.form.problem_panels]

    # ---- handlers ----

    @property
    def tokenizer(self) -> PromptTokenizer | None:
        """Any variant's: they share their vocabulary. That of a hub release arrives after the start."""
        return next((self.tokenizers[name] for name in self.variants if name in self.tokenizers), None)

    def submit(self, variants: str, draft: Draft) -> list[Any]:
        """Check and store; problems go to their places, the request's id to the page."""
        asked = variants.split(",")
        try:
            model = "clef" if len(asked) > 1 else f"clef-{asked[0]}"
            submission = submission_of(draft, model)
            if self.tokenizer is not None:
                sizes = [(image.width, image.height) for image in submission.images]
                self.tokenizer.check_length(submission.request, sizes, self.settings.max_tokens)
            submitted = self.submitter.submit(submission, asked, source="page")
        except DraftError as error:
            return self.show_refused(error, draft)
        except RequestError as error:
            return self.show_refused(DraftError(error.problems), draft)
        except ClefError as error:
            return self.show_refused(DraftError([Problem((), str(error), "refused")]), draft)
        clean = show_card_problems(draft.cards, {})
        return [str(submitted.request_id), gr.Timer(active=True), *self.show_problems(()), *clean]

    def show_refused(self, error: DraftError, draft: Draft) -> list[Any]:
        by_card, rest = place_problems(error.problems, draft.cards if draft.questions is None else ())
        for uid, problem in error.by_card:
            by_card.setdefault(uid, []).append(problem)
        problems = self.show_problems(rest, has_others=bool(by_card))
        return [gr.skip(), gr.skip(), *problems, *show_card_problems(draft.cards, by_card)]

    def show_problems(self, problems: Sequence[Problem], *, has_others: bool = False) -> list[str]:
        """Each problem at its field; beside the button those without one, or that there are some."""
        general = problems_html(problem for problem in problems if not set(problem.loc[:1]) & set(FORM_PLACES))
        if (has_others or problems) and not general:
            general = f'<p class="look-left" role="alert">{LOOK_LEFT}</p>'
        return [general, *show_form_problems(problems)]

    def refresh(self, request_id: str) -> list[Any]:
        """What the page shows of a request now; stops the timer when nothing more will come."""
        snapshot = self.load(request_id)
        if snapshot is None:
            return [gr.Timer(active=False), *self.show_nothing()]
        return [gr.Timer(active=not snapshot.is_finished), *self.show(snapshot)]

    def restore(self, http: gr.Request) -> list[Any]:
        """At page load: the request that the address names; setting its id shows its answers."""
        asked = http.query_params.get("request", "")
        unchanged = [*[gr.skip()] * 6, questions_json(self.examples[0][1].cards)]
        if not asked:
            return [*unchanged, "", ""]
        snapshot = self.load(asked)
        if snapshot is None:
            return [*unchanged, "", error_html(f"There is no decision {asked[:20]!r} here.")]
        try:
            return [*show_filled(self.fill_stored(snapshot.request)), asked, ""]
        except (OSError, ClefError) as error:  # an image is gone, or a row that never was a request
            return [*unchanged, asked, error_html(f"The inputs of this decision cannot be shown here: {error}")]

    def load(self, request_id: str) -> Snapshot | None:
        number = stored_id(request_id)
        return None if number is None else load_snapshot(self.submitter, number)

    def fill_stored(self, request: RequestView) -> Filled:
        body = {"model": request.asked_model, "state": request.state or "", "questions": request.questions}
        if request.truncate:
            body["x_truncate"] = request.truncate
        images = [check_image(self.submitter.images.get(sha256), ("images",)) for sha256 in request.images]
        return fill(Request.model_validate(body), images)

    def show(self, snapshot: Snapshot) -> list[Any]:
        """Values for `shown`."""
        texts = responses(snapshot, self.settings)
        raw = [gr.update(value=texts.get(variant), visible=variant in texts) for variant in self.variants]
        return [results_html(snapshot, self.settings), gr.update(visible=bool(texts)), *raw]

    def show_nothing(self) -> list[Any]:
        return [EMPTY, gr.update(visible=False), *([gr.update(value=None, visible=False)] * len(self.variants))]
