"""Requests, decisions, batches, runs, workers, comparisons."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision: str | None = None
branch_labels: str | None = None
depends_on: str | None = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
JSON = sa.JSON()


def upgrade() -> None:
    op.create_table(
        "images",
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("media_type", sa.String(length=40), nullable=False),
        sa.Column("width", sa.Integer(), nullable=False),
        sa.Column("height", sa.Integer(), nullable=False),
        sa.Column("num_bytes", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("sha256", name="pk_images"),
    )
    op.create_table(
        "question_sets",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("questions", JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_question_sets"),
    )
    op.create_table(
        "runs",
        sa.Column("id", ID, nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("variant", sa.String(length=100), nullable=False),
        sa.Column("release_checksum", sa.String(length=100), nullable=False),
        sa.Column("linear_mode", sa.String(length=40), nullable=True),
        sa.Column("dtype", sa.String(length=40), nullable=False),
        sa.Column("head_dtype", sa.String(length=40), nullable=True),
        sa.Column("device", sa.String(length=100), nullable=False),
        sa.Column("threads", sa.Integer(), nullable=True),
        sa.Column("batching", JSON, nullable=False),
        sa.Column("versions", JSON, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_runs"),
        sa.UniqueConstraint("fingerprint", name="uq_runs_fingerprint"),
    )
    op.create_table(
        "workers",
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("variants", JSON, nullable=False),
        sa.Column("host", sa.String(length=200), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("device", sa.String(length=100), nullable=False),
        sa.Column("state", sa.String(length=10), nullable=False),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("releases", JSON, nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("heartbeat_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_workers"),
    )
    op.create_index("ix_workers_heartbeat_at", "workers", ["heartbeat_at"], unique=False)

    op.create_table(
        "batches",
        sa.Column("id", ID, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("source", sa.String(length=40), nullable=False),
        sa.Column("variants", JSON, nullable=False),
        sa.Column("question_set_id", sa.String(length=64), nullable=False),
        sa.Column("columns", JSON, nullable=False),
        sa.Column("mapping", JSON, nullable=False),
        sa.Column("num_rows", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("stored_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("cancel_requested_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["question_set_id"], ["question_sets.id"], name="fk_batches_question_set_id_question_sets"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_batches"),
    )
    op.create_index("ix_batches_created_at", "batches", ["created_at"], unique=False)

    op.create_table(
        "comparisons",
        sa.Column("id", ID, nullable=False),
        sa.Column("batch_id", ID, nullable=True),
        sa.Column("left_run_id", ID, nullable=False),
        sa.Column("right_run_id", ID, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("parameters", JSON, nullable=False),
        sa.Column("statistics", JSON, nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"], name="fk_comparisons_batch_id_batches"),
        sa.ForeignKeyConstraint(["left_run_id"], ["runs.id"], name="fk_comparisons_left_run_id_runs"),
        sa.ForeignKeyConstraint(["right_run_id"], ["runs.id"], name="fk_comparisons_right_run_id_runs"),
        sa.PrimaryKeyConstraint("id", name="pk_comparisons"),
    )
    op.create_table(
        "requests",
        sa.Column("id", ID, nullable=False),
        sa.Column("batch_id", ID, nullable=True),
        sa.Column("row_number", sa.Integer(), nullable=True),
        sa.Column("external_id", sa.Text(), nullable=True),
        sa.Column("asked_model", sa.String(length=200), nullable=False),
        sa.Column("state", JSON, nullable=True),
        sa.Column("title", sa.String(length=200), nullable=False),
        sa.Column("question_set_id", sa.String(length=64), nullable=False),
        sa.Column("images", JSON, nullable=False),
        sa.Column("truncate", sa.String(length=10), nullable=True),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("cells", JSON, nullable=True),
        sa.Column("labels", JSON, nullable=True),
        sa.Column("input_error", JSON, nullable=True),
        sa.Column("source", sa.String(length=40), nullable=False),
        sa.Column("idempotency_key", sa.String(length=200), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"], name="fk_requests_batch_id_batches"),
        sa.ForeignKeyConstraint(
            ["question_set_id"], ["question_sets.id"], name="fk_requests_question_set_id_question_sets"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_requests"),
        sa.UniqueConstraint("idempotency_key", name="uq_requests_idempotency_key"),
    )
    op.create_index("ix_requests_batch_id_created_at", "requests", ["batch_id", "created_at"], unique=False)
    op.create_index("ix_requests_batch_id_digest", "requests", ["batch_id", "digest"], unique=False)
    op.create_index("ix_requests_batch_id_row_number", "requests", ["batch_id", "row_number"], unique=False)

    op.create_table(
        "decisions",
        sa.Column("id", ID, nullable=False),
        sa.Column("request_id", ID, nullable=False),
        sa.Column("batch_id", ID, nullable=True),
        sa.Column("variant", sa.String(length=100), nullable=False),
        sa.Column("take", sa.Integer(), nullable=False),
        sa.Column("run_id", ID, nullable=True),
        sa.Column("status", sa.String(length=10), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("claim_owner", sa.String(length=200), nullable=True),
        sa.Column("claim_token", sa.String(length=40), nullable=True),
        sa.Column("claimed_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("crashes", sa.Integer(), nullable=False),
        sa.Column("log_probs", JSON, nullable=True),
        sa.Column("answers", JSON, nullable=True),
        sa.Column("input_tokens", sa.Integer(), nullable=True),
        sa.Column("truncated_tokens", sa.Integer(), nullable=True),
        sa.Column("latency_ms", sa.Double(), nullable=True),
        sa.Column("copied_from_id", ID, nullable=True),
        sa.Column("error", JSON, nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"], name="fk_decisions_batch_id_batches"),
        sa.ForeignKeyConstraint(["copied_from_id"], ["decisions.id"], name="fk_decisions_copied_from_id_decisions"),
        sa.ForeignKeyConstraint(["request_id"], ["requests.id"], name="fk_decisions_request_id_requests"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_decisions_run_id_runs"),
        sa.PrimaryKeyConstraint("id", name="pk_decisions"),
        sa.UniqueConstraint("request_id", "variant", "take", name="uq_decisions_request_id_variant_take"),
    )
    op.create_index("ix_decisions_batch_id_finished_at", "decisions", ["batch_id", "finished_at"], unique=False)
    op.create_index("ix_decisions_batch_id_status", "decisions", ["batch_id", "status"], unique=False)
    op.create_index("ix_decisions_status_claim_token", "decisions", ["status", "claim_token"], unique=False)
    op.create_index(
        "ix_decisions_variant_status_priority_id", "decisions", ["variant", "status", "priority", "id"], unique=False
    )


def downgrade() -> None:
    op.drop_table("decisions")
    op.drop_table("requests")
    op.drop_table("comparisons")
    op.drop_table("batches")
    op.drop_table("workers")
    op.drop_table("runs")
    op.drop_table("question_sets")
    op.drop_table("images")
