"""Transactions: nothing is lost between processes, and a reader cannot write."""

import multiprocessing
import sqlite3

import pytest
from database_fixtures import BACKENDS
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from db.session import Database

PROCESSES, INCREMENTS = 4, 50


def increment(url: str) -> None:
    database = Database(url)
    for _ in range(INCREMENTS):
        with database.write() as session:
            value = session.scalar(text("SELECT num_rows FROM batches WHERE id = 1 FOR UPDATE" if "postgres" in url
                                        else "SELECT num_rows FROM batches WHERE id = 1"))  # fmt: skip
            session.execute(text("UPDATE batches SET num_rows = :value WHERE id = 1"), {"value": value + 1})


def insert_batch(database: Database) -> None:
    with database.write() as session:
        session.execute(text("INSERT INTO question_sets (id, questions) VALUES ('q', '{}')"))
        session.execute(
            text(
                "INSERT INTO batches"
                " (id, name, source, variants, question_set_id, columns, mapping, num_rows, created_at)"
                " VALUES (1, 'b', 'test', '[]', 'q', '[]', '{}', 0, '2026-01-01 00:00:00')"
            )
        )


def test_read_modify_write_of_four_processes_loses_no_update(database: Database, database_url: str) -> None:
    insert_batch(database)
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=increment, args=(database_url,)) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    with database.read() as session:
        assert session.scalar(text("SELECT num_rows FROM batches")) == PROCESSES * INCREMENTS


def test_a_reader_cannot_write(database: Database) -> None:
    with database.read() as session, pytest.raises(DBAPIError, match=r"readonly|read-only"):
        session.execute(text("INSERT INTO question_sets (id, questions) VALUES ('q', '{}')"))


def test_a_writer_may_follow_a_reader_on_the_same_connection(database: Database) -> None:
    with database.read() as session:
        session.execute(text("SELECT 1"))
    insert_batch(database)
    with database.read() as session:
        assert session.scalar(text("SELECT count(*) FROM batches")) == 1


def test_an_exception_in_a_write_leaves_nothing_behind(database: Database) -> None:
    def insert_and_fail() -> None:
        with database.write() as session:
            session.execute(text("INSERT INTO question_sets (id, questions) VALUES ('q', '{}')"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        insert_and_fail()
    with database.read() as session:
        assert session.scalar(text("SELECT count(*) FROM question_sets")) == 0


def test_sqlite_keeps_a_committed_row_through_a_power_cut_by_its_settings(tmp_path: object) -> None:
    database = Database(f"sqlite:///{tmp_path}/settings.sqlite3")
    with database.read() as session:
        found = {
            name: session.execute(text(f"PRAGMA {name}")).scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    database.close()
    assert found == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 30_000}
    assert sqlite3.sqlite_version_info >= (3, 35)  # UPDATE ... RETURNING


def test_only_a_write_that_may_be_undone_does_not_wait_for_the_disk(tmp_path: object) -> None:
    database = Database(f"sqlite:///{tmp_path}/settings.sqlite3")
    found = []
    for is_durable in (True, False, True):  # one after the other on the same connection
        with database.write(is_durable=is_durable) as session:
            found.append(session.execute(text("PRAGMA synchronous")).scalar())
    database.close()
    full, normal = 2, 1
    assert found == [full, normal, full]


def test_these_tests_ran_on_postgresql_too() -> None:
    if "postgresql" not in BACKENDS:
        pytest.skip("CLEF_TEST_POSTGRES names no server: sessions, migrations and queries were tested on SQLite alone")
