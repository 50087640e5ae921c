"""`decide`: answer one request."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from worker.commands.terminal import SOME_FAILED, errors_on_one_line, fail, say, stderr

if TYPE_CHECKING:
    from clef_core.schema import Submission
    from db.views import DecisionView

MAX_REQUEST_BYTES = 20_000_000  # four images of a request as base64, with room
STDIN = "-"
WAIT_S = 0.5


@errors_on_one_line
def decide(
    request: Annotated[
        str, typer.Argument(metavar="REQUEST.json", help="A SystemOne request as JSON; - reads it from stdin.")
    ],
    variant: Annotated[
        list[str] | None,
        typer.Option("--variant", "-v", help="Variant to ask instead of the request's model. Repeat for several."),
    ] = None,
    both: Annotated[bool, typer.Option("--both", help="Ask bf16 and mxfp4.")] = False,
    image: Annotated[
        list[Path] | None,
        typer.Option("--image", "-i", help="Picture file to add after the request's own images. Repeat for several."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON also to a terminal. Into a file or pipe it is always JSON.")
    ] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.1, help="Seconds to wait for the answer once a worker is ready.")
    ] = 600.0,
) -> None:
    """Answer one REQUEST and print its answers.

    With one variant the JSON is the SystemOne response; with several it is {"responses": {variant: response}}. If no
    worker holds a variant, one is started for the duration.

    Exit codes: 0 answered, 1 not answered, 2 bad input.
    """
    from worker.commands.connect import chosen_variants, open_submitter
    from worker.commands.interrupt import deferred_interrupt
    from worker.commands.workers import Workers

    submission = read_submission(request, image or [])
    for field in submission.unknown_fields:
        say(f"note: the field {field} is not known and is ignored")
    with open_submitter() as submitter, deferred_interrupt() as interrupt:
        model = submission.request.model
        variants = chosen_variants(submitter.settings, variant or [], both=both, model=model)
        with Workers(submitter, variants, interrupt) as workers:
            submitted = submitter.submit(submission, variants, source="cli")
            with stderr().status("deciding", spinner="dots"):
                deadline = time.monotonic() + timeout_s
                while not _are_finished(decisions := submitter.wait(list(submitted.decision_ids.values()), WAIT_S)):
                    interrupt.check()
                    if time.monotonic() >= deadline:
                        break
                    workers.ensure()  # somebody may have closed the app whose worker was to answer
    responses = {decision.variant: _response(model, decision) for decision in decisions}
    if as_json or not sys.stdout.isatty():
        _print_json(responses)
    else:
        from worker.commands.answers import print_answers

        print_answers(submission.request.questions, decisions)
    for name, response in responses.items():
        if "error" in response:
            fail(f"{name}: {response['error']['message']}", SOME_FAILED)


def read_submission(request: str, images: list[Path]) -> Submission:
    """The request with the picture files added to its images."""
    import base64

    from clef_core.schema import parse_json, parse_request

    if request == STDIN:
        text = sys.stdin.buffer.read(MAX_REQUEST_BYTES + 1)
    else:
        with Path(request).open("rb") as file:
            text = file.read(MAX_REQUEST_BYTES + 1)
    if len(text) > MAX_REQUEST_BYTES:
        fail(f"the request has more than {MAX_REQUEST_BYTES:,} bytes, which is the limit")
    body = parse_json(text) if images else text
    if images and isinstance(body, dict):
        own = body.get("images")
        added = [base64.b64encode(path.read_bytes()).decode("ascii") for path in images]
        body["images"] = [*own, *added] if isinstance(own, list) else added if own is None else own
    return parse_request(body)  # type: ignore[arg-type]  # what is no object is refused there


def _are_finished(decisions: Sequence[DecisionView]) -> bool:
    return all(decision.is_finished for decision in decisions)


def _response(model: str, decision: DecisionView) -> dict[str, Any]:
    from worker.results import response_of

    if decision.status == "done":
        return response_of(decision, model)
    problems = "; ".join(f"{problem['msg']}" for problem in decision.error or ())
    return {"error": {"message": problems or f"not answered in time; decision {decision.id} is {decision.status}"}}


def _print_json(responses: dict[str, dict[str, Any]]) -> None:
    import json

    body = next(iter(responses.values())) if len(responses) == 1 else {"responses": responses}
    typer.echo(json.dumps(body, ensure_ascii=False, indent=2))
