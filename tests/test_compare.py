"""Comparisons as workers decide them: real engines in bfloat16 on the small releases, real SQLite, real Redis."""

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copy, copytree

import pytest
import torch
from lab import QUESTIONS, rows_of, settings_of, submit_batch
from safetensors.torch import load_file, save_file
from sqlalchemy import select

from clef_core.comparison_report import Report
from clef_core.engine import Engine
from clef_core.errors import RequestError
from clef_core.model import Release, load_release
from db import store
from db.models import Comparison, Decision
from db.views import SOURCE_COMPARISON
from worker.bell import Bell
from worker.compare import (
    ComparisonError,
    continue_comparison,
    look_at_progress,
    open_comparison,
    start_comparison,
    stop_comparison,
    watch_comparison,
)
from worker.jobs import RowJobs
from worker.settings import PROJECT_DIR
from worker.submit import BatchRow, Submitter
from worker.sweep import Sweeper
from worker.watchdog import Watchdog

NAME = "worker-under-test"
SMALL = PROJECT_DIR / "checkpoints" / "random-bf16"
WORDS = ("refund", "invoice", "outage", "password", "late", "broken", "login", "card", "order", "cancel", "page")


def states(number: int, seed: int = 0) -> list[str]:
    """Messages of different lengths, so that padding has something to do."""
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=generator.randint(3, 60))) for _ in range(number)]


@pytest.fixture(scope="module")
def release() -> Release:
    return load_release(SMALL, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def perturbed(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """The same release, except that the weights of one MLP are off by about two per cent."""
    path = tmp_path_factory.mktemp("releases") / "perturbed"
    copytree(SMALL, path)
    (path / "SHA256SUMS").unlink()
    tensors = load_file(path / "model.safetensors")
    (name,) = (name for name in tensors if name.endswith("layers.2.mlp.down_proj.weight"))
    noise = torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(0))
    tensors[name] = (tensors[name].float() * (1 + 0.02 * noise)).bfloat16()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return load_release(path, dtype=torch.bfloat16)


@pytest.fixture
def submitter(tmp_path: Path, migrated_sqlite: Path) -> Iterator[Submitter]:
    settings = settings_of(tmp_path)
    settings.data_dir.mkdir()
    copy(migrated_sqlite, settings.data_dir / "clef.sqlite3")
    with Submitter.connect(settings) as submitter:
        with submitter.database.write() as session:
            store.register_worker(session, NAME, ["bf16"], host="h", pid=1, device="cpu")
        yield submitter


@pytest.fixture
def work(submitter: Submitter, release: Release, perturbed: Release) -> Callable[[], None]:
    """Decide all that waits, as a worker for both releases would."""
    engines = {"bf16": Engine(release, variant="bf16"), "perturbed": Engine(perturbed, variant="perturbed")}
    watchdog = Watchdog(600, parent_pid=None, on_orphan=lambda: None)
    bell = Bell(submitter.redis)
    stop = threading.Event()
    jobs = RowJobs(NAME, engines, submitter.database, submitter.images, bell, stop=stop, watchdog=watchdog)

    def work() -> None:
        for variant in engines:
            with submitter.database.read() as session:
                waiting = [row.decision_id for row in store.waiting_rows(session, variant, limit=10_000)]
            for at in range(0, len(waiting), 64):
                jobs.decide_rows(waiting[at : at + 64])

    return work


def store_rows(submitter: Submitter, texts: list[str], labels: list[dict[str, str]] | None = None) -> int:
    rows = rows_of(texts)
    if labels is not None:
        rows = [
            BatchRow(row.number, row.external_id, row.submission, labels=of)
            for row, of in zip(rows, labels, strict=True)
        ]
    return submitter.submit_batch("rows", QUESTIONS, rows, (), source=SOURCE_COMPARISON, columns=(), mapping={})


def finish(submitter: Submitter, comparison_id: int) -> Report:
    last = list(watch_comparison(submitter.database, comparison_id))[-1]
    assert (last.status, last.failed) == ("done", 0)
    report = open_comparison(submitter.database, comparison_id)[1]
    assert report is not None
    return report


def test_a_variant_against_itself_agrees_exactly_in_two_computed_runs(
    submitter: Submitter, work: Callable[[], None]
) -> None:
    texts = states(12)
    batch_id = store_rows(submitter, [*texts, *texts[:4]])  # equal rows too
    comparison_id = start_comparison(submitter, batch_id, left="bf16", right="bf16", floor=None)
    work()
    report = finish(submitter, comparison_id)
    assert report.overall.n == 16 * len(QUESTIONS)
    assert (report.overall.agreement, report.overall.kl_mean, report.overall.max_abs_dp) == (1.0, 0.0, 0.0)
    assert report.headline.startswith("bf16 run again picked the same option as bf16 for 32 of 32 answers")

    view, _ = open_comparison(submitter.database, comparison_id)
    assert view.left_run is not None
    assert view.right_run is not None
    assert view.left_run.id != view.right_run.id
    assert view.left_run.batching["mode"] == view.right_run.batching["mode"] == "single"
    with submitter.database.read() as session:
        decisions = session.execute(
            select(Decision.side, Decision.run_id, Decision.copied_from_id, Decision.latency_ms).where(
                Decision.comparison_id == comparison_id
            )
        ).all()
    assert len(decisions) == 32
    assert {(row.side, row.run_id) for row in decisions} == {("left", view.left_run.id), ("right", view.right_run.id)}
    assert {row.copied_from_id for row in decisions} == {None}
    assert all(row.latency_ms > 0 for row in decisions)


def test_the_floor_moves_in_bfloat16_and_a_perturbed_layer_is_outside_it(
    submitter: Submitter, work: Callable[[], None]
) -> None:
    batch_id = store_rows(submitter, states(40))
    comparison_id = start_comparison(submitter, batch_id, left="bf16", right="perturbed")
    work()
    overall = finish(submitter, comparison_id).overall
    assert overall.floor is not None
    assert overall.floor.max_abs_dp > 0
    assert overall.floor.kl_mean > 0
    assert overall.kl_mean > 3 * overall.floor.kl_mean
    assert overall.is_within_floor is False
    view, _ = open_comparison(submitter.database, comparison_id)
    assert view.floor_run is not None
    assert (view.floor_run.batching["mode"], view.floor_run.dtype) == ("padded", "bfloat16")
    assert view.left_run is not None
    assert view.right_run is not None
    assert view.left_run.release_checksum != view.right_run.release_checksum


def test_a_variant_against_itself_is_within_its_floor(submitter: Submitter, work: Callable[[], None]) -> None:
    comparison_id = start_comparison(submitter, store_rows(submitter, states(8)), left="bf16", right="bf16")
    work()
    assert finish(submitter, comparison_id).overall.is_within_floor is True


def test_the_numbers_are_equal_when_run_again_whatever_else_is_in_the_queue(
    submitter: Submitter, work: Callable[[], None]
) -> None:
    batch_id = store_rows(submitter, states(10), [{"team": "billing"}] * 10)
    first_id = start_comparison(submitter, batch_id, left="bf16", right="perturbed", floor=None)
    work()
    first = finish(submitter, first_id)
    submit_batch(submitter, states(5, seed=1), ["bf16"])
    second_id = start_comparison(submitter, batch_id, left="bf16", right="perturbed", floor=None)
    submit_batch(submitter, states(5, seed=2), ["bf16"])
    work()
    second = finish(submitter, second_id)
    assert second == first
    assert first.overall.labelled is not None
    assert first.overall.labelled.left.n == 10


def test_an_ordinary_batch_is_not_answered_from_a_comparison(submitter: Submitter, work: Callable[[], None]) -> None:
    texts = states(3)
    comparison_id = start_comparison(submitter, store_rows(submitter, texts), left="bf16", right="bf16", floor=None)
    work()
    finish(submitter, comparison_id)
    batch_id = submit_batch(submitter, texts, ["bf16"])
    work()
    with submitter.database.read() as session:
        decisions = [row.decisions["bf16"] for row in store.iter_results(session, batch_id)]
    assert {decision.status for decision in decisions} == {"done"}
    assert {decision.run.batching["mode"] for decision in decisions if decision.run} == {"fast"}


def test_a_finished_batch_can_be_compared_and_keeps_its_own_answers(
    submitter: Submitter, work: Callable[[], None]
) -> None:
    batch_id = submit_batch(submitter, states(4), ["bf16"])
    work()
    with submitter.database.read() as session:
        before = list(store.iter_results(session, batch_id))
    comparison_id = start_comparison(submitter, batch_id, left="bf16", right="perturbed", floor=None)
    work()
    assert finish(submitter, comparison_id).num_records == 4
    with submitter.database.read() as session:
        assert list(store.iter_results(session, batch_id)) == before
        assert store.batch_progress(session, batch_id).num_decisions == 4
        assert len(store.list_decisions(session, before[0].request.id)) == 1


def test_every_decision_is_rung_for_and_a_lost_bell_is_rung_again(submitter: Submitter) -> None:
    comparison_id = start_comparison(submitter, store_rows(submitter, states(70)), left="bf16", right="perturbed")
    bell = Bell(submitter.redis)
    with submitter.database.read() as session:
        of = {
            variant: set(session.scalars(select(Decision.id).where(Decision.variant == variant)))
            for variant in ("bf16", "perturbed")
        }
    assert (len(of["bf16"]), len(of["perturbed"])) == (140, 70)
    assert {variant: bell.rung_rows(variant) for variant in of} == of
    submitter.redis.flushall()
    Sweeper(submitter.database, submitter.redis, ["bf16", "perturbed"]).sweep()
    assert {variant: bell.rung_rows(variant) for variant in of} == of
    assert look_at_progress(submitter.database, comparison_id).queued == 210


def test_the_sweeper_summarises_a_comparison_that_nobody_waits_for(
    submitter: Submitter, work: Callable[[], None]
) -> None:
    comparison_id = start_comparison(submitter, store_rows(submitter, states(3)), left="bf16", right="bf16", floor=None)
    sweeper = Sweeper(submitter.database, submitter.redis, ["bf16"])
    sweeper.sweep()
    assert look_at_progress(submitter.database, comparison_id).status == "running"
    work()
    assert look_at_progress(submitter.database, comparison_id).status == "summarising"
    sweeper.sweep()
    assert look_at_progress(submitter.database, comparison_id).status == "done"
    assert open_comparison(submitter.database, comparison_id)[1] is not None


def test_a_stopped_comparison_goes_on_with_what_is_missing(submitter: Submitter, work: Callable[[], None]) -> None:
    comparison_id = start_comparison(submitter, store_rows(submitter, states(3)), left="bf16", right="bf16", floor=None)
    stop_comparison(submitter.database, comparison_id)
    assert list(watch_comparison(submitter.database, comparison_id))[-1].status == "cancelled"
    assert continue_comparison(submitter, comparison_id) == 6
    work()
    assert finish(submitter, comparison_id).num_records == 3
    assert continue_comparison(submitter, comparison_id) == 0
    assert finish(submitter, comparison_id).num_records == 3


def test_rows_that_cannot_be_asked_are_left_out(submitter: Submitter, work: Callable[[], None]) -> None:
    problem = RequestError.at(("state",), "empty").problems
    rows = [*rows_of(states(2)), BatchRow(9, None, None, problem)]
    batch_id = submitter.submit_batch("rows", QUESTIONS, rows, (), source=SOURCE_COMPARISON, columns=(), mapping={})
    comparison_id = start_comparison(submitter, batch_id, left="bf16", right="bf16", floor=None)
    work()
    assert finish(submitter, comparison_id).num_records == 2
    assert open_comparison(submitter.database, comparison_id)[0].num_rows == 2


def test_what_cannot_be_compared_is_refused_and_nothing_is_stored(submitter: Submitter) -> None:
    with pytest.raises(ComparisonError, match="no batch 7"):
        start_comparison(submitter, 7)
    problem = RequestError.at(("state",), "empty").problems
    empty = submitter.submit_batch(
        "rows", QUESTIONS, [BatchRow(0, None, None, problem)], (), source=SOURCE_COMPARISON, columns=(), mapping={}
    )
    with pytest.raises(ComparisonError, match="no row that could be asked"):
        start_comparison(submitter, empty)
    with pytest.raises(ComparisonError, match="no comparison 7"):
        open_comparison(submitter.database, 7)
    with pytest.raises(ComparisonError, match="no comparison 7"):
        look_at_progress(submitter.database, 7)
    with submitter.database.read() as session:
        assert session.scalars(select(Comparison.id)).all() == []
