"""Writing results: names of columns, numbers, formulas, both variants, rows that are not done, the three formats."""

import csv
import hashlib
import io
import json
import math
from datetime import UTC, datetime
from typing import Any

import pytest

from clef_core.answers import build_answers
from clef_core.schema import parse_questions
from db.views import DecisionView, RequestView, ResultRow
from worker.tables import (
    RowNote,
    TableError,
    Written,
    collect_question_types,
    neutralise,
    output_columns,
    question_types,
    write_csv,
    write_jevl,
    write_jsonl,
)

NOW = datetime(2026, 3, 1, 12, 30, 5, 250_000, tzinfo=UTC)
QUESTIONS: dict[str, Any] = {
    "team": {"type": "choice", "criteria": {"b": None, "a": None}},
    "urgency": {"type": "score", "criteria": ["low", "mid", "high"]},
    "down": {"type": "noul"},
}
LOG_PROBS = {
    "team": {"b": math.log(0.25), "a": math.log(0.75)},
    "urgency": {"0": math.log(0.5), "1": math.log(0.3), "2": math.log(0.2)},
    "down": {"true": math.log(1 / 3), "false": math.log(2 / 3)},
}
OTHER_LOG_PROBS = {
    "team": {"b": math.log(0.5), "a": math.log(0.5)},
    "urgency": {"0": math.log(0.5), "1": math.log(0.3), "2": math.log(0.2)},
    "down": {"true": math.log(2 / 3), "false": math.log(1 / 3)},
}


def decision(
    variant: str = "mxfp4",
    status: str = "done",
    log_probs: dict[str, dict[str, float]] | None = None,
    error: str | None = None,
    questions: dict[str, Any] = QUESTIONS,
) -> DecisionView:
    values = (log_probs or LOG_PROBS) if status == "done" else None
    return DecisionView(
        id=1,
        request_id=1,
        variant=variant,
        status=status,  # type: ignore[arg-type]
        log_probs=values,
        answers=build_answers(parse_questions(questions), values) if values else None,
        input_tokens=120 if values else None,
        truncated_tokens=0 if values else None,
        latency_ms=5.0,
        error=[{"loc": ["state"], "msg": error, "type": "value_error"}] if error else None,
        run=None,
        created_at=NOW,
        finished_at=NOW,
    )


def row(
    *decisions: DecisionView,
    number: int = 1,
    cells: dict[str, Any] | None = None,
    external_id: str | None = None,
    labels: dict[str, str] | None = None,
    questions: dict[str, Any] = QUESTIONS,
) -> ResultRow:
    request = RequestView(
        id=number,
        batch_id=1,
        row_number=number,
        external_id=external_id,
        asked_model="clef",
        state="hello",
        questions=questions,
        images=(),
        truncate=None,
        labels=labels,
        cells={"text": "hello"} if cells is None else cells,
        input_error=None,
        source="cli",
        created_at=NOW,
    )
    return ResultRow(request, {one.variant: one for one in decisions})


def csv_of(
    rows: list[ResultRow],
    variants: tuple[str, ...] = ("mxfp4",),
    columns: tuple[str, ...] = ("text",),
    questions: dict[str, Any] = QUESTIONS,
    **options: Any,
) -> list[dict[str, str]]:
    out = io.StringIO(newline="")
    write_csv(rows, out, columns=columns, types=question_types(questions), variants=variants, **options)
    return list(csv.DictReader(io.StringIO(out.getvalue(), newline="")))


def lines_of(text: io.StringIO) -> list[Any]:
    return [json.loads(line) for line in text.getvalue().splitlines()]


# Columns


def test_one_variant_gives_answer_confidence_and_probabilities_after_the_input():
    assert output_columns(["id", "text"], question_types(QUESTIONS), ["mxfp4"]) == (
        *("id", "text"),
        *("team", "team_confidence", "team_probabilities"),
        *("urgency", "urgency_confidence", "urgency_probabilities"),
        *("down", "down_probabilities"),
        *("model", "_row", "error"),
    )


def test_two_variants_give_both_answers_agreement_and_divergence():
    header = output_columns(["text"], question_types({"q": QUESTIONS["team"]}), ["mxfp4", "bf16"])
    assert header == ("text", "q_bf16", "q_mxfp4", "q_agree", "q_kl", "model", "_row", "error")


def test_three_variants_name_each_divergence():
    header = output_columns([], question_types({"q": QUESTIONS["down"]}), ["int8", "bf16", "mxfp4"])
    assert header[:6] == ("q_bf16", "q_int8", "q_mxfp4", "q_agree", "q_kl_int8", "q_kl_mxfp4")


@pytest.mark.parametrize(
    ("columns", "ids", "message"),
    [
        (["text", "team"], ["team"], '"team", which exists already'),
        (["team_confidence"], ["team"], '"team_confidence", which exists already'),
        (["error"], ["team"], '"error", which exists already'),
        (["_row", "model"], ["team"], '"_row", "model", which exists already'),
        (["text"], ["team", "team_confidence"], 'share the column "team_confidence"'),
        (["text"], ["model"], 'share the column "model"'),
        (["'=x"], ["=x"], "'=x"),
    ],
)
def test_a_clash_of_columns_is_refused(columns, ids, message):
    types = question_types({question_id: QUESTIONS["team"] for question_id in ids})
    with pytest.raises(TableError, match=message):
        output_columns(columns, types, ["mxfp4"])


def test_the_clash_is_found_before_anything_is_written():
    out = io.StringIO()
    with pytest.raises(TableError):
        write_csv([], out, columns=["team"], types=question_types(QUESTIONS), variants=["mxfp4"])
    assert out.getvalue() == ""


# Values


def test_the_values_are_those_of_the_log_probabilities_with_six_digits():
    (line,) = csv_of([row(decision())])
    assert line["team"] == "a"
    assert line["team_confidence"] == "0.75"
    assert json.loads(line["team_probabilities"]) == {"b": 0.25, "a": 0.75}
    assert line["urgency"] == "0.7"  # 0.3 * 1 + 0.2 * 2
    assert line["urgency_confidence"] == "0.5"
    assert line["down"] == "0.333333"
    assert line["down_probabilities"] == '{"true":0.333333,"false":0.666667}'
    assert (line["model"], line["_row"], line["error"]) == ("clef-mxfp4", "1", "")


def test_small_probabilities_keep_six_digits():
    questions = {"down": {"type": "noul"}}
    tiny = {"down": {"true": math.log(1.23456789e-7), "false": math.log1p(-1.23456789e-7)}}
    (line,) = csv_of([row(decision(log_probs=tiny, questions=questions), questions=questions)], questions=questions)
    assert line["down"] == "1.23457e-07"


def test_the_confidence_follows_the_setting():
    (line,) = csv_of([row(decision())], confidence="typesafe")
    assert line["team_confidence"] == "0.5"  # (0.75 - 1/2) / (1 - 1/2)


def test_two_variants_are_set_side_by_side():
    both = row(decision("mxfp4", log_probs=OTHER_LOG_PROBS), decision("bf16"))
    (line,) = csv_of([both], variants=("mxfp4", "bf16"))
    assert (line["team_bf16"], line["team_mxfp4"], line["team_agree"]) == ("a", "b", "false")
    expected = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)  # KL(BF16 || MXFP4)
    assert float(line["team_kl"]) == pytest.approx(expected, rel=1e-5)
    assert (line["urgency_agree"], line["urgency_kl"]) == ("true", "0")
    assert (line["down_bf16"], line["down_mxfp4"], line["down_agree"]) == ("0.333333", "0.666667", "false")
    assert line["model"] == "clef-mxfp4;clef-bf16"


def test_a_variant_that_failed_leaves_the_other_and_says_which():
    half = row(decision("bf16"), decision("mxfp4", "failed", error="too long"))
    (line,) = csv_of([half], variants=("bf16", "mxfp4"))
    assert (line["team_bf16"], line["team_mxfp4"], line["team_agree"], line["team_kl"]) == ("a", "", "", "")
    assert line["error"] == "mxfp4: state: too long"


def test_rows_keep_order_count_and_all_input_columns():
    rows = [row(decision(), number=n, cells={"b": str(n), "a": 'x, "y"\nz'}) for n in (1, 2, 3)]
    lines = csv_of(rows, columns=("b", "a"))
    assert [line["b"] for line in lines] == ["1", "2", "3"]
    assert {line["a"] for line in lines} == {'x, "y"\nz'}


def test_rows_without_an_answer_say_why_and_have_empty_cells():
    rows = [
        row(decision(status="failed", error="bad\nrow"), number=1),
        row(decision(status="queued"), number=2),
        row(decision(status="running"), number=3),
        row(decision(status="cancelled"), number=4),
    ]
    lines = csv_of(rows)
    assert [line["error"] for line in lines] == ["state: bad row", "not done yet", "not done yet", "cancelled"]
    assert {line[name] for line in lines for name in ("team", "team_confidence", "down")} == {""}
    assert [line["text"] for line in lines] == ["hello"] * 4


def test_both_variants_say_the_same_reason_once():
    rows = [row(decision("bf16", "queued"), decision("mxfp4", "queued"))]
    assert csv_of(rows, variants=("bf16", "mxfp4"))[0]["error"] == "not done yet"


def test_the_writer_counts_how_the_rows_stand():
    rows = [
        row(decision()),
        row(decision(status="failed", error="x"), number=2),
        row(decision(status="queued")),
        row(decision()),
    ]
    out = io.StringIO()
    written = write_csv(rows, out, columns=[], types=question_types(QUESTIONS), variants=["mxfp4"])
    assert written == Written(
        num_rows=4, num_answered=2, num_failed=1, num_unfinished=1, failures=[RowNote(2, "state: x")]
    )


def test_rows_with_questions_of_their_own_share_one_table():
    other = {"team": {"type": "noul"}, "extra": {"type": "noul"}}
    noul = {"true": math.log(0.5), "false": math.log(0.5)}
    rows = [
        row(decision()),
        row(decision(log_probs={"team": noul, "extra": noul}, questions=other), number=2, questions=other),
    ]
    types = collect_question_types(rows)
    out = io.StringIO(newline="")
    write_csv(rows, out, columns=[], types=types, variants=["mxfp4"])
    first, second = csv.DictReader(io.StringIO(out.getvalue()))
    assert (first["team"], first["team_confidence"], first["extra"]) == ("a", "0.75", "")
    assert (second["team"], second["team_confidence"], second["extra"], second["urgency"]) == ("0.5", "", "0.5", "")


# Formulas


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('=HYPERLINK("http://x","y")', '\'=HYPERLINK("http://x","y")'),
        ("-2+3", "'-2+3"),
        ("+49 30 1234", "'+49 30 1234"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\t=1", "'\t=1"),
        ("\r=1", "'\r=1"),
        ("-5", "-5"),
        ("+5.25", "+5.25"),
        ("-1.5e-3", "-1.5e-3"),
        ("-.5", "-.5"),
        ("-", "'-"),
        ("-5\n=1", "'-5\n=1"),
        ("-٥", "'-٥"),
        ("plain = text", "plain = text"),
        ("", ""),
    ],
)
def test_what_a_spreadsheet_would_run_gets_an_apostrophe_and_a_number_does_not(text, expected):
    assert neutralise(text) == expected


def test_formulas_are_neutralised_in_cells_headers_and_answers():
    questions = {"=q": {"type": "choice", "criteria": {"=cmd": None, "b": None}}}
    log_probs = {"=q": {"=cmd": math.log(0.9), "b": math.log(0.1)}}
    one = row(decision(log_probs=log_probs, questions=questions), cells={"@c": "=1+1"}, questions=questions)
    (line,) = csv_of([one], columns=("@c",), questions=questions)
    assert list(line)[:2] == ["'@c", "'=q"]
    assert (line["'@c"], line["'=q"]) == ("'=1+1", "'=cmd")


def test_jsonl_leaves_formulas_as_they_are():
    out = io.StringIO()
    write_jsonl([row(decision(), cells={"id": "=1+1"}, external_id="=1+1")], out, variants=["mxfp4"], id_column="id")
    assert lines_of(out)[0]["id"] == "=1+1"


# JSONL and jevl


def test_jsonl_has_the_id_and_the_response():
    out = io.StringIO()
    rows = [row(decision(), external_id="m1"), row(decision(status="failed", error="too long"), number=2)]
    write_jsonl(rows, out, variants=["mxfp4"])
    answered, failed = lines_of(out)
    assert answered == {
        "id": "m1",
        "model": "clef",
        "answers": {
            "team": {"type": "choice", "choice": "a", "confidence": 0.75, "probabilities": {"b": 0.25, "a": 0.75}},
            "urgency": {
                "type": "score",
                "score": 0.7,
                "confidence": 0.5,
                "legend": {"0": "low", "1": "mid", "2": "high"},
                "probabilities": {"0": 0.5, "1": 0.3, "2": 0.2},
            },
            "down": {"type": "noul", "noul": 0.3333},
        },
        "usage": {"input_tokens": 120, "output_tokens": 0},
        "x_variant": "mxfp4",
    }
    assert failed == {"id": 2, "error": {"message": "state: too long"}}


def test_jsonl_keeps_an_id_that_was_a_number():
    out = io.StringIO()
    write_jsonl([row(decision(), cells={"id": 7}, external_id="7")], out, variants=["mxfp4"], id_column="id")
    assert lines_of(out)[0]["id"] == 7


def test_jsonl_holds_both_variants_in_one_line():
    out = io.StringIO()
    both = row(decision("bf16"), decision("mxfp4", "failed", error="x"))
    write_jsonl([both], out, variants=["bf16", "mxfp4"])
    (line,) = lines_of(out)
    assert line["responses"]["bf16"]["x_variant"] == "bf16"
    assert line["responses"]["mxfp4"] == {"error": {"message": "state: x"}}


def test_jevl_has_a_record_per_answered_row_and_variant():
    out = io.StringIO()
    rows = [
        row(decision("bf16"), decision("mxfp4"), labels={"team": "b", "urgency": "2", "down": "false"}),
        row(decision("bf16", "queued"), decision("mxfp4", "failed", error="x"), number=2),
    ]
    write_jevl(rows, out, variants=["bf16", "mxfp4"])
    first, second = lines_of(out)
    text = (
        '{"questions":{"down":{"type":"noul"},"team":{"criteria":{"a":null,"b":null},"type":"choice"},'
        '"urgency":{"criteria":["low","mid","high"],"type":"score"}},"state":"hello"}'
    )
    assert first["v"] == 1
    assert first["id"] == "sha256:" + hashlib.sha256(text.encode()).hexdigest()
    assert first["ts"] == "2026-03-01T12:30:05.250Z"
    assert (first["model"], second["model"]) == ("clef-bf16", "clef-mxfp4")
    assert first["request"] == {"state": "hello", "questions": QUESTIONS}
    assert first["answers"]["team"]["choice"] == "a"
    assert first["label"] == {"team": "b", "urgency": 2, "down": False}


def test_jevl_without_labels_has_no_label():
    out = io.StringIO()
    write_jevl([row(decision())], out, variants=["mxfp4"])
    assert "label" not in lines_of(out)[0]
