"""The web application: our routes, the page behind them, the doors before both.

Knows neither how the parts it is given were made nor how it is served.

What surprises: Gradio checks that a file in a request was uploaded only after `launch()`, which a mounted page never
calls, so `has_launched` is set here before mounting. Without it any visitor can make the server read its own files.
"""

import os
import warnings
from collections.abc import Mapping
from pathlib import Path

import gradio as gr
from fastapi import APIRouter, Depends, FastAPI
from starlette.middleware.trustedhost import TrustedHostMiddleware

from clef_core.tokens import PromptTokenizer
from web.api import DecisionRoutes, add_error_handlers
from web.doors import BodyDoor, OriginDoor, require_api_key, trusted_hosts
from web.event_streams import JoinAfterStreamEnd
from web.page import build_page
from web.status import StatusRoutes
from web.theme import CSS, THEME
from web.waiting import DecisionWatch
from worker.settings import Settings
from worker.submit import Submitter


def create_app(submitter: Submitter, tokenizers: Mapping[str, PromptTokenizer]) -> FastAPI:
    """Put routes, page and doors together.

    Args:
        submitter: an open one; its settings are the ones used here.
        tokenizers: per variant, to count tokens before anything is stored; a variant may lack one.
    """
    settings = submitter.settings
    uploads = (settings.data_dir / "uploads").resolve()
    uploads.mkdir(parents=True, exist_ok=True)
    os.environ["GRADIO_TEMP_DIR"] = str(uploads)  # Gradio has no argument for it

    app = FastAPI(title="Clef", docs_url=None, redoc_url=None, openapi_url=None)
    guarded = APIRouter(dependencies=[Depends(require_api_key(settings.api_key))])
    status = StatusRoutes(submitter)
    DecisionRoutes(submitter, tokenizers, DecisionWatch(submitter.database)).add_to(guarded)
    guarded.add_api_route("/v1/models", status.models, methods=["GET"])
    app.include_router(guarded)
    app.add_api_route("/healthz", status.health, methods=["GET"])
    add_error_handlers(app)
    mount_page(app, build_page(submitter, tokenizers), settings)
    add_doors(app, settings, uploads)
    return app


def mount_page(app: FastAPI, page: gr.Blocks, settings: Settings) -> None:
    """Mount a Gradio page at `/`, behind the login where one is set."""
    page.has_launched = True
    user, _, password = (settings.auth or "").partition(":")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "SSR mode is not supported")  # said of several screens even where it is off
        gr.mount_gradio_app(
            app,
            page,
            path="/",
            auth=(user, password) if settings.auth else None,
            max_file_size=settings.max_upload_bytes,
            ssr_mode=False,
            run_history=False,  # it offers to store runs on a hub
            footer_links=[],
            theme=THEME,
            css=CSS,
        )


def add_doors(app: FastAPI, settings: Settings, uploads: Path) -> None:
    """Stand the doors before everything; the one added last is the outermost."""
    app.add_middleware(JoinAfterStreamEnd)
    app.add_middleware(BodyDoor, uploads=uploads)
    app.add_middleware(OriginDoor, allowed_hosts=settings.allowed_hosts)
    app.add_middleware(
        TrustedHostMiddleware,
        allowed_hosts=trusted_hosts(settings.host, settings.allowed_hosts),
        www_redirect=False,
    )
