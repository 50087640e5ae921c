"""Question cards and questions are two views of one thing: whatever goes there and back is unchanged."""

from dataclasses import replace
from typing import Any

import pytest

from clef_core.errors import Problem
from clef_core.schema import parse_questions
from web.builder import (
    Card,
    card_problems,
    card_to_question,
    cards_of,
    cards_to_questions,
    duplicated,
    keep_uids,
    moved_down,
    moved_up,
    new_card,
    parse_options,
    place_problems,
    read_value,
    removed,
    summarize,
    write_options,
    write_value,
)

TRICKY = [
    "plain",
    "with: colon",
    "ends with:",
    " spaces around ",
    "",
    "two\nlines",
    '"quoted"',
    "{not json",
    '{"is": "json"}',
    "[1, 2]",
    "null",
    "5",
    "ünïcödé – 猫 🐈",
    "line\u2028separator",
    "tab\there",
    "back\\slash",
]


@pytest.mark.parametrize("value", [*TRICKY, {"a": [1, 2.5, None]}, ["x", {"y": "z"}], {}, []])
def test_a_value_written_as_text_reads_as_itself(value: Any) -> None:
    assert read_value(write_value(value)) == value


@pytest.mark.parametrize("text", ["{broken", "[1, 2", '"open', '{"a": 1, "a": 2}', "[NaN]"])
def test_what_only_looks_like_json_stays_the_text_it_is(text: str) -> None:
    assert read_value(text) == text


@pytest.mark.parametrize("name", TRICKY)
@pytest.mark.parametrize("description", [None, *TRICKY, {"a": "b"}, ["c"]])
def test_an_option_written_as_a_line_reads_as_itself(name: str, description: Any) -> None:
    options = {"first": "before", name: description, "last": None}
    assert dict(parse_options(write_options(options))) == options


def test_options_are_read_one_per_line_with_an_optional_description() -> None:
    text = "billing: Payments or invoices\n\n  technical :  Bugs \nother\nurl: see http://x.example"
    assert parse_options(text) == (
        ("billing", "Payments or invoices"),
        ("technical", "Bugs"),
        ("other", None),
        ("url", "see http://x.example"),
    )


def test_a_trailing_colon_is_no_part_of_the_name() -> None:
    assert parse_options("billing:") == (("billing", None),)


def test_ordinary_options_are_written_as_people_would_write_them() -> None:
    assert write_options({"billing": "Payments: all", "other": None}) == "billing: Payments: all\nother"


QUESTIONS: dict[str, Any] = {
    "department": {"type": "choice", "instructions": "Which team?", "criteria": {"billing": "Invoices", "x: y": None}},
    "urgency": {"type": "score", "criteria": ["Can wait", {"when": "now"}, "a: b"]},
    "outage": {"type": "noul"},
    "told": {"type": "noul", "instructions": {"ask": ["this"]}, "criteria": {"true": "Yes, told"}},
    "<b>markup</b>": {"type": "noul", "instructions": '{"text": "that looks like JSON"}'},
}


def test_questions_survive_the_way_through_the_cards() -> None:
    assert cards_to_questions(cards_of(parse_questions(QUESTIONS))) == QUESTIONS


def test_the_order_of_questions_and_options_is_kept() -> None:
    questions = {"z": {"type": "choice", "criteria": {"b": None, "a": None}}, "a": {"type": "noul"}}
    back = cards_to_questions(cards_of(parse_questions(questions)))
    assert list(back) == ["z", "a"]
    assert list(back["z"]["criteria"]) == ["b", "a"]  # type: ignore[index, call-overload]


def test_a_half_filled_card_is_json_already() -> None:
    assert card_to_question(new_card("", "choice")) == {"type": "choice", "criteria": {}}
    assert card_to_question(new_card("", "score", options="only one")) == {"type": "score", "criteria": ["only one"]}
    assert card_to_question(new_card("q", "noul")) == {"type": "noul"}


def test_cards_with_the_same_content_keep_their_place_in_the_form() -> None:
    old = [new_card("a"), new_card("b"), new_card("c")]
    edited = [new_card("b"), new_card("a", "noul"), new_card("c")]
    kept = keep_uids(edited, old)
    assert [card.uid for card in kept] == [old[1].uid, edited[1].uid, old[2].uid]


def test_two_equal_cards_never_share_a_uid() -> None:
    old = [new_card("a")]
    kept = keep_uids([new_card("a"), new_card("a")], old)
    assert len({card.uid for card in kept}) == 2


def test_titles_say_id_type_and_size() -> None:
    assert summarize(new_card("team", "choice", options="a\nb\n\nc")) == "team · choice · 3 options"
    assert summarize(new_card("urgency", "score", options="a")) == "urgency · score · 1 level"
    assert summarize(new_card("", "noul")) == "unnamed question · noul · true or false"


def ids(cards: tuple[Card, ...]) -> str:
    return " ".join(card.id for card in cards)


def test_cards_move_within_the_list_and_stop_at_its_ends() -> None:
    cards = (new_card("a"), new_card("b"), new_card("c"))
    assert ids(moved_up(cards, 1)) == "b a c"
    assert ids(moved_down(cards, 1)) == "a c b"
    assert moved_up(cards, 0) == cards
    assert moved_down(cards, 2) == cards
    assert ids(removed(cards, 1)) == "a c"


def test_a_copy_stands_below_its_card_with_a_free_id_and_a_uid_of_its_own() -> None:
    cards = (new_card("a", "choice", "Which?", "x\ny"), new_card("a_2"))
    copied = duplicated(cards, 0)
    assert ids(copied) == "a a_3 a_2"
    assert replace(copied[1], id="a", uid=cards[0].uid) == cards[0]
    assert len({card.uid for card in copied}) == 3


def test_an_id_used_twice_is_a_problem_of_the_second_card() -> None:
    cards = [new_card("a"), new_card("b"), new_card("a")]
    assert [(uid, problem.msg) for uid, problem in card_problems(cards)] == [
        (cards[2].uid, "the id 'a' is used by two questions")
    ]


def test_an_option_named_twice_is_a_problem_although_json_would_hide_it() -> None:
    card = new_card("a", "choice", options="x: one\nx: two\ny")
    assert [(uid, problem.loc) for uid, problem in card_problems([card])] == [
        (card.uid, ("questions", "a", "criteria", "x"))
    ]


def test_equal_levels_of_a_score_are_no_problem() -> None:
    assert card_problems([new_card("a", "score", options="same\nsame")]) == []


def test_problems_go_to_the_card_they_name_and_others_are_left_over() -> None:
    card = new_card("team")
    mine, other, general = (
        Problem(("questions", "team", "criteria"), "too few"),
        Problem(("questions", "gone"), "unknown"),
        Problem(("state",), "missing"),
    )
    placed, rest = place_problems([mine, other, general], [card])
    assert placed == {card.uid: [mine]}
    assert rest == [other, general]
