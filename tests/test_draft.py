"""From the Decide form to a request: how a state is read, and where each problem goes."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from clef_core.errors import RequestError
from clef_core.schema import parse_request
from clef_core.tokens import PromptTokenizer
from web.builder import new_card
from web.draft import (
    Draft,
    DraftError,
    ReadAs,
    describe_state,
    draft_cards,
    fill,
    measure,
    read_state,
    submission_of,
    whole_request,
    write_state,
)
from web.uploads import publish_image

CARD = new_card("late", "noul")


@pytest.fixture
def uploads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "uploads"))
    return tmp_path / "uploads"


def draft(**changes: Any) -> Draft:
    return Draft(**{"state": "text", "read_as": "auto", "images": (), "cards": (CARD,)} | changes)


@pytest.mark.parametrize(
    ("text", "read_as", "state"),
    [
        ("plain", "auto", "plain"),
        ('{"a": 1}', "auto", {"a": 1}),
        (" [1, 2]", "auto", [1, 2]),
        ('{"a": 1}', "text", '{"a": 1}'),
        ("{broken", "auto", "{broken"),
        ('"quoted"', "auto", '"quoted"'),
        ("5", "auto", "5"),
    ],
)
def test_a_state_is_read_as_the_switch_says(text: str, read_as: ReadAs, state: Any) -> None:
    assert read_state(text, read_as) == state


def test_a_state_to_be_read_as_json_that_is_none_is_a_problem_of_the_state() -> None:
    with pytest.raises(RequestError) as caught:
        read_state('{"a": 1, "a": 2}', "json")
    assert caught.value.problems[0].loc[0] == "state"


@pytest.mark.parametrize("state", ["text", '{"a": 1}', "[", "", {"a": [1, "ü"]}, ["x"], {}, "[1]"])
def test_a_state_shown_in_the_form_reads_as_itself(state: Any) -> None:
    assert read_state(*write_state(state)) == state


@pytest.mark.parametrize(
    ("text", "read_as", "words"),
    [
        ("hello", "auto", "Read as plain text"),
        ('{"a": 1}', "auto", "Read as a JSON object with 1 key"),
        ("[1, 2]", "json", "Read as a JSON array of 2 entries"),
        ("{broken", "auto", "Read as plain text, since it is not valid JSON"),
        ("5", "json", "A state is text, an object or an array"),
    ],
)
def test_the_page_says_what_a_state_is_read_as(text: str, read_as: ReadAs, words: str) -> None:
    assert describe_state(text, read_as) == words


def test_a_draft_becomes_the_request_it_shows(uploads: Path) -> None:
    submission = submission_of(draft(state='{"a": 1}', truncate=True), "clef")
    assert submission.request.to_json() == {
        "model": "clef",
        "state": {"a": 1},
        "questions": {"late": {"type": "noul"}},
        "x_truncate": "end",
    }


def test_all_problems_of_a_draft_are_found_at_once(uploads: Path) -> None:
    bad = draft(
        state="{",
        read_as="json",
        cards=(new_card("a", "choice", options="x"), new_card("b", "noul"), new_card("b", "noul")),
        images=(str(uploads / "gone.png"),),
    )
    with pytest.raises(DraftError) as caught:
        submission_of(bad, "clef")
    places = {problem.loc[:2] for problem in caught.value.problems}
    assert places == {("state",), ("questions", "a"), ("images", 0)}
    assert [uid for uid, _ in caught.value.by_card] == [bad.cards[2].uid]


def test_a_file_outside_the_upload_folder_is_never_opened(uploads: Path, tmp_path: Path) -> None:
    uploads.mkdir()
    Image.new("RGB", (40, 40)).save(tmp_path / "private.png")
    (uploads / "link.png").symlink_to(tmp_path / "private.png")
    for path in (tmp_path / "private.png", uploads / ".." / "private.png", uploads / "link.png"):
        with pytest.raises(DraftError) as caught:
            submission_of(draft(images=(str(path),)), "clef")
        assert [problem.type for problem in caught.value.problems] == ["foreign_file"]


def test_a_request_shown_in_the_form_is_the_same_request_again(uploads: Path) -> None:
    body = json.loads((Path(__file__).parents[1] / "examples" / "receipt_request.json").read_text())
    submission = parse_request(body)
    filled = fill(submission.request, submission.images)
    paths = tuple(publish_image(image.data, image.sha256, image.media_type) for image in filled.images)
    again = submission_of(Draft(filled.state, filled.read_as, paths, filled.cards, truncate=filled.truncate), "clef")
    assert again == submission


def test_the_json_view_counts_while_it_is_open(uploads: Path) -> None:
    shown = draft(questions="mood:\n  kind: score\n  levels: [bad, good]\n")
    assert list(submission_of(shown, "clef").request.questions) == ["mood"]
    assert [card.id for card in draft_cards(shown)] == ["mood"]


def test_a_json_view_without_questions_is_a_problem_of_the_questions(uploads: Path) -> None:
    with pytest.raises(DraftError) as caught:
        submission_of(draft(questions="{"), "clef")
    assert [problem.loc for problem in caught.value.problems] == [("questions",)]


@pytest.mark.parametrize("text", ['{"late": {"type": "noul"}}', "{", '{"questions": {"late": {"type": "noul"}}}', "[]"])
def test_questions_alone_are_no_whole_request(text: str) -> None:
    assert whole_request(text) is None


def test_a_whole_request_needs_no_model_name_to_be_taken_over() -> None:
    submission = whole_request('{"state": "s", "questions": {"late": {"type": "noul"}}, "top_k": 1}')
    assert submission is not None
    assert submission.unknown_fields == ("top_k",)


def test_tokens_are_counted_for_the_state_alone_while_questions_are_incomplete() -> None:
    release = Path(__file__).parent / "data" / "golden" / "release-bf16"
    tokenizer = PromptTokenizer.from_release(release)
    incomplete = measure(draft(state="some words", cards=(new_card("a", "choice"),)), tokenizer)
    complete = measure(draft(state="some words"), tokenizer)
    assert incomplete.count is None
    assert complete.count is not None
    assert complete.count.state == incomplete.state_tokens > 0
