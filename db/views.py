"""Plain data that travels in and out of the database.

Frozen dataclasses only: no session, no lazy loading, safe to keep after the transaction ended. JSON columns arrive as
plain Python values. Times are aware UTC datetimes.
"""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

Json = Any
DecisionStatus = Literal["queued", "running", "done", "failed", "cancelled"]
WorkerState = Literal["starting", "idle", "busy", "stopping", "failed"]
HistoryKind = Literal["decision", "batch"]
Batching = Literal["fast", "single", "padded"]
Side = Literal["left", "right", "floor"]
"""Which run of a comparison a decision belongs to; the floor is the left variant again, in another shape."""

PRIORITY_BATCH = 0
PRIORITY_SINGLE = 1

SOURCE_COMPARISON = "comparison"
SOURCE_TOGETHER = "together"
INNER_SOURCES = (SOURCE_COMPARISON, SOURCE_TOGETHER)
"""Batches that exist for something else than their own results: the history leaves them out."""


@dataclass(frozen=True)
class NewRequest:
    """A request to store. `problems` marks a row that could not become a request: it is stored as failed."""

    asked_model: str
    state: Json
    questions: dict[str, Json]
    images: tuple[str, ...] = ()
    truncate: str | None = None
    title: str = ""
    row_number: int | None = None
    external_id: str | None = None
    cells: dict[str, Json] | None = None
    labels: dict[str, str] | None = None
    problems: tuple[dict[str, Json], ...] = ()
    idempotency_key: str | None = None


@dataclass(frozen=True)
class NewImage:
    sha256: str
    media_type: str
    width: int
    height: int
    num_bytes: int


@dataclass(frozen=True)
class StoredRequest:
    """The ids of a request that was just stored; `decision_ids` maps variant to decision."""

    request_id: int
    decision_ids: dict[str, int]


@dataclass(frozen=True)
class KnownRequest:
    """A request found under an idempotency key, with what its repetition must be equal to."""

    request_id: int
    digest: str
    asked_model: str
    decision_ids: dict[str, int]


@dataclass(frozen=True)
class NewResult:
    """What a worker saves for one claimed decision: log-probabilities and answers, or an error."""

    decision_id: int
    log_probs: dict[str, dict[str, float]] | None = None
    answers: dict[str, Json] | None = None
    input_tokens: int | None = None
    truncated_tokens: int | None = None
    latency_ms: float | None = None
    error: tuple[dict[str, Json], ...] = ()
    copied_from_id: int | None = None


@dataclass(frozen=True)
class NewRun:
    """How a variant was run. Two equal values are one row of table `runs`."""

    variant: str
    release_checksum: str
    linear_mode: str | None
    dtype: str
    head_dtype: str | None
    device: str
    threads: int | None
    batching: dict[str, Json] = field(default_factory=dict)
    versions: dict[str, Json] = field(default_factory=dict)


@dataclass(frozen=True)
class RequestView:
    id: int
    batch_id: int | None
    row_number: int | None
    external_id: str | None
    asked_model: str
    state: Json
    questions: dict[str, Json]
    images: tuple[str, ...]
    truncate: str | None
    labels: dict[str, str] | None
    cells: dict[str, Json] | None
    input_error: list[dict[str, Json]] | None
    source: str
    created_at: datetime


@dataclass(frozen=True)
class RunView:
    id: int
    variant: str
    release_checksum: str
    linear_mode: str | None
    dtype: str
    head_dtype: str | None
    device: str
    threads: int | None
    batching: dict[str, Json]
    versions: dict[str, Json]
    created_at: datetime


@dataclass(frozen=True)
class DecisionView:
    id: int
    request_id: int
    variant: str
    status: DecisionStatus
    log_probs: dict[str, dict[str, float]] | None
    answers: dict[str, Json] | None
    input_tokens: int | None
    truncated_tokens: int | None
    latency_ms: float | None
    error: list[dict[str, Json]] | None
    run: RunView | None
    created_at: datetime
    finished_at: datetime | None

    @property
    def is_finished(self) -> bool:
        return self.status in ("done", "failed", "cancelled")


@dataclass(frozen=True)
class BatchView:
    """`stored_at` is None while rows still stream in (or when the process that streamed them died)."""

    id: int
    name: str
    source: str
    variants: tuple[str, ...]
    questions: dict[str, Json]
    columns: tuple[str, ...]
    mapping: dict[str, Json]
    num_rows: int
    created_at: datetime
    stored_at: datetime | None
    cancel_requested_at: datetime | None
    finished_at: datetime | None


@dataclass(frozen=True)
class BatchProgress:
    """Counts are decisions (rows x variants). `eta_s` is None while no row finished lately."""

    batch_id: int
    num_rows: int
    num_decisions: int
    queued: int
    running: int
    done: int
    failed: int
    cancelled: int
    rows_per_s: float
    eta_s: float | None
    is_finished: bool
    is_cancelled: bool


@dataclass(frozen=True)
class ResultRow:
    request: RequestView
    decisions: dict[str, DecisionView]


@dataclass(frozen=True)
class HistoryItem:
    """`id` is a request id or a batch id, by `kind`."""

    kind: HistoryKind
    id: int
    created_at: datetime
    title: str
    variants: tuple[str, ...]
    status: str
    summary: str


@dataclass(frozen=True)
class WorkerView:
    """`releases` maps variant to facts: checksum, is_random, dtype, linear_mode. `message` says why it failed."""

    name: str
    variants: tuple[str, ...]
    host: str
    pid: int
    device: str
    state: WorkerState
    message: str | None
    releases: dict[str, dict[str, Json]]
    started_at: datetime
    heartbeat_at: datetime

    @property
    def is_ready(self) -> bool:
        """The model is in memory, so that a queued row will be taken."""
        return self.state in ("idle", "busy")


@dataclass(frozen=True)
class ClaimedRow:
    """A decision that this worker holds, with the request it needs to answer.

    A row with a `comparison_id` is computed for that comparison, whatever is known of equal requests.
    """

    decision_id: int
    variant: str
    batching: Batching
    comparison_id: int | None
    side: Side | None
    priority: int
    attempts: int
    crashes: int
    digest: str
    request: RequestView


@dataclass(frozen=True)
class WaitingRow:
    """A queued decision: what is needed to ring for it."""

    decision_id: int
    variant: str
    priority: int
    crashes: int
