"""Answers as HTML: what a reader sees, and that nothing a user wrote becomes markup."""

import math
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from clef_core.answers import build_answers
from clef_core.schema import AnyQuestion, parse_questions
from web.bars import MAX_OPEN_OPTIONS, Shown, answers_html, bars_of, differs, num_differing

MARKUP = "<img src=x onerror=alert(1)><script>alert('2')</script>&\"'"


def shown(variant: str, questions: dict[str, AnyQuestion], probabilities: dict[str, dict[str, float]]) -> Shown:
    log_probs = {id: {o: math.log(p) for o, p in options.items()} for id, options in probabilities.items()}
    return Shown(variant, log_probs, build_answers(questions, log_probs))


def draw(questions: dict[str, Any], **variants: dict[str, dict[str, float]]) -> str:
    parsed = parse_questions(questions)
    return answers_html(parsed, [shown(name, parsed, p) for name, p in variants.items()], "top")


class Reader(HTMLParser):
    """Collects tags and the text between them."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(markup)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        self.text += data


CHOICE: dict[str, Any] = {"team": {"type": "choice", "criteria": {"billing": "Invoices", "technical": None}}}
SCORE: dict[str, Any] = {"urgency": {"type": "score", "criteria": ["Can wait", "This week", "Today"]}}
NOUL: dict[str, Any] = {"outage": {"type": "noul"}}


def test_the_first_variant_fills_the_bar_and_the_second_is_a_tick_on_it() -> None:
    markup = draw(
        CHOICE,
        mxfp4={"team": {"billing": 0.25, "technical": 0.75}},
        bf16={"team": {"billing": 0.4, "technical": 0.6}},
    )
    rows = re.findall(r'class="fill" style="width:([\d.]+)%".*?class="tick tick-1" style="left:([\d.]+)%"', markup)
    assert rows == [("75.00", "60.00"), ("25.00", "40.00")]


def test_one_variant_alone_has_neither_ticks_nor_a_word_on_agreement() -> None:
    markup = draw(CHOICE, mxfp4={"team": {"billing": 0.25, "technical": 0.75}})
    assert 'class="tick' not in markup
    assert "same answer" not in markup


def test_variants_that_choose_differently_are_flagged_and_both_answers_stand_there() -> None:
    markup = draw(
        CHOICE,
        mxfp4={"team": {"billing": 0.25, "technical": 0.75}},
        bf16={"team": {"billing": 0.6, "technical": 0.4}},
    )
    assert "answers differ" in markup
    assert re.findall(r'class="v-answer">([^<]+)<', markup) == ["technical", "billing"]
    assert "max Δ 0.350" in markup


def test_variants_that_choose_the_same_get_one_answer_and_no_flag() -> None:
    markup = draw(
        CHOICE,
        mxfp4={"team": {"billing": 0.25, "technical": 0.75}},
        bf16={"team": {"billing": 0.3, "technical": 0.7}},
    )
    assert "answers differ" not in markup
    assert re.findall(r'class="v-answer">([^<]+)<', markup) == ["technical"]


def test_only_the_chosen_option_is_emphasised() -> None:
    reader = draw(CHOICE, mxfp4={"team": {"billing": 0.25, "technical": 0.75}})
    rows = re.findall(r'<tr class="(o[^"]*)"><th scope="row"><span class="o-id">(\w+)', reader)
    assert rows == [("o o-chosen", "technical"), ("o", "billing")]


def test_of_equal_options_the_first_of_the_request_is_chosen() -> None:
    markup = draw(CHOICE, mxfp4={"team": {"billing": 0.5, "technical": 0.5}})
    assert re.findall(r'class="v-answer">([^<]+)<', markup) == ["billing"]


def test_a_score_keeps_its_order_and_marks_the_expected_level_of_each_variant() -> None:
    markup = draw(
        SCORE,
        mxfp4={"urgency": {"0": 0.1, "1": 0.2, "2": 0.7}},
        bf16={"urgency": {"0": 0.5, "1": 0.25, "2": 0.25}},
    )
    levels = re.findall(r'<th scope="row"><span class="o-id"><span class="level">(\d)</span>([^<]+)', markup)
    assert levels == [("0", "Can wait"), ("1", "This week"), ("2", "Today")]
    # expected levels 0.2 + 1.4 = 1.6 and 0.25 + 0.5 = 0.75, on a line from 0 to 2
    assert re.findall(r'class="mark mark-\d tick-\d" style="left:([\d.]+)%"', markup) == ["80.00", "37.50"]
    assert re.findall(r"expected level.*?<td class=\"p p-fill\">([\d.]+)</td><td class=\"p\">([\d.]+)", markup) == [
        ("1.60", "0.75")
    ]


def test_a_noul_is_one_bar_from_false_to_true() -> None:
    markup = draw(NOUL, mxfp4={"outage": {"true": 0.9, "false": 0.1}})
    assert markup.count('class="fill"') == 1
    assert 'style="width:90.00%"' in markup
    assert re.findall(r'class="v-answer">([^<]+)<', markup) == ["true"]


def test_a_noul_below_one_half_answers_false() -> None:
    markup = draw(NOUL, mxfp4={"outage": {"true": 0.2, "false": 0.8}})
    assert re.findall(r'class="v-answer">([^<]+)<', markup) == ["false"]


def test_a_long_choice_folds_the_unlikely_options_away_and_says_how_much_they_hold() -> None:
    ids = [f"option{number:02}" for number in range(20)]
    questions = {"q": {"type": "choice", "criteria": dict.fromkeys(ids)}}
    weights = {id: 0.5 if id == "option07" else 0.5 / 19 for id in ids}
    head, _, folded = draw(questions, mxfp4={"q": weights}).partition('<details class="more">')
    assert head.count('<th scope="row">') == MAX_OPEN_OPTIONS
    assert f"{20 - MAX_OPEN_OPTIONS} more options, together {12 * 0.5 / 19:.3f}" in folded


def test_an_option_that_only_the_other_variant_chose_is_not_folded_away() -> None:
    ids = [f"option{number:02}" for number in range(20)]
    questions = {"q": {"type": "choice", "criteria": dict.fromkeys(ids)}}
    first = {id: (20 - place) / 210 for place, id in enumerate(ids)}
    second = {id: 0.9 if id == "option19" else 0.1 / 19 for id in ids}
    head, _, folded = draw(questions, mxfp4={"q": first}, bf16={"q": second}).partition('<details class="more">')
    assert "option19" in head
    assert "option19" not in folded


def test_a_positive_probability_never_prints_as_zero() -> None:
    markup = draw(CHOICE, mxfp4={"team": {"billing": 0.0001, "technical": 0.9999}})
    assert "&lt;.001" in markup
    assert ">0.000<" not in markup


@pytest.mark.parametrize("kind", ["choice", "score", "noul"])
def test_markup_in_ids_instructions_and_options_stays_text(kind: str) -> None:
    criteria: dict[str, Any] = {
        "choice": {MARKUP: MARKUP, "b": {"why": MARKUP}},
        "score": [MARKUP, {"why": MARKUP}],
        "noul": {"true": MARKUP},
    }
    options = {"choice": [MARKUP, "b"], "score": ["0", "1"], "noul": ["true", "false"]}[kind]
    questions = {MARKUP: {"type": kind, "instructions": MARKUP, "criteria": criteria[kind]}}
    probabilities = {MARKUP: dict(zip(options, (0.7, 0.3), strict=True))}
    other = {MARKUP: dict(zip(options, (0.2, 0.8), strict=True))}
    reader = Reader(draw(questions, **{MARKUP: probabilities, "bf16": other}))
    assert not {"img", "script"} & set(reader.tags)
    assert MARKUP in reader.text


def test_every_element_is_closed_where_it_was_opened() -> None:
    questions = CHOICE | SCORE | NOUL
    probabilities = {
        "team": {"billing": 0.25, "technical": 0.75},
        "urgency": {"0": 0.1, "1": 0.2, "2": 0.7},
        "outage": {"true": 0.9, "false": 0.1},
    }
    assert Reader(draw(questions, mxfp4=probabilities, bf16=probabilities)).open == []


def test_differing_questions_are_counted() -> None:
    questions = parse_questions(CHOICE | NOUL)
    first = shown(
        "mxfp4", questions, {"team": {"billing": 0.4, "technical": 0.6}, "outage": {"true": 0.9, "false": 0.1}}
    )
    second = shown(
        "bf16", questions, {"team": {"billing": 0.6, "technical": 0.4}, "outage": {"true": 0.8, "false": 0.2}}
    )
    assert num_differing(questions, [first, second]) == 1
    assert not differs(bars_of("outage", questions["outage"], [first, second]))
