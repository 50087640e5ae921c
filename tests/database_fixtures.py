"""A migrated database of its own for each test: SQLite always, PostgreSQL too where CLEF_TEST_POSTGRES names a server.

The tests of PostgreSQL need a server such as `postgresql+psycopg://user@host/postgres` on which databases may be made.
"""

import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text

import db
from db.session import Database

POSTGRES = os.environ.get("CLEF_TEST_POSTGRES")
BACKENDS = ("sqlite", "postgresql") if POSTGRES else ("sqlite",)


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file with the newest tables, to copy: a migration waits for the disk many times."""
    file = tmp_path_factory.mktemp("migrated") / "clef.sqlite3"
    db.migrate(f"sqlite:///{file}")
    return file


@pytest.fixture(params=BACKENDS)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/clef.sqlite3"
        return
    name = f"clef_test_{uuid.uuid4().hex}"
    admin = create_engine(str(POSTGRES), isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    yield make_url(str(POSTGRES)).set(database=name).render_as_string(hide_password=False)
    with admin.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    admin.dispose()


@pytest.fixture
def database(database_url: str, migrated_sqlite: Path) -> Iterator[Database]:
    url = make_url(database_url)
    if url.get_backend_name() == "sqlite":
        shutil.copy(migrated_sqlite, str(url.database))
    else:
        db.migrate(database_url)
    database = Database(database_url)
    yield database
    database.close()
