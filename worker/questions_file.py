"""Read a questions file: JSON or YAML, in the spellings that people use, into the one SystemOne map.

Accepted are the map itself, the map under `questions` (so also a whole request), and a list of objects with `id`;
`kind` for `type`, `options` for a choice's criteria (names, or a map from name to description), `levels` for a score's.
The result is checked by the same rules as a request. Knows nothing of tables.

Surprising: YAML is read as JSON would be. Keys stay text, `yes`, `no`, `on` and dates stay text, and anchors and tags
are refused, because an option named `no` must not become false.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from clef_core.errors import ClefError, RequestError, describe
from clef_core.schema import Json, parse_json, parse_questions

MAX_QUESTIONS_BYTES = 1_000_000

_ALIAS_OF_CRITERIA = {"choice": "options", "score": "levels"}


class QuestionsFileError(ClefError):
    """The questions file cannot be used; the message says where and why."""


def load_questions(source: Path | str) -> dict[str, Any]:
    """Read questions from a file (a `Path`) or from text (a `str`).

    Returns:
        question id → question as a SystemOne request has it, checked.

    Raises:
        QuestionsFileError: not readable as JSON or YAML, or not a set of questions.
        RequestError: a question breaks the rules of a request.
    """
    name = source.name if isinstance(source, Path) else "the questions"
    questions = usual_questions(_parse(_read_text(source) if isinstance(source, Path) else source, name), name)
    parse_questions(questions)
    return questions


def usual_questions(value: Json, name: str) -> dict[str, Any]:
    """Bring an already parsed set of questions into the usual spelling; it is not checked further.

    Raises:
        QuestionsFileError: it is no set of questions, or uses a name and its alias at once; begins with `name`.
    """
    return {key: _with_usual_names(key, question) for key, question in _question_map(value, name).items()}


def _read_text(path: Path) -> str:
    data = path.read_bytes()
    if len(data) > MAX_QUESTIONS_BYTES:
        raise QuestionsFileError(f"{path.name} has {len(data):,} bytes, the limit is {MAX_QUESTIONS_BYTES:,}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise QuestionsFileError(f"{path.name} is not UTF-8 (line {line}): save it as UTF-8") from None


def _parse(text: str, name: str) -> Json:
    if not text.strip():
        raise QuestionsFileError(f"{name} is empty")
    if text.lstrip()[0] in "{[":
        try:
            return parse_json(text)
        except RequestError as error:
            raise QuestionsFileError(f"{name}: {error.problems[0]}") from None
    try:
        value: Json = yaml.load(text, Loader=_PlainLoader)  # a SafeLoader with fewer types
    except yaml.YAMLError as error:
        raise QuestionsFileError(f"{name} is neither JSON nor YAML: {_yaml_message(error)}") from None
    except RecursionError:
        raise QuestionsFileError(f"{name} nests too deep") from None
    except ValueError as error:  # a number of thousands of digits
        raise QuestionsFileError(f"{name}: {error}") from None
    return value


def _yaml_message(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())


def _question_map(value: Json, name: str) -> dict[str, Any]:
    """Find the questions in what was read; a list becomes a map by its `id`s."""
    if isinstance(value, dict) and _is_wrapper(value.get("questions")):
        value = value["questions"]
    if isinstance(value, list):
        return _map_by_id(value, name)
    if not isinstance(value, dict):
        raise QuestionsFileError(f"{name} must be an object of questions or a list of them; this is {describe(value)}")
    return value


def _is_wrapper(value: Json) -> bool:
    """Whether this stands under the key `questions` as the questions, and is not a question of that name."""
    return isinstance(value, list) or (
        isinstance(value, dict) and not any(isinstance(value.get(key), str) for key in ("type", "kind"))
    )


def _map_by_id(entries: list[Any], name: str) -> dict[str, Any]:
    questions: dict[str, Any] = {}
    for position, entry in enumerate(entries, start=1):
        if not isinstance(entry, dict) or not isinstance(entry.get("id"), str):
            raise QuestionsFileError(f'{name}: question {position} of the list has no "id" (a text)')
        if entry["id"] in questions:
            raise QuestionsFileError(f"{name}: two questions have the id {describe(entry['id'])}")
        questions[entry["id"]] = {key: value for key, value in entry.items() if key != "id"}
    return questions


def _with_usual_names(question_id: str, question: Json) -> Json:
    """Replace the aliases by the names that a request has; whatever else is wrong is left for the request's rules."""
    if not isinstance(question, dict):
        return question
    question = _renamed(question_id, question, "kind", "type")
    alias = _ALIAS_OF_CRITERIA.get(str(question.get("type")))
    for key in _ALIAS_OF_CRITERIA.values():
        if key in question and key != alias:
            kind = describe(question.get("type"))
            raise QuestionsFileError(f'question {describe(question_id)}: "{key}" does not go with the type {kind}')
    if alias is None:
        return question
    if alias == "options" and isinstance(question.get("options"), list):
        question = question | {"options": _options_by_name(question_id, question["options"])}
    return _renamed(question_id, question, alias, "criteria")


def _renamed(question_id: str, question: dict[str, Any], alias: str, usual: str) -> dict[str, Any]:
    if alias in question and usual in question:
        raise QuestionsFileError(f'question {describe(question_id)}: "{alias}" and "{usual}" mean the same, give one')
    return {usual if key == alias else key: value for key, value in question.items()}


def _options_by_name(question_id: str, names: list[Any]) -> dict[str, None]:
    for name in names:
        if not isinstance(name, str):
            raise QuestionsFileError(
                f"question {describe(question_id)}: an option must be a name; this is {describe(name)}"
                + (", which becomes one in quotes" if isinstance(name, int | float) else "")
            )
        if names.count(name) > 1:
            raise QuestionsFileError(f"question {describe(question_id)}: the option {describe(name)} stands twice")
    return dict.fromkeys(names)


class _PlainLoader(yaml.SafeLoader):
    """YAML with JSON's values: text, true, false, null, numbers, lists and maps with text keys."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]  # as the stubs have it
            raise yaml.composer.ComposerError(None, None, "anchors and aliases are not accepted", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        mapping: dict[Hashable, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a text", key_node.start_mark)
            if key_node.value in mapping:
                message = f"the key {describe(key_node.value)} stands twice"
                raise yaml.constructor.ConstructorError(None, None, message, key_node.start_mark)
            mapping[key_node.value] = self.construct_object(value_node, deep=True)
        return mapping


for _tag, _pattern, _first in (
    ("tag:yaml.org,2002:null", r"null|~|", ["n", "~", ""]),
    ("tag:yaml.org,2002:bool", r"true|false", ["t", "f"]),
    ("tag:yaml.org,2002:int", r"-?(?:0|[1-9][0-9]*)", list("-0123456789")),
    ("tag:yaml.org,2002:float", r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?", list("-0123456789")),
):
    _PlainLoader.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})\Z"), _first)
