"""Problems and errors: shapes that travel in JSON, messages fit to show, one tree."""

import json
import pickle

import pytest

from clef_core.errors import (
    ClefError,
    EngineError,
    Problem,
    ReleaseError,
    RequestError,
    SettingsError,
    TooLongError,
    describe,
)

USES = {"state": 19_000, "media": 0, "questions": 900, "protocol": 100}


def test_a_problem_has_the_shape_of_fastapi() -> None:
    problem = Problem(("questions", "q", "criteria", 1), "bad", "level_type")
    assert problem.to_json() == {"loc": ["questions", "q", "criteria", 1], "msg": "bad", "type": "level_type"}


def test_a_problem_can_always_be_encoded_as_utf8_json() -> None:
    problem = Problem(("state", "\ud83d", "a\0b"), "has \udc00 and \0")
    text = json.dumps(problem.to_json(), ensure_ascii=False)
    assert "\0" not in text
    assert text.encode("utf-8")
    assert problem.loc == ("state", "\\ud83d", "a\\u0000b")


def test_a_problem_shortens_a_key_of_a_megabyte() -> None:
    assert len(Problem(("questions", "x" * 1_000_000), "bad").loc[1]) == 121


def test_every_error_of_the_program_is_a_clef_error() -> None:
    assert issubclass(TooLongError, RequestError)
    assert all(issubclass(error, ClefError) for error in (RequestError, ReleaseError, SettingsError, EngineError))


def test_a_request_error_reads_as_its_places_and_messages() -> None:
    error = RequestError((Problem(("state",), "one"), Problem(("images", 0), "two"), Problem((), "three")))
    assert str(error) == "state: one\nimages.0: two\nthree"


@pytest.mark.parametrize(
    "error", [RequestError.at(("state",), "bad", "state_type"), TooLongError(20_000, 16_384, USES)]
)
def test_request_errors_survive_pickling(error: RequestError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert copy.problems == error.problems


def test_too_long_says_tokens_limit_and_what_uses_them() -> None:
    (problem,) = TooLongError(20_000, 16_384, USES).problems
    assert problem.loc == ("state",)
    assert problem.type == "too_many_tokens"
    for fact in ("20,000", "16,384", "state 19,000", "questions 900", '"x_truncate": "end"'):
        assert fact in problem.msg


@pytest.mark.parametrize(("big", "place"), [("questions", "questions"), ("media", "images")])
def test_too_long_does_not_suggest_cutting_a_state_that_is_not_to_blame(big: str, place: str) -> None:
    (problem,) = TooLongError(20_010, 16_384, {"state": 5, "media": 5, "questions": 5, big: 19_995}).problems
    assert problem.loc == (place,)
    assert "x_truncate" not in problem.msg


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (False, "false"),
        (7, "7"),
        (1.5, "1.5"),
        ("a\n", '"a\\n"'),
        ("x" * 61, '"' + "x" * 60 + '…"'),
        ({}, "an object with 0 keys"),
        ({"a": 1}, "an object with 1 key"),
        ([1, 2], "an array of 2 entries"),
        pytest.param(10**5000, "a very long integer", id="10**5000"),
        ((1, 2), "a Python tuple"),
    ],
)
def test_values_are_named_shortly_and_as_json_has_them(value: object, text: str) -> None:
    assert describe(value) == text
