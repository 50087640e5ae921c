"""Prompt log-probabilities from any server that speaks OpenAI's completions, such as `vllm serve DIR`.

Asks with token ids, so that the server scores the very windows that we do. What surprises: there are two ways to ask.
vLLM answers `prompt_logprobs` with the log-probability of every prompt token by id; other servers echo the prompt with
`token_logprobs`. The first is tried first, and a server that does neither is named in the error. Imports no torch.
"""

import http.client
import json
import math
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from clef_core.errors import EngineError
from clef_core.windows import Perplexity, summarise_losses

TIMEOUT_S = 600.0
MAX_ANSWER_BYTES = 200_000_000
MAX_QUOTED_CHARS = 300


class EndpointError(EngineError):
    """The server cannot be reached, or does not answer with prompt log-probabilities."""


@dataclass(frozen=True)
class Endpoint:
    """A server. `url` is its root, with or without `/v1`; `model` is a name that it serves."""

    url: str
    model: str
    api_key: str | None = None
    timeout_s: float = TIMEOUT_S

    def token_log_probs(self, window: Sequence[int]) -> list[float]:
        """Log-probability of each token of a window but the first, in nats, given those before it.

        Raises:
            EndpointError: the server does not answer so.
        """
        body = {"model": self.model, "prompt": list(window), "max_tokens": 1, "temperature": 0}
        answer = self._post(body | {"prompt_logprobs": 1})
        choice = _first_choice(answer)
        if choice.get("prompt_logprobs") is not None:
            return _checked(_by_id(choice["prompt_logprobs"], window), window)
        answer = self._post(body | {"echo": True, "logprobs": 1})
        found = (_first_choice(answer).get("logprobs") or {}).get("token_logprobs")
        if not isinstance(found, list) or len(found) < len(window):
            raise EndpointError(
                f"{self.url} gives no prompt log-probabilities, neither as prompt_logprobs nor as echoed token_logprobs"
            )
        return _checked(found[1 : len(window)], window)

    def _post(self, body: dict[str, Any]) -> Any:
        return _ask(f"{root_of(self.url)}/completions", self.api_key, self.timeout_s, body)


def root_of(url: str) -> str:
    """The address that the API's paths follow: with `/v1`, without a slash at the end.

    Raises:
        EndpointError: it is no http address.
    """
    if not url.startswith(("http://", "https://")):
        raise EndpointError(f"{url} is no address: it must begin with http:// or https://")
    trimmed = url.rstrip("/")
    return trimmed if trimmed.endswith("/v1") else f"{trimmed}/v1"


def served_model(url: str, api_key: str | None = None, timeout_s: float = TIMEOUT_S) -> str:
    """The name of the one model that a server has.

    Raises:
        EndpointError: it has none or several.
    """
    answer = _ask(f"{root_of(url)}/models", api_key, timeout_s, None)
    listed = answer.get("data") if isinstance(answer, dict) else None
    names = [str(one["id"]) for one in listed or () if isinstance(one, dict) and "id" in one]
    if len(names) != 1:
        raise EndpointError(f"{url} serves {', '.join(names) or 'no model'}: name one with --model")
    return names[0]


def endpoint_perplexity(
    endpoint: Endpoint, windows: Sequence[Sequence[int]], progress: Callable[[int], None] = lambda done: None
) -> Perplexity:
    """Perplexity over windows of token ids, all of one length, one request per window.

    Args:
        progress: hears how many windows are done.

    Raises:
        EndpointError: as `Endpoint.token_log_probs`.
    """

    def losses() -> Iterator[float]:
        for done, window in enumerate(windows, start=1):
            found = endpoint.token_log_probs(window)
            yield -math.fsum(found) / len(found)
            progress(done)

    return summarise_losses(list(losses()), len(windows[0]))


def _ask(url: str, api_key: str | None, timeout_s: float, body: dict[str, Any] | None) -> Any:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return json.loads(answer.read(MAX_ANSWER_BYTES))
    except urllib.error.HTTPError as error:
        with error:
            text = error.read(10_000).decode("utf-8", "replace")
        raise EndpointError(f"{url} answers {error.code}: {' '.join(text.split())[:MAX_QUOTED_CHARS]}") from None
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        raise EndpointError(f"{url} cannot be reached: {getattr(error, 'reason', error)}") from error
    except ValueError as error:
        raise EndpointError(f"{url} does not answer with JSON: {error}") from error


def _first_choice(answer: Any) -> dict[str, Any]:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise EndpointError("the server's answer has no choices")
    return choices[0]


def _by_id(entries: Any, window: Sequence[int]) -> list[Any]:
    """vLLM's list: null, then per token a map of token id to its log-probability, the prompt's own token included."""
    if not isinstance(entries, list) or len(entries) != len(window):
        raise EndpointError(f"asked about {len(window)} tokens, the server answered about another number")
    try:
        return [entry[str(token)]["logprob"] for entry, token in zip(entries[1:], window[1:], strict=True)]
    except (KeyError, TypeError) as error:
        raise EndpointError(
            f"the server gives no log-probability of token {error}: it has another tokenizer than the release"
        ) from error


def _checked(values: Sequence[Any], window: Sequence[int]) -> list[float]:
    if len(values) != len(window) - 1 or not all(
        isinstance(value, int | float) and math.isfinite(value) and value <= 1e-6 for value in values
    ):
        raise EndpointError("the server's log-probabilities are not a number of at most 0 for every token")
    return [float(value) for value in values]
