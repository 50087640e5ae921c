"""The HTTP routes, through the whole application; answers come from a real worker on the small release."""

import base64
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from paths import DATA, read_jsonl
from sqlalchemy import func, select
from web_app import WebApp, open_app

from db import store
from db.models import Request
from db.views import NewResult
from web.api import Preference

CASES = read_jsonl(DATA / "cases" / "requests.jsonl")
JSON = {"content-type": "application/json"}
LATER = {"prefer": "respond-async, wait=0"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebApp]:
    """With a worker that has loaded its release."""
    with open_app(tmp_path_factory.mktemp("served"), with_worker=True) as app:
        deadline = time.monotonic() + 90
        while app.client.get("/healthz").status_code != 200:
            assert time.monotonic() < deadline, app.client.get("/v1/models").json()
            time.sleep(0.2)
        yield app


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebApp]:
    """Without a worker: what is stored stays queued."""
    with open_app(tmp_path_factory.mktemp("idle"), answer_timeout_s=0.2) as app:
        yield app


def body(state: Any = "The order is late.", **changes: Any) -> dict[str, Any]:
    return {"model": "clef", "state": state, "questions": {"late": {"type": "noul"}}, **changes}


def num_requests(app: WebApp) -> int:
    with app.submitter.database.read() as session:
        return session.scalars(select(func.count()).select_from(Request)).one()


def finish(app: WebApp, decision_id: int, **result: Any) -> None:
    """Save a result as a worker does: claim the row, then save under the claim."""
    with app.submitter.database.write() as session:
        store.claim_rows(session, [decision_id], owner="test", token="token")
        assert store.save_results(session, "token", None, [NewResult(decision_id, **result)]) == [decision_id]


# Cases: every line and every image has its right status over HTTP.


@pytest.mark.parametrize("case", [case for case in CASES if case["status"] == 200], ids=lambda case: case["name"])
def test_a_good_case_is_answered(served: WebApp, case: dict[str, Any]) -> None:
    reply = served.client.post("/v1/systemone", content=case["body"].encode(), headers=JSON)
    assert reply.status_code == 200, reply.text
    questions = json.loads(case["body"])["questions"]
    answers = reply.json()["answers"]
    assert list(answers) == list(questions)
    for question_id, answer in answers.items():
        if answer["type"] == "choice":
            assert list(answer["probabilities"]) == list(questions[question_id]["criteria"])
            assert sum(answer["probabilities"].values()) == pytest.approx(1, abs=1e-4 * len(answer["probabilities"]))


@pytest.mark.parametrize("case", [case for case in CASES if case["status"] != 200], ids=lambda case: case["name"])
def test_a_bad_case_is_refused_with_its_reason_and_not_stored(idle: WebApp, case: dict[str, Any]) -> None:
    before = num_requests(idle)
    reply = idle.client.post("/v1/systemone", content=case["body"].encode(), headers=JSON)
    assert reply.status_code == case["status"]
    detail = reply.json()["detail"]
    assert all(problem["loc"][0] == "body" and problem["msg"] and problem["type"] for problem in detail)
    assert case["error_mentions"] in json.dumps(detail, ensure_ascii=False)
    assert num_requests(idle) == before


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("rotated_exif6.jpg", 200),
        ("cmyk.jpg", 200),
        ("palette_alpha.png", 200),
        ("truncated.jpg", 422),
        ("html.png", 422),
        ("bomb_30000x30000.png", 422),
    ],
)
def test_an_image_has_its_right_outcome(served: WebApp, name: str, status: int) -> None:
    data = base64.b64encode((DATA / "cases" / "images" / name).read_bytes()).decode()
    reply = served.client.post("/v1/systemone", json=body(images=[data]))
    assert reply.status_code == status, reply.text
    if status == 422:
        assert reply.json()["detail"][0]["loc"][:3] == ["body", "images", 0]


# Answers.


def test_the_answer_has_the_shape_of_systemone_and_says_the_variant(served: WebApp) -> None:
    reply = served.client.post("/v1/systemone", json=body(model="jev-latest"))
    answer = reply.json()
    assert (answer["model"], answer["x_variant"]) == ("jev-latest", "bf16")
    assert answer["usage"]["output_tokens"] == 0
    assert answer["usage"]["input_tokens"] > 50
    assert answer["answers"]["late"].keys() == {"type", "noul"}


def test_a_truncated_state_is_answered_and_the_answer_says_so(served: WebApp) -> None:
    reply = served.client.post("/v1/systemone", json=body("The order is late. " * 6000, x_truncate="end"))
    assert reply.status_code == 200, reply.text
    assert reply.json()["x_truncated_tokens"] > 0
    assert reply.json()["usage"]["input_tokens"] <= 16384


def test_the_link_of_an_answer_gives_the_same_answer_again(served: WebApp) -> None:
    reply = served.client.post("/v1/systemone", json=body())
    again = served.client.get(reply.headers["location"]).json()
    assert (again["status"], again["response"], again["error"]) == ("done", reply.json(), None)


def test_forty_callers_at_once_get_their_own_answers(served: WebApp) -> None:
    def ask(number: int) -> dict[str, Any]:
        questions = {f"question {number}": {"type": "choice", "criteria": {f"option {number}": None, "other": None}}}
        return served.client.post("/v1/systemone", json=body(questions=questions)).json()

    with ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(ask, range(40)))
    for number, answer in enumerate(answers):
        assert list(answer["answers"]) == [f"question {number}"]
        assert list(answer["answers"][f"question {number}"]["probabilities"]) == [f"option {number}", "other"]


# Waiting.


def test_a_slow_answer_is_202_with_its_link_whether_or_not_the_caller_prefers_it(idle: WebApp) -> None:
    for headers in ({}, LATER):
        reply = idle.client.post("/v1/systemone", json=body(), headers=headers)
        assert reply.status_code == 202
        shown = idle.client.get(reply.headers["location"])
        assert shown.json() == reply.json()
        assert (shown.status_code, shown.json()["status"], shown.json()["response"]) == (200, "queued", None)
        assert ("preference-applied" in reply.headers) == (headers == LATER)


def test_an_answer_that_comes_while_the_caller_waits_is_given(idle: WebApp) -> None:
    first = idle.client.post("/v1/systemone", json=body("slow"), headers={**LATER, "idempotency-key": "wait"})
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(idle.client.post, "/v1/systemone", json=body("slow"), headers={"idempotency-key": "wait"})
        finish(idle, first.json()["id"], log_probs={"late": {"true": -0.5108256, "false": -0.9162907}}, input_tokens=7)
        reply = waiting.result()
    assert reply.status_code == 200
    assert reply.json()["answers"] == {"late": {"type": "noul", "noul": 0.6}}


@pytest.mark.parametrize(
    ("headers", "timeout_s"),
    [
        ([], 60),
        (["respond-async"], 1),
        (["respond-async, wait=10"], 10),
        (["respond-async", "wait=10"], 10),
        (["Wait = 5; x=y, Respond-Async"], 5),
        (['wait="7"'], 7),
        (["wait=600"], 60),
        (["wait=0"], 0),
        (["wait=-1"], 60),
        (["wait=soon, return=minimal"], 60),
        (["wait=٣"], 60),
    ],
)
def test_prefer_shortens_the_wait_and_never_lengthens_it(headers: list[str], timeout_s: float) -> None:
    assert Preference.parse(headers).timeout_s(60) == timeout_s


def test_a_failed_decision_is_422_with_the_worker_s_reason(idle: WebApp) -> None:
    headers = {**LATER, "idempotency-key": "fails"}
    link = idle.client.post("/v1/systemone", json=body("poison"), headers=headers).headers["location"]
    problem = {"loc": [], "msg": "Tried 3 times.", "type": "worker_crash"}
    finish(idle, int(link.rpartition("/")[2]), error=(problem,))
    again = idle.client.post("/v1/systemone", json=body("poison"), headers=headers)
    assert (again.status_code, again.json()) == (422, {"detail": [{**problem, "loc": ["body"]}]})
    assert idle.client.get(link).json()["error"] == [problem]


# Repetition and refusal.


def test_the_same_key_is_the_same_decision(idle: WebApp) -> None:
    headers = {**LATER, "idempotency-key": "once"}
    first, second = (idle.client.post("/v1/systemone", json=body("once"), headers=headers) for _ in range(2))
    assert first.headers["location"] == second.headers["location"]


def test_a_key_of_another_request_is_refused_at_the_header(idle: WebApp) -> None:
    headers = {**LATER, "idempotency-key": "mine"}
    idle.client.post("/v1/systemone", json=body("one"), headers=headers)
    other = idle.client.post("/v1/systemone", json=body("another"), headers=headers)
    assert other.status_code == 422
    assert other.json()["detail"][0]["loc"] == ["header", "Idempotency-Key"]


def test_a_key_that_is_too_long_is_refused(idle: WebApp) -> None:
    reply = idle.client.post("/v1/systemone", json=body(), headers={"idempotency-key": "k" * 201})
    assert (reply.status_code, reply.json()["detail"][0]["loc"][0]) == (422, "header")


def test_an_unknown_model_is_400_in_the_shape_of_the_client(idle: WebApp) -> None:
    reply = idle.client.post("/v1/systemone", json=body(model="gpt-4"))
    assert reply.status_code == 400
    assert reply.json()["detail"]["error_type"] == "api_usage_error"
    assert "clef-bf16" in reply.json()["detail"]["message"]


def test_all_mistakes_are_named_at_once(idle: WebApp) -> None:
    reply = idle.client.post("/v1/systemone", json={"state": 3, "questions": {"q": {"type": "boolean"}}})
    assert reply.status_code == 422
    assert {tuple(problem["loc"][:2]) for problem in reply.json()["detail"]} == {
        ("body", "model"),
        ("body", "state"),
        ("body", "questions"),
    }


def test_a_request_that_is_too_long_is_refused_at_the_door_with_its_numbers(idle: WebApp) -> None:
    before = num_requests(idle)
    reply = idle.client.post("/v1/systemone", json=body("The order is late. " * 6000))
    (problem,) = reply.json()["detail"]
    assert (reply.status_code, problem["type"]) == (422, "too_many_tokens")
    assert "16,384" in problem["msg"]
    assert num_requests(idle) == before


def test_a_full_queue_is_503_with_retry_after_and_nothing_is_stored(tmp_path: Path) -> None:
    with open_app(tmp_path, max_queue=2) as app:
        for _ in range(2):
            assert app.client.post("/v1/systemone", json=body(), headers=LATER).status_code == 202
        reply = app.client.post("/v1/systemone", json=body(), headers=LATER)
        assert (reply.status_code, int(reply.headers["retry-after"]) > 0) == (503, True)
        assert reply.json()["detail"]["error_type"] == "overloaded"
        assert num_requests(app) == 2


def test_a_body_over_the_limit_is_413(idle: WebApp) -> None:
    assert idle.client.post("/v1/systemone", json=body("x" * 17_000_000)).status_code == 413


@pytest.mark.parametrize(("number", "status"), [("999999", 404), (2**63, 422), (10**30, 422), (0, 422), ("x", 422)])
def test_a_decision_that_is_not_there_is_4xx(idle: WebApp, number: object, status: int) -> None:
    reply = idle.client.get(f"/v1/decisions/{number}")
    assert (reply.status_code, reply.json()["detail"][0]["loc"]) == (status, ["path", "decision_id"])


def test_the_key_guards_v1_but_not_the_health_check(tmp_path: Path) -> None:
    with open_app(tmp_path, api_key="a long key") as app:
        for method, path in (("POST", "/v1/systemone"), ("GET", "/v1/decisions/1"), ("GET", "/v1/models")):
            assert app.client.request(method, path, json={}).status_code == 401
        assert app.client.get("/v1/models", headers={"x-api-key": "a long key"}).status_code == 200
        assert app.client.get("/healthz").status_code == 503


# What runs.


def test_models_names_every_model_and_says_that_the_weights_are_random(served: WebApp) -> None:
    reply = served.client.get("/v1/models").json()
    (model,) = reply["models"]
    assert (reply["default_variant"], model["id"], model["aliases"]) == ("bf16", "clef-bf16", ["clef", "jev-latest"])
    assert (model["state"], model["workers"], model["release"]["is_random"]) == ("ready", 1, True)


def test_health_counts_workers_and_the_queue(idle: WebApp, served: WebApp) -> None:
    assert served.client.get("/healthz").json()["variants"] == {"bf16": {"state": "ready", "workers": 1, "queued": 0}}
    idle.client.post("/v1/systemone", json=body(), headers=LATER)
    reply = idle.client.get("/healthz")
    facts = reply.json()["variants"]["bf16"]
    assert (reply.status_code, reply.json()["status"], facts["state"]) == (503, "unhealthy", "absent")
    assert facts["queued"] > 0


def test_health_says_that_redis_is_gone(tmp_path: Path) -> None:
    with open_app(tmp_path) as app:
        app.submitter.redis.shutdown()
        reply = app.client.get("/healthz")
        assert (reply.status_code, reply.json()["redis"], reply.json()["database"]) == (503, "unreachable", "ok")
