"""What the doors refuse, and that they let the page and the client through."""

import json
from pathlib import Path

import pytest
from fastapi import Depends, FastAPI, Request
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.testclient import TestClient

from clef_core.errors import SettingsError
from web.doors import BodyDoor, OriginDoor, require_api_key, trusted_hosts
from worker.settings import load_settings


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    return TestClient(build_app(tmp_path), base_url="http://127.0.0.1:7860")


def build_app(uploads: Path, *, api_key: str | None = None, allowed_hosts: tuple[str, ...] = ()) -> FastAPI:
    app = FastAPI()

    @app.post("/v1/echo", dependencies=[Depends(require_api_key(api_key))])
    async def echo(request: Request) -> dict[str, int]:
        return {"length": len(await request.body())}

    @app.post("/gradio_api/queue/join")
    @app.post("/gradio_api/upload")
    async def page(request: Request) -> dict[str, int]:
        return {"length": len(await request.body())}

    @app.get("/")
    async def index() -> str:
        return "page"

    app.add_middleware(BodyDoor, uploads=uploads, max_bytes=1000)
    app.add_middleware(OriginDoor, allowed_hosts=allowed_hosts)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=trusted_hosts("127.0.0.1", allowed_hosts))
    return app


def file_data(path: str) -> dict[str, object]:
    return {"data": [[{"image": {"path": path, "meta": {"_type": "gradio.FileData"}}}], "text"], "fn_index": 1}


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_a_json_route_refuses_what_a_browser_sends_without_asking(client: TestClient, content_type: str) -> None:
    reply = client.post("/v1/echo", content=b'{"a": 1}', headers={"content-type": content_type})
    assert (reply.status_code, reply.json()["detail"][0]["type"]) == (415, "content_type")


def test_json_passes_with_its_body_untouched(client: TestClient) -> None:
    body = b'{"text": "\xc3\xa9"}'
    reply = client.post("/v1/echo", content=body, headers={"content-type": "application/json; charset=utf-8"})
    assert (reply.status_code, reply.json()) == (200, {"length": len(body)})


def test_an_upload_passes_as_a_form_and_only_as_a_form(client: TestClient) -> None:
    assert client.post("/gradio_api/upload", files={"files": b"x" * 2000}).status_code == 200
    assert client.post("/gradio_api/upload", content=b"x", headers={"content-type": "text/plain"}).status_code == 415


def test_a_declared_and_a_streamed_body_over_the_limit_are_413(client: TestClient) -> None:
    headers = {"content-type": "application/json"}
    declared = client.post("/v1/echo", content=b"1" * 1001, headers=headers)
    streamed = client.post("/v1/echo", content=(b"1" * 300 for _ in range(4)), headers=headers)
    assert (declared.status_code, streamed.status_code) == (413, 413)
    assert "1000 bytes" in declared.json()["detail"][0]["msg"]
    assert client.post("/v1/echo", content=b"1" * 1000, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "http://169.254.169.254/latest/meta-data", "https://example.com/a.png", "../x", "{uploads}/../x"],
)
def test_the_page_takes_no_file_that_was_not_uploaded(client: TestClient, tmp_path: Path, path: str) -> None:
    reply = client.post("/gradio_api/queue/join", json=file_data(path.format(uploads=tmp_path)))
    assert (reply.status_code, reply.json()["detail"][0]["type"]) == (422, "foreign_file")


def test_the_page_takes_an_uploaded_file(client: TestClient, tmp_path: Path) -> None:
    assert client.post("/gradio_api/queue/join", json=file_data(str(tmp_path / "ab12" / "a.png"))).status_code == 200


@pytest.mark.parametrize("body", [b"{", b"[" * 900, b"\xff", b""])
def test_a_broken_body_for_the_page_is_4xx_or_left_to_it(client: TestClient, body: bytes) -> None:
    reply = client.post("/gradio_api/queue/join", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == (200 if body == b"" else 422)


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:7860", "[::2]", ""])
def test_a_foreign_host_is_refused(client: TestClient, host: str) -> None:
    assert client.get("/", headers={"host": host}).status_code == 400


@pytest.mark.parametrize("host", ["localhost", "localhost:7860", "127.0.0.1:1", "[::1]", "[::1]:7860"])
def test_every_name_of_this_machine_is_answered(client: TestClient, host: str) -> None:
    assert client.get("/", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "null",
        "http://127.0.0.1:3000",
        "http://localhost:7860",
        "http://[",
        "file://127.0.0.1:7860",
        "",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_another_site_is_refused(client: TestClient, method: str, origin: str) -> None:
    reply = client.request(method, "/v1/echo", json={}, headers={"origin": origin})
    assert (reply.status_code, reply.json()["detail"][0]["type"]) == (403, "foreign_origin")


def test_the_page_itself_may_post(client: TestClient) -> None:
    assert client.post("/v1/echo", json={}, headers={"origin": "http://127.0.0.1:7860"}).status_code == 200


def test_a_proxy_with_its_own_host_may_post_when_the_operator_names_it(tmp_path: Path) -> None:
    client = TestClient(build_app(tmp_path, allowed_hosts=("clef.example.com",)), base_url="http://127.0.0.1:7860")
    assert client.post("/v1/echo", json={}, headers={"origin": "https://clef.example.com"}).status_code == 200
    assert client.get("/", headers={"host": "clef.example.com"}).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Basic k3y"}, 401),
        ({"authorization": "Bearer "}, 401),
        ({"x-api-key": "ké".encode()}, 401),
        ({"authorization": "Bearer k3y"}, 200),
        ({"authorization": "bearer k3y"}, 200),
        ({"x-api-key": "k3y"}, 200),
    ],
)
def test_the_key_opens_by_either_header(tmp_path: Path, headers: dict[str, str | bytes], status: int) -> None:
    client = TestClient(build_app(tmp_path, api_key="k3y"), base_url="http://127.0.0.1:7860")
    reply = client.post("/v1/echo", json={}, headers={**headers})
    assert reply.status_code == status
    assert ("www-authenticate" in reply.headers) == (status == 401)


def test_without_a_key_configured_everybody_passes(client: TestClient) -> None:
    assert client.post("/v1/echo", content=json.dumps({}), headers={"content-type": "application/json"}).is_success


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "clef.example.com", "127.0.0.1.evil.example"])
@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "CLEF_API_KEY and CLEF_AUTH are not set"),
        ({"api_key": "a long key"}, "CLEF_AUTH is not set"),
        ({"auth": "user:password"}, "CLEF_API_KEY is not set"),
    ],
)
def test_other_machines_need_key_and_login(host: str, given: dict[str, str], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        load_settings(host=host, **given).check_doors()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.53", "localhost", "::1", "[::1]"])
def test_this_machine_needs_neither_key_nor_login(host: str) -> None:
    load_settings(host=host).check_doors()


def test_key_and_login_or_an_explicit_word_open_the_bind() -> None:
    load_settings(host="0.0.0.0", api_key="a long key", auth="user:password").check_doors()
    load_settings(host="0.0.0.0", allow_anonymous=True).check_doors()


def test_the_address_bound_to_is_a_trusted_host_unless_it_is_every_address() -> None:
    assert "192.168.1.5" in trusted_hosts("192.168.1.5", ())
    assert "[fe80::1]" in trusted_hosts("fe80::1", ())
    assert trusted_hosts("0.0.0.0", ("clef.example.com",)) == ["localhost", "127.0.0.1", "[::1]", "clef.example.com"]
