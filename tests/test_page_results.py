"""What the right half of the Decide screen says while a request waits, when it failed, and when it is answered."""

import math
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from db.views import DecisionView, RequestView, WorkerState, WorkerView
from web.results import Snapshot, responses, results_html
from worker.settings import Settings, load_settings

NOW = datetime.now(UTC)
MARKUP = "<img src=x onerror=alert(1)>"
LOG_PROBS = {"late": {"true": math.log(0.75), "false": math.log(0.25)}}
REQUEST = RequestView(
    id=7,
    batch_id=None,
    row_number=None,
    external_id=None,
    asked_model="clef",
    state="text",
    questions={"late": {"type": "noul"}},
    images=(),
    truncate=None,
    labels=None,
    cells=None,
    input_error=None,
    source="page",
    created_at=NOW,
)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings(data_dir=tmp_path)


def decision(status: Any, variant: str = "mxfp4", **facts: Any) -> DecisionView:
    fields: dict[str, Any] = {
        "id": 1,
        "request_id": 7,
        "variant": variant,
        "status": status,
        "log_probs": LOG_PROBS if status == "done" else None,
        "answers": None,
        "input_tokens": 321 if status == "done" else None,
        "truncated_tokens": 0,
        "latency_ms": 42.4 if status == "done" else None,
        "error": None,
        "run": None,
        "created_at": NOW,
        "finished_at": None,
    }
    return DecisionView(**fields | facts)


def worker(state: WorkerState, message: str | None = None) -> WorkerView:
    return WorkerView("w", ("mxfp4",), "host", 1, "cpu", state, message, {}, NOW, NOW)


def shown(settings: Settings, *decisions: DecisionView, waiting: int = 0, workers: tuple[WorkerView, ...] = ()) -> str:
    return results_html(Snapshot(REQUEST, decisions, {1: waiting}, workers), settings)


@pytest.mark.parametrize(
    ("state", "message", "before", "words"),
    [
        ("idle", None, 0, "queued, next in line"),
        ("busy", None, 3, "queued at position 4"),
        ("starting", None, 0, "loading the model"),
        ("failed", "the release has no config.json", 0, "the release has no config.json"),
    ],
)
def test_a_waiting_decision_says_what_it_waits_for(
    settings: Settings, state: WorkerState, message: str | None, before: int, words: str
) -> None:
    assert words in shown(settings, decision("queued"), waiting=before, workers=(worker(state, message),))


def test_without_a_worker_the_page_says_that_nothing_will_come(settings: Settings) -> None:
    assert "no worker is running" in shown(settings, decision("queued"))


def test_an_answer_is_shown_while_the_other_variant_runs(settings: Settings) -> None:
    markup = shown(settings, decision("done"), decision("running", "bf16", id=2))
    assert "running" in markup
    assert "0.750" in markup
    assert "42 ms" in markup
    assert "321" in markup


def test_a_failure_gives_its_reasons_as_text(settings: Settings) -> None:
    error = [{"loc": ["state"], "msg": MARKUP, "type": "too_long"}]
    markup = shown(settings, decision("failed", error=error))
    assert "gave no answer" in markup
    assert "&lt;img" in markup
    assert "<img" not in markup


def test_a_cut_state_is_never_hidden(settings: Settings) -> None:
    assert "12 tokens were cut" in shown(settings, decision("done", truncated_tokens=12))


def test_the_response_is_given_per_answered_variant(settings: Settings) -> None:
    decisions = (decision("done"), decision("failed", "bf16", id=2, error=[]))
    texts = responses(Snapshot(REQUEST, decisions, {}, ()), settings)
    assert list(texts) == ["mxfp4"]
    assert '"noul": 0.75' in texts["mxfp4"]


def test_a_row_that_never_was_a_request_can_be_looked_at(settings: Settings) -> None:
    error = [{"loc": [], "msg": "line 3: 3 cells, the header has 2", "type": "table_row"}]
    request = replace(REQUEST, state=None, questions={}, input_error=error)
    snapshot = Snapshot(request, (decision("failed", error=error),), {}, ())
    assert "the header has 2" in results_html(snapshot, settings)
    assert responses(snapshot, settings) == {}
