"""The dry run: what a table would cost, before anything is stored."""

import pytest
from paths import PROJECT

from clef_core.tokens import PromptTokenizer
from tests.test_tables import OUTAGE, data_url, png, read, rows_of
from worker.tables import ColumnMapping, RowNote, plan, table_rows


@pytest.fixture(scope="module")
def tokenizer() -> PromptTokenizer:
    return PromptTokenizer.from_release(PROJECT / "checkpoints" / "random-mxfp4")


def test_a_plan_counts_rows_tokens_and_what_cannot_be_answered(tmp_path, tokenizer):
    table = read(tmp_path, f"id,state\n1,short\n2,{'long ' * 3_000}\n3,short\n4\n5,a bit more text\n")
    found = plan(table_rows(table, ColumnMapping(("state",)), OUTAGE, "clef"), tokenizer, max_tokens=1_000)
    assert (found.num_rows, found.num_answerable, found.num_distinct) == (5, 3, 2)
    assert found.bad == (RowNote(4, "line 5: 1 cell, the header has 2"),)
    assert [note.number for note in found.too_long] == [2]
    short, longest = (
        tokenizer.count(row.submission.request).total
        for row in (rows_of(table)[0], rows_of(table)[4])
        if row.submission
    )
    assert found.total_tokens == 2 * short + longest
    assert (found.longest_tokens, found.longest_row) == (longest, 5)
    assert found.estimated_s is None


def test_a_plan_estimates_the_time_and_counts_identical_rows_once(tmp_path, tokenizer):
    table = read(tmp_path, "state\nsame\nsame\nsame\n")
    found = plan(table_rows(table, ColumnMapping(("state",)), OUTAGE, "clef"), tokenizer, tokens_per_s=10)
    assert found.estimated_s == pytest.approx(found.total_tokens / 3 / 10)


def test_a_plan_counts_the_tokens_of_pictures(tmp_path, tokenizer):
    table = read(tmp_path, f'state,image\nlook,"{data_url(png(256, 256))}"\nlook,\n')
    mapping = ColumnMapping(("state",), images="image")
    found = plan(table_rows(table, mapping, OUTAGE, "clef"), tokenizer)
    assert found.longest_row == 1
    assert found.num_distinct == 2
