"""`compare` as a person runs it: processes, the real queue, a real worker, files, exit codes."""

import csv
import io
import json
import re
import signal
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from paths import PROJECT
from test_cli import TIMEOUT_S, Cli, Outcome

SMALL = PROJECT / "checkpoints" / "random-bf16"
QUESTIONS = {
    "team": {"type": "choice", "criteria": {"billing": "Payments", "technical": "Bugs", "sales": None}},
    "urgent": {"type": "noul", "instructions": "Is it urgent?"},
}
ROWS = [
    {"id": "a", "state": "The invoice is wrong.", "questions": QUESTIONS, "labels": {"team": "billing"}},
    {"id": "b", "state": "=cmd|' /C calc'!A0", "questions": QUESTIONS, "labels": {"team": "technical"}},
    {"id": "c", "state": {"subject": "late", "body": "Where is my order?"}, "questions": QUESTIONS},
    {"id": "d", "state": "The page is slow | and <b>broken</b>.", "questions": QUESTIONS, "labels": {"urgent": True}},
]


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """A command line whose data folder has one worker for both variants."""
    cli = Cli(tmp_path_factory.mktemp("data"), OMP_NUM_THREADS="1")
    log = (tmp_path_factory.mktemp("log") / "worker.log").open("w+")
    worker = cli.start("serve", "--variant", "mxfp4", "--variant", "bf16", stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while not any(w["state"] == "idle" for w in cli("status", "--json").json["workers"]):
            assert worker.poll() is None, (log.seek(0), log.read())
            assert time.monotonic() < deadline, "the worker does not become ready"
        yield cli
    finally:
        worker.terminate()
        worker.wait(TIMEOUT_S)
        log.close()


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "requests.jsonl", ROWS)


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def comparison_id(outcome: Outcome) -> int:
    found = re.search(r"comparison (\d+) is stored", outcome.stderr)
    assert found, outcome.stderr
    return int(found[1])


def test_a_file_of_requests_is_compared_and_written_in_every_format(cli: Cli, requests: Path, tmp_path: Path) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("json", "markdown", "csv", "jevl")}
    options = [part for name, path in files.items() for part in (f"--{name}", path)]
    outcome = cli("compare", "--requests", requests, *options)
    assert outcome.code == 0, outcome.stderr
    assert outcome.stdout == files["markdown"].read_text(encoding="utf-8")
    assert outcome.stdout.startswith("**mxfp4 picked the same option as bf16 for ")

    body = json.loads(files["json"].read_text(encoding="utf-8"))
    overall = body["overall"]
    assert overall["n"] == 8
    assert 0 <= overall["agreement_low"] <= overall["agreement"] <= overall["agreement_high"] <= 1
    assert overall["kl_mean"] > 0
    assert overall["tv_mean"] > 0
    assert overall["max_abs_dp"] >= overall["tv_mean"]
    assert overall["floor"]["kl_mean"] < overall["kl_mean"]
    assert list(body["questions"]) == ["team", "urgent"]
    assert body["questions"]["team"]["labelled"]["left"]["n"] == 2
    assert body["comparison"]["left"]["batching"]["mode"] == "single"
    assert body["comparison"]["floor"]["batching"]["mode"] == "padded"
    assert body["comparison"]["parameters"]["random_releases"] == ["bf16", "mxfp4"]

    lines = list(csv.DictReader(io.StringIO(files["csv"].read_text(encoding="utf-8"), newline="")))
    assert [(line["id"], line["question"]) for line in lines] == [(i, q) for i in "abcd" for q in ("team", "urgent")]
    assert lines[2]["state"].startswith("'=cmd")
    assert json.loads(lines[4]["state"]) == ROWS[2]["state"]
    assert [line["label"] for line in lines if line["label"]] == ["billing", "technical", "true"]
    kl = sum(float(line["kl"]) for line in lines) / len(lines)
    assert kl == pytest.approx(overall["kl_mean"], rel=1e-4)  # six significant digits in the file
    assert sum(line["agree"] == "true" for line in lines) == overall["num_agree"]

    records = [json.loads(line) for line in files["jevl"].read_text(encoding="utf-8").splitlines()]
    assert [record["model"] for record in records] == ["clef-bf16", "clef-mxfp4"] * 4
    assert len({record["id"] for record in records}) == 4
    assert records[0]["label"] == {"team": "billing"}
    assert not list(tmp_path.glob("*.part"))


def test_a_variant_against_itself_is_computed_twice_and_equal(cli: Cli, requests: Path, tmp_path: Path) -> None:
    jevl = tmp_path / "out.jevl"
    sides = ("--left", "bf16", "--right", "bf16", "--no-floor")
    outcome = cli("compare", "--requests", requests, *sides, "--json", "-", "--jevl", jevl)
    assert outcome.code == 0, outcome.stderr
    body = outcome.json
    assert (body["overall"]["agreement"], body["overall"]["kl_mean"], body["overall"]["max_abs_dp"]) == (1.0, 0.0, 0.0)
    assert body["comparison"]["left"]["id"] != body["comparison"]["right"]["id"]
    assert body["overall"]["floor"] is None
    models = {json.loads(line)["model"] for line in jevl.read_text(encoding="utf-8").splitlines()}
    assert models == {"clef-bf16", "clef-bf16-again"}


def test_a_finished_batch_is_compared_by_its_number(cli: Cli, tmp_path: Path) -> None:
    rows = [{"id": row["id"], "state": row["state"], "questions": QUESTIONS} for row in ROWS]
    batch = cli("batch", write_jsonl(tmp_path / "rows.jsonl", rows), "--variant", "bf16")
    assert batch.code == 0, batch.stderr
    outcome = cli("compare", "--batch", str(batch.batch_id), "--no-floor", "--json", "-")
    assert outcome.code == 0, outcome.stderr
    assert (outcome.json["num_records"], outcome.json["comparison"]["batch_id"]) == (4, batch.batch_id)
    assert cli("export", str(batch.batch_id), "--format", "jsonl").stdout == batch.stdout


def test_bad_rows_are_left_out_said_and_make_the_exit_code_1(cli: Cli, tmp_path: Path) -> None:
    rows = [*ROWS[:2], {"id": "x", "state": 5, "questions": QUESTIONS}]
    outcome = cli("compare", "--requests", write_jsonl(tmp_path / "r.jsonl", rows), "--no-floor", "--json", "-")
    assert outcome.code == 1
    assert outcome.json["num_records"] == 2
    assert "1 row could not be asked" in outcome.stderr


def test_a_stored_comparison_is_written_again_without_a_worker(cli: Cli, requests: Path) -> None:
    first = cli("compare", "--requests", requests, "--no-floor", "--json", "-")
    again = cli("compare", "--resume", str(comparison_id(first)), "--json", "-")
    assert again.code == 0, again.stderr
    assert again.json == first.json


def test_the_table_escapes_what_users_wrote(cli: Cli, tmp_path: Path) -> None:
    questions = {"a|b\n*c*": QUESTIONS["urgent"], "plain": QUESTIONS["urgent"]}
    rows = [{"state": "x", "questions": questions}]
    outcome = cli("compare", "--requests", write_jsonl(tmp_path / "r.jsonl", rows), "--no-floor")
    assert outcome.code == 0, outcome.stderr
    assert "| a\\|b \\*c\\* | 1 |" in outcome.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--requests FILE, --batch ID, --task NAME"]),
        (["--batch", "1", "--task", "card"], ["one of"]),
        (["--task", "mmlu"], ["no task is called mmlu", "banking77"]),
        (["--task", "banking77", "--data", "/nowhere"], ["/nowhere/banking77/test.csv is missing", "PolyAI", "--data"]),
        (["--task", "card", "--left", "nope"], ["nope is no variant", "bf16, mxfp4", "no such release"]),
        (["--task", "card", "--json", "/nowhere/out.json"], ["there is no folder /nowhere"]),
        (["--task", "card", "--csv", "a", "--jevl", "a"], ["two outputs have one name"]),
        (
            ["--task", "card", "--no-floor", "--floor-dtype", "float32"],
            ["--floor-dtype and --floor-device need the floor"],
        ),
        (["--task", "card", "--floor-device", "cuda:99"], ["--floor-device cuda:99"]),
        (["--task", "card", "--questions", "q.json"], ["--questions belongs to --requests"]),
        (["--resume", "77"], ["there is no comparison 77"]),
        (["--batch", "77"], ["there is no batch 77"]),
    ],
)
def test_bad_input_is_said_in_a_line(cli: Cli, arguments: list[str], words: list[str]) -> None:
    cli("compare", *arguments).assert_bad_input(*words)


@pytest.mark.slow
def test_a_release_directory_is_compared_with_a_worker_of_its_own(cli: Cli, requests: Path, tmp_path: Path) -> None:
    other = tmp_path / "my release"
    copytree(SMALL, other)
    (other / "SHA256SUMS").unlink()
    (other / "NOTE").write_text("the same weights in another directory")
    outcome = cli("compare", "--requests", requests, "--right", other, "--no-floor", "--json", "-")
    assert outcome.code == 0, outcome.stderr
    body = outcome.json
    assert (body["overall"]["agreement"], body["overall"]["kl_mean"]) == (1.0, 0.0)  # the weights are the same
    assert re.fullmatch(r"my-release-[0-9a-f]{8}", body["comparison"]["right"]["variant"])
    assert body["comparison"]["left"]["release_checksum"] != body["comparison"]["right"]["release_checksum"]
    same = cli("compare", "--requests", requests, "--right", SMALL, "--no-floor", "--json", "-")
    assert same.json["comparison"]["right"]["variant"] == "bf16"  # a configured release is its variant


@pytest.mark.slow
def test_the_floor_can_be_run_in_another_dtype(cli: Cli, requests: Path) -> None:
    outcome = cli("compare", "--requests", requests, "--floor-dtype", "float32", "--json", "-")
    assert outcome.code == 0, outcome.stderr
    runs = outcome.json["comparison"]
    assert (runs["left"]["dtype"], runs["floor"]["dtype"]) == ("bfloat16", "float32")
    assert runs["floor"]["variant"] == "bf16-float32"
    assert outcome.json["overall"]["floor"]["max_abs_dp"] > 0
    assert "bf16 against itself as bf16-float32: " in outcome.json["headline"]


@pytest.mark.slow
def test_ctrl_c_stops_a_comparison_and_resume_goes_on(cli: Cli, tmp_path: Path) -> None:
    rows = [{"state": f"row {n} " + "word " * 100, "questions": QUESTIONS} for n in range(40)]
    process = cli.start("compare", "--requests", write_jsonl(tmp_path / "r.jsonl", rows), "--no-floor", "--json", "-")
    database = next(Path(cli.environment["CLEF_DATA_DIR"]).glob("*.sqlite3"))
    deadline = time.monotonic() + TIMEOUT_S
    with sqlite3.connect(database) as connection:
        while True:
            (number,) = connection.execute("SELECT max(id) FROM comparisons WHERE num_rows = 40").fetchone()
            done = "SELECT count(*) FROM decisions WHERE comparison_id = ? AND status = 'done'"
            if number is not None and connection.execute(done, (number,)).fetchone()[0] >= 2:
                break
            assert time.monotonic() < deadline
            time.sleep(0.1)
    connection.close()
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, stdout) == (130, ""), stderr
    assert f"python -m worker compare --resume {number}" in stderr
    resumed = cli("compare", "--resume", str(number), "--json", "-")
    assert resumed.code == 0, resumed.stderr
    assert (resumed.json["num_records"], resumed.json["num_skipped"]) == (40, 0)
    assert resumed.json["comparison"]["is_cancelled"] is False
