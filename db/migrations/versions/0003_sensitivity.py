"""Sensitivity runs: what quantising one part of a release at a time does to the answers."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision: str | None = "0002"
branch_labels: str | None = None
depends_on: str | None = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
JSON = sa.JSON()


def upgrade() -> None:
    op.create_table(
        "sensitivity_runs",
        sa.Column("id", ID, nullable=False),
        sa.Column("release", sa.Text(), nullable=False),
        sa.Column("release_checksum", sa.String(length=100), nullable=False),
        sa.Column("requests", sa.Text(), nullable=False),
        sa.Column("requests_sha256", sa.String(length=64), nullable=False),
        sa.Column("parts", sa.String(length=10), nullable=False),
        sa.Column("results", JSON, nullable=False),
        sa.Column("provenance", JSON, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_sensitivity_runs"),
    )
    op.create_index("ix_sensitivity_runs_created_at", "sensitivity_runs", ["created_at"], unique=False)


def downgrade() -> None:
    op.drop_table("sensitivity_runs")
