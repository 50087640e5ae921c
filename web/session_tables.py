"""Keeps a drawing of the question cards from failing when another event of the same tab changes its session meanwhile.

Gradio draws in a thread and then walks over all components of the session, while its event loop adds one whenever an
event reads a field that was updated before: "dictionary changed size during iteration", and the page stays without
cards (Gradio 6.31; about 1 page load in 1,000, more on a busy machine). So the tables of a page, which each session
copies, give their values as of the moment they are asked for. Knows of Gradio only these two tables.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import gradio as gr

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class SteadyTable(dict[_Key, _Value]):
    """A dict that may change while somebody walks over its values; copies of it are of the same kind."""

    def values(self) -> Any:  # dict_values cannot be subclassed
        return list(super().values())  # in one step: no other thread comes between

    def __copy__(self) -> "SteadyTable[_Key, _Value]":
        return SteadyTable(self)


def steady_sessions(page: gr.Blocks) -> None:
    """Make the tables of `page`, and so those of its future sessions, steady. Call it once all is drawn."""
    config = page.default_config
    config.blocks = _steady(config.blocks)
    config.fns = _steady(config.fns)


def _steady(table: Mapping[_Key, _Value]) -> dict[_Key, _Value]:
    return SteadyTable(table)
