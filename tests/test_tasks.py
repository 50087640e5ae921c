"""Tasks: the published formats on small hand-made copies, and the real files where they lie beside the project."""

import csv
import json
import random

import pytest
from PIL import Image

from clef_core.tasks import TaskError, find_task, humanise, intent_questions

INTENTS = ["card_arrival", "lost_card", "oos"]


@pytest.fixture
def data(tmp_path):
    """Small files in the published formats."""
    (tmp_path / "banking77").mkdir()
    (tmp_path / "banking77/categories.json").write_text(json.dumps(INTENTS[:2]))
    with (tmp_path / "banking77/test.csv").open("w", newline="") as stream:
        rows = [[f"message, {n}", INTENTS[n % 2]] for n in range(10)]
        csv.writer(stream).writerows([["text", "category"], *rows])
    (tmp_path / "clinc150").mkdir()
    parts = {
        "test": [["t0", "lost_card"], ["t1", "card_arrival"]],
        "oos_test": [["o0", "oos"]],
        "train": [["x", "lost_card"]],
    }
    (tmp_path / "clinc150/data_oos_plus.json").write_text(json.dumps(parts))
    (tmp_path / "receipts").mkdir()
    Image.new("RGB", (40, 60), "white").save(tmp_path / "receipts/one.png")
    questions = {"is_receipt": {"type": "noul"}, "band": {"type": "choice", "criteria": {"low": None, "high": None}}}
    row = {
        "id": "r1",
        "state": "Look.",
        "images": ["one.png"],
        "questions": questions,
        "labels": {"is_receipt": True, "band": "low"},
    }
    (tmp_path / "receipts/receipts.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path


def test_labels_become_descriptions():
    assert [humanise(label) for label in INTENTS] == ["card arrival", "lost card", "out of scope"]
    question = intent_questions(INTENTS)["intent"]
    assert question["instructions"] == "Which intent does the message express?"
    assert list(question["criteria"]) == INTENTS


def test_the_sample_is_pythons_own_for_the_seed(data):
    records = find_task("banking77").load(data, n=4, seed=0)
    assert [record.id for record in records] == [f"banking77-{i}" for i in random.Random(0).sample(range(10), 4)]
    assert records[0].submission.request.state.startswith("message, ")


def test_all_records_come_in_order_when_there_are_no_more_than_asked(data):
    assert [record.id for record in find_task("banking77").load(data)] == [f"banking77-{n}" for n in range(10)]


def test_clinc150_is_the_test_rows_then_the_out_of_scope_rows(data):
    records = find_task("clinc150").load(data)
    assert [record.submission.request.state for record in records] == ["t0", "t1", "o0"]
    assert [record.labels["intent"] for record in records] == ["lost_card", "card_arrival", "oos"]


def test_receipts_carry_their_image_and_labels(data):
    (record,) = find_task("receipts").load(data)
    assert [(image.width, image.height) for image in record.submission.images] == [(40, 60)]
    assert record.labels == {"is_receipt": "true", "band": "low"}


def test_an_image_outside_the_folder_is_refused(data):
    file = data / "receipts/receipts.jsonl"
    file.write_text(file.read_text().replace("one.png", "../../etc/hostname"))
    with pytest.raises(TaskError, match="outside"):
        find_task("receipts").load(data)


def test_missing_data_name_the_file_and_the_source(tmp_path):
    with pytest.raises(TaskError, match=r"test\.csv is missing.*PolyAI.*--data"):
        find_task("banking77").load(tmp_path)


def test_damaged_data_are_named(data):
    (data / "clinc150/data_oos_plus.json").write_text("{}")
    with pytest.raises(TaskError, match="CLINC150"):
        find_task("clinc150").load(data)


def test_an_unknown_task_lists_the_known():
    with pytest.raises(TaskError, match="banking77, clinc150, receipts, card"):
        find_task("mmlu")


def test_the_card_example_needs_no_data(tmp_path):
    (record,) = find_task("card").load(tmp_path)
    assert record.labels == {"department": "technical", "urgency": "2", "outage": "true"}


@pytest.mark.parametrize(
    ("name", "rows", "options"), [("banking77", 3080, 77), ("clinc150", 5500, 151), ("receipts", 6, 3)]
)
def test_published_files_are_read_whole(shared_data, name, rows, options):
    records = find_task(name).load(shared_data, n=None)
    assert len(records) == rows
    questions = records[0].submission.request.questions
    assert max(len(q.criteria or ()) for q in questions.values()) == options
    for record in records:
        for question_id, label in record.labels.items():
            criteria = questions[question_id].criteria
            assert label in (criteria if isinstance(criteria, dict) else ("true", "false"))
