"""Bring a database to the newest schema: `db.migrate(url)`, called at every start.

Several processes may start at once, so one lock is held meanwhile: a file beside a SQLite database, an advisory lock
on PostgreSQL. The connection has `foreign_keys` off: SQLite changes a table by writing it anew.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import URL, Connection, create_engine, make_url, pool, text

MIGRATIONS = Path(__file__).parent / "migrations"
_ADVISORY_LOCK = 7_203_391


def migrate(url: str) -> None:
    """Create or upgrade the tables; does nothing when they are up to date."""
    target = make_url(url)
    with _locked_file(target), connect(url) as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _ADVISORY_LOCK})
        command.upgrade(config_of(connection), "head")
        connection.commit()


@contextmanager
def connect(url: str) -> Iterator[Connection]:
    """A connection for migrations, without the settings of `db.session`."""
    engine = create_engine(url, poolclass=pool.NullPool)
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()


def config_of(connection: Connection) -> Config:
    """Alembic's configuration without an ini file, to upgrade through this connection.

    A new migration is drafted with
    `alembic.command.revision(config_of(connection), "message", autogenerate=True)`.
    """
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


@contextmanager
def _locked_file(url: URL) -> Iterator[None]:
    if url.get_backend_name() != "sqlite" or not url.database or url.database == ":memory:":
        yield
        return
    path = Path(url.database)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(path.name + ".migrate.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
