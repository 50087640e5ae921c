"""The command line as a user runs it: processes, files, exit codes, a real worker, the embedded Redis."""

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from paths import DATA, PROJECT, RANDOM_ENVIRONMENT
from typer.testing import CliRunner

from worker.__main__ import app

EXAMPLES = PROJECT / "examples"
CASES = DATA / "cases" / "csv"
COMMANDS = sorted(command.callback.__name__ for command in app.registered_commands if command.callback)
NOUL = {"down": {"type": "noul"}}
TIMEOUT_S = 120


class Cli:
    """Runs `python -m worker` on one data folder."""

    def __init__(self, data_dir: Path, **variables: str) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("CLEF_")}
        own = {"CLEF_DATA_DIR": str(data_dir), "OMP_WAIT_POLICY": "PASSIVE", "COLUMNS": "120", "NO_COLOR": "1"}
        self.environment = inherited | RANDOM_ENVIRONMENT | own | variables

    def start(self, *arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "worker", *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL} | options
        return subprocess.Popen(command, env=self.environment, cwd=PROJECT, text=True, **pipes)

    def __call__(self, *arguments: str | Path, given: str = "") -> "Outcome":
        with self.start(*arguments, stdin=subprocess.PIPE) as process:
            stdout, stderr = process.communicate(given, timeout=TIMEOUT_S)
        return Outcome(process.returncode, stdout, stderr)


class InProcess:
    """The same interface without a new process for each call: quick, for what ends before a worker is needed."""

    def __init__(self, data_dir: Path, **variables: str) -> None:
        self.environment = RANDOM_ENVIRONMENT | {"CLEF_DATA_DIR": str(data_dir)} | variables

    def __call__(self, *arguments: str | Path, given: str = "") -> "Outcome":
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("CLEF_")]:
                patch.delenv(name)
            result = CliRunner().invoke(app, list(map(str, arguments)), input=given, env=self.environment)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Outcome(result.exit_code, result.stdout, result.stderr)


class Outcome:
    def __init__(self, code: int, stdout: str, stderr: str) -> None:
        self.code, self.stdout, self.stderr = code, stdout, stderr
        assert "Traceback" not in stderr, stderr

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)

    @property
    def rows(self) -> list[dict[str, str]]:
        return list(csv.DictReader(io.StringIO(self.stdout, newline="")))

    @property
    def batch_id(self) -> int:
        found = re.search(r"batch (\d+),", self.stderr)
        assert found, self.stderr
        return int(found[1])

    def assert_bad_input(self, *words: str) -> None:
        assert self.code == 2, (self.stdout, self.stderr)
        assert self.stdout == ""
        (line,) = [line for line in self.stderr.splitlines() if line.startswith("Error: ")]
        for word in words:
            assert word in line


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """A command line whose data folder has one worker for both variants."""
    cli = Cli(tmp_path_factory.mktemp("data"))
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


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> InProcess:
    """A command line without a worker."""
    return InProcess(tmp_path_factory.mktemp("alone"))


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    return write(tmp_path / "q.json", json.dumps(NOUL))


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def request(**fields: Any) -> str:
    return json.dumps({"model": "clef", "state": "hello", "questions": NOUL} | fields)


# Help


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_and_each_of_its_options(command):
    documented = typer.main.get_command(app).commands[command]
    assert documented.help
    assert documented.params
    assert [param.name for param in documented.params if not getattr(param, "help", None)] == []


def test_the_help_of_a_command_names_its_exit_codes(alone):
    outcome = alone("batch", "--help")
    assert outcome.code == 0
    assert "batch [OPTIONS] [FILE]" in outcome.stdout
    assert "0 all rows answered, 1 some failed, 2 bad input" in outcome.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_the_readme_shows_every_command(command):
    assert f"python -m worker {command}" in (PROJECT / "README.md").read_text(encoding="utf-8")


def test_help_answers_without_loading_what_is_heavy():
    code = (
        "import sys, worker.__main__; print([m for m in ('torch', 'sqlalchemy', 'redis', 'PIL') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], cwd=PROJECT, text=True).strip() == "[]"


def test_no_command_at_all_shows_the_help(alone):
    outcome = alone()
    assert all(command in outcome.stdout + outcome.stderr for command in COMMANDS)


# decide


def test_a_request_is_answered_as_json(cli):
    outcome = cli("decide", EXAMPLES / "card_example.json")
    assert outcome.code == 0
    assert list(outcome.json["answers"]) == ["department", "urgency", "outage"]
    assert outcome.json["model"] == "clef"
    assert outcome.json["x_variant"] == "mxfp4"
    assert "random weights" in outcome.stderr


def test_stdin_and_a_named_variant(cli):
    outcome = cli("decide", "-", "--variant", "bf16", given=request())
    assert outcome.json["x_variant"] == "bf16"


def test_both_variants_answer_side_by_side(cli):
    responses = cli("decide", "-", "--both", given=request()).json["responses"]
    assert {name: response["x_variant"] for name, response in responses.items()} == {"bf16": "bf16", "mxfp4": "mxfp4"}


def test_picture_files_are_added_to_the_request(cli):
    plain = cli("decide", "-", given=request()).json["usage"]["input_tokens"]
    pictures = ["--image", EXAMPLES / "receipt_cafe.png", "--image", EXAMPLES / "not_a_receipt.png"]
    assert cli("decide", "-", *pictures, given=request()).json["usage"]["input_tokens"] > plain + 100


def test_an_unknown_field_is_noted(cli):
    outcome = cli("decide", "-", given=request(temperature=0))
    assert outcome.code == 0
    assert "temperature is not known" in outcome.stderr


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("{", ["not valid JSON"]),
        ("[]", ["must be a JSON object"]),
        ("", ["not valid JSON"]),
        (request(model="gpt"), ["gpt", "clef-mxfp4"]),
        (request(state=None, questions={}), ["state", "questions"]),
        (request(images=["/etc/hostname"]), ["images", "never opened"]),
    ],
)
def test_a_bad_request_is_one_line_and_exit_code_2(alone, given, words):
    alone("decide", "-", given=given).assert_bad_input(*words)


def test_a_bad_request_is_one_line_in_a_process_of_its_own_too(tmp_path):
    Cli(tmp_path)("decide", "-", given="{").assert_bad_input("not valid JSON")


def test_a_missing_file_or_variant_or_release_is_bad_input(alone, tmp_path):
    alone("decide", tmp_path / "none.json").assert_bad_input("No such file", "none.json")
    alone("decide", "-", "--variant", "int3", given=request()).assert_bad_input("int3", "bf16, mxfp4")
    alone("decide", "-", "--variant", "bf16", "--both", given=request()).assert_bad_input("--both")
    alone("decide", "-", "--image", CASES / "quoted.csv", given=request()).assert_bad_input("not a PNG")
    missing = InProcess(tmp_path / "data", CLEF_MXFP4=str(tmp_path / "nowhere"))
    missing("decide", "-", given=request()).assert_bad_input("nowhere", "no such release")
    InProcess(tmp_path / "data", CLEF_PORT="x")("decide", "-", given=request()).assert_bad_input("CLEF_PORT")


def test_an_unreachable_redis_is_said_at_once(tmp_path):
    outcome = InProcess(tmp_path, REDIS_URL="redis://127.0.0.1:1")("decide", "-", given=request())
    assert outcome.code == 1
    assert "Error: Redis does not work" in outcome.stderr


@pytest.mark.slow
def test_without_a_worker_one_is_started_for_the_duration(tmp_path):
    cli = Cli(tmp_path / "data")
    outcome = cli("decide", "-", given=request())
    assert outcome.code == 0
    assert "starting a mxfp4 worker ..." in outcome.stderr
    assert outcome.json["x_variant"] == "mxfp4"
    assert cli("status", "--json").json["workers"] == []


# batch


def test_the_example_table_is_answered_in_order_and_complete(cli):
    outcome = cli("batch", EXAMPLES / "messages.csv", "--questions", EXAMPLES / "questions.json")
    assert outcome.code == 0, outcome.stderr
    with (EXAMPLES / "messages.csv").open(encoding="utf-8", newline="") as file:
        given = list(csv.DictReader(file))
    rows = outcome.rows
    assert [row["id"] for row in rows] == [row["id"] for row in given]
    assert [row["channel"] for row in rows] == [row["channel"] for row in given]
    assert list(rows[0]) == [
        *("id", "message", "channel", "label:department"),
        *("department", "department_confidence", "department_probabilities"),
        *("urgency", "urgency_confidence", "urgency_probabilities", "outage", "outage_probabilities"),
        *("model", "_row", "error"),
    ]
    assert {row["error"] for row in rows} == {""}
    assert {row["model"] for row in rows} == {"clef-mxfp4"}
    assert [row["_row"] for row in rows] == [str(n) for n in range(1, 41)]
    assert rows[36]["message"].startswith("'=SUM(B2:B9)")
    for row in rows:
        assert sum(json.loads(row["department_probabilities"]).values()) == pytest.approx(1, abs=1e-5)
        assert 0 <= float(row["urgency"]) <= 2


def test_the_same_command_again_computes_nothing(cli, tmp_path, questions):
    table = write(tmp_path / "t.csv", "state\none\ntwo\n")
    first = cli("batch", table, "-q", questions)
    again = cli("batch", table, "-q", questions)
    assert "finished already" in again.stderr
    assert again.batch_id == first.batch_id
    assert again.stdout == first.stdout
    assert cli("batch", table, "-q", questions, "--fresh").batch_id != first.batch_id
    assert cli("batch", table, "-q", questions, "--variant", "bf16").batch_id != first.batch_id


def test_bad_rows_fail_alone_with_exit_code_1(cli, questions):
    outcome = cli("batch", CASES / "ragged.csv", "-q", questions)
    assert outcome.code == 1
    first, second, third = outcome.rows
    assert first["error"] == ""
    assert 0 < float(first["down"]) < 1
    assert second["error"].startswith("line 3: 4 cells, the header has 3")
    assert third["error"] == "line 4: 2 cells, the header has 3"
    assert (second["down"], third["down"]) == ("", "")
    assert "3 rows: 1 answered, 2 failed" in outcome.stderr


def test_a_row_that_is_too_long_fails_alone(cli, tmp_path, questions):
    table = write(tmp_path / "t.csv", f"state\nshort\n{'the order is late ' * 6_000}\n")
    outcome = cli("batch", table, "-q", questions)
    assert outcome.code == 1
    assert outcome.rows[0]["error"] == ""
    assert "16,384" in outcome.rows[1]["error"]


def test_csv_neutralises_formulas_and_jsonl_is_lossless(cli, tmp_path, questions):
    outcome = cli("batch", CASES / "formula.csv", "-q", questions)
    states = [row["state"] for row in outcome.rows]
    assert states == ['\'=HYPERLINK("http://x","y")', "'-2+3", "'@SUM(A1)", "-5"]
    table = write(tmp_path / "t.jsonl", '{"id": 7, "state": {"cell": "=1+1"}}\n{"id": "=2", "state": "-2+3"}\n')
    lines = [json.loads(line) for line in cli("batch", table, "-q", questions).stdout.splitlines()]
    assert [line["id"] for line in lines] == [7, "=2"]
    assert [line["answers"]["down"]["type"] for line in lines] == ["noul", "noul"]


def test_both_variants_are_set_side_by_side(cli, tmp_path, questions):
    table = write(tmp_path / "t.csv", "state\none\ntwo\n")
    rows = cli("batch", table, "-q", questions, "--both").rows
    assert list(rows[0]) == ["state", "down_bf16", "down_mxfp4", "down_agree", "down_kl", "model", "_row", "error"]
    for row in rows:
        assert float(row["down_kl"]) >= 0
        assert row["down_agree"] == str((float(row["down_bf16"]) >= 0.5) == (float(row["down_mxfp4"]) >= 0.5)).lower()


def test_a_table_with_pictures_and_labels(cli):
    arguments = ["-q", EXAMPLES / "receipt_questions.json", "--images-zip", EXAMPLES / "receipts.zip", "-f", "jevl"]
    outcome = cli("batch", EXAMPLES / "receipts.csv", *arguments)
    assert outcome.code == 0, outcome.stderr
    records = [json.loads(line) for line in outcome.stdout.splitlines()]
    assert records[1]["label"] == {"is_receipt": True, "paid_by_card": True, "total_band": "over_50"}
    assert records[3]["label"] == {"is_receipt": False, "total_band": "none"}


def test_rows_may_bring_their_own_questions(cli, tmp_path):
    lines = [{"state": "a", "questions": NOUL}, {"state": "b", "questions": {"x": {"type": "noul"}}}]
    table = write(tmp_path / "t.jsonl", "\n".join(map(json.dumps, lines)))
    outcome = cli("batch", table, "--format", "csv")
    assert outcome.code == 0, outcome.stderr
    assert [(row["down"] != "", row["x"] != "") for row in outcome.rows] == [(True, False), (False, True)]


def test_columns_are_chosen_by_options(cli, tmp_path, questions):
    table = write(tmp_path / "t.csv", "message,topic,nr\nhello,x,A\n")
    chosen = ["-s", "topic", "-s", "message", "--id-column", "nr", "--label-column", "", "-f", "jevl"]
    (record,) = map(json.loads, cli("batch", table, "-q", questions, *chosen).stdout.splitlines())
    assert record["request"]["state"] == {"topic": "x", "message": "hello"}


def test_a_label_that_is_no_option_is_noted_and_the_row_answered(cli, tmp_path, questions):
    table = write(tmp_path / "t.csv", "state,label\nhello,perhaps\n")
    outcome = cli("batch", table, "-q", questions)
    assert outcome.code == 0
    assert 'line 2: the label "perhaps" is no option of "down"' in outcome.stderr


def test_a_dry_run_counts_and_stores_nothing(cli, tmp_path, questions):
    batches = cli("status", "--json", "--batches", "1000").json["batches"]
    table = write(tmp_path / "t.csv", f"id,state\n1,one\n2\n3,{'very long ' * 20_000}\n4,one\n")
    outcome = cli("batch", table, "-q", questions, "--dry-run")
    plan = outcome.json
    assert outcome.code == 1
    assert (plan["num_rows"], plan["num_bad"], plan["num_too_long"], plan["num_distinct"]) == (4, 1, 1, 1)
    assert plan["bad"] == [{"number": 2, "message": "line 3: 1 cell, the header has 2"}]
    assert plan["total_tokens"] == 2 * plan["longest_tokens"] > 0
    assert cli("status", "--json", "--batches", "1000").json["batches"] == batches


@pytest.mark.parametrize(
    ("content", "word"),
    [(b"id;state\n1;a\n", "semicolons"), (b"state\ncaf\xe9\n", "line 2 is not UTF-8"), (b"state,down\na,b\n", "down")],
    ids=["semicolon", "latin-1", "clash"],
)
def test_a_bad_table_is_one_line_and_exit_code_2(alone, tmp_path, questions, content, word):
    alone("batch", write(tmp_path / "t.csv", content), "-q", questions).assert_bad_input(word)


def test_contradicting_or_missing_arguments_are_bad_input(alone, tmp_path, questions):
    table = write(tmp_path / "t.csv", "state\na\n")
    alone("batch").assert_bad_input("FILE")
    alone("batch", table).assert_bad_input("questions are missing")
    alone("batch", table, "-q", tmp_path / "none.json").assert_bad_input("No such file")
    alone("batch", table, "-q", questions, "-s", "text").assert_bad_input('no column "text"', '"state"')
    alone("batch", table, "-q", questions, "--images-zip", table).assert_bad_input("not a zip")
    alone("batch", table, "-q", questions, "-o", table).assert_bad_input("is the input")
    alone("batch", table, "-q", questions, "-o", tmp_path / "no" / "x.csv").assert_bad_input("no folder")
    alone("batch", "--resume", "99").assert_bad_input("no batch 99")
    assert alone("batch", table, "--no-such-option").code == 2
    assert table.read_text() == "state\na\n"


def test_ctrl_c_stops_cleanly_and_the_same_command_goes_on(cli, tmp_path, questions):
    num_rows = 600  # seconds of work: the process is interrupted in the midst of it
    table = write(tmp_path / "many.csv", "state\n" + "".join(f"message number {n} of many\n" for n in range(num_rows)))
    output = tmp_path / "out.csv"
    arguments = ["batch", table, "-q", questions, "-o", output]

    status = InProcess(Path(cli.environment["CLEF_DATA_DIR"]))  # at once: a process of its own takes a second

    def newest() -> dict[str, Any]:
        batches = status("status", "--json", "--batches", "1").json["batches"]
        return dict(batches[0]) if batches else {"name": None}

    process = cli.start(*arguments)
    while (seen := newest())["name"] != "many.csv" or seen["rows_done"] == 0:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=TIMEOUT_S)
    stopped = newest()
    assert process.returncode == 130, stderr
    assert f"python -m worker batch --resume {stopped['id']}" in stderr
    assert "Traceback" not in stderr
    assert stopped["is_cancelled"]
    assert 0 < stopped["rows_done"] < num_rows
    assert not output.exists()

    part = cli("export", str(stopped["id"]))
    assert part.code == 1
    assert len(part.rows) == num_rows
    assert {row["error"] for row in part.rows} == {"", "cancelled"}
    times_before = finish_times(cli, stopped["id"])

    again = cli(*arguments)
    assert again.code == 0, again.stderr
    assert f"batch {stopped['id']} goes on: {stopped['rows_done']} of {num_rows} rows" in again.stderr
    with output.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["_row"] for row in rows] == [str(n) for n in range(1, num_rows + 1)]
    assert {row["error"] for row in rows} == {""}
    times_after = finish_times(cli, stopped["id"])
    assert len(times_after) == num_rows
    assert {state: times_after[state] for state in times_before} == times_before


def test_a_batch_whose_storing_was_killed_is_stored_anew(tmp_path):
    cli = Cli(tmp_path / "data")
    table = write(tmp_path / "t.csv", "state\n" + "one more message\n" * 60_000)
    arguments = ["batch", table, "-q", EXAMPLES / "questions.json"]
    process = cli.start(*arguments)
    while not (batches := cli("status", "--json").json["batches"]) or batches[0]["num_rows"] == 0:
        assert process.poll() is None, process.communicate()
    cli(*arguments).assert_bad_input("stores these rows just now", str(process.pid))
    process.kill()
    process.communicate()
    process = cli.start(*arguments)
    while len(batches := cli("status", "--json").json["batches"]) < 2:
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=TIMEOUT_S)
    new, old = cli("status", "--json").json["batches"]
    assert old["is_cancelled"]
    assert new["is_cancelled"]


def finish_times(cli: Cli, batch_id: int) -> dict[str, str]:
    """When each row that is done was computed."""
    lines = cli("export", str(batch_id), "--format", "jevl").stdout.splitlines()
    return {record["request"]["state"]: record["ts"] for record in map(json.loads, lines)}


# export and status


def test_a_batch_is_exported_in_the_format_of_the_file_name(cli, tmp_path, questions):
    table = write(tmp_path / "t.csv", "id,state\nx,one\n")
    batch_id = str(cli("batch", table, "-q", questions, "-f", "csv").batch_id)
    for name, beginning in (("a.csv", "id,state,down"), ("a.jsonl", '{"id": "x", "model"'), ("a.jevl", '{"v": 1')):
        assert cli("export", batch_id, "--output", tmp_path / name).code == 0
        assert (tmp_path / name).read_text().startswith(beginning)
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".part") == []


def test_an_unknown_batch_is_bad_input_and_leaves_no_file(alone, tmp_path):
    alone("export", "99", "-o", tmp_path / "x.csv").assert_bad_input("no batch 99")
    assert list(tmp_path.iterdir()) == []


def test_status_lists_workers_queues_and_batches(cli):
    facts = cli("status", "--json").json
    (worker,) = facts["workers"]
    assert set(worker["variants"]) == {"bf16", "mxfp4"}
    assert worker["releases"]["mxfp4"]["is_random"] is True
    assert set(facts["queues"]) == {"bf16", "mxfp4"}
    text = cli("status").stdout
    assert "Workers" in text
    assert "random weights" in text


def test_status_without_anything_says_so(alone):
    assert "the app is not running" in alone("status").stdout
