"""The History screen: every decision and batch, newest first, each a link that opens it again."""

from collections.abc import Sequence
from datetime import datetime
from html import escape
from typing import Any

import gradio as gr

from db import store
from db.views import HistoryItem
from web.bars import variant_label
from web.batch_view import status_html
from web.frame import QUIET, draw_frame, empty_html, panel, time_html
from web.results import variant_order
from worker.submit import Submitter

PAGE_ITEMS = 50
MAX_SCANNED = 1_000
"""How many items are looked through for those of one variant before the page says that there are no more."""

SENTENCE = "Everything decided on this machine, newest first. Open an entry to see its inputs and answers again."


class HistoryScreen:
    """Builds the screen; its list is drawn by `history_html`."""

    def __init__(self, submitter: Submitter, page: gr.Blocks) -> None:
        self.submitter = submitter
        draw_frame(submitter, page, "History", SENTENCE)
        bare: dict[str, Any] = {"show_label": False, "container": False, "interactive": True, "min_width": 0}
        with gr.Row(elem_classes=["filters"]):
            text = gr.Textbox(
                label="Search", placeholder="Search states and file names", elem_id="history-text", scale=1, **bare
            )
            kind = gr.Radio(
                [("All", ""), ("Decisions", "decision"), ("Batches", "batch")],
                value="",
                label="Kind",
                elem_id="history-kind",
                elem_classes=["segmented"],
                **bare,
            )
            variant = gr.Radio(
                [("Any variant", ""), *((variant_label(name), name) for name in variant_order(submitter.settings))],
                value="",
                label="Variant",
                elem_id="history-variant",
                elem_classes=["segmented"],
                **bare,
            )
        self.items = panel(elem_id="history")
        more = gr.Button("Show more", elem_id="history-more", visible=False)
        num_pages = gr.State(1)
        filters: dict[str, Any] = {"inputs": [text, kind, variant], "outputs": [self.items, more, num_pages]}
        gr.on([text.change, kind.change, variant.change], self.first, trigger_mode="always_last", **filters, **QUIET)
        page.load(self.first, **filters, **QUIET)
        more.click(self.more, [text, kind, variant, num_pages], [self.items, more, num_pages], **QUIET)

    def first(self, text: str, kind: str, variant: str) -> tuple[str, Any, int]:
        return self.more(text, kind, variant, 0)

    def more(self, text: str, kind: str, variant: str, num_pages: int) -> tuple[str, Any, int]:
        """The list with one more page than before."""
        wanted = (num_pages + 1) * PAGE_ITEMS
        items, has_more = self.find(text.strip(), kind, variant, wanted)
        is_filtered = bool(text.strip() or kind or variant)
        return history_html(items, is_filtered=is_filtered), gr.update(visible=has_more), num_pages + 1

    def find(self, text: str, kind: str, variant: str, wanted: int) -> tuple[list[HistoryItem], bool]:
        """The newest items that fit, and whether there are more."""
        found: list[HistoryItem] = []
        before: datetime | None = None
        scanned = 0
        with self.submitter.database.read() as session:
            while len(found) <= wanted and scanned < MAX_SCANNED + wanted:
                chunk = store.list_history(
                    session,
                    kind=kind or None,  # type: ignore[arg-type]  # the radio offers only kinds
                    text=text,
                    limit=wanted + 1,
                    before=before,
                )
                found += [item for item in chunk if not variant or variant in item.variants]
                scanned += len(chunk)
                if len(chunk) <= wanted:
                    break
                before = chunk[-1].created_at
        return found[:wanted], len(found) > wanted


def history_html(items: Sequence[HistoryItem], *, is_filtered: bool) -> str:
    """The list; every text of a user is escaped."""
    if not items:
        if is_filtered:
            return empty_html("Nothing fits", "No decision or batch fits these filters. Try fewer words.")
        return empty_html("Nothing here yet", "Decide something or run a batch; it will be listed here, to open again.")
    rows = "".join(_item_html(item) for item in items)
    return f'<ul class="links">{rows}</ul>'


def _item_html(item: HistoryItem) -> str:
    link = f"/?request={item.id}" if item.kind == "decision" else f"/batch?batch={item.id}"
    variants = " · ".join(variant_label(variant) for variant in item.variants)
    return (
        f'<li><a href="{link}"><span class="h-kind h-{escape(item.kind)}">{escape(item.kind)}</span>'
        f'<span class="h-title">{escape(item.title) or "(empty state)"}</span>'
        f'<span class="h-meta">{escape(item.summary)}</span><span class="h-variants">{escape(variants)}</span>'
        f"{status_html(item.status)}{time_html(item.created_at)}</a></li>"
    )
