"""Finished sensitivity runs, to be shown again. What is in `results` is known to `clef_core.sensitivity` alone."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from db.models import SensitivityRun
from db.store_requests import now_utc


@dataclass(frozen=True)
class NewSensitivityRun:
    """A run to store. `release` and `requests` are names for people, the checksums say what they really were.

    parts: what was quantised at a time: `layer`, `kind` or `linear`.
    """

    release: str
    release_checksum: str
    requests: str
    requests_sha256: str
    parts: str
    results: dict[str, Any]
    provenance: dict[str, Any]


@dataclass(frozen=True)
class SensitivityRunView(NewSensitivityRun):
    """A stored run."""

    id: int
    created_at: datetime


def store_sensitivity_run(session: Session, run: NewSensitivityRun) -> int:
    """Store a run and return its id."""
    row = SensitivityRun(**vars(run), created_at=now_utc())
    session.add(row)
    session.flush()
    return row.id


def get_sensitivity_run(session: Session, run_id: int) -> SensitivityRunView | None:
    row = session.get(SensitivityRun, run_id)
    return None if row is None else _view(row)


def list_sensitivity_runs(session: Session, limit: int = 50) -> list[SensitivityRunView]:
    """The newest runs, newest first."""
    rows = session.scalars(select(SensitivityRun).order_by(SensitivityRun.id.desc()).limit(limit))
    return [_view(row) for row in rows]


def _view(row: SensitivityRun) -> SensitivityRunView:
    return SensitivityRunView(
        release=row.release,
        release_checksum=row.release_checksum,
        requests=row.requests,
        requests_sha256=row.requests_sha256,
        parts=row.parts,
        results=row.results,
        provenance=row.provenance,
        id=row.id,
        created_at=row.created_at,
    )
