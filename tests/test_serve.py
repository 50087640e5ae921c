"""The worker process as it is started: signals, a release that does not load, a forward that hangs, a lost Redis."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copy

import pytest
from lab import settings_of, submission_of, submit_batch, wait_until

from clef_core.errors import SettingsError
from db import store
from db.views import BatchProgress, WorkerView
from worker.serve import serve
from worker.settings import PROJECT_DIR, Settings
from worker.submit import Submitter
from worker.watchdog import EXIT_HANGING

START_TIMEOUT_S = 120
END_TIMEOUT_S = 30
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_of(tmp_path, threads=1, max_batch_tokens=1024, forward_timeout_s=20)


@pytest.fixture
def submitter(settings: Settings, migrated_sqlite: Path) -> Iterator[Submitter]:
    settings.data_dir.mkdir()
    copy(migrated_sqlite, settings.data_dir / "clef.sqlite3")
    with Submitter.connect(settings) as submitter:
        yield submitter


@pytest.fixture
def start(submitter: Submitter) -> Iterator[Start]:
    processes = []

    def start(*variants: str, settings: Settings = submitter.settings) -> subprocess.Popen[bytes]:
        command = [sys.executable, "tests/marked_worker.py", *variants]
        process = subprocess.Popen(command, cwd=PROJECT_DIR, env=os.environ | settings.to_environment())
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()


def workers(submitter: Submitter) -> list[WorkerView]:
    with submitter.database.read() as session:
        return store.live_workers(session)


def progress(submitter: Submitter, batch_id: int) -> BatchProgress:
    with submitter.database.read() as session:
        return store.batch_progress(session, batch_id)


def wait_ready(submitter: Submitter) -> WorkerView:
    ready: list[WorkerView] = wait_until(
        lambda: [worker for worker in workers(submitter) if worker.is_ready], START_TIMEOUT_S
    )
    return ready[0]


@pytest.mark.slow
def test_a_worker_says_what_it_does_from_start_to_end(submitter: Submitter, start: Start) -> None:
    process = start("bf16", "mxfp4")
    wait_until(lambda: [worker.state for worker in workers(submitter)] == ["starting"], START_TIMEOUT_S)
    worker = wait_ready(submitter)
    assert (worker.pid, set(worker.variants)) == (process.pid, {"bf16", "mxfp4"})
    assert worker.device.startswith("cpu")
    for variant in ("bf16", "mxfp4"):
        facts = worker.releases[variant]
        assert facts["is_random"] is True
        assert len(facts["checksum"]) == 64
        assert {"dtype", "linear_mode"} <= set(facts)

    submitted = submitter.submit(submission_of("hello"), ["bf16", "mxfp4"], source="test")
    views = submitter.wait(list(submitted.decision_ids.values()), 60)
    assert [(view.variant, view.status) for view in views] == [("bf16", "done"), ("mxfp4", "done")]

    process.terminate()
    assert process.wait(END_TIMEOUT_S) == 0
    assert workers(submitter) == []


@pytest.mark.slow
def test_sigterm_saves_the_micro_batch_in_work_and_gives_the_rest_back(submitter: Submitter, start: Start) -> None:
    batch_id = submit_batch(submitter, [f"SLOW {n}" for n in range(40)], ["bf16"])
    process = start("bf16")
    wait_until(lambda: progress(submitter, batch_id).done, START_TIMEOUT_S)
    process.terminate()
    assert process.wait(END_TIMEOUT_S) == 0
    after = progress(submitter, batch_id)
    assert (after.running, after.failed) == (0, 0)
    assert 0 < after.done < 40
    assert after.queued == 40 - after.done
    with submitter.database.read() as session:
        assert {row.crashes for row in store.waiting_rows(session, "bf16", limit=40)} == {0}


@pytest.mark.slow
def test_a_release_that_cannot_be_loaded_is_said_in_the_workers_row(
    submitter: Submitter, start: Start, tmp_path: Path
) -> None:
    broken = settings_of(tmp_path, bf16=str(tmp_path))
    process = start("bf16", settings=broken)
    assert process.wait(START_TIMEOUT_S) != 0
    (worker,) = workers(submitter)
    assert worker.state == "failed"
    assert worker.message is not None
    assert f"{tmp_path}: not a Clef release" in worker.message


@pytest.mark.slow
def test_a_forward_that_hangs_ends_the_process(submitter: Submitter, start: Start, tmp_path: Path) -> None:
    submitter.submit(submission_of("HANG"), ["bf16"], source="test")
    process = start("bf16", settings=settings_of(tmp_path, threads=1, forward_timeout_s=3))
    assert process.wait(START_TIMEOUT_S) == EXIT_HANGING


@pytest.mark.slow
def test_redis_may_die_under_a_worker_which_keeps_its_model(submitter: Submitter, start: Start) -> None:
    process = start("bf16")
    wait_ready(submitter)
    for moment in ("idle", "SLOW and busy"):
        decision_id = submitter.submit(submission_of(moment), ["bf16"], source="test").decision_ids["bf16"]
        if moment == "idle":
            submitter.wait([decision_id], 60)
        os.kill(int(submitter.redis.info("server")["process_id"]), signal.SIGKILL)
        (view,) = submitter.wait([decision_id], 60)
        assert view.status == "done"
        after = submitter.submit(submission_of(f"after {moment}"), ["bf16"], source="test").decision_ids["bf16"]
        (view,) = submitter.wait([after], 60)  # nobody but the worker starts Redis again, and rings
        assert view.status == "done"
    assert process.poll() is None


@pytest.mark.slow
def test_a_worker_ends_when_its_supervisor_is_killed(submitter: Submitter, settings: Settings) -> None:
    batch_id = submit_batch(submitter, [f"SLOW {n}" for n in range(40)], ["bf16"])
    code = (
        "import os, subprocess, sys; os.environ['CLEF_SUPERVISOR_PID'] = str(os.getpid()); "
        "subprocess.run([sys.executable, 'tests/marked_worker.py', 'bf16'], start_new_session=True)"
    )
    supervisor = subprocess.Popen(
        [sys.executable, "-c", code], cwd=PROJECT_DIR, env=os.environ | settings.to_environment()
    )
    wait_until(lambda: progress(submitter, batch_id).done, START_TIMEOUT_S)
    (worker,) = workers(submitter)
    supervisor.kill()
    supervisor.wait()
    wait_until(lambda: not Path(f"/proc/{worker.pid}").exists(), END_TIMEOUT_S)
    assert workers(submitter) == []
    after = progress(submitter, batch_id)
    assert (after.running, after.done + after.queued) == (0, 40)


def test_a_variant_that_is_not_configured_is_refused(settings: Settings) -> None:
    with pytest.raises(SettingsError, match="no variant int8; configured: bf16, mxfp4"):
        serve(settings, ["int8"])
