"""musterd tells systemd that it serves, and that its event loop still runs."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.daemon.node.kept_memory.systemd_fd_store import tell_systemd
from muster.daemon.node.watchdog import report_alive, watchdog_s
from muster.daemon.transport.identity import SecretCredentials


class Systemd:
    """The notification socket."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.line.bind(str(path))
        self.line.setblocking(False)

    async def hears(self) -> str:
        """The next message."""
        return (await asyncio.get_running_loop().sock_recv(self.line, 4096)).decode()


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    played = Systemd(tmp_path / "notify")
    yield played
    played.line.close()


async def test_it_serves_and_then_it_still_does(systemd: Systemd) -> None:
    telling = asyncio.create_task(report_alive(str(systemd.path), 0.03))
    assert [await systemd.hears() for _ in range(4)] == ["READY=1", "WATCHDOG=1", "WATCHDOG=1", "WATCHDOG=1"]
    telling.cancel()


async def test_without_a_watchdog_it_says_once_that_it_serves(systemd: Systemd) -> None:
    await report_alive(str(systemd.path), 0)
    assert await systemd.hears() == "READY=1"


async def test_without_systemd_nothing_is_said_and_nothing_goes_wrong(caplog: pytest.LogCaptureFixture) -> None:
    await report_alive("", 0)
    assert caplog.messages == []


def test_a_systemd_that_does_not_listen_is_named_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tell_systemd(str(tmp_path / "nobody"), "READY=1")
    assert [record.message for record in caplog.records if "systemd does not take READY=1" in record.message]


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({}, 0.0),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "42"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "43"}, 0.0),
        ({"WATCHDOG_USEC": "soon", "WATCHDOG_PID": "42"}, 0.0),
    ],
)
def test_the_watchdog_is_that_of_this_process(environ: dict[str, str], seconds: float) -> None:
    assert watchdog_s(environ, 42) == seconds


async def test_a_musterd_that_hangs_tells_nothing_more(tmp_path: Path, systemd: Systemd) -> None:
    SecretCredentials.create(tmp_path / "secret")
    (tmp_path / "kmsg").touch(mode=0o600)
    musterd = [sys.executable, "-Im", "muster.daemon.node", "--coordinator=127.0.0.1:1", "--listen=127.0.0.1:0"]
    musterd += [f"--auth=secret:{tmp_path}/secret", "--node=n1", f"--kmsg={tmp_path}/kmsg", "--memory="]
    told = {"NOTIFY_SOCKET": str(systemd.path), "WATCHDOG_USEC": "150000"}
    process = await asyncio.create_subprocess_exec(*musterd, env={**os.environ, **told})
    try:
        async with asyncio.timeout(60):
            while await systemd.hears() != "READY=1":  # before it: the socket that reserves the port
                pass
            assert [await systemd.hears() for _ in range(3)] == ["WATCHDOG=1"] * 3
            process.send_signal(signal.SIGSTOP)
            await asyncio.to_thread(os.waitid, os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            while True:  # what it had said before it was stopped
                try:
                    systemd.line.recv(4096)
                except BlockingIOError:
                    break
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):  # two of its watchdog's times
                    await systemd.hears()
            process.send_signal(signal.SIGCONT)
            assert await systemd.hears() == "WATCHDOG=1"
    finally:
        process.terminate()
        assert await process.wait() == 0
