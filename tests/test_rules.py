"""Every rule for requests, each broken alone and at its edge: the place, and what the message must say."""

from typing import Any

import pytest

from clef_core.errors import Loc, RequestError
from clef_core.schema import parse_questions, parse_request

NOUL = {"type": "noul"}
CHOICE = {"type": "choice", "criteria": {"a": None, "b": None}}
SCORE = {"type": "score", "criteria": ["low", "high"]}


def body(**changes: Any) -> dict[str, Any]:
    return {"model": "clef", "state": "s", "questions": {"q": NOUL}, **changes}


def asked(**changes: Any) -> dict[str, Any]:
    """A body with one question, noul unless the changes say otherwise."""
    return body(questions={"q": {**NOUL, **changes}})


def without(field: str) -> dict[str, Any]:
    return {name: value for name, value in body().items() if name != field}


def named(question_id: str) -> dict[str, Any]:
    return body(questions={question_id: NOUL})


Q: Loc = ("questions", "q")

BROKEN = [
    ("model missing", without("model"), ("model",), "needs a model"),
    ("model null", body(model=None), ("model",), "must be a string; this is null"),
    ("state missing", without("state"), ("state",), "needs a state"),
    ("state null", body(state=None), ("state",), "this is null"),
    ("state true", body(state=True), ("state",), "this is true"),
    ("state number", body(state=0), ("state",), "this is 0"),
    ("state float", body(state=1.5), ("state",), "this is 1.5"),
    ("questions missing", without("questions"), ("questions",), "1 to 64"),
    ("questions null", body(questions=None), ("questions",), "this is null"),
    ("questions list", body(questions=[NOUL]), ("questions",), "an array of 1 entry"),
    ("no questions", body(questions={}), ("questions",), "has 0"),
    ("65 questions", body(questions={str(i): NOUL for i in range(65)}), ("questions",), "has 65"),
    ("empty id", named(""), ("questions", ""), "must not be empty"),
    ("id of 101", named("x" * 101), ("questions", "x" * 101), "has 101"),
    ("id with NUL", named("a\0"), ("questions", "a\\u0000"), "NUL"),
    ("id with surrogate", named("\ud83d"), ("questions", "\\ud83d"), "surrogate"),
    ("question string", body(questions={"q": "is it spam?"}), Q, '"is it spam?"'),
    ("question null", body(questions={"q": None}), Q, "this is null"),
    ("question list", body(questions={"q": [NOUL]}), Q, "an array"),
    ("type missing", body(questions={"q": {}}), (*Q, "type"), "needs a type"),
    ("type null", asked(type=None), (*Q, "type"), "this is null"),
    ("type list", asked(type=["noul"]), (*Q, "type"), "an array of 1 entry"),
    ("type object", asked(type={}), (*Q, "type"), "an object"),
    ("type unknown", asked(type="enum"), (*Q, "type"), '"choice", "score" or "noul"; this is "enum"'),
    ("type in capitals", asked(type="Noul"), (*Q, "type"), 'this is "Noul"'),
    ("type boolean", asked(type="boolean"), (*Q, "type"), 'A yes-or-no question has the type "noul"'),
    ("type bool", asked(type="Bool"), (*Q, "type"), 'has the type "noul"'),
    ("instructions number", asked(instructions=7), (*Q, "instructions"), "this is 7"),
    ("instructions true", asked(instructions=True), (*Q, "instructions"), "this is true"),
    ("choice without criteria", asked(type="choice"), (*Q, "criteria"), "there are none"),
    ("choice null", asked(type="choice", criteria=None), (*Q, "criteria"), "this is null"),
    ("choice list", asked(type="choice", criteria=["a", "b"]), (*Q, "criteria"), "must be an object"),
    ("choice string", asked(type="choice", criteria="ab"), (*Q, "criteria"), 'this is "ab"'),
    ("choice of 1", asked(type="choice", criteria={"a": None}), (*Q, "criteria"), "2 to 255 options; this one has 1"),
    (
        "choice of 256",
        asked(type="choice", criteria=dict.fromkeys(map(str, range(256)))),
        (*Q, "criteria"),
        "this one has 256",
    ),
    ("description number", asked(type="choice", criteria={"a": 1, "b": None}), (*Q, "criteria", "a"), "this is 1"),
    ("description true", asked(type="choice", criteria={"a": None, "b": True}), (*Q, "criteria", "b"), "this is true"),
    ("score without criteria", asked(type="score"), (*Q, "criteria"), "there are none"),
    ("score object", asked(type="score", criteria={"0": "a", "1": "b"}), (*Q, "criteria"), "must be an array"),
    ("score string", asked(type="score", criteria="abc"), (*Q, "criteria"), "must be an array"),
    (
        "score of 1",
        asked(type="score", criteria=["a"]),
        (*Q, "criteria"),
        "2 to 10 levels, lowest first; this one has 1",
    ),
    ("score of 11", asked(type="score", criteria=["a"] * 11), (*Q, "criteria"), "this one has 11"),
    ("level null", asked(type="score", criteria=["a", None]), (*Q, "criteria", 1), "this is null"),
    ("level number", asked(type="score", criteria=[3, "b"]), (*Q, "criteria", 0), "this is 3"),
    ("noul true", asked(criteria=True), (*Q, "criteria"), "this is true"),
    ("noul list", asked(criteria=["yes", "no"]), (*Q, "criteria"), "an array"),
    ("noul empty", asked(criteria={}), (*Q, "criteria"), "this one is empty"),
    ("noul key", asked(criteria={"true": "x", "maybe": "y"}), (*Q, "criteria", "maybe"), '"maybe" is neither'),
    ("noul key True", asked(criteria={"True": "x"}), (*Q, "criteria", "True"), '"True" is neither'),
    ("noul description", asked(criteria={"true": 1}), (*Q, "criteria", "true"), "this is 1"),
    ("x_truncate", body(x_truncate="start"), ("x_truncate",), 'must be "end"'),
    ("x_truncate true", body(x_truncate=True), ("x_truncate",), "this is true"),
    ("videos", body(videos=[["frame"]]), ("videos",), "Python library"),
    ("images string", body(images="x"), ("images",), "must be an array"),
    ("assets list", body(assets=[]), ("assets",), "must be an object"),
    ("body list", [body()], (), "must be a JSON object; this is an array of 1 entry"),
]

KEPT = [
    ("state empty", body(state="")),
    ("state object", body(state={"a": [1, None, True, 1.5]})),
    ("state array", body(state=[])),
    ("64 questions", body(questions={str(i): NOUL for i in range(64)})),
    ("id of 100", named("긴" * 100)),
    ("ids of all kinds", body(questions={"frage 1": NOUL, "a:b": CHOICE, "긴급": SCORE, "<|im_end|>": NOUL})),
    ("instructions null", asked(instructions=None)),
    ("instructions empty", asked(instructions="")),
    ("instructions object", asked(instructions={"task": 1})),
    ("instructions array", asked(instructions=["a", 7, None, True])),
    ("choice of 2", asked(type="choice", criteria={"": None, "b": "x"})),
    ("choice of 255", asked(type="choice", criteria=dict.fromkeys(map(str, range(255))))),
    ("descriptions", asked(type="choice", criteria={"a": "", "b": {}, "c": [], "d": None})),
    ("score of 2", asked(**SCORE)),
    ("score of 10", asked(type="score", criteria=["", {}, [], *["x"] * 7])),
    ("noul null", asked(criteria=None)),
    ("noul one-sided", asked(criteria={"false": ["x"]})),
    ("noul both", asked(criteria={"true": {"y": 1}, "false": None})),
    ("x_truncate null", body(x_truncate=None)),
    ("x_truncate end", body(x_truncate="end")),
    ("no media", body(images=None, assets={}, videos=[])),
    ("extras", body(seed=7, x_trace_id="t")),
]


@pytest.mark.parametrize(("broken", "loc", "said"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_a_broken_rule_is_the_only_problem_and_points_at_its_place(broken: Any, loc: Loc, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_request(broken)
    (problem,) = caught.value.problems
    assert problem.loc == loc
    assert said in problem.msg


@pytest.mark.parametrize("kept", [case[1] for case in KEPT], ids=[case[0] for case in KEPT])
def test_what_the_rules_allow_passes(kept: dict[str, Any]) -> None:
    assert list(parse_request(kept).request.questions) == list(kept["questions"])


def test_all_mistakes_of_a_body_are_reported_at_once() -> None:
    text = """{"model": 3, "state": NaN, "x_truncate": "start", "videos": [1], "images": ["/etc/hostname"],
        "questions": {"": {"type": "boolean"}, "s": {"type": "score", "criteria": [1, null], "instructions": 4}}}"""
    with pytest.raises(RequestError) as caught:
        parse_request(text)
    assert {problem.loc for problem in caught.value.problems} == {
        ("model",),
        ("state",),
        ("x_truncate",),
        ("videos",),
        ("images", 0),
        ("questions", ""),
        ("questions", "", "type"),
        ("questions", "s", "criteria", 0),
        ("questions", "s", "criteria", 1),
        ("questions", "s", "instructions"),
    }


def test_no_message_and_no_place_shows_the_inside_of_the_validator() -> None:
    for _, broken, _, _ in BROKEN:
        with pytest.raises(RequestError) as caught:
            parse_request(broken)
        text = str(caught.value)
        assert not any(noise in text for noise in ("function-", "tagged-union", "pydantic", "Input should", "[key]"))


def test_thousands_of_mistakes_give_a_hundred_and_a_last_word() -> None:
    bad = {str(i): {"type": "choice", "criteria": {str(k): 7 for k in range(255)}} for i in range(64)}
    with pytest.raises(RequestError) as caught:
        parse_request(body(questions=bad))
    assert len(caught.value.problems) == 101
    assert "first 100" in caught.value.problems[-1].msg


def test_a_map_of_questions_alone_keeps_the_same_rules() -> None:
    with pytest.raises(RequestError) as caught:
        parse_questions({"q": {"type": "choice"}, "n": {"type": "noul", "instructions": float("nan")}})
    assert {problem.loc for problem in caught.value.problems} == {("questions", "n", "instructions")}
    with pytest.raises(RequestError) as caught:
        parse_questions({"q": {"type": "choice"}, "n": {"type": "enum"}})
    assert [problem.loc for problem in caught.value.problems] == [
        ("questions", "q", "criteria"),
        ("questions", "n", "type"),
    ]
