"""The form of the Decide screen: state, images, questions as cards and as JSON, the meter, problems at their fields.

Its truth is in the browser: `Form` names the components that hold a request, `draft_of` makes a draft of their values,
`show_filled` puts a request into them. Nothing is submitted here.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gradio as gr

from clef_core.errors import Problem, RequestError
from clef_core.schema import Submission
from clef_core.tokens import PromptTokenizer
from web.builder import Card, Cards, card_problems, cards_to_questions
from web.cards import CardList, DrawnCard, collect, draw_cards
from web.draft import Draft, Filled, describe_state, draft_cards, fill, measure, whole_request
from web.frame import QUEUED, QUIET, panel, problems_html, remembered_questions
from web.meter import meter_html
from web.uploads import publish_image

FORM_PLACES = ("state", "images", "questions")
"""First parts of a problem's place for which the form has a panel."""

DrawnForm = Callable[[Cards, list[DrawnCard]], None]
"""Hears of each new drawing of the cards, to wire what reads all fields."""


@dataclass(frozen=True)
class Form:
    """The components on the left that hold a request."""

    state: gr.Textbox
    read_as: gr.Radio
    images: gr.Gallery
    truncate: gr.Checkbox
    cards: gr.State
    json_view: gr.Code
    view: gr.Textbox
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
        questions=json_view if view == "edited" else None,
        truncate=truncate,
    )


def _paths(gallery: list[tuple[str, str | None]] | None) -> tuple[str, ...]:
    return tuple(path for path, _ in gallery or ())


def _events(box: gr.Textbox) -> tuple[Any, Any]:
    return box.input, box.blur


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


class DecideForm:
    """Draws and wires the form; it keeps nothing of a visitor.

    on_drawn: wires what else reads the fields, such as the Decide button.
    tokenizer: asked for at each count, since that of a hub release arrives after the start.
    """

    def __init__(
        self,
        page: gr.Blocks,
        first: Filled,
        tokenizer: Callable[[], PromptTokenizer | None],
        max_tokens: int,
        on_drawn: DrawnForm,
    ) -> None:
        self.page = page
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.on_drawn = on_drawn
        self.draw_state(first)
        self.draw_images()
        self.draw_questions(first)
        self.wire_meter()

    # ---- layout ----

    def draw_state(self, first: Filled) -> None:
        with gr.Group(elem_classes=["block-state"]):
            self.state = gr.Textbox(
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
                self.read_as = gr.Radio(
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
            self.truncate = gr.Checkbox(
                first.truncate,
                label="Too long? Cut the end of the state so that it fits",
                elem_id="truncate",
                interactive=True,
                container=False,
                visible=False,
            )
        self.state_problems = panel(elem_id="state-problems")

    def draw_images(self) -> None:
        self.images = gr.Gallery(
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

    def draw_questions(self, first: Filled) -> None:
        cards = gr.State(first.cards)
        unfolded: gr.State = gr.State(frozenset())
        view = gr.Textbox("form", visible=False)  # "form", "json", or "edited" once somebody typed in the JSON view
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
        self.form = Form(
            self.state, self.read_as, self.images, self.truncate, cards, json_view, view, remembered_questions()
        )
        with slot:
            target = CardList(self.form.questions, show_questions, unfolded)

            def draw(cards_now: Cards, unfolded_now: frozenset[int]) -> None:
                drawn = draw_cards(cards_now, unfolded_now, target)
                self.wire_cards(cards_now, drawn)
                self.wire_tabs(cards_now, drawn, form_tab, json_tab)
                self.on_drawn(cards_now, drawn)

            triggers = [self.page.load, cards.change]
            gr.render(inputs=[cards, unfolded], triggers=triggers, show_progress="hidden", queue=False)(draw)

    # ---- wiring ----

    @property
    def filled(self) -> list[gr.components.Component]:
        """Outputs of `show_filled`."""
        return self.form.filled

    def fields_of(self, drawn: Sequence[DrawnCard]) -> list[gr.components.Component]:
        """Inputs whose values `draft_of` takes."""
        return [*self.form.fields, *(field for card in drawn for field in card.fields)]

    def wire_cards(self, cards: Cards, drawn: list[DrawnCard]) -> None:
        """Remember the questions while somebody types; called at each drawing of the cards."""

        def remember(*values: Any) -> list[str]:
            return [questions_json(draft_of(cards, values).cards)] * 2

        # Only what a person does: an event of a field that is drawn anew would call a listener that is gone already.
        # Keys are inputs, but what is pasted or dropped is only heard of when the field is left.
        typed = [event for card in drawn for event in (card.type.input, *_events(card.id))]
        typed += [event for card in drawn for event in (*_events(card.instructions), *_events(card.options))]
        if typed:
            fields = self.fields_of(drawn)
            outputs = [self.form.remembered, self.form.json_view]
            gr.on(typed, remember, fields, outputs, trigger_mode="always_last", **QUIET)

    def wire_tabs(self, cards: Cards, drawn: list[DrawnCard], form_tab: gr.Tab, json_tab: gr.Tab) -> None:
        """Keep the cards and the JSON view in step; called at each drawing of the cards."""
        form, fields = self.form, self.fields_of(drawn)

        def lost_in_json(*values: Any) -> str:
            return problems_html(problem for _, problem in card_problems(draft_of(cards, values).cards))

        # In the browser alone: nobody's typing is overwritten by a late answer, and no late answer counts as typed.
        json_tab.select(None, None, form.view, js="() => 'json'", api_visibility="private")
        form.json_view.input(None, None, form.view, js="() => 'edited'", api_visibility="private")
        json_tab.select(lost_in_json, fields, self.question_problems, **QUIET)

        def open_form(*values: Any) -> list[Any]:
            try:
                return [*show_questions(draft_cards(draft_of(cards, values))), "form", ""]
            except RequestError as error:
                note = Problem((), "The JSON view was not valid, so the cards are as they were before.", "json_view")
                current = collect(cards, values[len(form.fields) :])
                return [*show_questions(current), "form", problems_html((note, *error.problems))]

        form_tab.select(open_form, fields, [*form.questions, form.view, self.question_problems], **QUEUED)
        form.json_view.input(
            lambda text, *values: self.check_json_view(replace(draft_of(cards, values), questions=text)),
            [form.json_view, *fields],
            [*form.filled, self.question_problems],
            trigger_mode="always_last",
            **QUEUED,
        )

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

    # ---- handlers ----

    def count(self, draft: Draft) -> tuple[str, Any]:
        """The line under the state, and whether the offer to cut the state is of use."""
        tokenizer = self.tokenizer()
        words = describe_state(draft.state, draft.read_as)
        if tokenizer is None:
            return meter_html(words, None, self.max_tokens), gr.update(visible=True)
        meter = measure(draft, tokenizer)
        tokens = meter.count.total if meter.count else meter.state_tokens
        is_too_long = tokens > self.max_tokens
        return meter_html(words, meter, self.max_tokens), gr.update(visible=is_too_long or draft.truncate)

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

    @property
    def problem_panels(self) -> list[gr.components.Component]:
        """Outputs of `show_form_problems`."""
        return [self.state_problems, self.image_problems, self.question_problems]

    @staticmethod
    def card_panels(drawn: Sequence[DrawnCard]) -> list[gr.components.Component]:
        """Outputs of `show_card_problems`."""
        return [part for card in drawn for part in (card.problems, card.frame)]


def show_form_problems(problems: Sequence[Problem]) -> list[str]:
    """Values for `DecideForm.problem_panels`; problems of other places are left out."""
    at = {place: [problem for problem in problems if problem.loc[:1] == (place,)] for place in FORM_PLACES}
    return [
        problems_html(at["state"], skip=1),
        problems_html(at["images"]),
        problems_html(at["questions"], skip=1),
    ]


def show_card_problems(cards: Cards, by_card: Mapping[int, Sequence[Problem]]) -> list[Any]:
    """Values for `DecideForm.card_panels`: the card's problems, and the card unfolded if it has some."""
    parts: list[Any] = []
    for card in cards:
        problems = by_card.get(card.uid, ())
        parts += [problems_html(problems, skip=2), gr.update(open=True) if problems else gr.skip()]
    return parts


def taken_html(submission: Submission) -> str:
    """What became of a whole request pasted into the JSON view."""
    taken = "State, images and questions" if submission.images else "State and questions"
    ignored = [
        Problem((), f"Ignored, since no field has this name: {name}", "ignored") for name in submission.unknown_fields
    ]
    return f'<p class="taken">{taken} were taken over.</p>' + problems_html(ignored)
