"""Who may speak to this server: what is checked before any route runs.

The doors, from the outside in: the Host header (against DNS rebinding; Starlette's `TrustedHostMiddleware`), the Origin
header (against other sites in a visitor's browser), the body of a POST (JSON, of bounded size, naming no file that was
not uploaded), and for `/v1` an API key. Knows no route's meaning and no database.

What surprises: Gradio answers every Origin when it is not served from localhost, fetches a public URL that stands where
an uploaded file should, and takes any body. So the doors stand before the page as well as before our own routes.
"""

import hmac
import json
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Header, HTTPException
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_JSON_BYTES = 16 * 2**20
"""Largest JSON body: 8 MiB of images are 10.7 MiB in base64, the rest is room for the state."""

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")

_FORM_ROUTES = {
    "/gradio_api/upload": ("multipart/form-data",),
    "/login": ("multipart/form-data", "application/x-www-form-urlencoded"),
}
_UNSAFE_METHODS = frozenset({"POST", "PUT", "PATCH", "DELETE"})


def trusted_hosts(bind_host: str, allowed_hosts: Sequence[str]) -> list[str]:
    """The Host names to answer to: this machine's own, the address bound to, and the operator's."""
    own = [bind_host] if bind_host not in ("", "0.0.0.0", "::") else []
    bracketed = [f"[{host}]" if ":" in host and not host.startswith("[") else host for host in own]
    return list(dict.fromkeys([*LOOPBACK_HOSTS, *bracketed, *allowed_hosts]))


class OriginDoor:
    """Refuses what a page of another site sends (403): its Origin must be the Host asked, or a name of the operator's.

    A reverse proxy that rewrites Host needs its public name in `CLEF_ALLOWED_HOSTS`; wildcards do not count here.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: Sequence[str]) -> None:
        self.app = app
        self.allowed_hosts = frozenset(host.lower() for host in allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            headers = Headers(scope=scope)
            origin = headers.get("origin")
            if origin is not None and not self.is_own(origin, headers.get("host", "")):
                message = f"requests from the site {origin} are refused; add its name to CLEF_ALLOWED_HOSTS to allow it"
                await refuse(403, ("header", "origin"), message, "foreign_origin")(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def is_own(self, origin: str, host: str) -> bool:
        try:
            parts = urlsplit(origin.lower())
            name = parts.hostname or ""
        except ValueError:
            return False
        if not name or parts.scheme not in ("http", "https"):
            return False
        return parts.netloc == host.lower() or name in self.allowed_hosts


class BodyDoor:
    """Demands that a POST carries JSON (415), of bounded size (413), and names only uploaded files (422).

    Browsers send a form or `text/plain` to any site without asking it first, but not JSON. The only forms here are
    Gradio's upload and login, which bring their own limits.
    """

    def __init__(self, app: ASGIApp, uploads: Path, max_bytes: int = MAX_JSON_BYTES) -> None:
        self.app = app
        self.uploads = uploads.resolve()
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in _UNSAFE_METHODS:
            await self.app(scope, receive, send)
            return
        path = scope["path"].rstrip("/")
        content_type = Headers(scope=scope).get("content-type", "").partition(";")[0].strip().lower()
        if content_type in _FORM_ROUTES.get(path, ()):
            await self.app(scope, receive, send)
            return
        if content_type != "application/json":
            message = f"the content type must be application/json, not {content_type or 'absent'}"
            await refuse(415, ("header", "content-type"), message, "content_type")(scope, receive, send)
            return
        try:
            body = await _read_body(scope, receive, self.max_bytes)
        except ClientDisconnect:
            return
        if body is None:
            message = f"the body is larger than the limit of {self.max_bytes} bytes"
            await refuse(413, ("body",), message, "too_large")(scope, receive, send)
            return
        if not path.startswith("/v1/"):
            problem = self._file_problem(body)
            if problem is not None:
                await refuse(422, ("body",), problem, "foreign_file")(scope, receive, send)
                return
        await self.app(scope, _replay(body, receive), send)

    def _file_problem(self, body: bytes) -> str | None:
        try:
            files = list(_named_files(json.loads(body or b"null")))
        except (ValueError, RecursionError):
            return "the body is not JSON"
        for name in files:
            if not _is_inside(name, self.uploads):
                return f"{name[:200]} is not an uploaded file; files reach this server by upload only"
        return None


def require_api_key(api_key: str | None) -> Callable[..., Awaitable[None]]:
    """A FastAPI dependency that demands the key as `Authorization: Bearer KEY` or `x-api-key: KEY` (401).

    With no key configured everybody passes.
    """

    async def check(
        authorization: Annotated[str | None, Header()] = None, x_api_key: Annotated[str | None, Header()] = None
    ) -> None:
        if not api_key:
            return
        scheme, _, token = (authorization or "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else (x_api_key or "")
        if not hmac.compare_digest(given.encode(), api_key.encode()):
            detail = {
                "error_type": "authentication_error",
                "message": "send the API key as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
            }
            raise HTTPException(401, detail, headers={"WWW-Authenticate": "Bearer"})

    return check


def refuse(status: int, loc: tuple[str | int, ...], message: str, kind: str) -> JSONResponse:
    """One problem in FastAPI's shape."""
    return JSONResponse({"detail": [{"loc": list(loc), "msg": message, "type": kind}]}, status)


def _named_files(value: object) -> Iterator[str]:
    """Paths of all Gradio file objects in a JSON value."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            meta = item.get("meta")
            if isinstance(meta, dict) and meta.get("_type") == "gradio.FileData" and isinstance(item.get("path"), str):
                yield item["path"]
            waiting.extend(item.values())
        elif isinstance(item, list):
            waiting.extend(item)


def _is_inside(name: str, folder: Path) -> bool:
    """Decided by the text alone: a path that a visitor sent is not even looked up."""
    return Path(os.path.abspath(name)).is_relative_to(folder)


async def _read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes | None:
    """The whole body, or `None` as soon as it is known to be too large.

    Raises:
        ClientDisconnect: the client left before the end.
    """
    declared = Headers(scope=scope).get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > max_bytes:
        return None
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientDisconnect
        body += message.get("body", b"")
        if len(body) > max_bytes:
            return None
        if not message.get("more_body", False):
            return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body once, then what the server says (a disconnect)."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return waiting.pop() if waiting else await receive()

    return replayed
