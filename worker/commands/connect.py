"""Opening what a command works with: settings, the database at its newest schema, the queue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import db
from clef_core.errors import RequestError
from db.session import Database
from worker.settings import Settings, load_settings
from worker.submit import Submitter


@contextmanager
def open_submitter(settings: Settings | None = None) -> Iterator[Submitter]:
    """The way into the queue; starts the embedded Redis if nobody else has. Settings are read unless given.

    Raises:
        redis.RedisError: REDIS_URL names a server that does not answer. Rows would wait for ever, so it is asked first.
    """
    settings = settings or load_settings()
    db.migrate(settings.database_url)
    with Submitter.connect(settings) as submitter:
        submitter.redis.ping()
        yield submitter


@contextmanager
def open_database() -> Iterator[tuple[Settings, Database]]:
    """Only the database, for commands that look and do not ask."""
    settings = load_settings()
    db.migrate(settings.database_url)
    database = Database(settings.database_url)
    try:
        yield settings, database
    finally:
        database.close()


def chosen_variants(settings: Settings, asked: Sequence[str], *, both: bool, model: str = "clef") -> tuple[str, ...]:
    """The variants that the options name, else the one that the request's model means.

    Raises:
        RequestError: one of them is not configured, or the options contradict each other.
    """
    if both and asked:
        raise RequestError.at((), "--both and --variant cannot be given together")
    names = ("bf16", "mxfp4") if both else tuple(dict.fromkeys(asked))
    for name in names:
        if name not in settings.variants:
            raise RequestError.at((), f'there is no variant "{name}"; configured: {", ".join(settings.variants)}')
    return names or (settings.variant_of(model),)
