"""Answers from log-probabilities: the golden responses, ties, both confidences, and what a model must not answer."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from paths import GOLDEN, read_jsonl

from clef_core.answers import build_answers, build_response
from clef_core.errors import EngineError
from clef_core.schema import parse_questions, parse_request

BODIES = read_jsonl(GOLDEN / "requests.jsonl")
GOLDEN_RUNS = ["bf16.float32", "bf16.bfloat16", "mxfp4.float32", "mxfp4.bfloat16"]

QUESTIONS = parse_questions(
    {
        "team": {"type": "choice", "criteria": {"z": None, "a": "first", "m": ["x"]}},
        "urgency": {"type": "score", "criteria": ["low", {"level": "mid"}, "high"]},
        "spam": {"type": "noul"},
    }
)


def logs(probabilities: Mapping[str, float]) -> dict[str, float]:
    return {option: math.log(p) for option, p in probabilities.items()}


LOG_PROBS = {
    "team": logs({"a": 0.25, "m": 0.25, "z": 0.5}),
    "urgency": logs({"0": 0.1, "1": 0.2, "2": 0.7}),
    "spam": logs({"true": 0.123456, "false": 0.876544}),
}


def log_softmax(logits: Sequence[float]) -> list[float]:
    values = np.asarray(logits, dtype=np.float32)
    shifted = values - values.max()
    return [float(value) for value in shifted - np.log(np.exp(shifted).sum(dtype=np.float32))]


@pytest.mark.parametrize("run", GOLDEN_RUNS)
def test_all_golden_responses_follow_from_their_logits(run: str) -> None:
    expected = read_jsonl(GOLDEN / f"expected.{run}.jsonl")
    assert len(expected) == len(BODIES) == 40
    at_rounding_edges = 0
    for body, golden in zip(BODIES, expected, strict=True):
        request = parse_request(body).request
        log_probs = {
            question["id"]: dict(zip(question["option_ids"], log_softmax(logits), strict=True))
            for question, logits in zip(golden["questions"], golden["logits"], strict=True)
        }
        response = build_response(request.model, None, request.questions, log_probs, len(golden["input_ids"]))
        unrounded = build_answers(request.questions, log_probs, decimals=None)
        for id, answer in golden["response"]["answers"].items():
            at_rounding_edges += take_edge_values(response["answers"][id], answer, unrounded[id])
            assert list(response["answers"][id].get("probabilities", {})) == list(answer.get("probabilities", {}))
        assert response == golden["response"]
    assert at_rounding_edges <= 1  # 0.0951500039 of mxfp4.float32, where the reference's softmax had 0.0951499939


def take_edge_values(ours: dict, golden: dict, unrounded: dict) -> int:
    """Copy golden numbers over ours where float32's last bit decides the fourth decimal; return how many."""
    num_taken = 0
    for key, value in unrounded.items():
        if key == "probabilities":
            num_taken += take_edge_values(ours[key], golden[key], value)
        elif isinstance(value, float) and ours[key] != golden[key] and abs(value - golden[key]) < 0.5e-4 + 1e-7:
            ours[key] = golden[key]
            num_taken += 1
    return num_taken


def test_the_options_of_a_choice_come_back_in_the_order_of_the_request() -> None:
    answer = build_answers(QUESTIONS, LOG_PROBS)["team"]
    assert list(answer["probabilities"]) == ["z", "a", "m"]
    assert answer == {
        "type": "choice",
        "choice": "z",
        "confidence": 0.5,
        "probabilities": {"z": 0.5, "a": 0.25, "m": 0.25},
    }


def test_of_equal_options_the_first_of_the_request_wins() -> None:
    equal = {**LOG_PROBS, "team": logs({"a": 1 / 3, "m": 1 / 3, "z": 1 / 3})}
    assert build_answers(QUESTIONS, equal)["team"]["choice"] == "z"


def test_a_score_is_the_expectation_of_unrounded_probabilities_and_echoes_its_levels() -> None:
    small = {str(level): 0.00004 for level in range(1, 5)}  # each rounds to 0
    questions = parse_questions({"q": {"type": "score", "criteria": ["a", {"level": "b"}, "c", "d", "e"]}})
    answer = build_answers(questions, {"q": logs({"0": 1 - 0.00016, **small})})["q"]
    assert answer["probabilities"] == {"0": 0.9998, "1": 0.0, "2": 0.0, "3": 0.0, "4": 0.0}
    assert answer["score"] == 0.0004  # (1 + 2 + 3 + 4) * 0.00004
    assert answer["legend"] == {"0": "a", "1": {"level": "b"}, "2": "c", "3": "d", "4": "e"}


def test_a_noul_answer_is_the_probability_of_true_and_nothing_else() -> None:
    assert build_answers(QUESTIONS, LOG_PROBS)["spam"] == {"type": "noul", "noul": 0.1235}


def test_without_decimals_nothing_is_rounded() -> None:
    assert build_answers(QUESTIONS, LOG_PROBS, decimals=None)["spam"]["noul"] == pytest.approx(0.123456, abs=1e-12)


def test_typesafe_confidence_of_a_choice_is_its_lead_over_chance() -> None:
    answer = build_answers(QUESTIONS, LOG_PROBS, "typesafe")["team"]
    assert answer["confidence"] == 0.25  # (1/2 - 1/3) / (1 - 1/3)


def test_typesafe_confidence_of_a_score_is_one_minus_its_relative_spread() -> None:
    answer = build_answers(QUESTIONS, LOG_PROBS, "typesafe")["urgency"]
    assert answer["confidence"] == 0.6  # spread 2 * 0.1 + 1 * 0.2 = 0.4, of a uniform one (2 + 1 + 0) / 3 = 1


@pytest.mark.parametrize("options", [2, 3, 10])
def test_typesafe_confidence_of_a_uniform_distribution_is_zero(options: int) -> None:
    uniform = {str(index): math.log(1 / options) for index in range(options)}
    questions = parse_questions(
        {
            "c": {"type": "choice", "criteria": dict.fromkeys(uniform)},
            "s": {"type": "score", "criteria": ["level"] * options},
        }
    )
    answers = build_answers(questions, {"c": uniform, "s": uniform}, "typesafe")
    assert [abs(answers[id]["confidence"]) for id in "cs"] == [0, 0]


def test_a_response_names_its_variant_and_what_was_cut_only_where_there_is_something_to_name() -> None:
    plain = build_response("clef", None, {}, {}, 7)
    assert plain == {"model": "clef", "answers": {}, "usage": {"input_tokens": 7, "output_tokens": 0}}
    full = build_response("clef-bf16", "bf16", {}, {}, 7, 3)
    assert full == {**plain, "model": "clef-bf16", "x_variant": "bf16", "x_truncated_tokens": 3}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_answer_that_is_not_a_number_is_refused(value: float) -> None:
    with pytest.raises(EngineError, match="'spam'"):
        build_answers(QUESTIONS, {**LOG_PROBS, "spam": {"true": value, "false": -1.0}})


@pytest.mark.parametrize("options", [{}, {"true": 0.0}, {"true": -1.0, "false": -1.0, "maybe": -1.0}])
def test_an_answer_about_other_options_than_asked_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(EngineError, match="'spam'"):
        build_answers(QUESTIONS, {**LOG_PROBS, "spam": options})
