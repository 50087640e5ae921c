"""The whole program in one command: `python app.py` starts Redis, the workers and the page, and ends them again.

Composition root: it puts the parts together and knows what none of them knows, namely the others. The page opens
while the workers still load their releases.

What surprises: the data folder and the port are taken before anything is started, so that a second start says so in
one line (exit code 2) and leaves the first one alone. SIGTERM and SIGHUP end everything just as Ctrl-C does.
"""

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TextIO

import uvicorn
from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError

from clef_core.errors import ClefError, ReleaseError, SettingsError
from clef_core.release import HUB_ID, read_release, resolve_release
from clef_core.tokens import PromptTokenizer
from db import migrate
from worker.settings import Settings, load_settings
from worker.submit import Submitter
from worker.supervise import Supervisor

logger = logging.getLogger("clef")

CANNOT_START = 2
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE_S = 2
"""How long open connections may take at the end; every open tab keeps one."""


def main() -> int:
    """Run until interrupted. Returns the exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn.error").addFilter(_is_no_farewell)
    for number in ENDING_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup has it ignored
            signal.signal(number, _interrupt)
    try:
        run(load_settings())
    except KeyboardInterrupt:
        say("Clef has stopped.")
    except (ClefError, OSError, RedisError, SQLAlchemyError) as error:
        say(f"Clef cannot start: {error}")
        return CANNOT_START
    return 0


def run(settings: Settings) -> None:
    """Start what is missing, serve, and end what was started.

    Raises:
        SettingsError: another Clef or another program has the data folder or the port, or a door would stand open.
        ReleaseError: what a variant names is not a release.
    """
    settings.check_doors()
    with only_one(settings.data_dir) as lock, listen(settings.host, settings.port) as listener:
        url = address(listener)
        _write(lock, f"{url} (process {os.getpid()})")
        say(f"Clef starts. Data folder: {settings.data_dir}")
        for variant, source in settings.variants.items():
            say(f"  {variant}: {source}")
        tokenizers = load_tokenizers(settings.variants)
        migrate(settings.database_url)
        with Submitter.connect(settings) as submitter, Supervisor(settings, list(settings.variants)):
            submitter.redis.ping()
            from web.server import create_app  # Gradio takes seconds: a start that is refused answers at once

            app = create_app(submitter, tokenizers)
            say(f"Clef is at {url} — the workers still load their releases. Ctrl-C ends everything.")
            config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=GRACE_S)
            uvicorn.Server(config).run(sockets=[listener])


@contextlib.contextmanager
def only_one(data_dir: Path) -> Iterator[TextIO]:
    """Hold the data folder for this process; the file that is held says who holds it.

    Raises:
        SettingsError: another process holds it.
    """
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)  # it holds what everyone asked
    with (data_dir / "app.lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise SettingsError(
                f"it already runs on the data folder {data_dir}, at {lock.read() or 'an address not known yet'}; "
                "another one needs a CLEF_DATA_DIR and a CLEF_PORT of its own"
            ) from None
        _write(lock, "")
        yield lock


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
        SettingsError: the address is taken or not this machine's.
    """
    try:
        family, _, _, _, where = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(where, family=family, backlog=2048)
    except OSError as error:
        reason = (
            f"port {port} of {host} is taken by another program; choose another with CLEF_PORT"
            if error.errno == errno.EADDRINUSE
            else f"CLEF_HOST={host}, CLEF_PORT={port} cannot be listened on: {error.strerror}"
        )
        raise SettingsError(reason) from None


def address(listener: socket.socket) -> str:
    """The address to open in a browser."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def load_tokenizers(variants: dict[str, str]) -> dict[str, PromptTokenizer]:
    """The token counter of each variant. One whose release must come from a hub first is added when it is there.

    Raises:
        ReleaseError: a directory is not a release.
    """
    tokenizers: dict[str, PromptTokenizer] = {}

    def fetch(variant: str, source: str) -> None:
        try:
            tokenizers[variant] = PromptTokenizer.from_release(resolve_release(source))
        except ReleaseError as error:  # its worker says so on the page
            logger.warning("no token counts for %s: %s", variant, error)

    for variant, source in variants.items():
        if HUB_ID.fullmatch(source) and not Path(source).is_dir():
            threading.Thread(target=fetch, args=(variant, source), daemon=True).start()
        else:
            tokenizers[variant] = PromptTokenizer.from_release(read_release(resolve_release(source)).path)
    return tokenizers


def say(line: str) -> None:
    """Tell the person at the terminal."""
    sys.stderr.write(line + "\n")


def _write(lock: TextIO, text: str) -> None:
    lock.truncate(0)
    lock.write(text)
    lock.flush()


def _is_no_farewell(record: logging.LogRecord) -> bool:
    """False for what uvicorn logs as errors when it ends the streams of open tabs."""
    is_cancelled = record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError)
    return not is_cancelled and "graceful shutdown exceeded" not in record.getMessage()


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """End once: what ends the parts must not be interrupted in turn."""
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
