"""The migrations make the tables that the models describe, whoever starts first."""

import multiprocessing
from multiprocessing.synchronize import Barrier

from alembic import command
from sqlalchemy import inspect

import db
from db.models import Base
from db.upgrade import config_of, connect


def migrate_together(url: str, barrier: Barrier) -> None:
    barrier.wait()
    db.migrate(url)


def test_an_empty_database_gets_every_table(database_url: str) -> None:
    db.migrate(database_url)
    with connect(database_url) as connection:
        assert set(inspect(connection).get_table_names()) == {*Base.metadata.tables, "alembic_version"}


def test_models_and_migrations_agree(database_url: str) -> None:
    db.migrate(database_url)
    with connect(database_url) as connection:
        command.check(config_of(connection))  # raises when autogenerate would add something


def test_migrating_twice_changes_nothing(database_url: str) -> None:
    db.migrate(database_url)
    db.migrate(database_url)


def test_four_processes_may_migrate_at_once(database_url: str) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(4)
    processes = [context.Process(target=migrate_together, args=(database_url, barrier)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]


def test_the_first_migration_can_be_taken_back(database_url: str) -> None:
    db.migrate(database_url)
    with connect(database_url) as connection:
        command.downgrade(config_of(connection), "base")
        connection.commit()
        assert inspect(connection).get_table_names() == ["alembic_version"]
