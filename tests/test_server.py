"""The page behind its doors: what a visitor's browser, or somebody who pretends to be one, can make the server do."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient
from web_app import ADDRESS, PROJECT, WebApp, open_app, small_settings

from web.server import mount_page
from worker.settings import Settings

FILE_FIELDS = {"file", "gallery", "image", "uploadbutton", "multimodaltextbox"}


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebApp]:
    with open_app(tmp_path_factory.mktemp("web")) as app:
        yield app


def file_data(path: str) -> dict[str, Any]:
    return {"path": path, "meta": {"_type": "gradio.FileData"}}


def upload_events(client: TestClient) -> list[tuple[int, list[Any]]]:
    """Index and input types of every event of the page that takes a file."""
    config = client.get("/config").json()
    kinds = {component["id"]: component["type"] for component in config["components"]}
    events = [(event["id"], [kinds[number] for number in event["inputs"]]) for event in config["dependencies"]]
    return [(index, inputs) for index, inputs in events if FILE_FIELDS & set(inputs)]


@pytest.mark.parametrize("path", ["/etc/passwd", "http://127.0.0.1:9/x.png", "https://example.com/x.csv"])
def test_no_field_of_the_page_takes_a_file_that_was_not_uploaded(web: WebApp, path: str) -> None:
    events = upload_events(web.client)
    assert events
    for index, inputs in events:
        data = [[{"image": file_data(path)}] if kind == "gallery" else file_data(path) for kind in inputs]
        reply = web.client.post("/gradio_api/queue/join", json={"data": data, "fn_index": index, "session_hash": "s"})
        assert (reply.status_code, reply.json()["detail"][0]["type"]) == (422, "foreign_file")


@pytest.mark.filterwarnings("ignore:'future.no_silent_downcasting'")  # Gradio's own, of pandas
def test_without_the_doors_a_mounted_page_still_reads_no_foreign_file(tmp_path: Path) -> None:
    secret = tmp_path / "secret.csv"
    secret.write_text("secret")
    with TestClient(asyncio.run(_app_that_reads_a_file(small_settings(tmp_path))), ADDRESS) as client:
        event = client.post("/gradio_api/call/read", json={"data": [file_data(str(secret))]}).json()["event_id"]
        result = client.get(f"/gradio_api/call/read/{event}").text
    assert "event: error" in result
    assert "secret" not in result.replace("secret.csv", "")


async def _app_that_reads_a_file(settings: Settings) -> FastAPI:
    def read(path: str) -> str:
        return Path(path).read_text()

    with gr.Blocks() as page:
        file, text = gr.File(), gr.Textbox()
        file.upload(read, file, text, api_name="read")
    app = FastAPI()
    mount_page(app, page, settings)
    return app


def test_an_uploaded_file_lies_in_the_data_folder_and_is_not_served_as_a_page(web: WebApp) -> None:
    (path,) = web.client.post("/gradio_api/upload", files={"files": ("a.html", b"<script>1</script>")}).json()
    assert Path(path).is_relative_to(web.submitter.settings.data_dir / "uploads")
    served = web.client.get(f"/gradio_api/file={path}")
    assert served.headers["content-disposition"].startswith("attachment")


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "{data}/clef.sqlite3", "{project}/app.py", "{data}/uploads/../app.lock"]
)
def test_no_file_outside_the_uploads_is_served(web: WebApp, name: str) -> None:
    path = name.format(data=web.submitter.settings.data_dir, project=PROJECT)
    assert web.client.get(f"/gradio_api/file={path}").status_code in (403, 404)


def test_an_upload_over_the_limit_is_413(tmp_path: Path) -> None:
    with open_app(tmp_path, max_upload_bytes=1000) as app:
        assert app.client.post("/gradio_api/upload", files={"files": b"x" * 900}).status_code == 200
        assert app.client.post("/gradio_api/upload", files={"files": b"x" * 2000}).status_code == 413


def test_the_page_is_refused_to_another_host_and_to_another_site(web: WebApp) -> None:
    assert web.client.get("/", headers={"host": "evil.example"}).status_code == 400
    assert web.client.get("/config", headers={"origin": "https://evil.example"}).status_code == 403
    plain = {"content-type": "text/plain"}
    assert web.client.post("/v1/systemone", content="{}", headers=plain).status_code == 415
    assert web.client.post("/gradio_api/queue/join", content="{}", headers=plain).status_code == 415


def test_the_login_guards_every_part_of_the_page(tmp_path: Path) -> None:
    with open_app(tmp_path, auth="user:pass:word", api_key="a long key") as app:
        assert app.client.get("/config").status_code == 401
        assert app.client.post("/gradio_api/queue/join", json={}).status_code == 401
        assert app.client.post("/gradio_api/upload", files={"files": b"x"}).status_code == 401
        wrong = app.client.post("/login", data={"username": "user", "password": "pass"})
        right = app.client.post("/login", data={"username": "user", "password": "pass:word"})
        assert (wrong.status_code, right.status_code) == (400, 200)


def test_no_function_of_the_page_is_public(web: WebApp) -> None:
    info = web.client.get("/gradio_api/info").json()
    assert (info["named_endpoints"], info["unnamed_endpoints"]) == ({}, {})


def test_nothing_is_reported_home() -> None:
    code = "import web.server, gradio.analytics, huggingface_hub.constants as hub, json\n"
    code += "print(json.dumps([gradio.analytics.analytics_enabled(), hub.HF_HUB_DISABLE_TELEMETRY]))"
    switches = ("GRADIO_ANALYTICS_ENABLED", "HF_HUB_DISABLE_TELEMETRY", "HF_HUB_OFFLINE")
    env = {name: value for name, value in os.environ.items() if name not in switches}
    run = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, env=env, check=True)
    assert json.loads(run.stdout) == [False, True]
