"""`evaluate`: the card's table measured through the queue, and the card's own numbers beside it."""

from pathlib import Path

import pytest
from test_cli import Cli

from clef_core.card import CARD_EXAMPLE, CARD_RESULTS
from clef_core.tasks import TASKS, find_task
from worker.task_rows import load_task


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """A command line without workers: the command starts its own."""
    return Cli(tmp_path_factory.mktemp("data"), OMP_NUM_THREADS="1")


def test_the_cards_numbers_belong_to_tasks_and_options_that_exist() -> None:
    assert set(CARD_RESULTS) < set(TASKS)
    (record,) = find_task("card").load(Path("/nowhere"))
    for one in CARD_EXAMPLE:
        assert record.labels[one.question_id] == one.option_id
        assert 0 < one.left < 1
        assert 0 < one.right < 1


def test_a_task_becomes_rows_with_ids_and_labels() -> None:
    loaded = load_task(find_task("card"), None, 300, 0)
    (row,) = loaded.rows
    assert (loaded.name, row.number, row.external_id) == ("card (n = 1, seed 0)", 1, "card")
    assert row.labels == {"department": "technical", "urgency": "2", "outage": "true"}
    assert list(loaded.questions) == ["department", "urgency", "outage"]


def test_missing_data_are_bad_input_with_their_source(cli: Cli, tmp_path: Path) -> None:
    outcome = cli("evaluate", "--task", "clinc150", "--data", tmp_path)
    outcome.assert_bad_input("data_oos_plus.json is missing", "clinc/oos-eval", "--data DIR")


def test_evaluate_prints_the_cards_table_and_the_cards_own_numbers(cli: Cli) -> None:
    outcome = cli("evaluate", "--task", "card")
    assert outcome.code == 0, outcome.stderr
    tables = [line for line in outcome.stdout.splitlines() if line.startswith("| ")]
    header, _, row = tables[:3]
    assert [cell.strip() for cell in header.strip("|").split("|")] == [
        "task", "n", "bf16 accuracy (95 % CI)", "mxfp4 accuracy (95 % CI)", "top-1 agreement (95 % CI)",
        "mean KL(bf16‖mxfp4)", "floor: bf16 against itself", "floor: mean KL", "difference",
    ]  # fmt: skip
    assert row.startswith("| the model card's example | 3 | ")
    assert "theirs, not measured here" in outcome.stdout
    assert "| card example: p(technical) of department | 0.917 | 0.918 | – | – |" in outcome.stdout
    assert "random weights, the figures say nothing about Clef: bf16, mxfp4" in outcome.stdout


def test_evaluate_gives_equal_numbers_when_run_again(cli: Cli, shared_data: Path) -> None:
    first, second = (
        cli("evaluate", "--task", "banking77", "--n", "2", "--data", shared_data, "--json", "-") for _ in range(2)
    )
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    one, two = first.json["banking77"], second.json["banking77"]
    assert one["overall"] == two["overall"]
    assert one["overall"]["n"] == 2
    assert one["overall"]["labelled"]["left"]["n"] == 2
    assert one["comparison"]["parameters"] == two["comparison"]["parameters"]
    assert one["comparison"]["id"] != two["comparison"]["id"]
