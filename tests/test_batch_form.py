"""From the Batch form to checked rows, and the panels that show them."""

import json
from pathlib import Path
from typing import Any

import pytest

from clef_core.errors import ClefError
from clef_core.tokens import PromptTokenizer
from web.batch_form import BatchDraft, check_draft, dry_run, first_rows, label_of
from web.batch_view import plan_html, preview_html
from worker.settings import load_settings
from worker.tables import TableError

MARKUP = "<img src=x onerror=alert(1)>"


@pytest.fixture
def uploads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "uploads"
    folder.mkdir()
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(folder))
    return folder


@pytest.fixture
def tokenizer() -> PromptTokenizer:
    return PromptTokenizer.from_release(Path(__file__).parent / "data" / "golden" / "release-bf16")


def draft(file: Path, **changes: Any) -> BatchDraft:
    fields: dict[str, Any] = {
        "file": str(file),
        "images_zip": None,
        "questions": '{"late": {"type": "noul"}}',
        "state": ("text",),
        "id": None,
        "images": None,
        "labels": (),
        "variants": ("mxfp4", "bf16"),
    }
    return BatchDraft(**fields | changes)


def test_a_single_question_takes_any_label_column_several_need_their_name() -> None:
    assert label_of(["category"], ["intent"]) == {"intent": "category"}
    assert label_of(["Label:A", "label:b"], ["a", "b"]) == {"a": "Label:A", "b": "label:b"}
    with pytest.raises(TableError, match="category"):
        label_of(["category"], ["a", "b"])
    with pytest.raises(TableError, match="both"):
        label_of(["one", "two"], ["a"])


def test_a_table_outside_the_upload_folder_is_never_read(uploads: Path, tmp_path: Path) -> None:
    private = tmp_path / "private.csv"
    private.write_text("text\nsecret\n")
    with pytest.raises(ClefError) as caught:
        check_draft(draft(private), load_settings())
    assert "secret" not in str(caught.value)


def test_the_dry_run_counts_rows_and_names_those_that_cannot_be_asked(
    uploads: Path, tokenizer: PromptTokenizer
) -> None:
    table = uploads / "t.csv"
    table.write_text(f"text,label:late\nsame,true\nsame,maybe\n{'word ' * 300},\n,false\n")
    batch = check_draft(draft(table, labels=("label:late",)), load_settings())
    plan, warnings = dry_run(batch, tokenizer, 350, tokens_per_s=100.0)
    assert (plan.num_rows, plan.num_bad, plan.num_too_long, plan.num_distinct) == (4, 1, 1, 1)
    assert [note.number for note in plan.bad + plan.too_long] == [4, 3]
    assert [note.number for note in warnings] == [2]
    shown = plan_html(plan, warnings)
    assert "Row 4" in shown
    assert "Row 3" in shown
    assert "maybe" in shown


def test_the_preview_shows_what_the_model_reads_and_no_markup(uploads: Path, tokenizer: PromptTokenizer) -> None:
    table = uploads / "t.jsonl"
    rows = [{"text": MARKUP, "id": MARKUP}, {"text": 5, "id": "b"}]
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    batch = check_draft(draft(table, id="id"), load_settings())
    shown = preview_html(first_rows(batch, tokenizer), batch.table)
    assert "JOINT SCHEMA DECISIONS:" in shown
    assert "prow-bad" in shown
    assert "<img" not in shown
    assert "&lt;img" in shown


def test_several_variants_ask_under_the_default_name_and_one_under_its_own(uploads: Path) -> None:
    assert draft(uploads).model == "clef"
    assert draft(uploads, variants=("bf16",)).model == "clef-bf16"
