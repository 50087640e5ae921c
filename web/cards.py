"""The question cards on the page: folded forms that can be added, copied, moved and removed.

`gr.render` draws them again whenever the list of cards changes, which is when a question comes, goes or moves or the
program sets other content; never while somebody types. Between two drawings the browser holds the truth, so every
handler gets all fields as inputs and makes cards of them with `collect`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gradio as gr

from web.builder import (
    QUESTION_TYPES,
    Card,
    Cards,
    duplicated,
    moved_down,
    moved_up,
    new_card,
    removed,
    summarize,
)
from web.frame import QUEUED, QUIET, panel

OPTION_LABELS = {
    "choice": "Options, one per line as name: description",
    "score": "Levels, one per line, lowest first",
    "noul": "What true and false mean (optional)",
}
OPTION_PLACEHOLDERS = {
    "choice": "billing: Payments or invoices\ntechnical: Bugs or outages",
    "score": "Can wait\nThis week\nToday",
    "noul": "true: A service is down for everybody\nfalse: Anything else",
}
FIELDS_PER_CARD = 4
CHANGES: dict[str, Callable[[Cards, int], Cards]] = {
    "Move up": moved_up,
    "Move down": moved_down,
    "Duplicate": duplicated,
    "Remove": removed,
}


@dataclass(frozen=True)
class DrawnCard:
    """The components of one card."""

    frame: gr.Accordion
    id: gr.Textbox
    type: gr.Radio
    instructions: gr.Textbox
    options: gr.Textbox
    problems: gr.HTML

    @property
    def fields(self) -> list[gr.components.Component]:
        """What `collect` reads; `FIELDS_PER_CARD` of them."""
        return [self.id, self.type, self.instructions, self.options]


def collect(cards: Sequence[Card], values: Sequence[Any]) -> Cards:
    """The cards with what the fields hold now."""
    starts = range(0, len(values), FIELDS_PER_CARD)
    return tuple(
        replace(card, id=values[at], type=values[at + 1], instructions=values[at + 2], options=values[at + 3])
        for card, at in zip(cards, starts, strict=True)
    )


@dataclass(frozen=True)
class CardList:
    """Where the list of cards lives in the page.

    outputs: what to set when the list changes; `show` gives the values for it.
    unfolded: uids of the cards that are open; Gradio forgets it from one drawing to the next.
    """

    outputs: Sequence[gr.components.Component]
    show: Callable[[Cards], list[Any]]
    unfolded: gr.State


def draw_cards(cards: Cards, unfolded: frozenset[int], target: CardList) -> list[DrawnCard]:
    """Draw a form per card and wire what changes the list; call it inside `gr.render`.

    Args:
        cards: as they are now; all fields of a uid seen before keep what the browser holds.
        unfolded: uids of the cards that are open now.
    """
    if not cards:
        panel('<p class="hint">No question yet. Add one, or take an example above.</p>')
    drawn = []
    buttons: list[tuple[gr.Button, Callable[[Cards, int], Cards]]] = []
    for place, card in enumerate(cards):
        with gr.Accordion(
            summarize(card),
            open=card.uid in unfolded or not card.id,
            key=("frame", card.uid),
            preserved_by_key=["label"],
            elem_classes=["card"],
            elem_id=f"card-{place}",
        ) as frame:
            drawn.append(_draw_fields(card, place, frame))
            with gr.Row(elem_classes=["card-actions"]):
                for words, change in CHANGES.items():
                    button = gr.Button(
                        words,
                        size="sm",
                        variant="secondary",
                        min_width=0,
                        elem_classes=[f"do-{words.split()[-1].lower()}"],
                    )
                    buttons.append((button, change))
        _wire_folding(frame, card.uid, target.unfolded)
    add = gr.Button("+ Add a question", size="md", elem_id="add-question", elem_classes=["quiet"])
    fields = [field for card in drawn for field in card.fields]
    add.click(lambda *values: target.show((*collect(cards, values), new_card())), fields, target.outputs, **QUEUED)
    for number, (button, change) in enumerate(buttons):
        _wire_change(button, change, number // len(CHANGES), cards, fields, target)
    return drawn


def _draw_fields(card: Card, place: int, frame: gr.Accordion) -> DrawnCard:
    problems = panel(key=("problems", card.uid), elem_classes=["card-problems"])
    common: dict[str, Any] = {"interactive": True, "container": True}
    with gr.Row(elem_classes=["card-head"]):
        id = gr.Textbox(
            card.id,
            label="Id",
            placeholder="department",
            max_lines=1,
            key=("id", card.uid),
            elem_classes=["f-id"],
            scale=3,
            min_width=140,
            **common,
        )
        type = gr.Radio(
            list(QUESTION_TYPES),
            value=card.type,
            label="Type",
            key=("type", card.uid),
            elem_classes=["f-type", "segmented"],
            scale=2,
            min_width=220,
            **common,
        )
    instructions = gr.Textbox(
        card.instructions,
        label="Instructions",
        placeholder="What is asked? Left empty, the id is the question.",
        lines=1,
        max_lines=6,
        key=("instructions", card.uid),
        elem_classes=["f-instructions"],
        **common,
    )
    options = gr.Textbox(
        card.options,
        label=OPTION_LABELS[card.type],
        placeholder=OPTION_PLACEHOLDERS[card.type],
        lines=3,
        max_lines=12,
        key=("options", card.uid),
        elem_classes=["f-options", "mono"],
        **common,
    )

    def retitle(id: str, type: Any, options: str) -> tuple[Any, Any]:
        title = summarize(replace(card, id=id, type=type, options=options))
        return gr.update(label=title), gr.update(label=OPTION_LABELS[type], placeholder=OPTION_PLACEHOLDERS[type])

    gr.on([id.blur, type.input, options.blur], retitle, [id, type, options], [frame, options], **QUIET)
    return DrawnCard(frame, id, type, instructions, options, problems)


def _wire_folding(frame: gr.Accordion, uid: int, unfolded: gr.State) -> None:
    frame.expand(lambda uids: uids | {uid}, unfolded, unfolded, **QUIET)
    frame.collapse(lambda uids: uids - {uid}, unfolded, unfolded, **QUIET)


def _wire_change(
    button: gr.Button,
    change: Callable[[Cards, int], Cards],
    place: int,
    cards: Cards,
    fields: Sequence[gr.components.Component],
    target: CardList,
) -> None:
    button.click(lambda *values: target.show(change(collect(cards, values), place)), fields, target.outputs, **QUEUED)
