"""The real web application in a folder of its own: real database, real Redis, the small release, workers if asked."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.testclient import TestClient

from clef_core.tokens import PromptTokenizer
from db import migrate
from web.server import create_app
from worker.settings import Settings, load_settings
from worker.submit import Submitter
from worker.supervise import Supervisor

PROJECT = Path(__file__).parent.parent
RELEASE = PROJECT / "checkpoints" / "random-bf16"
ADDRESS = "http://127.0.0.1:7860"


@dataclass(frozen=True)
class WebApp:
    client: TestClient
    submitter: Submitter


def small_settings(data_dir: Path, **overrides: Any) -> Settings:
    """One variant, `bf16`, on the small release."""
    given = {"data_dir": data_dir, "bf16": str(RELEASE), "mxfp4": "", "default_variant": "bf16"}
    return load_settings(**{**given, **overrides})


@contextmanager
def open_app(data_dir: Path, *, with_worker: bool = False, **overrides: Any) -> Iterator[WebApp]:
    """The application as `app.py` makes it, behind a test client that stands for a browser on this machine."""
    settings = small_settings(data_dir, **overrides)
    migrate(settings.database_url)
    tokenizers = {variant: PromptTokenizer.from_release(RELEASE) for variant in settings.variants}
    with ExitStack() as stack:
        submitter = stack.enter_context(Submitter.connect(settings))
        if with_worker:
            stack.enter_context(Supervisor(settings, list(settings.variants)))
        app = asyncio.run(_create_app(submitter, tokenizers))
        yield WebApp(stack.enter_context(TestClient(app, ADDRESS)), submitter)


async def _create_app(submitter: Submitter, tokenizers: Mapping[str, PromptTokenizer]) -> FastAPI:
    """Gradio opens event loops that it never closes when it builds a page outside of one."""
    return create_app(submitter, tokenizers)
