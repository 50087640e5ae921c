"""The Decide screen: a form on the left, what the variants answered on the right.

The form's truth is in the browser; `web.draft` makes a request of it. After submitting, the page only asks the
database, by a timer that runs while the request in the address bar is unfinished, so that a reload or a restart loses
nothing.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr

from clef_core.errors import ClefError, Problem, RequestError
from clef_core.images import check_image
from clef_core.schema import Request, Submission
from clef_core.tokens import PromptTokenizer
from db.views import RequestView
from web.bars import variant_label
from web.builder import Card, Cards, cards_to_questions, place_problems
from web.cards import CardList, DrawnCard, collect, draw_cards
from web.draft import (
    Draft,
    DraftError,
    Filled,
    describe_state,
    draft_cards,
    fill,
    measure,
    submission_of,
    whole_request,
)
from web.examples import decide_examples
from web.frame import (
    QUEUED,
    QUIET,
    draw_frame,
    error_html,
    panel,
    problems_html,
    remembered_questions,
    stored_id,
    variants_radio,
)
from web.meter import meter_html
from web.results import EMPTY, Snapshot, load_snapshot, responses, results_html, variant_order
from web.together import TogetherPanel
from web.uploads import publish_image
from worker.submit import Submitter

POLL_S = 0.3
TITLE = "Clef workbench"
SENTENCE = (
    "Ask typed questions about a text and its images; the model gives every allowed answer a probability, "
    "in two weight formats side by side."
)
SHOW_IN_ADDRESS = """(id) => {
    const url = new URL(window.location);
    id ? url.searchParams.set('request', id) : url.searchParams.delete('request');
    window.history.replaceState(null, '', url);
}"""


@dataclass(frozen=True)
class Form:
    """The components on the left that hold a request."""

    state: gr.Textbox
    read_as: gr.Radio
    images: gr.Gallery
    truncate: gr.Checkbox
    cards: gr.State
    json_view: gr.Code
    view: gr.State
    remembered: gr.BrowserState

    @property
    def fields(self) -> list[gr.components.Component]:
        """Inputs of `draft_of`, before the cards' fields."""
        return [self.state, self.read_as, self.images, self.truncate, self.json_view, self.view]

    @property
    def filled(self) -> list[gr.components.Component]:
        """Outputs of `show_filled`."""
        return [self.state, self.read_as, self.images, self.truncate, *self.questions]

    @property
    def questions(self) -> list[gr.components.Component]:
        """Outputs of `show_questions`: the cards, and their JSON for the JSON view, the meter and the Batch screen."""
        return [self.cards, self.json_view, self.remembered]


def draft_of(cards: Sequence[Card], values: Sequence[Any]) -> Draft:
    """A draft from the values of `Form.fields` and of all cards' fields."""
    state, read_as, images, truncate, json_view, view, *fields = values
    return Draft(
        state=state or "",
        read_as=read_as,
        images=_paths(images),
        cards=collect(cards, fields),
        questions=json_view if view == "json" else None,
        truncate=truncate,
    )


def _paths(gallery: list[tuple[str, str | None]] | None) -> tuple[str, ...]:
    return tuple(path for path, _ in gallery or ())


def show_filled(filled: Filled) -> list[Any]:
    """Values for `Form.filled`."""
    paths = [publish_image(image.data, image.sha256, image.media_type) for image in filled.images]
    return [filled.state, filled.read_as, paths, filled.truncate, *show_questions(filled.cards)]


def show_questions(cards: Cards) -> list[Any]:
    """Values for `Form.questions`."""
    text = questions_json(cards)
    return [cards, text, text]


def questions_json(cards: Sequence[Card]) -> str:
    return json.dumps(cards_to_questions(cards), ensure_ascii=False, indent=2)


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
                self.draw_inputs(first)
            with gr.Column(scale=5, min_width=300, elem_classes=["outputs"]):
                self.draw_outputs()
        for button, (_, filled) in zip(buttons, self.examples, strict=True):
            self.wire_fill(button, filled)
        self.wire_fill(clear, Filled("", "auto", (), (), truncate=False))
        self.wire_meter()
        self.wire_results()

    def draw_inputs(self, first: Filled) -> None:
        with gr.Group(elem_classes=["block-state"]):
            state = gr.Textbox(
                first.state,
                label="State",
                info="What the questions are about: a text, or JSON",
                placeholder="Paste a message, a document, or a JSON object…",
                lines=5,
                max_lines=18,
                interactive=True,
                elem_id="state",
            )
            with gr.Row(elem_classes=["state-foot"]):
                self.meter = panel(elem_id="meter")
                read_as = gr.Radio(
                    [("Auto", "auto"), ("Text", "text"), ("JSON", "json")],
                    value=first.read_as,
                    label="Read the state as",
                    show_label=False,
                    container=False,
                    interactive=True,
                    elem_id="read-as",
                    elem_classes=["segmented"],
                    min_width=0,
                )
            truncate = gr.Checkbox(
                first.truncate,
                label="Too long? Cut the end of the state so that it fits",
                elem_id="truncate",
                interactive=True,
                container=False,
                visible=False,
            )
        self.state_problems = panel(elem_id="state-problems")
        images = gr.Gallery(
            label="Images (optional): up to 4, PNG, JPEG or WebP",
            type="filepath",
            file_types=[".png", ".jpg", ".jpeg", ".webp"],
            sources=["upload", "clipboard"],
            interactive=True,
            columns=4,
            height=160,
            fit_columns=False,
            object_fit="contain",
            elem_id="images",
            buttons=[],
        )
        self.image_problems = panel(elem_id="image-problems")
        cards = gr.State(first.cards)
        unfolded: gr.State = gr.State(frozenset())
        view = gr.State("form")
        with gr.Tabs(elem_id="questions", elem_classes=["questions"]):
            with gr.Tab("Questions", id="form") as form_tab:
                slot = gr.Column(elem_classes=["cards"])
            with gr.Tab("JSON", id="json") as json_tab:
                json_view = gr.Code(
                    questions_json(first.cards),
                    language="json",
                    label="Questions as JSON or YAML; a whole request may be pasted too",
                    interactive=True,
                    lines=12,
                    elem_id="questions-json",
                    wrap_lines=True,
                )
        self.question_problems = panel(elem_id="question-problems")
        self.form = Form(state, read_as, images, truncate, cards, json_view, view, remembered_questions())
        with slot:
            target = CardList(self.form.questions, show_questions, unfolded)

            def draw(cards_now: Cards, unfolded_now: frozenset[int]) -> None:
                self.wire_form(cards_now, draw_cards(cards_now, unfolded_now, target), form_tab, json_tab)

            triggers = [self.page.load, cards.change]
            gr.render(inputs=[cards, unfolded], triggers=triggers, show_progress="hidden", queue=False)(draw)

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

    def wire_form(self, cards: Cards, drawn: list[DrawnCard], form_tab: gr.Tab, json_tab: gr.Tab) -> None:
        """Wire everything that reads the cards' fields; called at each drawing of the cards."""
        form = self.form
        fields = [*form.fields, *(field for card in drawn for field in card.fields)]

        def remember(*values: Any) -> str:
            return questions_json(draft_of(cards, values).cards)

        # Only what a person does: an event of a field that is drawn anew would call a listener that is gone already.
        typed = [event for card in drawn for event in (card.id.input, card.type.input)]
        typed += [event for card in drawn for event in (card.instructions.input, card.options.input)]
        if typed:
            gr.on(typed, remember, fields, form.remembered, trigger_mode="always_last", **QUIET)

        def open_json(*values: Any) -> tuple[str, str, str]:
            return questions_json(draft_of(cards, values).cards), "json", ""

        json_tab.select(open_json, fields, [form.json_view, form.view, self.question_problems], **QUIET)

        def open_form(*values: Any) -> list[Any]:
            try:
                return [*show_questions(draft_cards(draft_of(cards, values))), "form", ""]
            except RequestError as error:
                note = Problem((), "The JSON view was not valid, so the cards are as they were before.", "json_view")
                current = collect(cards, values[len(form.fields) :])
                return [*show_questions(current), "form", problems_html((note, *error.problems))]

        form_tab.select(open_form, fields, [*form.questions, form.view, self.question_problems], **QUEUED)
        form.json_view.input(
            lambda *values: self.check_json_view(draft_of(cards, values)),
            fields,
            [*form.filled, self.question_problems],
            trigger_mode="always_last",
            **QUEUED,
        )
        self.decide.click(
            lambda variants, *values: self.submit(variants, draft_of(cards, values), drawn),
            [self.chosen, *fields],
            [
                self.request_id,
                self.timer,
                *self.problem_panels,
                *(part for card in drawn for part in (card.problems, card.frame)),
            ],
            api_visibility="private",
            show_progress="minimal",
            show_progress_on=self.decide,
            concurrency_limit=None,
        ).then(None, self.request_id, None, js=SHOW_IN_ADDRESS, api_visibility="private")

    def wire_meter(self) -> None:
        """Count what the form holds; the questions come as the text that is remembered of them."""
        form = self.form
        form.json_view.input(lambda text: text, form.json_view, form.remembered, trigger_mode="always_last", **QUIET)
        gr.on(
            [self.page.load, form.state.change, form.read_as.change, form.images.change, form.remembered.change],
            lambda state, read_as, images, truncate, questions: self.count(
                Draft(state or "", read_as, _paths(images), (), questions or "{}", truncate)
            ),
            [form.state, form.read_as, form.images, form.truncate, form.remembered],
            [self.meter, form.truncate],
            trigger_mode="always_last",
            **QUIET,
        )

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
        return [self.general_problems, self.state_problems, self.image_problems, self.question_problems]

    # ---- handlers ----

    @property
    def tokenizer(self) -> PromptTokenizer | None:
        """Any variant's: they share their vocabulary. That of a hub release arrives after the start."""
        return next((self.tokenizers[name] for name in self.variants if name in self.tokenizers), None)

    def count(self, draft: Draft) -> tuple[str, Any]:
        """The line under the state, and whether the offer to cut the state is of use."""
        words = describe_state(draft.state, draft.read_as)
        if self.tokenizer is None:
            return meter_html(words, None, self.settings.max_tokens), gr.update(visible=True)
        meter = measure(draft, self.tokenizer)
        tokens = meter.count.total if meter.count else meter.state_tokens
        is_too_long = tokens > self.settings.max_tokens
        return meter_html(words, meter, self.settings.max_tokens), gr.update(visible=is_too_long or draft.truncate)

    def check_json_view(self, draft: Draft) -> list[Any]:
        """While somebody types JSON: say what is wrong, and take a whole request apart if one was pasted."""
        unchanged: list[Any] = [gr.skip()] * len(self.form.filled)
        try:
            submission = whole_request(draft.questions or "")
            if submission is None:
                draft_cards(draft)
                return [*unchanged, ""]
        except RequestError as error:
            return [*unchanged, problems_html(error.problems)]
        return [*show_filled(fill(submission.request, submission.images)), taken_html(submission)]

    def submit(self, variants: str, draft: Draft, drawn: Sequence[DrawnCard]) -> list[Any]:
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
            return self.show_draft_problems(error, draft, drawn)
        except RequestError as error:
            return self.show_draft_problems(DraftError(error.problems), draft, drawn)
        except ClefError as error:
            return self.show_draft_problems(DraftError([Problem((), str(error), "refused")]), draft, drawn)
        clean = [part for card in draft.cards for part in ("", gr.skip())]
        return [str(submitted.request_id), gr.Timer(active=True), *self.show_problems(()), *clean]

    def show_draft_problems(self, error: DraftError, draft: Draft, drawn: Sequence[DrawnCard]) -> list[Any]:
        by_card, rest = place_problems(error.problems, draft.cards if draft.questions is None else ())
        for uid, problem in error.by_card:
            by_card.setdefault(uid, []).append(problem)
        parts: list[Any] = []
        for card in draft.cards:
            problems = by_card.get(card.uid, [])
            parts += [problems_html(problems, skip=2), gr.update(open=True) if problems else gr.skip()]
        return [gr.skip(), gr.skip(), *self.show_problems(rest, has_others=bool(by_card)), *parts]

    def show_problems(self, problems: Sequence[Problem], *, has_others: bool = False) -> list[str]:
        """Each problem at its field; one line beside the button says that there are some."""
        places: dict[str, list[Problem]] = {"": [], "state": [], "images": [], "questions": []}
        for problem in problems:
            place = str(problem.loc[0]) if problem.loc else ""
            places[place if place in places else ""].append(problem)
        general = problems_html(places[""])
        if (has_others or problems) and not general:
            general = (
                '<p class="look-left" role="alert">Something in the form needs a change; see the marked places.</p>'
            )
        return [
            general,
            problems_html(places["state"], skip=1),
            problems_html(places["images"]),
            problems_html(places["questions"], skip=1),
        ]

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


def taken_html(submission: Submission) -> str:
    """What became of a whole request pasted into the JSON view."""
    num_images = len(submission.images)
    words = (
        "The state and the questions were taken over"
        if not num_images
        else "State, images and questions were taken over"
    )
    ignored = [
        Problem((), f"Ignored, because nothing of this name is known: {name}", "ignored")
        for name in submission.unknown_fields
    ]
    return f'<p class="taken">{words}.</p>' + problems_html(ignored)
