"""Keeps a drawing of the question cards from failing when another event of the same tab changes its session meanwhile.

Gradio draws in a thread and then walks over all components of the session, while its event loop adds one whenever an
event reads a field that was updated before: "dictionary changed size during iteration", and the page stays without
cards (Gradio 6.31; about 1 page load in 1,000, more on a busy machine). So the tables of a page, which each session
copies, give their values as of the moment they are asked for. Knows of Gradio only these two tables.
"""

from typing import Any

import gradio as gr


class SteadyTable(dict[Any, Any]):
    """A dict that may change while somebody walks over its values; copies of it are of the same kind."""

    def values(self) -> Any:  # dict_values cannot be subclassed
        return list(super().values())  # in one step: no other thread comes between


def steady_sessions(page: gr.Blocks) -> None:
    """Make the tables of `page`, and so those of its future sessions, steady. Call it once all is drawn."""
    page.default_config.blocks = SteadyTable(page.default_config.blocks)
    page.default_config.fns = SteadyTable(page.default_config.fns)
