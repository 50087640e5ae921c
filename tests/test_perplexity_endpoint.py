"""Perplexity through a server: a real HTTP server that answers from our engine, and servers that fail."""

import json
import math
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import PROJECT
from test_cli import Cli

from clef_core.model import Release, load_release
from clef_core.perplexity import perplexity, token_log_probs
from clef_core.windows import windows_of
from worker.endpoint import Endpoint, EndpointError, endpoint_perplexity, root_of, served_model

SMALL = PROJECT / "checkpoints" / "random-bf16"
TEXT = (PROJECT / "examples" / "messages.csv").read_text(encoding="utf-8")

Answer = Callable[[str, dict[str, Any]], tuple[int, Any]]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: dict[str, Any]) -> None:
        assert isinstance(self.server, Server)
        self.server.heard.append((self.path, body, self.headers.get("Authorization")))
        status, answer = self.server.answer(self.path, body)
        data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """The test's output stays clean."""


class Server(ThreadingHTTPServer):
    def __init__(self, answer: Answer) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer
        self.heard: list[tuple[str, dict[str, Any], str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], Server]]:
    servers = []

    def start(answer: Answer) -> Server:
        server = Server(answer)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def release() -> Release:
    return load_release(SMALL, dtype=torch.float32)


@pytest.fixture(scope="module")
def windows(release: Release) -> list[tuple[int, ...]]:
    return windows_of(release.tokenizer, TEXT, 2, 60)


def as_vllm(release: Release) -> Answer:
    """`/v1/completions` as vLLM answers `prompt_logprobs`: null, then for each token a map that has it."""

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": "clef"}]}
        window = body["prompt"]
        values = token_log_probs(release, window).tolist()
        found = [
            {str(token): {"logprob": value, "rank": 5, "decoded_token": "x"}, "-1": {"logprob": -0.1, "rank": 1}}
            for token, value in zip(window[1:], values, strict=True)
        ]
        return 200, {"choices": [{"index": 0, "text": "y", "logprobs": None, "prompt_logprobs": [None, *found]}]}

    return answer


def as_echo(release: Release) -> Answer:
    """`/v1/completions` as servers answer `echo`: the prompt's log-probabilities, then those of the new token."""

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        choice: dict[str, Any] = {"index": 0, "text": "y"}
        if body.get("echo"):
            values = token_log_probs(release, body["prompt"]).tolist()
            choice["logprobs"] = {"token_logprobs": [None, *values, -0.5], "tokens": ["x"] * (len(values) + 2)}
        return 200, {"choices": [choice]}

    return answer


@pytest.mark.parametrize("format", [as_vllm, as_echo])
def test_a_server_of_the_same_model_has_our_perplexity(format, serve, release, windows) -> None:
    server = serve(format(release))
    heard: list[int] = []
    found = endpoint_perplexity(Endpoint(server.url, "clef"), windows, heard.append)
    wanted = perplexity(release, windows)
    assert found.value == pytest.approx(wanted.value, rel=1e-6)
    assert found.standard_error == pytest.approx(wanted.standard_error, rel=1e-6)
    assert heard == [1, 2]
    assert {path for path, _, _ in server.heard} == {"/v1/completions"}
    assert [body["prompt"] for _, body, _ in server.heard if "prompt_logprobs" in body] == [list(w) for w in windows]


def test_the_server_is_asked_for_its_model_and_gets_the_key(serve, release, windows) -> None:
    server = serve(as_vllm(release))
    assert served_model(f"{server.url}/v1/", "secret") == "clef"
    Endpoint(f"{server.url}/v1", "clef", "secret").token_log_probs(windows[0])
    assert {key for _, _, key in server.heard} == {"Bearer secret"}


def test_a_server_with_several_models_wants_a_name(serve) -> None:
    server = serve(lambda path, body: (200, {"data": [{"id": "a"}, {"id": "b"}]}))
    with pytest.raises(EndpointError, match="serves a, b: name one with --model"):
        served_model(server.url)


def test_another_tokenizer_is_noticed(serve, release, windows) -> None:
    other = as_vllm(release)

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        status, found = other(path, body)
        found["choices"][0]["prompt_logprobs"][1] = {"999999": {"logprob": -1.0}}
        return status, found

    with pytest.raises(EndpointError, match="another tokenizer"):
        Endpoint(serve(answer).url, "clef").token_log_probs(windows[0])


@pytest.mark.parametrize(
    ("status", "answer", "message"),
    [
        (404, {"error": {"message": "no model clef"}}, "answers 404: .*no model clef"),
        (200, "<html>", "does not answer with JSON"),
        (200, {"choices": []}, "has no choices"),
        (200, {"choices": [{"text": "y"}]}, "gives no prompt log-probabilities"),
        (200, {"choices": [{"prompt_logprobs": [None, {}]}]}, "answered about another number"),
    ],
)
def test_what_a_server_does_wrong_is_said(status, answer, message, serve, windows) -> None:
    server = serve(lambda path, body: (status, answer))
    with pytest.raises(EndpointError, match=message):
        Endpoint(server.url, "clef").token_log_probs(windows[0])


@pytest.mark.parametrize("value", [math.nan, 0.5, None, -math.inf])
def test_a_value_that_is_no_log_probability_is_refused(value, serve, release, windows) -> None:
    good = as_vllm(release)

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        status, found = good(path, body)
        found["choices"][0]["prompt_logprobs"][3] = {str(windows[0][3]): {"logprob": value}}
        return status, found

    with pytest.raises(EndpointError, match="not a number of at most 0"):
        Endpoint(serve(answer).url, "clef").token_log_probs(windows[0])


def test_a_server_that_is_not_there_is_named(serve, windows) -> None:
    server = serve(lambda path, body: (200, {}))
    server.shutdown()
    server.server_close()
    with pytest.raises(EndpointError, match=f"{server.url}/v1/completions cannot be reached"):
        Endpoint(server.url, "clef").token_log_probs(windows[0])


def test_an_address_must_be_http() -> None:
    assert root_of("http://host:8000/") == "http://host:8000/v1"
    with pytest.raises(EndpointError, match="must begin with http"):
        root_of("file:///etc/passwd")


def test_the_command_measures_variants_and_a_server_over_the_same_windows(
    serve, release, windows, tmp_path: Path
) -> None:
    cli = Cli(tmp_path / "data", OMP_NUM_THREADS="1", CLEF_DTYPE="float32")
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    common = ("--text", text, "--windows", "2", "--window-tokens", "60", "--json", "-")
    server = serve(as_vllm(release))
    through = cli("perplexity", "--endpoint", server.url, "--variant", "bf16", *common)
    own = cli("perplexity", "--variant", "bf16", "--release", PROJECT / "checkpoints" / "random-mxfp4", *common)
    assert (through.code, own.code) == (0, 0), through.stderr + own.stderr
    assert set(own.json) == {"text", "bf16", "mxfp4"}
    assert own.json["bf16"]["value"] == pytest.approx(through.json["clef"]["value"], rel=1e-5)
    assert own.json["bf16"]["value"] == pytest.approx(perplexity(release, windows).value, rel=1e-5)
    assert own.json["mxfp4"]["ratio_to_first"] == pytest.approx(
        own.json["mxfp4"]["value"] / own.json["bf16"]["value"], rel=1e-9
    )
    nowhere = cli("perplexity", "--endpoint", "http://127.0.0.1:9", *common)
    assert (nowhere.code, nowhere.stdout) == (1, "")
    assert "cannot be reached" in nowhere.stderr
    cli("perplexity", "--text", text, "--windows", "9999").assert_bad_input("windows of 1,024 need more")
