"""Nobody takes musterd's port while musterd restarts: real sockets, and a process of another user."""

import array
import asyncio
import contextlib
import os
import socket
import struct
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc.aio
import pytest

from muster.daemon.node.daemon import NodeDaemon, NodeSettings, Systemd
from muster.daemon.node.kept_memory.systemd_fd_store import FdStore
from muster.daemon.node.port_reservation import PortReservation
from muster.daemon.node.sensors.sensor import SensorPaths
from muster.daemon.transport.call_binding import name_of_node_daemon
from muster.daemon.transport.channel import ListenError, open_channel
from muster.daemon.transport.identity import SecretCredentials
from muster.v1 import common_pb2_grpc
from muster.v1.common_pb2 import PingRequest

DEADLINE_S = 60.0
NOBODY = 65534
RESET = struct.pack("ii", 1, 0)
"""The value of SO_LINGER with which a connection leaves nothing behind."""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")

TAKE_PORT = """
import itertools, os, socket, sys
os.setgroups([])
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[2]))
port, families = int(sys.argv[1]), {"127.0.0.1": socket.AF_INET, "0.0.0.0": socket.AF_INET, "::": socket.AF_INET6}
for (host, family), reuse_address, reuse_port in itertools.product(families.items(), (0, 1), (0, 1)):
    with socket.socket(family, socket.SOCK_STREAM) as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse_address)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, reuse_port)
        try:
            taken.bind((host, port))
            taken.listen()
        except OSError:
            continue
        print("listens on", host)
"""


class StoringSystemd:
    """Plays systemd's side: takes in the descriptors that a service stores, and gives them to its next start."""

    def __init__(self, folder: Path) -> None:
        self.notify = str(folder / "notify")
        self.stored: dict[str, int] = {}
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._line.bind(self.notify)
        self._line.setblocking(False)

    def next_start(self) -> Systemd:
        """What the service is started with the next time."""
        self._hear()
        return Systemd(self.notify, {name: os.dup(fd) for name, fd in self.stored.items()})

    def close(self) -> None:
        self._hear()
        for fd in self.stored.values():
            os.close(fd)
        self._line.close()

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                data, beside, _, _ = self._line.recvmsg(4096, socket.CMSG_SPACE(array.array("i").itemsize))
                words = dict(line.split("=", 1) for line in data.decode().splitlines())
                if "FDSTOREREMOVE" in words:
                    os.close(self.stored.pop(words["FDNAME"]))
                elif "FDSTORE" in words:
                    self.stored[words["FDNAME"]] = array.array("i", beside[0][2])[0]


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[StoringSystemd]:
    played = StoringSystemd(tmp_path)
    yield played
    played.close()


@pytest.fixture
def credentials(tmp_path: Path) -> SecretCredentials:
    return SecretCredentials.create(tmp_path / "secret")


@contextlib.asynccontextmanager
async def _musterd(folder: Path, credentials: SecretCredentials, listen: str, systemd: Systemd) -> AsyncIterator[None]:
    (folder / "kmsg").touch(mode=0o600)
    paths = SensorPaths(kmsg=folder / "kmsg")
    settings = NodeSettings("n1", "127.0.0.1:1", listen, credentials, roots=paths, systemd=systemd)
    running = asyncio.create_task(NodeDaemon(settings).run())
    try:
        await _answers(listen, credentials, running)
        yield
    finally:
        running.cancel()
        await asyncio.wait({running})
    if not running.cancelled():
        running.result()


async def _answers(listen: str, credentials: SecretCredentials, running: asyncio.Task[None]) -> None:
    """Wait until musterd answers a probe. Raises what ended it before."""
    port = listen.rpartition(":")[2]
    address, name = f"127.0.0.1:{port}", name_of_node_daemon("n1")
    async with asyncio.timeout(DEADLINE_S), open_channel(address, credentials, server=name) as channel:
        while not running.done():
            with contextlib.suppress(grpc.aio.AioRpcError):
                reply = await common_pb2_grpc.ProbeServiceStub(channel).Ping(PingRequest(nonce="x"))
                assert reply.node == "n1"
                return
    running.result()


def _free_port() -> int:
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return int(tried.getsockname()[1])


async def _takes_port(port: int) -> str:
    """Where a process of another user comes to listen on this port, however it tries."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-Ic", TAKE_PORT, str(port), str(NOBODY), stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(DEADLINE_S):
        said, _ = await process.communicate()
    assert process.returncode == 0
    return said.decode()


@needs_root
@pytest.mark.parametrize("host", ["", "127.0.0.1", "[::]"])
async def test_no_other_user_takes_the_port_while_musterd_restarts(
    tmp_path: Path, credentials: SecretCredentials, systemd: StoringSystemd, host: str
) -> None:
    port = _free_port()
    for _ in range(3):
        async with _musterd(tmp_path, credentials, f"{host}:{port}", systemd.next_start()):
            assert await _takes_port(port) == ""
        assert await _takes_port(port) == "", "musterd has ended, and its next start has not come yet"


@needs_root
async def test_what_listens_in_that_moment_without_a_reservation(tmp_path: Path) -> None:
    """The attack, where nothing stands against it."""
    assert "listens on 127.0.0.1\n" in await _takes_port(_free_port())


async def test_two_daemons_on_one_port_are_a_mistake_although_they_could_share_it(
    tmp_path: Path, credentials: SecretCredentials, systemd: StoringSystemd
) -> None:
    listen = f":{_free_port()}"
    async with _musterd(tmp_path, credentials, listen, systemd.next_start()):
        with pytest.raises(ListenError, match=f"can't listen on {listen}"):
            async with _musterd(tmp_path, credentials, listen, Systemd()):
                pass
    with pytest.raises(ListenError):  # while the first one restarts
        async with _musterd(tmp_path, credentials, listen, Systemd()):
            pass


async def test_a_restart_without_systemd_is_not_held_up_by_old_connections(
    tmp_path: Path, credentials: SecretCredentials
) -> None:
    listen = f":{_free_port()}"
    for _ in range(3):
        async with _musterd(tmp_path, credentials, listen, Systemd()):
            pass


async def test_another_address_gives_up_the_earlier_one(
    tmp_path: Path, credentials: SecretCredentials, systemd: StoringSystemd
) -> None:
    ports = _free_port(), _free_port()
    for port in ports:
        async with _musterd(tmp_path, credentials, f"127.0.0.1:{port}", systemd.next_start()):
            pass
    held = systemd.next_start().stored
    assert len(held) == 1
    with socket.create_server(("127.0.0.1", ports[0])):
        pass
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", ports[1]))
    os.close(*held.values())


async def test_the_port_is_reserved_once_the_connections_of_an_older_musterd_are_gone(
    systemd: StoringSystemd, caplog: pytest.LogCaptureFixture
) -> None:
    """An older musterd did not share its port."""
    older = socket.create_server(("127.0.0.1", 0))
    port = older.getsockname()[1]
    caller = socket.create_connection(("127.0.0.1", port))
    connection, _ = older.accept()
    older.close()
    reservation = PortReservation(f"127.0.0.1:{port}", {}, FdStore(systemd.notify))
    reservation.take()
    assert not reservation.is_held
    assert "other users could take the port while musterd restarts" in caplog.text
    for end in (connection, caller):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        end.close()
    async with asyncio.timeout(DEADLINE_S):
        await reservation.run(retry_s=0)
    assert reservation.is_held
    reservation.close()


def test_other_names_in_the_store_are_left_alone(systemd: StoringSystemd) -> None:
    other = os.memfd_create("kept")
    reservation = PortReservation(":0", {"kept-1.0": other}, FdStore(systemd.notify))
    reservation.take()
    assert not reservation.is_held
    os.close(other)  # it is still open
