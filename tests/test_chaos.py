"""One batch in both variants, through everything that can die: no row is lost, none is done twice."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copy

import pytest
import redis
from lab import settings_of, submit_batch, wait_until
from sqlalchemy import text

from db import store
from db.views import BatchProgress
from worker.settings import PROJECT_DIR
from worker.submit import Submitter

NUM_ROWS = 96
VARIANTS = ["bf16", "mxfp4"]
FREE_AGAIN_S = 20
GOES_ON_S = 120
"""A bound for machines under load: starting a worker is mostly importing torch."""


@pytest.fixture
def submitter(tmp_path: Path, migrated_sqlite: Path) -> Iterator[Submitter]:
    settings = settings_of(tmp_path, threads=1, max_batch_tokens=1024)
    settings.data_dir.mkdir()
    copy(migrated_sqlite, settings.data_dir / "clef.sqlite3")
    with Submitter.connect(settings) as submitter:
        yield submitter


@pytest.fixture
def start_supervisor(submitter: Submitter) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "tests/marked_worker.py", "--supervise", *VARIANTS]
        process = subprocess.Popen(command, cwd=PROJECT_DIR, env=os.environ | submitter.settings.to_environment())
        started.append(process)
        return process

    yield start
    for process in started:
        process.send_signal(signal.SIGINT)
        process.wait(60)


@pytest.mark.slow
def test_a_batch_survives_the_death_of_worker_redis_queue_and_supervisor(
    submitter: Submitter, start_supervisor: Callable[[], subprocess.Popen[bytes]]
) -> None:
    with submitter.database.write() as session:  # SQLite itself counts how often a row becomes done
        session.execute(text("CREATE TABLE saves (decision_id INTEGER)"))
        session.execute(
            text(
                "CREATE TRIGGER count_saves AFTER UPDATE OF status ON decisions WHEN new.status IN ('done', 'failed') "
                "BEGIN INSERT INTO saves VALUES (new.id); END"
            )
        )

    def progress() -> BatchProgress:
        with submitter.database.read() as session:
            return store.batch_progress(session, batch_id)

    def wait_for_more_rows() -> None:
        before = progress().done
        wait_until(lambda: progress().done >= before + 4, GOES_ON_S)

    def redis_answers() -> bool:
        try:
            return bool(submitter.redis.ping())
        except redis.ConnectionError:
            return False

    def claims_of(owner: str) -> int:
        with submitter.database.read() as session:
            query = "SELECT count(*) FROM decisions WHERE status = 'running' AND claim_owner = :owner"
            return int(session.scalar(text(query), {"owner": owner}) or 0)

    states = [f"row {n} is SLOW" if n % 2 else f"row {n}" for n in range(NUM_ROWS)]
    batch_id = submit_batch(submitter, states, VARIANTS)
    supervisor = start_supervisor()
    wait_for_more_rows()

    with submitter.database.read() as session:
        worker = store.live_workers(session)[0]
    os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: claims_of(worker.name) == 0, FREE_AGAIN_S)
    wait_for_more_rows()

    os.kill(int(submitter.redis.info("server")["process_id"]), signal.SIGKILL)
    wait_until(redis_answers, FREE_AGAIN_S)
    wait_for_more_rows()

    submitter.redis.flushall()
    wait_for_more_rows()

    with submitter.database.read() as session:
        old = [worker.name for worker in store.live_workers(session)]
    supervisor.kill()
    supervisor.wait()
    start_supervisor()
    for owner in old:
        wait_until(lambda owner=owner: claims_of(owner) == 0, FREE_AGAIN_S)  # type: ignore[misc]
    assert progress().done < 2 * NUM_ROWS, "the batch was over before everything had died: it needs more rows"

    wait_until(lambda: progress().is_finished, 300)
    assert (progress().done, progress().failed, progress().running) == (2 * NUM_ROWS, 0, 0)
    with submitter.database.read() as session:
        saves = session.execute(text("SELECT count(*), count(DISTINCT decision_id) FROM saves")).one()
        rows = list(store.iter_results(session, batch_id))
    assert tuple(saves) == (2 * NUM_ROWS, 2 * NUM_ROWS)
    assert [row.request.state for row in rows] == states
    assert all(view.log_probs for row in rows for view in row.decisions.values())
