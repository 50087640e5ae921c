"""The Batch screen in a real browser: from a table to a table with answers, with a stop in between."""

import csv
import io
import json
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from browser.steps import EXAMPLES, many_messages, open_batch, open_decide, upload
from playwright.sync_api import Locator, Page, expect

RUN_TIMEOUT_MS = 900_000
MARKUP = "<img src=x onerror=\"document.title='hacked'\"><b>bold</b>"


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def choose_variant(page: Page, name: str) -> None:
    page.locator("#batch-variants label", has_text=name).click()


def download(page: Page, button: str) -> str:
    with page.expect_download() as started:
        page.locator(button).click()
    return Path(started.value.path()).read_text(encoding="utf-8")


def fact(page: Page, panel: str, name: str) -> Locator:
    """One number of a panel, with its words."""
    return page.locator(f"{panel} .fact", has=page.get_by_text(name, exact=True))


def num_answers(page: Page) -> int:
    """How many answers the page says there are."""
    return int(page.locator("#progress [role=progressbar]").get_attribute("aria-valuenow") or "0")


def cancel_and_resume(page: Page, num_rows: int, answer_columns: Sequence[str]) -> None:
    """Stop a run between its first and its last answer, look at the partial result, and go on."""
    expect(page.locator("#progress [role=progressbar]")).not_to_have_attribute("aria-valuenow", "0", timeout=60_000)
    page.locator("#cancel").click()
    expect(page.locator("#progress strong")).to_have_text("Cancelled", timeout=60_000)
    stopped_at = num_answers(page)
    assert 0 < stopped_at < num_rows * len(answer_columns)
    page.wait_for_timeout(1500)
    assert num_answers(page) == stopped_at, "nothing runs on after a cancel"

    rows = list(csv.DictReader(io.StringIO(download(page, "#download-csv"))))
    assert len(rows) == num_rows, "a partial download has all rows"
    assert sum(row[column] != "" for row in rows for column in answer_columns) == stopped_at
    assert all(row["error"] == "" or row["error"].endswith("cancelled") for row in rows)

    page.locator("#resume").click()
    expect(page.locator("#progress strong")).to_have_text("Running")


def test_the_example_runs_is_stopped_found_again_after_a_reload_resumed_and_downloaded(
    batch: Page, tmp_path: Path
) -> None:
    """The story of a fresh clone."""
    rows, copies = read_rows(EXAMPLES / "messages.csv"), 15
    table = many_messages(tmp_path, copies)
    num_rows = copies * len(rows)
    upload(batch, table, EXAMPLES / "questions.json")
    expect(fact(batch, "#plan", "Rows")).to_contain_text(str(num_rows))
    expect(fact(batch, "#plan", "Longest")).to_contain_text("tokens")
    expect(batch.locator("#map-state")).to_contain_text("message")
    expect(batch.locator("#map-labels")).to_contain_text("label:department")

    batch.locator("#run").click()

    expect(batch.locator("#progress strong")).to_have_text("Running", timeout=30_000)
    cancel_and_resume(batch, num_rows, ["department_mxfp4", "department_bf16"])
    assert re.search(r"[?&]batch=\d+", batch.url)
    batch.reload(wait_until="domcontentloaded")
    expect(batch.locator("#batch-head")).to_contain_text("many_messages.csv")
    expect(fact(batch, "#progress", "Speed")).to_contain_text("rows per second")
    expect(batch.locator("#progress strong")).to_have_text("Done", timeout=RUN_TIMEOUT_MS)

    out = list(csv.DictReader(io.StringIO(download(batch, "#download-csv"))))
    assert [row["id"] for row in out] == [f"{row['id']}-{copy}" for copy in range(copies) for row in rows]
    texts = [row["message"].removeprefix("'") for row in out[: len(rows)]]  # one looks like a formula
    assert texts == [f"{row['message']} (0)" for row in rows]
    assert {row["error"] for row in out} == {""}
    assert {row["department_agree"] for row in out} <= {"true", "false"}
    lines = [json.loads(line) for line in download(batch, "#download-jsonl").splitlines()]
    assert len({line["id"] for line in lines}) == num_rows


@pytest.mark.slow
def test_300_rows_of_banking77_with_77_options_run_are_stopped_resumed_and_downloaded(
    batch: Page, tmp_path: Path, shared_data: Path
) -> None:
    rows = read_rows(shared_data / "banking77" / "test.csv")[::10][:300]
    labels = json.loads((shared_data / "banking77" / "categories.json").read_text(encoding="utf-8"))
    table, questions = tmp_path / "banking77.csv", tmp_path / "intents.json"
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    question = {"type": "choice", "criteria": dict.fromkeys(labels)}
    questions.write_text(json.dumps({"intent": question}), encoding="utf-8")
    upload(batch, table, questions)
    expect(fact(batch, "#plan", "Rows")).to_contain_text("300", timeout=60_000)
    expect(batch.locator("#map-state")).to_contain_text("text")
    choose_variant(batch, "BF16")

    batch.locator("#run").click()

    expect(batch.locator("#progress strong")).to_have_text("Running", timeout=30_000)
    cancel_and_resume(batch, 300, ["intent"])
    batch.reload(wait_until="domcontentloaded")
    expect(batch.locator("#batch-head")).to_contain_text("banking77.csv")
    expect(batch.locator("#progress strong")).to_have_text("Done", timeout=RUN_TIMEOUT_MS)
    out = list(csv.DictReader(io.StringIO(download(batch, "#download-csv"))))
    assert [(row["text"], row["category"]) for row in out] == [(row["text"], row["category"]) for row in rows]
    assert {row["intent"] for row in out} <= set(labels)
    assert all(len(json.loads(row["intent_probabilities"])) == 77 for row in out)
    assert {row["error"] for row in out} == {""}


def test_a_bad_row_fails_alone_and_is_named(batch: Page, tmp_path: Path) -> None:
    table = tmp_path / "ragged.csv"
    table.write_text("id,text\na,first\nb,second,surplus\nc,third\n", encoding="utf-8")
    questions = tmp_path / "q.yaml"
    questions.write_text("late:\n  type: noul\n", encoding="utf-8")
    upload(batch, table, questions)
    expect(batch.locator("#preview .prow-bad")).to_contain_text("surplus")
    expect(batch.locator("#plan .fact-alert")).to_contain_text("Bad rows")
    batch.locator("#run").click()
    expect(batch.locator("#progress strong")).to_have_text("Done", timeout=60_000)
    expect(batch.locator("#failures")).to_contain_text("Row 2")
    expect(batch.locator("#first-answers tbody tr").nth(1)).to_contain_text("failed")
    out = list(csv.DictReader(io.StringIO(download(batch, "#download-csv"))))
    assert ["surplus" in row["error"] for row in out] == [False, True, False]


def test_images_come_from_a_zip_beside_the_table(batch: Page) -> None:
    batch.locator("#batch-zip input[type=file]").set_input_files(EXAMPLES / "receipts.zip")
    upload(batch, EXAMPLES / "receipts.csv", EXAMPLES / "receipt_questions.json")
    expect(batch.locator("#map-images input")).to_have_value("image")
    expect(batch.locator("#preview .prow").first).to_contain_text("1 image")
    choose_variant(batch, "BF16")
    batch.locator("#run").click()
    expect(batch.locator("#progress strong")).to_have_text("Done", timeout=60_000)
    expect(batch.locator("#first-answers tbody tr")).to_have_count(4)


def test_the_questions_of_the_decide_screen_can_be_taken(page: Page, app_url: str) -> None:
    open_decide(page, app_url)
    page.locator("#example-2").click()
    expect(page.locator("#card-0 > button")).to_contain_text("intent · choice · 12 options")
    expect(page.locator("#meter")).to_contain_text("questions")
    page.wait_for_timeout(500)
    open_batch(page, f"{app_url}/batch")
    page.locator("#take-questions").click()
    expect(page.locator("#batch-questions .cm-content")).to_contain_text("track_parcel")


def test_what_is_missing_is_said_before_anything_runs(batch: Page) -> None:
    batch.locator("#run").click()
    expect(batch.locator("#batch-problems")).to_contain_text("choose a file")
    batch.locator("#batch-file input[type=file]").set_input_files(EXAMPLES / "messages.csv")
    expect(batch.locator("#table-line")).to_contain_text("40 rows")
    batch.locator("#run").click()
    expect(batch.locator("#batch-problems")).to_contain_text("questions are missing")


def test_a_file_that_is_no_table_says_what_it_is(batch: Page, tmp_path: Path) -> None:
    book = tmp_path / "book.csv"
    with zipfile.ZipFile(book, "w") as archive:
        archive.writestr("xl/workbook.xml", "<x/>")
    batch.locator("#batch-file input[type=file]").set_input_files(book)
    expect(batch.locator("#table-line")).to_contain_text("Excel workbook")


def test_markup_in_names_cells_and_questions_is_shown_as_text(batch: Page, tmp_path: Path) -> None:
    table = tmp_path / "<b>bold<b>.csv"
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["id", MARKUP], [MARKUP, MARKUP], ["b", "=1+1"]])
    questions = tmp_path / "q.json"
    questions.write_text(
        json.dumps({MARKUP: {"type": "choice", "criteria": {MARKUP: MARKUP, "b": None}}}), encoding="utf-8"
    )
    batch.locator("#batch-file input[type=file]").set_input_files(table)
    expect(batch.locator("#table-line")).to_contain_text("2 rows")
    batch.locator("#upload-questions").locator("xpath=..").locator("input[type=file]").set_input_files(questions)
    expect(batch.locator("#preview .prow").first).to_contain_text(MARKUP)
    batch.locator("#run").click()
    expect(batch.locator("#progress strong")).to_have_text("Done", timeout=60_000)
    expect(batch.locator("#first-answers")).to_contain_text(MARKUP)
    expect(batch.locator("#recent-batches")).to_contain_text("bold")
    assert batch.locator("img[src='x']").count() == 0
    assert batch.locator("b", has_text="bold").count() == 0
    assert batch.title() != "hacked"
    out = list(csv.reader(io.StringIO(download(batch, "#download-csv"))))
    assert out[2][1] == "'=1+1", "a spreadsheet must not run a cell"


def test_a_batch_that_does_not_exist_says_so_and_the_form_stays(page: Page, app_url: str) -> None:
    open_batch(page, f"{app_url}/batch?batch=999999")
    expect(page.locator("body")).to_contain_text("no batch '999999'")
    expect(page.locator("#batch-file")).to_be_visible()


def test_a_click_on_run_is_not_lost_while_the_dry_run_ends(page: Page, app_url: str) -> None:
    for pause_ms in (0, 200, 400):
        open_batch(page, f"{app_url}/batch")
        page.locator("#batch-example").click()
        expect(page.locator("#map-labels")).to_contain_text("label:department")
        page.wait_for_timeout(pause_ms)
        page.locator("#batch-variants label", has_text="BF16").click()
        page.locator("#run").click()
        expect(page.locator("#progress strong")).to_be_visible()
        page.wait_for_url(re.compile(r"batch=\d+"))
