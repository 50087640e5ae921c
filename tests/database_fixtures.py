"""A migrated database of its own for each test: SQLite always, PostgreSQL where CLEF_TEST_POSTGRES names a server."""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text

import db
from db.session import Database


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/clef.sqlite3"
        return
    server = os.environ.get("CLEF_TEST_POSTGRES")
    if not server:
        pytest.skip("CLEF_TEST_POSTGRES names no PostgreSQL server, such as postgresql+psycopg://user@host/postgres")
    name = f"clef_test_{uuid.uuid4().hex}"
    admin = create_engine(server, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    yield make_url(server).set(database=name).render_as_string(hide_password=False)
    with admin.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    admin.dispose()


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    db.migrate(database_url)
    database = Database(database_url)
    yield database
    database.close()
