"""Reading a questions file: the spellings people use, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from paths import PROJECT

from clef_core.errors import ClefError, RequestError
from worker.questions_file import QuestionsFileError, load_questions

CHOICE = {"type": "choice", "instructions": "Which team?", "criteria": {"billing": None, "technical": "Bugs"}}
SCORE = {"type": "score", "criteria": ["low", "high"]}


@pytest.mark.parametrize(
    "value",
    [
        {"a": CHOICE, "b": SCORE},
        {"questions": {"a": CHOICE, "b": SCORE}},
        {"model": "clef", "state": "s", "questions": {"a": CHOICE, "b": SCORE}},
        [{"id": "a", **CHOICE}, {"id": "b", **SCORE}],
        {"questions": [{"id": "a", **CHOICE}, {"id": "b", **SCORE}]},
        {
            "a": {"kind": "choice", "instructions": "Which team?", "options": {"billing": None, "technical": "Bugs"}},
            "b": {"kind": "score", "levels": ["low", "high"]},
        },
    ],
)
def test_every_accepted_spelling_gives_the_same_map(value: Any):
    loaded = load_questions(json.dumps(value))
    assert loaded == {"a": CHOICE, "b": SCORE}
    assert list(loaded) == ["a", "b"]


def test_a_choice_may_list_its_options_by_name():
    assert load_questions('{"a": {"type": "choice", "options": ["x", "y"]}}')["a"]["criteria"] == {"x": None, "y": None}


def test_a_question_may_be_called_questions():
    assert load_questions('{"questions": {"type": "noul"}}') == {"questions": {"type": "noul"}}


def test_yaml_is_read_as_json_would_be():
    loaded = load_questions(
        "answer:\n  kind: choice\n  options: [yes, no, on, 2024-01-01, 1:30]\n"
        "sure:\n  type: noul\n  criteria: {true: it is so, false: ~}\n"
        "level:\n  type: score\n  levels:\n    - low\n    - means: high\n      number: 2\n"
    )
    assert loaded == {
        "answer": {"type": "choice", "criteria": dict.fromkeys(["yes", "no", "on", "2024-01-01", "1:30"])},
        "sure": {"type": "noul", "criteria": {"true": "it is so", "false": None}},
        "level": {"type": "score", "criteria": ["low", {"means": "high", "number": 2}]},
    }


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "q.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"a": SCORE}).encode())
    assert load_questions(path) == {"a": SCORE}


@pytest.mark.parametrize("name", ["questions.json", "intents.json", "receipt_questions.json", "card_example.json"])
def test_the_examples_are_readable(name: str):
    assert load_questions(PROJECT / "examples" / name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("{", "not valid JSON"),
        ('{"a": {"type": "noul"}, "a": {"type": "noul"}}', "more than once"),
        ("a: [", "neither JSON nor YAML: line 1"),
        ("a: &x {type: noul}\nb: *x", "line 2, column 4: anchors and aliases"),
        ("a: {type: noul}\na: {type: noul}", 'line 2, column 1: the key "a" stands twice'),
        ("a: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ("just text", "must be an object of questions or a list"),
        ('[{"type": "noul"}]', 'question 1 of the list has no "id"'),
        ('[{"id": "a", "type": "noul"}, {"id": "a", "type": "noul"}]', 'two questions have the id "a"'),
        ('{"a": {"type": "score", "options": ["x", "y"]}}', '"options" does not go with the type "score"'),
        ('{"a": {"type": "noul", "levels": ["x", "y"]}}', '"levels" does not go with the type "noul"'),
        ('{"a": {"kind": "noul", "type": "noul"}}', '"kind" and "type" mean the same'),
        ('{"a": {"type": "score", "levels": ["x", "y"], "criteria": ["x", "y"]}}', '"levels" and "criteria" mean'),
        ('{"a": {"type": "choice", "options": ["x", "x"]}}', 'the option "x" stands twice'),
        ("a: {type: choice, options: [1, 2]}", "an option must be a name; this is 1, which becomes one in quotes"),
        ("a: " + "[" * 5_000, "YAML|nests too deep"),
    ],
)
def test_what_is_no_questions_file_is_refused_with_its_place(text: str, message: str):
    with pytest.raises(QuestionsFileError, match=message):
        load_questions(text)


def test_a_broken_question_is_refused_by_the_rules_of_a_request():
    with pytest.raises(RequestError) as caught:
        load_questions('{"a": {"type": "boolean"}, "b": {"type": "choice", "options": ["one"]}}')
    assert [problem.loc[:2] for problem in caught.value.problems] == [("questions", "a"), ("questions", "b")]


def test_values_that_json_does_not_have_are_refused():
    with pytest.raises(ClefError):
        load_questions("a: {type: noul, instructions: [!!timestamp 2024-01-01]}")


def test_a_file_in_latin_1_is_refused_with_its_line(tmp_path: Path):
    path = tmp_path / "q.yaml"
    path.write_bytes("a:\n  type: noul\n  instructions: é\n".encode("latin-1"))
    with pytest.raises(QuestionsFileError, match=r"q.yaml is not UTF-8 \(line 3\)"):
        load_questions(path)


def test_a_huge_file_is_refused(tmp_path: Path):
    path = tmp_path / "q.json"
    path.write_text(" " * 1_000_001)
    with pytest.raises(QuestionsFileError, match="1,000,001 bytes"):
        load_questions(path)
