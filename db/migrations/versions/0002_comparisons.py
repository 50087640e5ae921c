"""Comparisons with their own decisions, a noise floor, and the compared answers.

The first `comparisons` table was never written to, so it is made anew.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision: str | None = "0001"
branch_labels: str | None = None
depends_on: str | None = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
JSON = sa.JSON()


def upgrade() -> None:
    op.drop_table("comparisons")
    op.create_table(
        "comparisons",
        sa.Column("id", ID, nullable=False),
        sa.Column("batch_id", ID, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("left_variant", sa.String(length=100), nullable=False),
        sa.Column("right_variant", sa.String(length=100), nullable=False),
        sa.Column("floor_variant", sa.String(length=100), nullable=True),
        sa.Column("left_run_id", ID, nullable=True),
        sa.Column("right_run_id", ID, nullable=True),
        sa.Column("floor_run_id", ID, nullable=True),
        sa.Column("parameters", JSON, nullable=False),
        sa.Column("statistics", JSON, nullable=True),
        sa.Column("num_rows", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("stored_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("cancel_requested_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"], name="fk_comparisons_batch_id_batches"),
        sa.ForeignKeyConstraint(["left_run_id"], ["runs.id"], name="fk_comparisons_left_run_id_runs"),
        sa.ForeignKeyConstraint(["right_run_id"], ["runs.id"], name="fk_comparisons_right_run_id_runs"),
        sa.ForeignKeyConstraint(["floor_run_id"], ["runs.id"], name="fk_comparisons_floor_run_id_runs"),
        sa.PrimaryKeyConstraint("id", name="pk_comparisons"),
    )
    op.create_index("ix_comparisons_batch_id", "comparisons", ["batch_id"], unique=False)
    op.create_index("ix_comparisons_created_at", "comparisons", ["created_at"], unique=False)
    op.create_table(
        "comparison_answers",
        sa.Column("comparison_id", ID, autoincrement=False, nullable=False),
        sa.Column("request_id", ID, autoincrement=False, nullable=False),
        sa.Column("question_id", sa.String(length=100), nullable=False),
        sa.Column("left_option", sa.Text(), nullable=False),
        sa.Column("right_option", sa.Text(), nullable=False),
        sa.Column("left_confidence", sa.Double(), nullable=False),
        sa.Column("right_confidence", sa.Double(), nullable=False),
        sa.Column("margin", sa.Double(), nullable=False),
        sa.Column("kl", sa.Double(), nullable=False),
        sa.Column("total_variation", sa.Double(), nullable=False),
        sa.Column("max_abs_dp", sa.Double(), nullable=False),
        sa.Column("label", sa.Text(), nullable=True),
        sa.Column("left_brier", sa.Double(), nullable=True),
        sa.Column("right_brier", sa.Double(), nullable=True),
        sa.Column("floor_option", sa.Text(), nullable=True),
        sa.Column("floor_kl", sa.Double(), nullable=True),
        sa.Column("floor_total_variation", sa.Double(), nullable=True),
        sa.Column("floor_max_abs_dp", sa.Double(), nullable=True),
        sa.Column("is_flip", sa.Boolean(), nullable=False),
        sa.Column("effect", sa.String(length=10), nullable=True),
        sa.ForeignKeyConstraint(
            ["comparison_id"], ["comparisons.id"], name="fk_comparison_answers_comparison_id_comparisons"
        ),
        sa.ForeignKeyConstraint(["request_id"], ["requests.id"], name="fk_comparison_answers_request_id_requests"),
        sa.PrimaryKeyConstraint("comparison_id", "request_id", "question_id", name="pk_comparison_answers"),
    )
    for name, columns in (
        ("ix_comparison_answers_comparison_id_is_flip_margin", ["comparison_id", "is_flip", "margin"]),
        ("ix_comparison_answers_comparison_id_effect", ["comparison_id", "effect"]),
        ("ix_comparison_answers_comparison_id_question_id", ["comparison_id", "question_id", "is_flip"]),
    ):
        op.create_index(name, "comparison_answers", columns, unique=False)
    with op.batch_alter_table("decisions") as decisions:
        decisions.add_column(sa.Column("batching", sa.String(length=10), server_default="fast", nullable=False))
        decisions.add_column(sa.Column("comparison_id", ID, nullable=True))
        decisions.add_column(sa.Column("side", sa.String(length=5), nullable=True))
        decisions.create_foreign_key("fk_decisions_comparison_id_comparisons", "comparisons", ["comparison_id"], ["id"])
        decisions.create_index("ix_decisions_comparison_id_status", ["comparison_id", "status"], unique=False)
        decisions.create_index("ix_decisions_comparison_id_request_id", ["comparison_id", "request_id"], unique=False)


def downgrade() -> None:
    op.execute("DELETE FROM decisions WHERE comparison_id IS NOT NULL")
    with op.batch_alter_table("decisions") as decisions:
        decisions.drop_index("ix_decisions_comparison_id_request_id")
        decisions.drop_index("ix_decisions_comparison_id_status")
        decisions.drop_constraint("fk_decisions_comparison_id_comparisons", type_="foreignkey")
        decisions.drop_column("side")
        decisions.drop_column("comparison_id")
        decisions.drop_column("batching")
    op.drop_table("comparison_answers")
    op.drop_table("comparisons")
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
