"""What every command shows: messages on stderr, results on stdout, one clear line instead of a traceback.

Knows no command. Surprising: stdout carries results only (JSON or a table), so that `python -m worker … > file` is
always usable; everything a person reads on the way goes to stderr.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, ParamSpec

import typer

if TYPE_CHECKING:
    from rich.console import Console

ALL_ANSWERED = 0
SOME_FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130  # 128 + SIGINT, what shells expect after Ctrl-C

Arguments = ParamSpec("Arguments")


@functools.cache
def stderr() -> Console:
    """The one console for messages and progress bars: two would write over each other."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def say(message: str) -> None:
    """Print one plain line for a person, above a running progress bar; text of users is never read as markup."""
    stderr().print(message, markup=False, soft_wrap=True)


def fail(message: str, code: int = BAD_INPUT) -> NoReturn:
    """Print `Error: …` on stderr and leave with `code`."""
    label = typer.style("Error:", fg=typer.colors.RED, bold=True)
    typer.echo(f"{label} {message}", err=True)
    raise typer.Exit(code)


def errors_on_one_line(command: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Wrap a command so that expected errors become one line and an exit code.

    Whatever the program raises on purpose, a file that cannot be read or written, and an unreachable Redis or database
    are expected; anything else is a defect and keeps its traceback.
    """

    @functools.wraps(command)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        from clef_core.errors import ClefError

        _log_to_stderr()
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt:
            say("Stopped.")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # The reader of stdout (head, less) has gone: nothing is left to say, and Python must not try at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(SOME_FAILED) from None
        except ClefError as error:
            fail(one_line(str(error)), SOME_FAILED if isinstance(error, _not_the_users_fault()) else BAD_INPUT)
        except OSError as error:
            fail(one_line(f"{error.strerror or error}: {error.filename}" if error.filename else str(error)))
        except _service_errors() as error:
            service = "the database" if hasattr(error, "orig") else "Redis"
            fail(one_line(f"{service} does not work: {getattr(error, 'orig', error)}"), SOME_FAILED)

    return run


def one_line(text: str) -> str:
    """Several lines (one per problem) as one."""
    parts = [part.strip() for part in text.splitlines() if part.strip()]
    return (" " if all(part.endswith(".") for part in parts) else "; ").join(parts)


def _not_the_users_fault() -> tuple[type[Exception], ...]:
    from clef_core.errors import EngineError
    from worker.submit import QueueFullError

    return (EngineError, QueueFullError)


def _service_errors() -> tuple[type[Exception], ...]:
    from redis import RedisError
    from sqlalchemy.exc import SQLAlchemyError

    return (RedisError, SQLAlchemyError)


def _log_to_stderr() -> None:
    """Show warnings above a running progress bar; `serve` asks for more."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", handlers=[_SayHandler()])


class _SayHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))
