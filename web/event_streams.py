"""Keeps a click from being lost when the page's event stream ends in the same moment.

Gradio's page opens one event stream per tab and the server ends it when no event of the tab is left. An event that is
joined right after that decision is answered on another connection: if that answer overtakes the end of the stream, the
page believes that the stream still stands, opens no new one, and never hears of the event (Gradio 6.31; a click on Run
during a dry run's last milliseconds did nothing). So an answer to a join waits until the stream's end must have been
read. Knows of Gradio only its two routes.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

READ_S = 0.1
"""By how much the end of a stream may arrive later than an answer sent after it on another connection."""


class JoinAfterStreamEnd:
    """Holds back answers to `/queue/join` until `READ_S` after the last end of the same session's stream."""

    def __init__(
        self,
        app: ASGIApp,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.app = app
        self.clock = clock
        self.sleep = sleep
        self.ended: dict[str, float] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        if path.endswith("/queue/data"):
            await self.app(scope, receive, self.noting_end(Request(scope).query_params.get("session_hash", ""), send))
        elif path.endswith("/queue/join"):
            await self.join(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def noting_end(self, session: str, send: Send) -> Send:
        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                now = self.clock()
                self.ended = {name: at for name, at in self.ended.items() if now - at < READ_S} | {session: now}
            await send(message)

        return send_on

    async def join(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = bytearray()

        async def receive_on() -> Message:
            message = await receive()
            body.extend(message.get("body", b""))
            return message

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                await self.sleep(self.ended.get(_session_of(body), 0.0) + READ_S - self.clock())
            await send(message)

        await self.app(scope, receive_on, send_on)


def _session_of(body: bytes | bytearray) -> str:
    """The session that a join names; the doors let only JSON pass, but not every JSON is an object."""
    try:
        joined = json.loads(body)
    except ValueError:
        return ""
    return str(joined.get("session_hash", "")) if isinstance(joined, dict) else ""
