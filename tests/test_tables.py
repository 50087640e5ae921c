"""Reading tables: which files are refused, which rows are bad, and what a row asks."""

import base64
import io
import json
import stat
import struct
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest
from paths import DATA, PROJECT
from PIL import Image

from worker import image_zip
from worker.submit import BatchRow
from worker.tables import (
    ColumnMapping,
    ImageZip,
    RowNote,
    Table,
    TableError,
    check_mapping,
    guess_mapping,
    read_table,
    split_image_cell,
    table_rows,
)

CASES = DATA / "cases" / "csv"
OUTAGE = {"outage": {"type": "noul", "instructions": "Is a service down?"}}
DEPARTMENT = {"department": {"type": "choice", "criteria": {"billing": None, "technical": None}}}
URGENCY = {"urgency": {"type": "score", "criteria": ["Can wait", "This week", "Today"]}}


def write(folder: Path, content: str | bytes, name: str = "table.csv") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read(folder: Path, content: str | bytes, name: str = "table.csv", **limits: int) -> Table:
    return read_table(write(folder, content, name), **limits)


def rows_of(table: Table, questions: dict[str, Any] = OUTAGE, **mapping: Any) -> list[BatchRow]:
    mapping.setdefault("state", ("state",))
    return list(table_rows(table, ColumnMapping(**mapping), questions, "clef"))


def state_of(row: BatchRow) -> Any:
    assert row.submission is not None, row.problems
    return row.submission.request.state


def only_problem(row: BatchRow) -> str:
    assert row.submission is None
    (problem,) = row.problems
    return str(problem)


def png(width: int = 8, height: int = 8, colour: tuple[int, int, int] = (200, 30, 30)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(out, "PNG")
    return out.getvalue()


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


# Files that are fine


def test_a_byte_order_mark_and_crlf_are_read_over():
    table = read_table(CASES / "bom_crlf.csv")
    assert table.columns == ("id", "state")
    assert [row.values["id"] for row in table.rows()] == ["1", "2"]


def test_inner_quotes_and_commas_are_kept():
    (row,) = rows_of(read_table(CASES / "quoted.csv"))
    assert state_of(row) == 'He said "down", then left'


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_every_line_end_is_understood_and_a_quoted_one_is_kept(tmp_path, end):
    table = read(tmp_path, f'id,state{end}1,"two{end}lines"{end}2,last')
    assert [(row.line, row.values["state"]) for row in table.rows()] == [(2, f"two{end}lines"), (4, "last")]


def test_a_field_beyond_128_kib_is_read(tmp_path):
    long = "word " * 60_000
    (row,) = rows_of(read(tmp_path, f"state\n{long}\n"))
    assert state_of(row) == long


def test_blank_lines_are_no_rows(tmp_path):
    table = read(tmp_path, "\nid,state\n\n1,a\n   \n2,b\n\n")
    assert [row.values["id"] for row in table.rows()] == ["1", "2"]
    assert table.num_rows == 2


def test_one_unnamed_column_is_kept_as_pandas_writes_it(tmp_path):
    assert read(tmp_path, ",state\n0,a\n").columns == ("", "state")


def test_reading_holds_one_row_and_not_the_file(tmp_path):
    path = write(tmp_path, "id,state\n" + "".join(f"{n},{'text ' * 200}\n" for n in range(20_000)))
    tracemalloc.start()
    table = read_table(path)
    assert sum(1 for _ in table.rows()) == 20_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert path.stat().st_size > 20_000_000
    assert peak < 1_000_000


# Files that are refused


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "empty"),
        ("  \n\n", "empty"),
        ("id,state\n", "no rows"),
        ("id;state\n1;a\n", "semicolons"),
        ('"id";"state"\n"1";"a"\n', "semicolons"),
        ("id\tstate\n1\ta\n", "tabs"),
        ("id,state\n1,caf\xe9\n".encode("latin-1"), r'line 2 is not UTF-8: byte 0xE9 \("é" in Latin-1'),
        ("id,state\n1,a\n".encode("utf-16"), "UTF-16"),
        ("id,state\n1,a\n".encode("utf-16-le"), "NUL"),
        (b"PK\x03\x04rest", "Excel workbook or a zip"),
        ("id,state,id\n1,a,2\n", r'two columns have the same name: "id" \(columns 1, 3\)'),
        ('id,state\n1,"never closed\n2,b\n', "line 2: a quote is opened here and not closed"),
        ("id,state\n1\n2\n", "no row .* can be read; the first problem: line 2: 1 cell, the header has 2"),
        ('[{"state": "a"}]', "one JSON array"),
        ('{"state": \n"a"}', "no row .* can be read"),
    ],
)
def test_a_file_that_is_no_usable_table_is_refused_and_named(tmp_path, content, message):
    with pytest.raises(TableError, match=message):
        read(tmp_path, content)


def test_a_late_line_in_another_encoding_is_named_by_its_number(tmp_path):
    lines = b"state\n" + b"fine\n" * 5_000 + b"na\xefve\n" + b"fine\n" * 5_000
    with pytest.raises(TableError, match="line 5002 is not UTF-8"):
        read(tmp_path, lines)


def test_the_semicolon_case_is_refused():
    with pytest.raises(TableError, match="semicolons"):
        read_table(CASES / "semicolon.csv")


def test_a_file_with_too_many_bytes_is_refused_before_it_is_read(tmp_path):
    with pytest.raises(TableError, match="12 bytes, the limit is 10"):
        read(tmp_path, "state\na\nb\nc\n", max_bytes=10)


def test_a_file_with_too_many_rows_is_refused(tmp_path):
    with pytest.raises(TableError, match="more than 2 rows"):
        read(tmp_path, "state\na\nb\nc\n", max_rows=2)
    assert read(tmp_path, "state\na\nb\n", max_rows=2).num_rows == 2


# Rows that are bad


def test_ragged_rows_are_bad_with_their_line_and_the_first_is_asked():
    first, second, third = rows_of(read_table(CASES / "ragged.csv"), id="id")
    assert state_of(first) == "hello"
    assert only_problem(second) == 'line 3: 4 cells, the header has 3 (too many: "cells")'
    assert only_problem(third) == "line 4: 2 cells, the header has 3"
    assert [row.external_id for row in (first, second, third)] == ["1", "2", "3"]
    assert third.cells == {"id": "3", "state": "few", "label": ""}


def test_text_after_a_closing_quote_spoils_its_own_row_only(tmp_path):
    first, second = rows_of(read(tmp_path, 'state\n"He said "down" and left"\nfine\n'))
    assert "line 2: text after a closing quote" in only_problem(first)
    assert state_of(second) == "fine"


def test_a_nul_character_spoils_its_own_row_only(tmp_path):
    content = "id,state\n" + "0,fine\n" * 2_000 + "x,a\x00b\nlast,fine\n"
    *_, bad, last = rows_of(read(tmp_path, content), id="id")
    assert only_problem(bad) == "line 2002: a NUL character"
    assert state_of(last) == "fine"


def test_an_empty_state_is_a_bad_row(tmp_path):
    first, second = rows_of(read(tmp_path, "id,state\n1,\n2,text\n"))
    assert only_problem(first) == 'state: line 2: "state" is empty'
    assert state_of(second) == "text"


def test_a_broken_json_line_is_a_bad_row(tmp_path):
    content = '{"state": "a"}\n{"state": "b"\n[1]\n{"state": "a", "state": "b"}\n{"state": NaN}\n{"other": 1}\n'
    first, *bad = rows_of(read(tmp_path, content, "t.jsonl"))
    assert state_of(first) == "a"
    messages = [only_problem(row) for row in bad]
    assert messages[0].startswith("line 2: This is not valid JSON")
    assert "at column" in messages[0]
    assert "line 1" not in messages[0]
    assert messages[1] == "line 3: a row must be a JSON object"
    assert "more than once" in messages[2]
    assert "NaN" in messages[3]
    assert messages[4] == 'state: line 6 has no "state"'


# What a row asks


def test_one_state_column_is_a_text_and_several_are_an_object(tmp_path):
    table = read(tmp_path, "state,channel\nhello,5\n")
    assert state_of(rows_of(table)[0]) == "hello"
    assert state_of(rows_of(table, state=("channel", "state"))[0]) == {"channel": "5", "state": "hello"}


def test_a_jsonl_state_keeps_its_type(tmp_path):
    table = read(tmp_path, '{"state": {"a": 1250.0}}\n{"state": ["x"]}\n{"state": 5}\n', "t.jsonl")
    first, second, third = rows_of(table)
    assert state_of(first) == {"a": 1250.0}
    assert state_of(second) == ["x"]
    assert "state" in only_problem(third)


def test_a_jsonl_row_may_bring_its_own_questions_and_labels(tmp_path):
    own = {"urgent": {"kind": "score", "levels": ["low", "high"]}}
    lines = [{"state": "a"}, {"state": "b", "questions": own, "labels": {"urgent": 1}}]
    table = read(tmp_path, "\n".join(map(json.dumps, lines)), "t.jsonl")
    first, second = rows_of(table, DEPARTMENT)
    assert first.submission is not None
    assert list(first.submission.request.questions) == ["department"]
    assert second.submission is not None
    assert second.submission.request.questions["urgent"].criteria == ["low", "high"]
    assert second.labels == {"urgent": "1"}


def test_a_jsonl_row_with_bad_questions_fails_alone(tmp_path):
    lines = [{"state": "a", "questions": {"q": {"type": "choice", "criteria": {"one": None}}}}, {"state": "b"}]
    first, second = rows_of(read(tmp_path, "\n".join(map(json.dumps, lines)), "t.jsonl"))
    assert "questions" in only_problem(first)
    assert state_of(second) == "b"


def test_questions_in_a_csv_are_a_column_like_any_other(tmp_path):
    (row,) = rows_of(read(tmp_path, 'state,questions\na,"{""q"": 1}"\n'))
    assert row.submission is not None
    assert list(row.submission.request.questions) == ["outage"]


def test_all_columns_are_carried_along_in_order(tmp_path):
    (row,) = rows_of(read(tmp_path, "z,state,a\n1,hello,=2\n"))
    assert list((row.cells or {}).items()) == [("z", "1"), ("state", "hello"), ("a", "=2")]


# Labels


@pytest.mark.parametrize(
    ("questions", "cell", "label"),
    [
        (DEPARTMENT, "billing", "billing"),
        (DEPARTMENT, " billing ", "billing"),
        (DEPARTMENT, "", None),
        (URGENCY, "2", "2"),
        (URGENCY, "2.0", "2"),
        (URGENCY, "Today", "2"),
        (OUTAGE, "true", "true"),
        (OUTAGE, "No", "false"),
        (OUTAGE, "1", "true"),
    ],
)
def test_a_label_becomes_the_id_of_its_option(tmp_path, questions, cell, label):
    (question_id,) = questions
    (row,) = rows_of(read(tmp_path, f"state,label\na,{cell}\n"), questions, labels={question_id: "label"})
    assert row.labels == ({question_id: label} if label else None)


@pytest.mark.parametrize(("questions", "cell"), [(DEPARTMENT, "Billing"), (URGENCY, "3"), (OUTAGE, "maybe")])
def test_a_label_that_no_option_has_is_a_warning_and_the_row_is_asked(tmp_path, questions, cell):
    table = read(tmp_path, f"state,label\nfine,\na,{cell}\n")
    (question_id,) = questions
    warnings: list[RowNote] = []
    mapping = ColumnMapping(("state",), labels={question_id: "label"})
    rows = list(table_rows(table, mapping, questions, "clef", on_warning=warnings.append))
    assert [row.labels for row in rows] == [None, None]
    assert rows[1].submission is not None
    assert [note.number for note in warnings] == [2]
    assert f'line 3: the label "{cell}" is no option of "{question_id}"' == warnings[0].message


# Guessing and checking columns


@pytest.mark.parametrize(
    ("columns", "question_ids", "expected"),
    [
        (["id", "message", "channel"], ["q"], ColumnMapping(("message",), "id")),
        (["ID", "Text", "label"], ["q"], ColumnMapping(("Text",), "ID", None, {"q": "label"})),
        (["state", "label", "label:b"], ["a", "b"], ColumnMapping(("state",), None, None, {"b": "label:b"})),
        (["complaint", "image"], ["q"], ColumnMapping(("complaint",), None, "image")),
        (["id", "label"], ["q"], ColumnMapping((), "id", None, {"q": "label"})),
    ],
)
def test_columns_are_guessed_by_their_names(columns, question_ids, expected):
    assert guess_mapping(columns, question_ids) == expected


def test_the_examples_are_guessed_right():
    table = read_table(PROJECT / "examples" / "messages.csv")
    assert table.num_rows == 40
    mapping = guess_mapping(table.columns, ["department", "urgency", "outage"])
    assert mapping == ColumnMapping(("message",), "id", None, {"department": "label:department"})


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (ColumnMapping(("text",)), 'no column "text"; the columns are "id", "state"'),
        (ColumnMapping(()), "choose the state column"),
        (ColumnMapping(("state",), labels={"other": "id"}), 'no question "other"'),
    ],
)
def test_a_mapping_that_does_not_fit_is_refused(tmp_path, mapping, message):
    with pytest.raises(TableError, match=message):
        check_mapping(read(tmp_path, "id,state\n1,a\n"), mapping, ["outage"])


def test_a_csv_without_questions_is_refused(tmp_path):
    with pytest.raises(TableError, match="questions are missing"):
        check_mapping(read(tmp_path, "state\na\n"), ColumnMapping(("state",)), [])


# Pictures


def test_an_image_cell_is_split_at_semicolons_but_not_inside_a_data_url():
    url = data_url(png())
    assert list(split_image_cell(f" a.png;{url}; b.png ;")) == ["a.png", url, "b.png"]
    assert list(split_image_cell("")) == []


def make_zip(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def picture_rows(folder: Path, cells: list[str], files: dict[str, bytes] | None) -> list[BatchRow]:
    table = read(folder, "state,image\n" + "".join(f"look,{cell}\n" for cell in cells))
    mapping = ColumnMapping(("state",), images="image")
    if files is None:
        return list(table_rows(table, mapping, OUTAGE, "clef"))
    with ImageZip(make_zip(folder / "p.zip", files)) as pictures:
        return list(table_rows(table, mapping, OUTAGE, "clef", pictures))


def test_pictures_come_from_the_zip_and_from_data_urls_in_their_order(tmp_path):
    first, second = png(8, 10), png(12, 14)
    cell = f'"one.png;{data_url(second)}"'
    (row,) = picture_rows(tmp_path, [cell], {"one.png": first})
    assert row.submission is not None
    assert [(image.width, image.height) for image in row.submission.images] == [(8, 10), (12, 14)]


def test_a_row_whose_picture_is_missing_or_broken_fails_alone(tmp_path):
    cells = ["none.png", "broken.png", "http://127.0.0.1/x.png", "", "good.png"]
    rows = picture_rows(tmp_path, cells, {"good.png": png(), "broken.png": b"<html>"})
    assert 'p.zip holds no file "none.png"' in only_problem(rows[0])
    assert "not a PNG" in only_problem(rows[1])
    assert "holds no file" in only_problem(rows[2])
    assert rows[3].submission is not None
    assert rows[4].submission is not None
    assert len(rows[4].submission.images) == 1


def test_a_named_picture_without_a_zip_is_a_bad_row_and_no_file_is_opened(tmp_path):
    (tmp_path / "here.png").write_bytes(png())
    (row,) = picture_rows(tmp_path, [str(tmp_path / "here.png")], None)
    assert "no zip of pictures was given" in only_problem(row)


def test_a_state_may_be_empty_beside_a_picture(tmp_path):
    table = read(tmp_path, f'state,image\n,"{data_url(png())}"\n')
    (row,) = table_rows(table, ColumnMapping(("state",), images="image"), OUTAGE, "clef")
    assert state_of(row) == ""


def test_the_example_zip_serves_its_table():
    table = read_table(PROJECT / "examples" / "receipts.csv")
    questions = json.loads((PROJECT / "examples" / "receipt_questions.json").read_text())
    mapping = guess_mapping(table.columns, list(questions))
    warnings: list[RowNote] = []
    with ImageZip(PROJECT / "examples" / "receipts.zip") as pictures:
        rows = list(table_rows(table, mapping, questions, "clef", pictures, on_warning=warnings.append))
    assert all(row.submission is not None and len(row.submission.images) == 1 for row in rows)
    assert rows[1].labels == {"is_receipt": "true", "paid_by_card": "true", "total_band": "over_50"}
    assert warnings == []


def link_zip(path: Path) -> Path:
    link = zipfile.ZipInfo("link.png")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(link, "/etc/passwd")
    return path


@pytest.mark.parametrize("name", ["folder/a.png", "../a.png", "/etc/a.png", "c:\\a.png", "folder/"])
def test_a_zip_with_folders_or_paths_is_refused(tmp_path, name):
    with pytest.raises(TableError, match="folder or path"):
        ImageZip(make_zip(tmp_path / "p.zip", {name: b""}))


def test_a_zip_with_a_link_is_refused(tmp_path):
    with pytest.raises(TableError, match="a link"):
        ImageZip(link_zip(tmp_path / "p.zip"))


def test_a_zip_with_too_many_files_or_bytes_is_refused(tmp_path):
    path = make_zip(tmp_path / "p.zip", {f"{n}.png": b"0" * 1_000 for n in range(5)})
    with pytest.raises(TableError, match="5 files, the limit is 4"):
        ImageZip(path, max_files=4)
    with pytest.raises(TableError, match="unpacks to 5,000 bytes, the limit is 4,999"):
        ImageZip(path, max_bytes=4_999)


def test_a_zip_whose_directory_would_fill_the_memory_is_not_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(image_zip, "MAX_DIRECTORY_BYTES", 200)
    with pytest.raises(TableError, match="too many files"):
        ImageZip(make_zip(tmp_path / "p.zip", {f"{n}.png": b"" for n in range(5)}))


@pytest.mark.parametrize("content", [b"", b"no zip at all", b"PK\x05\x06" + b"\xff" * 18])
def test_what_is_no_zip_is_refused(tmp_path, content):
    with pytest.raises(TableError, match=r"zip|too many"):
        ImageZip(write(tmp_path, content, "p.zip"))


def test_what_a_mac_adds_is_skipped(tmp_path):
    files = {"a.png": png(), "__MACOSX/._a.png": b"", ".DS_Store": b""}
    with ImageZip(make_zip(tmp_path / "p.zip", files)) as pictures:
        assert pictures.names == ("a.png",)


def test_a_picture_that_unpacks_to_more_than_an_image_may_have_is_not_unpacked(tmp_path):
    rows = picture_rows(tmp_path, ["bomb.png"], {"bomb.png": b"\0" * 50_000_000})
    assert "50,000,000 bytes, the limit is 4,194,304" in only_problem(rows[0])


def test_a_picture_that_is_larger_than_it_declares_is_damaged(tmp_path):
    path = make_zip(tmp_path / "p.zip", {"a.png": b"\0" * 50_000_000})
    data = bytearray(path.read_bytes())
    declared = struct.pack("<L", 1_000)
    directory = data.rfind(b"PK\x01\x02")
    data[directory + 24 : directory + 28] = declared
    data[22:26] = declared
    path.write_bytes(data)
    with ImageZip(path) as pictures, pytest.raises(ValueError, match="damaged"):
        pictures.read("a.png")
