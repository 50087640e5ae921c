"""The page: four screens under one navigation. What each does stands in its own module."""

from collections.abc import Mapping

import gradio as gr

from clef_core.tokens import PromptTokenizer
from web.batch import BatchScreen
from web.compare import CompareScreen
from web.decide import DecideScreen
from web.history import HistoryScreen
from web.session_tables import steady_sessions
from worker.submit import Submitter

EVENTS_AT_ONCE = 16
"""Of each kind; Gradio's own default is one, so that a slow visitor would hold up all others."""


def build_page(submitter: Submitter, tokenizers: Mapping[str, PromptTokenizer]) -> gr.Blocks:
    """Build all screens.

    Args:
        submitter: an open one, to store requests and to read what became of them.
        tokenizers: per variant, to count tokens; a variant may lack one.
    """
    with gr.Blocks(title="Clef workbench", analytics_enabled=False) as page:
        DecideScreen(submitter, tokenizers, page)
    with page.route("Batch", "/batch"):
        BatchScreen(submitter, tokenizers, page)
    with page.route("Compare", "/compare"):
        CompareScreen(submitter, page)
    with page.route("History", "/history"):
        HistoryScreen(submitter, page)
    page.queue(default_concurrency_limit=EVENTS_AT_ONCE)
    steady_sessions(page)
    return page
