"""Inputs that broke public systems of this kind (tests/data/cases), through the library."""

import json
from typing import Any

import pytest
from paths import DATA, GOLDEN, read_jsonl

from clef_core.answers import build_answers
from clef_core.errors import RequestError
from clef_core.images import check_image, open_image
from clef_core.schema import Submission, options, parse_request
from clef_core.tokens import PromptTokenizer, prompt_pieces

REQUESTS = {case["name"]: case for case in read_jsonl(DATA / "cases" / "requests.jsonl")}
IMAGES = DATA / "cases" / "images"


@pytest.fixture(scope="module")
def tokenizer() -> PromptTokenizer:
    return PromptTokenizer.from_release(GOLDEN / "release-bf16")


def accept(body: str, tokenizer: PromptTokenizer) -> Submission:
    submission = parse_request(body)
    tokenizer.check_length(submission.request)
    return submission


@pytest.mark.parametrize("case", REQUESTS.values(), ids=REQUESTS)
def test_a_request_gets_the_right_status_and_error(case: dict[str, Any], tokenizer: PromptTokenizer) -> None:
    if case["status"] == 200:
        accept(case["body"], tokenizer)
        return
    with pytest.raises(RequestError) as caught:
        accept(case["body"], tokenizer)
    assert caught.value.problems
    shown = json.dumps([problem.to_json() for problem in caught.value.problems], ensure_ascii=False)
    assert case["error_mentions"] in shown
    assert shown.encode("utf-8")


def test_a_request_that_is_too_long_is_told_its_tokens_and_the_limit(tokenizer: PromptTokenizer) -> None:
    request = parse_request(REQUESTS["long state"]["body"]).request
    with pytest.raises(RequestError, match="16,384") as caught:
        tokenizer.check_length(request)
    assert f"{tokenizer.count(request).total:,}" in str(caught.value)


def test_without_instructions_the_id_is_the_instruction() -> None:
    request = parse_request(REQUESTS["noul without instructions"]["body"]).request
    assert [piece.text for piece in prompt_pieces(request) if piece.part == "instructions"] == ["is_urgent"]


@pytest.mark.parametrize("name", ["composed and decomposed option", "options 1 to 12 keep request order"])
def test_option_ids_come_back_byte_for_byte_in_the_order_of_the_request(name: str) -> None:
    body = REQUESTS[name]["body"]
    questions = parse_request(body).request.questions
    answers = build_answers(questions, {"q": {option.id: -1.0 for option in options(questions["q"])}})
    assert list(answers["q"]["probabilities"]) == list(json.loads(body)["questions"]["q"]["criteria"])


@pytest.mark.parametrize("name", ["control token in state", "image placeholder in state"])
def test_the_tokens_of_a_state_contain_no_control_token(name: str, tokenizer: PromptTokenizer) -> None:
    (state,) = [p for p in prompt_pieces(parse_request(REQUESTS[name]["body"]).request) if p.part == "state"]
    assert "<|" in state.text
    assert not tokenizer.control_ids() & set(tokenizer.ids(state))


@pytest.mark.parametrize("name", ["truncated.jpg", "html.png", "bomb_30000x30000.png"])
def test_a_bad_image_is_refused(name: str) -> None:
    data = (IMAGES / name).read_bytes()
    for read in (lambda: check_image(data, ("images", 0)), lambda: open_image(data)):
        with pytest.raises(RequestError):
            read()


@pytest.mark.parametrize("name", ["cmyk.jpg", "palette_alpha.png", "rotated_exif6.jpg"])
def test_an_unusual_image_becomes_rgb(name: str) -> None:
    data = (IMAGES / name).read_bytes()
    checked, image = check_image(data, ("images", 0)), open_image(data)
    assert (image.mode, image.size) == ("RGB", (checked.width, checked.height))


def test_a_rotated_photo_is_seen_upright() -> None:
    image = open_image((IMAGES / "rotated_exif6.jpg").read_bytes())
    red, green, blue = image.getpixel((image.width // 2, 5))
    assert red > 180
    assert max(green, blue) < 80
