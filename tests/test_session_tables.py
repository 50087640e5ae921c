"""A session of the page that changes while its cards are drawn."""

import asyncio
from copy import copy

import gradio as gr
import pytest
from gradio.state_holder import SessionState

from web.session_tables import SteadyTable, steady_sessions


class Late:
    """Stands where Gradio asks a component for its load event; another event's component comes just then."""

    def __init__(self, session: SessionState) -> None:
        self.session = session

    def __bool__(self) -> bool:
        late = gr.HTML(render=False)
        self.session.blocks_config.blocks[late._id] = late
        return False


async def session_of_a_page(*, is_steady: bool) -> SessionState:
    """Async, as Gradio opens an event loop where none runs, and leaves it open."""
    with gr.Blocks() as page:
        components = [gr.HTML() for _ in range(3)]
    if is_steady:
        steady_sessions(page)
    session = SessionState(page)
    for component in components:
        component.load_event_to_attach = Late(session)  # type: ignore[assignment]
    return session


def test_a_component_may_come_while_gradio_walks_over_all() -> None:
    session = asyncio.run(session_of_a_page(is_steady=True))
    before = len(session.blocks_config.blocks)
    session.blocks_config.attach_load_events()
    assert len(session.blocks_config.blocks) == before + 3


def test_gradio_alone_fails_then() -> None:
    """When this fails, Gradio has mended it and `web.session_tables` can go."""
    session = asyncio.run(session_of_a_page(is_steady=False))
    with pytest.raises(RuntimeError, match="changed size during iteration"):
        session.blocks_config.attach_load_events()


def test_sessions_do_not_share_a_table() -> None:
    table = SteadyTable({1: "a"})
    other = copy(table)
    other[2] = "b"
    assert isinstance(other, SteadyTable)
    assert table == {1: "a"}
