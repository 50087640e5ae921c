"""The order in which a page hears of its events: never the answer to a join before the end of the stream."""

import asyncio
import json

import pytest
from starlette.types import Message, Receive, Scope, Send

from web.event_streams import READ_S, JoinAfterStreamEnd


async def gradio(scope: Scope, receive: Receive, send: Send) -> None:
    """As Gradio's two routes: a stream in two parts, and a join that reads its body."""
    if scope["path"].endswith("/queue/join"):
        while (await receive()).get("more_body"):
            pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"a", "more_body": True})
    await send({"type": "http.response.body", "body": b"b"})


class Clock:
    """Time that only passes when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept = 0.0

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept = max(seconds, 0.0)
        self.now += self.slept


@pytest.fixture
def clock() -> Clock:
    return Clock()


def call(app: JoinAfterStreamEnd, path: str, *, query: str = "", body: bytes = b"") -> None:
    parts: list[Message] = [
        {"type": "http.request", "body": body[:5], "more_body": True},
        {"type": "http.request", "body": body[5:]},
    ]
    sent: list[bytes] = []

    async def receive() -> Message:
        return parts.pop(0)

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))

    scope = {"type": "http", "method": "GET", "path": path, "query_string": query.encode(), "headers": []}
    asyncio.run(app(scope, receive, send))
    assert b"".join(sent) == b"ab"


def join(app: JoinAfterStreamEnd, session: str) -> None:
    call(app, "/gradio_api/queue/join", body=json.dumps({"session_hash": session}).encode())


def end_stream(app: JoinAfterStreamEnd, session: str) -> None:
    call(app, "/gradio_api/queue/data", query=f"session_hash={session}")


def test_an_answer_waits_for_the_end_of_its_own_stream_only(clock: Clock) -> None:
    app = JoinAfterStreamEnd(gradio, clock.monotonic, clock.sleep)
    join(app, "mine")
    assert clock.slept == 0.0
    end_stream(app, "mine")
    join(app, "another")
    assert clock.slept == 0.0
    clock.now += READ_S / 4
    join(app, "mine")
    assert clock.slept == pytest.approx(READ_S * 3 / 4)
    join(app, "mine")
    assert clock.slept == pytest.approx(0.0)  # by now the end is old


def test_ends_are_forgotten(clock: Clock) -> None:
    app = JoinAfterStreamEnd(gradio, clock.monotonic, clock.sleep)
    for number in range(5):
        end_stream(app, str(number))
        clock.now += READ_S * 0.3
    assert list(app.ended) == ["1", "2", "3", "4"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xff"])
def test_a_body_without_a_session_is_passed_on(clock: Clock, body: bytes) -> None:
    call(JoinAfterStreamEnd(gradio, clock.monotonic, clock.sleep), "/gradio_api/queue/join", body=body)
    assert clock.slept == 0.0
