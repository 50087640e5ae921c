"""Transactions. `Database.write()` holds the write lock from its first statement, `Database.read()` cannot write.

What surprises: pysqlite's own transaction handling loses updates, so it is switched off and BEGIN is sent here.
A write transaction is BEGIN IMMEDIATE: keep it short and never hold it over a forward.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.orm import Session

BUSY_TIMEOUT_MS = 30_000


def make_engine(url: str) -> Engine:
    """An engine with the settings this program relies on; PostgreSQL needs none of SQLite's."""
    is_sqlite = make_url(url).get_backend_name() == "sqlite"
    engine = create_engine(
        url,
        pool_pre_ping=not is_sqlite,  # a file does not go away between two transactions
        json_serializer=partial(json.dumps, ensure_ascii=False, allow_nan=False),
    )
    if is_sqlite:
        event.listen(engine, "connect", _configure_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


class Database:
    """Opens sessions on one database. Safe to share between threads; a session is not."""

    def __init__(self, url: str) -> None:
        self.url = make_url(url)
        self._engine = make_engine(url)
        self._reader = self._engine.execution_options(read_only=True, postgresql_readonly=True)
        self._hasty = self._engine.execution_options(synchronous="NORMAL")

    @contextmanager
    def write(self, *, is_durable: bool = True) -> Iterator[Session]:
        """A session whose transaction commits at the end, or rolls back on an exception.

        Args:
            is_durable: False does not wait for the disk, so that a power cut may undo it; SQLite only. Enough for
                claims, which end with the power anyway.
        """
        engine = self._engine if is_durable else self._hasty
        with Session(engine, expire_on_commit=False) as session, session.begin():
            yield session

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A session on a consistent snapshot. A statement that writes is an error."""
        with Session(self._reader) as session:
            yield session

    def close(self) -> None:
        self._engine.dispose()


def _configure_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None
    connection.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA foreign_keys=ON")


def _begin_sqlite(connection: Connection) -> None:
    options = connection.get_execution_options()
    is_read_only = options.get("read_only", False)
    connection.exec_driver_sql(f"PRAGMA query_only={int(is_read_only)}")
    connection.exec_driver_sql(f"PRAGMA synchronous={options.get('synchronous', 'FULL')}")
    connection.exec_driver_sql("BEGIN" if is_read_only else "BEGIN IMMEDIATE")
