"""The supervisor: workers start again, their rows come back at once, a poison row ends alone, all ends with it."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import copy

import pytest
from lab import settings_of, submission_of, submit_batch, wait_until
from marked_worker import marked_command

from db import store
from db.views import WorkerView
from worker.bell import Bell
from worker.settings import Settings
from worker.submit import Submitter
from worker.supervise import Supervisor
from worker.sweep import Sweeper

START_TIMEOUT_S = 120


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_of(tmp_path, max_batch_tokens=1024)


@pytest.fixture
def submitter(settings: Settings, migrated_sqlite: Path) -> Iterator[Submitter]:
    settings.data_dir.mkdir()
    copy(migrated_sqlite, settings.data_dir / "clef.sqlite3")
    with Submitter.connect(settings) as submitter:
        yield submitter


def workers(submitter: Submitter) -> list[WorkerView]:
    with submitter.database.read() as session:
        return store.live_workers(session)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_worker_that_keeps_failing_is_started_ever_more_slowly_and_shown(
    submitter: Submitter, settings: Settings, tmp_path: Path
) -> None:
    times = tmp_path / "times"
    code = f"import time; open({str(times)!r}, 'a').write(f'{{time.monotonic()}}\\n'); raise SystemExit(3)"
    with Supervisor(settings, ["bf16"], lambda variant: python(code)):
        wait_until(lambda: times.exists() and len(times.read_text().split()) >= 3, 60)
        (failed,) = wait_until(lambda: workers(submitter), 20)
    started = [float(line) for line in times.read_text().split()]
    assert started[1] - started[0] >= 1.0  # at least the pauses; how long Python itself takes to start is not ours
    assert started[2] - started[1] >= 2.0
    assert (failed.state, failed.variants) == ("failed", ("bf16",))
    assert failed.message is not None
    assert failed.message.startswith("The worker for bf16 ended (exit code 3); it starts again in ")
    assert workers(submitter) == []


def test_a_failure_stays_visible_while_nothing_else_is_known(submitter: Submitter, settings: Settings) -> None:
    with submitter.database.write() as session:
        name = store.mark_worker_failed(session, "h", 1, ["bf16"], "no release")
    with submitter.database.write() as session:
        store.beat(session, [name])
    assert workers(submitter)[0].message == "no release"


def test_workers_get_threads_settings_and_a_session_of_their_own(
    submitter: Submitter, settings: Settings, tmp_path: Path
) -> None:
    code = (
        "import json, os, time; facts = {name: os.environ.get(name) for name in "
        "('OMP_WAIT_POLICY', 'OMP_NUM_THREADS', 'CLEF_SUPERVISOR_PID', 'CLEF_DATA_DIR')}; "
        f"facts['session'] = os.getsid(0); file = {str(tmp_path)!r} + f'/{{os.getpid()}}'; "
        "open(file, 'w').write(json.dumps(facts)); os.rename(file, file + '.json'); time.sleep(60)"
    )
    with Supervisor(settings, ["bf16", "mxfp4"], lambda variant: python(code)) as supervisor:
        pids = set(supervisor.pids.values())
        files = wait_until(lambda: len(found := list(tmp_path.glob("*.json"))) == 2 and found, 10)
        facts = {int(file.stem): json.loads(file.read_text()) for file in files}
    assert set(facts) == pids
    for pid, found in facts.items():
        assert found == {
            "OMP_WAIT_POLICY": "PASSIVE",
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 2)),
            "CLEF_SUPERVISOR_PID": str(os.getpid()),
            "CLEF_DATA_DIR": str(settings.data_dir),
            "session": pid,
        }
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_a_worker_that_does_not_end_is_killed(
    submitter: Submitter, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.supervise.STOP_TIMEOUT_S", 0.5)
    ready = tmp_path / "ready"
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"open({str(ready)!r}, 'w').close(); time.sleep(60)"
    )
    with Supervisor(settings, ["bf16"], lambda variant: python(code)) as supervisor:
        wait_until(ready.exists, 10)
        (pid,) = supervisor.pids.values()
    assert not Path(f"/proc/{pid}").exists()


def test_the_sweeper_rings_for_every_waiting_row_without_a_bell(submitter: Submitter) -> None:
    batch_id = submit_batch(submitter, [f"s{n}" for n in range(100)], ["bf16"])
    single = submitter.submit(submission_of("alone"), ["bf16"], source="page").decision_ids["bf16"]
    with submitter.database.read() as session:
        rows = {row.decisions["bf16"].id for row in store.iter_results(session, batch_id)} | {single}
    sweeper = Sweeper(submitter.database, submitter.redis, ["bf16", "mxfp4"])
    bell = Bell(submitter.redis)

    submitter.redis.flushall()
    sweeper.sweep()
    assert bell.rung_rows("bf16") == rows
    length = submitter.redis.llen("rq:queue:clef:bf16")
    sweeper.sweep()
    assert submitter.redis.llen("rq:queue:clef:bf16") == length == 3  # one in front, 64 and 36 rows


def test_a_sweep_without_redis_is_met_again_later(submitter: Submitter) -> None:
    submitter.submit(submission_of("x"), ["bf16"], source="page")
    sweeper = Sweeper(submitter.database, submitter.redis, ["bf16"])
    os.kill(int(submitter.redis.info("server")["process_id"]), signal.SIGKILL)
    sweeper.sweep()


@pytest.mark.slow
def test_a_poison_row_fails_alone_and_its_neighbours_are_answered(submitter: Submitter, settings: Settings) -> None:
    batch_id = submit_batch(submitter, ["one", "two", "CRASH", "three", "four"], ["bf16"])
    with Supervisor(settings, ["bf16"], marked_command):

        def is_finished() -> bool:
            with submitter.database.read() as session:
                return store.batch_progress(session, batch_id).is_finished

        wait_until(is_finished, 240)
    with submitter.database.read() as session:
        views = {row.request.state: row.decisions["bf16"] for row in store.iter_results(session, batch_id)}
    assert {state: view.status for state, view in views.items()} == {
        "one": "done", "two": "done", "three": "done", "four": "done", "CRASH": "failed",
    }  # fmt: skip
    assert views["CRASH"].error == [
        {"loc": [], "msg": "Tried 3 times, the last time the worker process ended.", "type": "worker_crash"}
    ]


@pytest.mark.slow
def test_a_killed_worker_gives_its_rows_back_at_once_and_starts_again(submitter: Submitter, settings: Settings) -> None:
    batch_id = submit_batch(submitter, [f"SLOW {n}" for n in range(12)], ["bf16"])

    def counts() -> tuple[int, int]:
        with submitter.database.read() as session:
            progress = store.batch_progress(session, batch_id)
        return progress.running, progress.done

    with Supervisor(settings, ["bf16"], marked_command) as supervisor:
        wait_until(lambda: counts()[1] > 0, START_TIMEOUT_S)
        first = supervisor.pids["bf16"]
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: counts()[0] == 0, 10)  # sooner than the 15 s after which a worker counts as silent
        wait_until(lambda: counts()[1] == 12, 120)
        assert supervisor.pids["bf16"] != first
