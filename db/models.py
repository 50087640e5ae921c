"""The tables. One class per table, nothing else; every query stands in the store modules.

What surprises: times are stored as UTC and come back aware on SQLite too; `decisions.batch_id` repeats
`requests.batch_id`, so that the progress of a batch is one index scan.
"""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    DateTime,
    Dialect,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Text,
    TypeDecorator,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

MAX_TITLE_CHARS = 200
MAX_KEY_CHARS = 200


class UtcDateTime(TypeDecorator[datetime]):
    """An aware datetime, stored in UTC. SQLite has no zones: it stores naive UTC and gets the zone back here."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"a time without zone cannot be stored: {value!r}")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


Id = BigInteger().with_variant(Integer, "sqlite")
JsonValue = JSON(none_as_null=True)
Sha256 = String(64)


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(column_0_N_label)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {datetime: UtcDateTime, dict[str, Any]: JsonValue, list[Any]: JsonValue}  # noqa: RUF012


class QuestionSet(Base):
    """A map of questions, stored once however many rows ask it. The id is the SHA-256 of its JSON, order kept."""

    __tablename__ = "question_sets"

    id: Mapped[str] = mapped_column(Sha256, primary_key=True)
    questions: Mapped[dict[str, Any]]


class Image(Base):
    """What is known of an image; its bytes lie in the image store under the same SHA-256."""

    __tablename__ = "images"

    sha256: Mapped[str] = mapped_column(Sha256, primary_key=True)
    media_type: Mapped[str] = mapped_column(String(40))
    width: Mapped[int]
    height: Mapped[int]
    num_bytes: Mapped[int]
    created_at: Mapped[datetime]


class Batch(Base):
    __tablename__ = "batches"

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    name: Mapped[str] = mapped_column(Text)
    source: Mapped[str] = mapped_column(String(40))
    variants: Mapped[list[Any]]
    question_set_id: Mapped[str] = mapped_column(ForeignKey("question_sets.id"))
    columns: Mapped[list[Any]]
    mapping: Mapped[dict[str, Any]]
    num_rows: Mapped[int]
    created_at: Mapped[datetime] = mapped_column(index=True)
    stored_at: Mapped[datetime | None]
    cancel_requested_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]


class Request(Base):
    __tablename__ = "requests"
    __table_args__ = (
        Index("ix_requests_batch_id_row_number", "batch_id", "row_number"),
        Index("ix_requests_batch_id_digest", "batch_id", "digest"),
        Index("ix_requests_batch_id_created_at", "batch_id", "created_at"),
    )

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    batch_id: Mapped[int | None] = mapped_column(ForeignKey("batches.id"))
    row_number: Mapped[int | None]
    external_id: Mapped[str | None] = mapped_column(Text)
    asked_model: Mapped[str] = mapped_column(String(200))
    state: Mapped[Any | None] = mapped_column(JsonValue)
    title: Mapped[str] = mapped_column(String(MAX_TITLE_CHARS))
    question_set_id: Mapped[str] = mapped_column(ForeignKey("question_sets.id"))
    images: Mapped[list[Any]]
    truncate: Mapped[str | None] = mapped_column(String(10))
    digest: Mapped[str] = mapped_column(Sha256)
    cells: Mapped[dict[str, Any] | None]
    labels: Mapped[dict[str, Any] | None]
    input_error: Mapped[list[Any] | None]
    source: Mapped[str] = mapped_column(String(40))
    idempotency_key: Mapped[str | None] = mapped_column(String(MAX_KEY_CHARS), unique=True)
    created_at: Mapped[datetime]


class Run(Base):
    """How a variant was run. Equal fingerprints are one row."""

    __tablename__ = "runs"

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    fingerprint: Mapped[str] = mapped_column(Sha256, unique=True)
    variant: Mapped[str] = mapped_column(String(100))
    release_checksum: Mapped[str] = mapped_column(String(100))
    linear_mode: Mapped[str | None] = mapped_column(String(40))
    dtype: Mapped[str] = mapped_column(String(40))
    head_dtype: Mapped[str | None] = mapped_column(String(40))
    device: Mapped[str] = mapped_column(String(100))
    threads: Mapped[int | None]
    batching: Mapped[dict[str, Any]]
    versions: Mapped[dict[str, Any]]
    created_at: Mapped[datetime]


class Decision(Base):
    """One request in one variant: its place in the queue, the claim on it, and what came out.

    `attempts` counts claims, `crashes` the claims whose worker fell silent. `take` is 0 for the decision that was asked
    for; a comparison makes takes of its own, and says in `side` which run of it they are.
    """

    __tablename__ = "decisions"
    __table_args__ = (
        UniqueConstraint("request_id", "variant", "take"),
        Index("ix_decisions_variant_status_priority_id", "variant", "status", "priority", "id"),
        Index("ix_decisions_batch_id_status", "batch_id", "status"),
        Index("ix_decisions_batch_id_finished_at", "batch_id", "finished_at"),
        Index("ix_decisions_status_claim_token", "status", "claim_token"),
        Index("ix_decisions_comparison_id_status", "comparison_id", "status"),
        Index("ix_decisions_comparison_id_request_id", "comparison_id", "request_id"),
    )

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    request_id: Mapped[int] = mapped_column(ForeignKey("requests.id"))
    batch_id: Mapped[int | None] = mapped_column(ForeignKey("batches.id"))
    variant: Mapped[str] = mapped_column(String(100))
    take: Mapped[int]
    batching: Mapped[str] = mapped_column(String(10), server_default="fast")
    comparison_id: Mapped[int | None] = mapped_column(ForeignKey("comparisons.id"))
    side: Mapped[str | None] = mapped_column(String(5))
    run_id: Mapped[int | None] = mapped_column(ForeignKey("runs.id"))
    status: Mapped[str] = mapped_column(String(10))
    priority: Mapped[int]
    claim_owner: Mapped[str | None] = mapped_column(String(200))
    claim_token: Mapped[str | None] = mapped_column(String(40))
    claimed_at: Mapped[datetime | None]
    attempts: Mapped[int]
    crashes: Mapped[int]
    log_probs: Mapped[dict[str, Any] | None]
    answers: Mapped[dict[str, Any] | None]
    input_tokens: Mapped[int | None]
    truncated_tokens: Mapped[int | None]
    latency_ms: Mapped[float | None]
    copied_from_id: Mapped[int | None] = mapped_column(ForeignKey("decisions.id"))
    error: Mapped[list[Any] | None]
    created_at: Mapped[datetime]
    finished_at: Mapped[datetime | None]


class Worker(Base):
    __tablename__ = "workers"

    name: Mapped[str] = mapped_column(String(200), primary_key=True)
    variants: Mapped[list[Any]]
    host: Mapped[str] = mapped_column(String(200))
    pid: Mapped[int]
    device: Mapped[str] = mapped_column(String(100))
    state: Mapped[str] = mapped_column(String(10))
    message: Mapped[str | None] = mapped_column(Text)
    releases: Mapped[dict[str, Any]]
    started_at: Mapped[datetime]
    heartbeat_at: Mapped[datetime] = mapped_column(index=True)


class Comparison(Base):
    """Two runs side by side over the requests of a batch, and a third where a noise floor is measured.

    The runs are known when the decisions are there. `stored_at`: every decision waits; `finished_at`: the answers are
    compared and `statistics` is what came out (None where nothing could be compared).
    """

    __tablename__ = "comparisons"

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    batch_id: Mapped[int] = mapped_column(ForeignKey("batches.id"), index=True)
    name: Mapped[str] = mapped_column(Text)
    left_variant: Mapped[str] = mapped_column(String(100))
    right_variant: Mapped[str] = mapped_column(String(100))
    floor_variant: Mapped[str | None] = mapped_column(String(100))
    left_run_id: Mapped[int | None] = mapped_column(ForeignKey("runs.id"))
    right_run_id: Mapped[int | None] = mapped_column(ForeignKey("runs.id"))
    floor_run_id: Mapped[int | None] = mapped_column(ForeignKey("runs.id"))
    parameters: Mapped[dict[str, Any]]
    statistics: Mapped[dict[str, Any] | None]
    num_rows: Mapped[int]
    created_at: Mapped[datetime] = mapped_column(index=True)
    stored_at: Mapped[datetime | None]
    cancel_requested_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]


class ComparisonAnswer(Base):
    """One answer of both runs boiled down to the numbers that are listed, filtered and drawn."""

    __tablename__ = "comparison_answers"
    __table_args__ = (
        Index("ix_comparison_answers_comparison_id_is_flip_margin", "comparison_id", "is_flip", "margin"),
        Index("ix_comparison_answers_comparison_id_effect", "comparison_id", "effect"),
        Index("ix_comparison_answers_comparison_id_question_id", "comparison_id", "question_id", "is_flip"),
    )

    comparison_id: Mapped[int] = mapped_column(ForeignKey("comparisons.id"), primary_key=True, autoincrement=False)
    request_id: Mapped[int] = mapped_column(ForeignKey("requests.id"), primary_key=True, autoincrement=False)
    question_id: Mapped[str] = mapped_column(String(100), primary_key=True)
    left_option: Mapped[str] = mapped_column(Text)
    right_option: Mapped[str] = mapped_column(Text)
    left_confidence: Mapped[float]
    right_confidence: Mapped[float]
    margin: Mapped[float]
    kl: Mapped[float]
    total_variation: Mapped[float]
    max_abs_dp: Mapped[float]
    label: Mapped[str | None] = mapped_column(Text)
    left_brier: Mapped[float | None]
    right_brier: Mapped[float | None]
    floor_option: Mapped[str | None] = mapped_column(Text)
    floor_kl: Mapped[float | None]
    floor_total_variation: Mapped[float | None]
    floor_max_abs_dp: Mapped[float | None]
    is_flip: Mapped[bool]
    effect: Mapped[str | None] = mapped_column(String(10))


class SensitivityRun(Base):
    """What quantising one part of a release at a time did to the answers of some requests; a row is a finished run."""

    __tablename__ = "sensitivity_runs"

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    release: Mapped[str] = mapped_column(Text)
    release_checksum: Mapped[str] = mapped_column(String(100))
    requests: Mapped[str] = mapped_column(Text)
    requests_sha256: Mapped[str] = mapped_column(Sha256)
    parts: Mapped[str] = mapped_column(String(10))
    results: Mapped[dict[str, Any]]
    provenance: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(index=True)
