"""The HTTP routes of a decision: `POST /v1/systemone` and `GET /v1/decisions/{id}`.

A request takes the same way as one from the page: checked, stored, queued, answered by a worker; this module waits for
the answer. Knows no model and no queue beyond `submit`.

What surprises: an answer that is not there in time is 202 with the decision's link, never an error. The decision is
stored and will be made; the official client repeats every 5xx, and each repetition would be another decision. `Prefer:
respond-async` and `Prefer: wait=N` only shorten the wait. A repetition under the same `Idempotency-Key` waits for, or
gives, the one decision. A decision that failed in the worker is 422 as well: asked again, it would fail again.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, FastAPI, HTTPException, Path, Request
from fastapi.responses import JSONResponse

from clef_core.answers import build_response
from clef_core.errors import Problem, RequestError
from clef_core.schema import parse_questions, parse_request
from clef_core.tokens import PromptTokenizer
from db import store
from db.views import DecisionView, RequestView
from web.waiting import DecisionWatch
from worker.settings import UnknownModelError
from worker.submit import QueueFullError, Submitter

ASYNC_WAIT_S = 1.0
"""How long `Prefer: respond-async` waits for an answer when it names no time of its own."""

MAX_ID = 2**63 - 1  # the largest id a database can hold


@dataclass(frozen=True)
class Preference:
    """The `Prefer` header (RFC 7240), as far as it concerns waiting."""

    is_async: bool = False
    wait_s: float | None = None

    @classmethod
    def parse(cls, headers: Sequence[str]) -> "Preference":
        """Read one or several headers; what is not understood is ignored, as the RFC demands."""
        is_async, wait_s = False, None
        for token in ",".join(headers).split(","):
            name, _, value = token.partition(";")[0].partition("=")
            if name.strip().lower() == "respond-async":
                is_async = True
            elif name.strip().lower() == "wait" and re.fullmatch(r"[0-9]{1,9}", value.strip(' "')):
                wait_s = float(value.strip(' "'))
        return cls(is_async, wait_s)

    def timeout_s(self, longest_s: float) -> float:
        """How long to wait for an answer, at most `longest_s`."""
        wanted = self.wait_s if self.wait_s is not None else ASYNC_WAIT_S if self.is_async else longest_s
        return min(wanted, longest_s)


@dataclass(frozen=True)
class DecisionRoutes:
    """The two routes, and what they need."""

    submitter: Submitter
    tokenizers: Mapping[str, PromptTokenizer]
    watch: DecisionWatch

    def add_to(self, router: APIRouter) -> None:
        router.add_api_route("/v1/systemone", self.decide, methods=["POST"], response_model=None)
        router.add_api_route("/v1/decisions/{decision_id}", self.show, methods=["GET"], response_model=None)

    async def decide(self, request: Request) -> JSONResponse:
        """Decide one request: 200 with the SystemOne response, 202 when it takes longer than the caller waits."""
        key = request.headers.get("idempotency-key")
        preference = Preference.parse(request.headers.getlist("prefer"))
        decision_id = await to_thread.run_sync(self._submit, await request.body(), key)
        await self.watch.wait(decision_id, preference.timeout_s(self.submitter.settings.answer_timeout_s))
        return await to_thread.run_sync(self._reply, decision_id, preference)

    def show(self, decision_id: Annotated[int, Path(ge=1, le=MAX_ID)]) -> JSONResponse:
        """A decision's status and, once it is done, the same response that `POST /v1/systemone` gives."""
        return JSONResponse(self._describe(*self._read(decision_id)))

    def _submit(self, body: bytes, key: str | None) -> int:
        submission = parse_request(body)
        settings = self.submitter.settings
        variant = settings.variant_of(submission.request.model)
        tokenizer = self.tokenizers.get(variant)
        if tokenizer is not None:
            sizes = [(image.width, image.height) for image in submission.images]
            tokenizer.check_length(submission.request, sizes, settings.max_tokens)
        submitted = self.submitter.submit(submission, [variant], source="http", idempotency_key=key)
        return submitted.decision_ids[variant]

    def _reply(self, decision_id: int, preference: Preference) -> JSONResponse:
        decision, request = self._read(decision_id)
        headers = {"Location": decision_link(decision_id)}
        if not decision.is_finished:
            if preference.is_async:
                headers["Preference-Applied"] = "respond-async"
            return JSONResponse(self._describe(decision, request), 202, headers)
        if decision.error:
            raise RequestError(tuple(Problem(tuple(p["loc"]), p["msg"], p["type"]) for p in decision.error))
        return JSONResponse(self._response(decision, request), headers=headers)

    def _read(self, decision_id: int) -> tuple[DecisionView, RequestView]:
        with self.submitter.database.read() as session:
            decision = store.get_decision(session, decision_id)
            request = store.get_request(session, decision.request_id) if decision is not None else None
        if decision is None or request is None:
            raise HTTPException(404, [{"loc": ["path", "decision_id"], "msg": "no such decision", "type": "missing"}])
        return decision, request

    def _describe(self, decision: DecisionView, request: RequestView) -> dict[str, Any]:
        with self.submitter.database.read() as session:
            position = store.queue_position(session, decision.id) if decision.status == "queued" else None
        return {
            "id": decision.id,
            "status": decision.status,
            "variant": decision.variant,
            "link": decision_link(decision.id),
            "queue_position": position,
            "created_at": decision.created_at.isoformat(),
            "finished_at": decision.finished_at.isoformat() if decision.finished_at else None,
            "response": self._response(decision, request) if decision.status == "done" else None,
            "error": decision.error,
        }

    def _response(self, decision: DecisionView, request: RequestView) -> dict[str, Any]:
        return build_response(
            request.asked_model,
            decision.variant,
            parse_questions(request.questions),
            decision.log_probs or {},
            decision.input_tokens or 0,
            decision.truncated_tokens or 0,
            self.submitter.settings.confidence,
        )


def decision_link(decision_id: int) -> str:
    return f"/v1/decisions/{decision_id}"


def error_body(kind: str, message: str) -> dict[str, Any]:
    """The body of an error that is not about one field of the request."""
    return {"detail": {"error_type": kind, "message": message}}


def add_error_handlers(app: FastAPI) -> None:
    """Turn the errors that routes raise into the statuses of SPEC: 400, 422 and 503, in FastAPI's shape."""

    @app.exception_handler(UnknownModelError)
    def unknown_model(_: Request, error: UnknownModelError) -> JSONResponse:
        return JSONResponse(error_body("api_usage_error", error.problems[0].msg), 400)

    @app.exception_handler(RequestError)
    def bad_request(_: Request, error: RequestError) -> JSONResponse:
        detail = [problem.to_json() for problem in error.problems]
        for problem in detail:
            place = "header" if problem["loc"][:1] == ["Idempotency-Key"] else "body"
            problem["loc"] = [place, *problem["loc"]]
        return JSONResponse({"detail": detail}, 422)

    @app.exception_handler(QueueFullError)
    def full_queue(_: Request, error: QueueFullError) -> JSONResponse:
        return JSONResponse(error_body("overloaded", str(error)), 503, {"Retry-After": str(error.retry_after_s)})
