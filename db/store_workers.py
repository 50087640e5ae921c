"""The workers' own rows: what each holds in memory, and when it was last heard of.

A worker that can be silent without being dead does not exist here: its row is rewritten every few seconds, and the
sweeper takes the claims of one that stops. A row in state `failed` says why a variant has no worker at the moment.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from db.models import Worker
from db.store_requests import now_utc
from db.views import WorkerState, WorkerView

WORKER_SILENT_S = 15.0
_FORGET_AFTER_S = 600.0


def register_worker(session: Session, name: str, variants: Sequence[str], *, host: str, pid: int, device: str) -> None:
    """Write the row of a worker that starts.

    Failed rows of the same host and variants make room for it, and so do rows silent for ten minutes.
    """
    now = now_utc()
    session.execute(delete(Worker).where(Worker.heartbeat_at < now - timedelta(seconds=_FORGET_AFTER_S)))
    for failed in session.scalars(select(Worker).where(Worker.host == host, Worker.state == "failed")).all():
        if set(failed.variants) <= set(variants):
            session.delete(failed)
    session.add(
        Worker(
            name=name,
            variants=list(variants),
            host=host,
            pid=pid,
            device=device,
            state="starting",
            releases={},
            started_at=now,
            heartbeat_at=now,
        )
    )


def set_worker_state(
    session: Session,
    name: str,
    state: WorkerState,
    *,
    message: str | None = None,
    device: str | None = None,
    releases: dict[str, dict[str, Any]] | None = None,
) -> bool:
    """Write the worker's state, which is also a sign of life; None leaves a fact as it is. False: its row is gone."""
    values: dict[str, Any] = {"state": state, "message": message, "heartbeat_at": now_utc()}
    if releases is not None:
        values["releases"] = releases
    if device is not None:
        values["device"] = device
    return bool(
        session.scalars(update(Worker).where(Worker.name == name).values(**values).returning(Worker.name)).all()
    )


def beat(session: Session, names: Sequence[str]) -> None:
    """Say that these workers were heard of now."""
    session.execute(update(Worker).where(Worker.name.in_(names)).values(heartbeat_at=now_utc()))


def remove_worker(session: Session, name: str) -> None:
    session.execute(delete(Worker).where(Worker.name == name))


def remove_processes(session: Session, host: str, pids: Sequence[int]) -> None:
    """Remove the rows of processes that ended and shall not come back."""
    session.execute(delete(Worker).where(Worker.host == host, Worker.pid.in_(pids)))


def mark_worker_failed(session: Session, host: str, pid: int, variants: Sequence[str], message: str) -> str:
    """Say that the process is gone, so that its claims are free for the sweeper at once. Returns the row's name.

    A worker that said itself why it failed keeps its own words; one that ended before it had a row gets one.
    """
    worker = session.scalars(
        select(Worker).where(Worker.host == host, Worker.pid == pid).order_by(Worker.started_at.desc()).limit(1)
    ).one_or_none()
    if worker is None:
        name = f"{host}-{pid}-ended"
        register_worker(session, name, variants, host=host, pid=pid, device="")
        set_worker_state(session, name, "failed", message=message)
        return name
    if worker.state != "failed":
        worker.state, worker.message = "failed", message
    worker.heartbeat_at = now_utc()
    return worker.name


def live_workers(session: Session, silent_s: float = WORKER_SILENT_S) -> list[WorkerView]:
    """Every worker heard of within `silent_s`, those in state `failed` included: look at `state` or `is_ready`."""
    heard = now_utc() - timedelta(seconds=silent_s)
    workers = session.scalars(select(Worker).where(Worker.heartbeat_at >= heard).order_by(Worker.started_at))
    return [
        WorkerView(
            name=worker.name,
            variants=tuple(worker.variants),
            host=worker.host,
            pid=worker.pid,
            device=worker.device,
            state=worker.state,  # type: ignore[arg-type]  # only this package writes the column
            message=worker.message,
            releases=worker.releases,
            started_at=worker.started_at,
            heartbeat_at=worker.heartbeat_at,
        )
        for worker in workers
    ]


def has_live_worker(session: Session, variant: str) -> bool:
    """Whether a worker for the variant runs or starts; one that failed does not count."""
    return any(variant in worker.variants and worker.state != "failed" for worker in live_workers(session))
