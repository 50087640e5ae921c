"""Requests as objects: what is kept to the letter, what the model sees, and how images leave the state."""

import base64
import io
import json
import time
from typing import Any

import pytest
from paths import GOLDEN, read_jsonl
from PIL import Image
from pydantic import ValidationError

from clef_core.errors import RequestError
from clef_core.schema import (
    ChoiceQuestion,
    NoulQuestion,
    Option,
    Request,
    ScoreQuestion,
    options,
    parse_questions,
    parse_request,
)

NOUL = {"type": "noul"}


def png(width: int) -> str:
    """Base64 of a PNG that its width tells apart."""
    file = io.BytesIO()
    Image.new("RGB", (width, 8)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def part(width: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png(width)}"}}


def body(**changes: Any) -> dict[str, Any]:
    return {"model": "clef", "state": "s", "questions": {"q": NOUL}, **changes}


def problem_places(submitted: Any) -> list[tuple[str | int, ...]]:
    with pytest.raises(RequestError) as caught:
        parse_request(submitted)
    return [problem.loc for problem in caught.value.problems]


@pytest.mark.parametrize("asked", read_jsonl(GOLDEN / "requests.jsonl"))
def test_what_was_asked_is_kept_to_the_letter(asked: dict[str, Any]) -> None:
    kept = {name: value for name, value in asked.items() if name != "images"}
    submission = parse_request(json.dumps(asked))
    # The text, not only equality, which cannot tell 1250 from 1250.0 or the order of options.
    assert json.dumps(submission.request.to_json()) == json.dumps(
        {
            **kept,
            "questions": {
                id: {name: question[name] for name in ("type", "instructions", "criteria") if name in question}
                for id, question in asked["questions"].items()
            },
        }
    )
    assert len(submission.images) == len(asked.get("images", []))
    assert parse_request(submission.request.to_json()).request == submission.request


def test_text_bytes_and_object_give_the_same_request() -> None:
    asked = body(state={"é": [1, 1.0]}, x_truncate="end")
    text = json.dumps(asked, ensure_ascii=False)
    assert parse_request(text) == parse_request(text.encode()) == parse_request(asked)


def test_composed_and_decomposed_ids_stay_different() -> None:
    criteria = {"\u00e9": "one", "e\u0301": "two"}
    question = parse_questions({"\u00e9": {"type": "choice", "criteria": criteria}, "e\u0301": NOUL})
    assert [id.encode() for id in question] == [b"\xc3\xa9", b"e\xcc\x81"]
    assert [option.description for option in options(question["\u00e9"])] == ["two", "one"]


def test_the_model_sees_the_options_of_a_choice_sorted_as_text() -> None:
    question = ChoiceQuestion(type="choice", criteria={"b": "x", "10": None, "2": ["y"], "B": {"z": 1}})
    assert options(question) == (Option("10", None), Option("2", ["y"]), Option("B", {"z": 1}), Option("b", "x"))


def test_the_model_sees_the_levels_of_a_score_numbered_from_zero() -> None:
    question = ScoreQuestion(type="score", criteria=["low", {"level": 1}])
    assert options(question) == (Option("0", "low"), Option("1", {"level": 1}))


def test_the_model_sees_true_then_false_with_what_each_means() -> None:
    plain = options(NoulQuestion(type="noul"))
    assert [option.id for option in plain] == ["true", "false"]
    assert plain[0].description == "The proposition is true or the answer is yes."
    assert plain[1].description == "The proposition is false or the answer is no."
    partly = options(NoulQuestion(type="noul", criteria={"false": {"no": 1}}))
    assert partly == (plain[0], Option("false", {"no": 1}))
    assert options(NoulQuestion(type="noul", criteria={"true": None}))[0] == Option("true", None)


def test_a_request_that_breaks_a_rule_cannot_be_built_in_python_either() -> None:
    with pytest.raises(RequestError) as caught:
        Request(model="clef", state=float("nan"), questions={"q": NOUL})
    assert caught.value.problems[0].loc == ("state",)
    with pytest.raises(RequestError):
        Request(model="clef", state="s", questions={})
    with pytest.raises(RequestError):
        ChoiceQuestion(type="choice", criteria={"only": None})
    with pytest.raises(RequestError):
        ChoiceQuestion(type="choice", criteria={1: None, 2: None})


def test_a_request_can_be_built_of_questions_that_exist() -> None:
    question = NoulQuestion(type="noul", instructions="Is it?")
    request = Request(model="clef", state="s", questions={"q": question})
    assert request.questions == {"q": question}
    assert request.to_json()["questions"] == {"q": {"type": "noul", "instructions": "Is it?"}}


def test_a_request_does_not_change() -> None:
    request = parse_request(body()).request
    with pytest.raises(ValidationError, match="frozen"):
        request.state = "other"


def test_unknown_fields_are_ignored_and_listed() -> None:
    asked = body(seed=7, x_trace_id="t", questions={"q": {**NOUL, "weight": 2}}, images=[], assets={}, videos=None)
    submission = parse_request(asked)
    assert submission.unknown_fields == ("seed", "x_trace_id", "questions.q.weight")
    assert submission.request == parse_request(body()).request


def test_images_are_numbered_as_the_model_sees_them_list_then_assets_then_parts() -> None:
    asked = body(
        state=["look", part(30), {"messages": [{"content": [part(40)]}]}],
        assets={"scan": {"type": "image", "format": "png", "data_base64": png(20)}},
        images=[png(10)],
    )
    submission = parse_request(asked)
    assert [image.width for image in submission.images] == [10, 20, 30, 40]
    assert submission.request.state == [
        "look",
        {"image": 3, "type": "image"},
        {"messages": [{"content": [{"image": 4, "type": "image"}]}]},
    ]


def test_the_callers_own_body_is_not_changed() -> None:
    asked = body(state=[part(30)])
    before = json.dumps(asked)
    parse_request(asked)
    assert json.dumps(asked) == before


def test_a_stored_body_with_placeholders_is_the_same_request_again() -> None:
    request = parse_request(body(state=["look", part(30)])).request
    again = parse_request(json.dumps(request.to_json()))
    assert again.request == request
    assert again.images == ()


@pytest.mark.parametrize("state", [part(30), {"picture": part(30)}, [{"type": "image_url"}], [["image_url"]]])
def test_what_is_no_part_of_an_array_stays_data(state: Any) -> None:
    submission = parse_request(body(state=state))
    assert submission.request.state == state
    assert submission.images == ()


def test_four_images_are_the_limit_over_all_places() -> None:
    two, more = [png(10), png(11)], [part(12), part(13)]
    assert len(parse_request(body(images=two, state=more)).images) == 4
    assert problem_places(body(images=two, state=[*more, part(14)])) == [("state",)]
    assert problem_places(body(images=[png(10)] * 5)) == [("images",)]


@pytest.mark.parametrize(
    ("changes", "loc"),
    [
        ({"images": ["http://169.254.169.254/"]}, ("images", 0)),
        ({"images": [png(10), None]}, ("images", 1)),
        ({"images": [png(10), 7, "x"]}, ("images", 1)),
        ({"images": [{"content_type": "image/png", "base64": "?"}]}, ("images", 0, "base64")),
        ({"images": [{"content_type": "image/gif", "base64": png(10)}]}, ("images", 0, "content_type")),
        ({"assets": {"a": {"type": "image", "format": "png", "data_base64": 7}}}, ("assets", "a", "data_base64")),
        ({"assets": {"a": {"type": "audio", "format": "wav", "data_base64": "x"}}}, ("assets", "a", "type")),
        ({"assets": {"a": "text"}}, ("assets", "a")),
        (
            {"state": ["x", {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]},
            ("state", 1, "image_url", "url"),
        ),
        ({"state": [{"type": "image_url", "image_url": "data:"}]}, ("state", 0, "image_url")),
    ],
)
def test_a_bad_image_is_named_by_its_place(changes: dict[str, Any], loc: tuple[str | int, ...]) -> None:
    assert problem_places(body(**changes))[0] == loc


def test_bad_images_are_reported_beside_other_mistakes() -> None:
    link = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    asked = {"state": [link], "questions": {}, "images": ["/etc/hostname"]}
    assert problem_places(asked) == [("model",), ("questions",), ("images", 0), ("state", 0, "image_url", "url")]


def test_duplicate_keys_are_found_wherever_they_are() -> None:
    text = (
        '{"model": "clef", "state": {"a": 1, "a": 2}, "x": {"b": 1, "b": 2},'
        ' "questions": {"q": {"type": "choice", "criteria": {"o": null, "p": null, "o": null}}}}'
    )
    assert problem_places(text) == [("state", "a"), ("x", "b"), ("questions", "q", "criteria", "o")]


def test_each_field_may_nest_100_deep() -> None:
    deep = '{"model": "clef", "questions": {"q": {"type": "noul"}}, "state": %s}'
    parse_request(deep % ("[" * 100 + "]" * 100))
    assert problem_places(deep % ("[" * 101 + "]" * 101)) == [("state",)]


def test_a_request_of_the_largest_size_is_checked_in_a_blink() -> None:
    criteria = {f"option {k}": "what it means" for k in range(255)}
    questions = {f"q{i}": {"type": "choice", "criteria": criteria} for i in range(64)}
    text = json.dumps(body(questions=questions))
    start = time.perf_counter()
    parse_request(text)
    assert time.perf_counter() - start < 1  # measured 0.04 s


@pytest.mark.parametrize("text", ["", "null", "7", '"s"', "[]", "state=s&questions=q", b"\xff", "[" * 100_000])
def test_a_body_that_is_no_object_is_refused_as_a_whole(text: str | bytes) -> None:
    assert problem_places(text) == [()]
