"""What counts as JSON here, with hostile documents: each is refused with its place, quickly, and without a crash."""

import json
import time

import pytest

from clef_core.errors import RequestError
from clef_core.strict_json import MAX_PROBLEMS, MAX_VALUES, Json, check_json, parse_json


def places(text: str | bytes) -> list[tuple[tuple[str | int, ...], str]]:
    with pytest.raises(RequestError) as caught:
        parse_json(text)
    return [(problem.loc, problem.type) for problem in caught.value.problems]


@pytest.mark.parametrize(
    "text", ['{"b": 1, "a": [1250, 1250.0, null, true, "긴급 é", -0.0]}', '"s"', "0", "[]", " {} \n", '{"": ""}']
)
def test_json_comes_back_as_the_standard_library_reads_it(text: str) -> None:
    value = parse_json(text)
    assert repr(value) == repr(json.loads(text))
    assert repr(parse_json(text.encode())) == repr(value)


def test_an_integer_and_a_float_of_the_same_value_stay_different() -> None:
    assert json.dumps(parse_json("[1250, 1250.0]")) == "[1250, 1250.0]"


def test_a_byte_order_mark_is_skipped() -> None:
    assert parse_json(b"\xef\xbb\xbf[1]") == [1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        (" \n ", "empty"),
        ("state=s", "line 1 column 1"),
        ('{"a": 1,\n "b": }', "line 2 column 7"),
        ("{'a': 1}", "line 1 column 2"),
        ('"raw\nnewline"', "line 1 column 5"),
        ('{"a": 1} {}', "line 1 column 10"),
        ("[1, 2", "line 1 column 6"),
        (b"\xff\xfe[\x001\x00]\x00", "UTF-8"),
        (b'"caf\xe9"', "byte 0xe9 at position 4"),
        (b'"\xed\xa0\xbd"', "UTF-8"),  # an encoded surrogate
    ],
)
def test_what_is_no_json_is_refused_with_its_position(text: str | bytes, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_json(text)
    (problem,) = caught.value.problems
    assert (problem.loc, problem.type) == ((), "json_invalid")
    assert said in problem.msg


@pytest.mark.parametrize(
    ("text", "loc", "type"),
    [
        ('{"a": {"b": [1, NaN]}}', ("a", "b", 1), "finite_number"),
        ("[Infinity]", (0,), "finite_number"),
        ("[-Infinity]", (0,), "finite_number"),
        ("[1e999]", (0,), "finite_number"),
        ("[-1e999]", (0,), "finite_number"),
        pytest.param("[" + "9" * 4301 + "]", (0,), "int_too_long", id="4301 digits"),
        pytest.param("[-" + "9" * 4301 + "]", (0,), "int_too_long", id="minus 4301 digits"),
        ('["\\ud83d"]', (0,), "string_unicode"),
        ('["\\udc00\\ud800"]', (0,), "string_unicode"),
        ('{"k": "a\\u0000b"}', ("k",), "string_unicode"),
        ('{"a\\u0000b": 1}', ("a\\u0000b",), "string_unicode"),
        ('{"\\ud83d": 1}', ("\\ud83d",), "string_unicode"),
        ('{"a": {"x": 1, "y": 2, "x": 1}}', ("a", "x"), "duplicate_key"),
        ('{"a": 1, "\\u0061": 2}', ("a",), "duplicate_key"),
    ],
)
def test_what_would_break_later_is_refused_at_its_place(text: str, loc: tuple[str | int, ...], type: str) -> None:
    assert places(text) == [(loc, type)]


def test_what_is_just_within_the_rules_passes() -> None:
    for text in ("9" * 4300, "-" + "9" * 4300, "1.7e308", '"\\ud83d\\ude00"', '"\\u0001"', "[" * 100 + "]" * 100):
        parse_json(text)


def test_all_problems_are_found_in_document_order() -> None:
    text = '{"a": NaN, "b": [1e999, {"c": 1, "c": "\\u0000"}], "d": "\\ud83d"}'
    assert [loc for loc, _ in places(text)] == [("a",), ("b", 0), ("b", 1, "c"), ("b", 1, "c"), ("d",)]


def test_a_duplicate_inside_a_dropped_duplicate_does_not_point_elsewhere() -> None:
    assert places('{"a": {"x": 1, "x": 2}, "a": {"y": 1}}') == [(("a",), "duplicate_key")]


def test_nesting_over_100_is_refused() -> None:
    assert places("[" * 101 + "]" * 101) == [((0,), "json_nesting")]
    assert places('{"a":' * 101 + "1" + "}" * 101) == [(("a",), "json_nesting")]


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "[" * 100_000 + "]" * 100_000, '{"a":' * 100_000, '{"a":[' * 50_000, "[" * 900 + "]" * 900],
    ids=["open", "closed", "objects", "mixed", "within Python's own limit"],
)
def test_bottomless_documents_do_not_crash_the_interpreter(text: str) -> None:
    assert [type for _, type in places(text)] == ["json_nesting"]


@pytest.mark.parametrize(
    "text",
    [
        "[" + "0," * 5_000_000 + "0]",
        "[1" + "0" * 5_000_000 + "]",
        "[1e" + "9" * 5_000_000 + "]",
        "[" + ",".join(['{"a":1,"a":2}'] * 100_000) + "]",
        "[" + "NaN," * 100_000 + "NaN]",
        '{"a":"' + "\\ud83d" * 1_000_000 + '"}',
    ],
    ids=["values", "digits", "exponent", "duplicates", "nan", "surrogates"],
)
def test_hostile_documents_are_refused_soon_and_shortly(text: str) -> None:
    start = time.perf_counter()
    found = places(text)
    assert time.perf_counter() - start < 5  # about 0.5 s; a quadratic algorithm would take hours
    assert len(found) <= MAX_PROBLEMS


def test_a_document_of_too_many_values_is_refused() -> None:
    assert places("[" + "0," * MAX_VALUES + "0]") == [((), "json_size")]


@pytest.mark.parametrize(
    ("value", "type"),
    [
        ({1: "a"}, "json_key"),
        ({None: "a"}, "json_key"),
        ([(1, 2)], "json_type"),
        ([b"bytes"], "json_type"),
        ([{1, 2}], "json_type"),
        ([float("nan")], "finite_number"),
        pytest.param([10**4300], "int_too_long", id="4301 digits"),
        (["\ud83d"], "string_unicode"),
    ],
)
def test_python_values_keep_the_same_rules(value: Json, type: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_json(value, ("state",))
    (problem,) = caught.value.problems
    assert problem.loc[0] == "state"
    assert problem.type == type


def test_a_value_that_contains_itself_is_refused() -> None:
    endless: list[object] = []
    endless.extend([endless] * 10)
    with pytest.raises(RequestError, match="deeper than 100"):
        check_json(endless)


def test_a_value_that_unfolds_to_billions_is_refused() -> None:
    laughs: list[object] = ["ha"]
    for _ in range(30):
        laughs = [laughs] * 10
    with pytest.raises(RequestError, match="200,000 values"):
        check_json(laughs)
