"""On which ports agents listen, with the site's range for them and without."""

from __future__ import annotations

import os
import re
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from muster.daemon.agent.listening import listen, listen_for_streams
from muster.daemon.host import clock
from muster.daemon.host.port_range import PortRange
from muster.daemon.testing.scripted_gang import Gang, scripted_gang
from muster.daemon.transport.authority import Authority
from muster.daemon.transport.channel import ListenError, make_server
from muster.daemon.transport.identity import SecretCredentials
from muster.daemon.transport.server_limits import agent_limits
from muster.daemon.transport.tls import ServerKey

WAIT_S = 60.0
"""Ends a wait that would never end."""
WAIT = "import time; time.sleep(100)"


def free_ports(count: int) -> PortRange:
    """So many free ports in a row, outside of those from which the kernel chooses."""
    while True:
        first = 20_000 + secrets.randbelow(10_000)
        try:
            for port in range(first, first + count):
                with taken(port):
                    pass
        except OSError:
            continue
        return PortRange(first, first + count - 1)


@contextmanager
def taken(port: int, family: socket.AddressFamily = socket.AF_INET) -> Iterator[None]:
    """Another process of the node listens on the port, on all addresses of one family."""
    with socket.socket(family, socket.SOCK_STREAM) as other:
        if family == socket.AF_INET6:
            other.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        other.bind(("", port))
        other.listen()
        yield


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[grpc.aio.Server]:
    made = make_server(SecretCredentials.create(tmp_path / "secret"), agent_limits(members=2))
    yield made
    await made.stop(None)


async def test_agents_share_the_range_until_it_is_used_up(server: grpc.aio.Server) -> None:
    """Two agents with TLS, each with a port for pieces in plain text. There is no port for a third one."""
    ports, key = free_ports(4), ServerKey("agent/g/n1")
    found = [
        listen(server, "0.0.0.0:0", ports, certificates) for certificates in (key.certificates, None) for _ in range(2)
    ]
    assert sorted(found) == list(range(ports.first, ports.last + 1))
    with pytest.raises(ListenError) as refused:
        listen(server, "0.0.0.0:0", ports, None)
    assert str(refused.value) == (
        f"no port is free from {ports.first} to {ports.last} on this node: muster.toml has "
        f'agent_ports = "{ports.first}-{ports.last}", and each agent needs two ports'
    )


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
async def test_a_port_that_another_process_has_is_passed_over(
    server: grpc.aio.Server, family: socket.AddressFamily, capfd: pytest.CaptureFixture[str]
) -> None:
    """A port that is taken in one family of addresses only would lead a part of the callers to somebody else."""
    ports = free_ports(2)
    with taken(ports.first, family):
        assert listen(server, "0.0.0.0:0", ports, None) == ports.last
        with pytest.raises(ListenError, match="no port is free"):
            listen(server, "0.0.0.0:0", ports, None)
    assert listen(server, "0.0.0.0:0", ports, None) == ports.first
    assert capfd.readouterr().err == ""  # gRPC logs each port that it can't have


async def test_a_port_of_the_command_line_wins_over_the_range(server: grpc.aio.Server) -> None:
    ports, own = free_ports(2), free_ports(2).first
    assert listen(server, f"127.0.0.1:{own}", ports, None) == own


async def test_without_a_range_any_free_port_is_taken(server: grpc.aio.Server) -> None:
    assert listen(server, "127.0.0.1:0", None, None) > 0


async def test_an_address_of_another_host_is_not_taken_for_a_range_that_is_used_up(server: grpc.aio.Server) -> None:
    with pytest.raises(ListenError, match="not an address of this host"):
        listen(server, "192.0.2.1:0", free_ports(2), None)


def test_every_port_is_tried_once_from_a_random_one() -> None:
    ports = PortRange(61000, 61999)
    tries = [list(ports.from_random_place()) for _ in range(20)]
    assert all(sorted(found) == list(range(61000, 62000)) for found in tries)
    assert len({found[0] for found in tries}) > 1  # of 20 random places all are the same once in 1000^19


@pytest.fixture
async def gang(tmp_path: Path) -> AsyncIterator[Gang]:
    async with scripted_gang(tmp_path) as found:
        yield found


async def test_agents_of_a_node_tell_their_gang_ports_of_the_range(gang: Gang, monkeypatch: pytest.MonkeyPatch) -> None:
    ports = free_ports(4)  # each agent has two
    (gang.folder / "muster.toml").write_text(f'agent_ports = "{ports}"\n')
    monkeypatch.setenv("MUSTER_CONFIG", str(gang.folder / "muster.toml"))
    await gang.start(2, sys.executable, "-c", WAIT)
    told = {int(gang.coordinator.agents[node].hello.peer_address.rpartition(":")[2]) for node in gang.nodes}
    assert len(told) == 2
    assert told <= set(range(ports.first, ports.last + 1))


async def test_an_agent_without_a_port_says_which_setting_to_change(
    gang: Gang, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = free_ports(2)
    (gang.folder / "muster.toml").write_text(f'agent_ports = "{ports}"\n')
    monkeypatch.setenv("MUSTER_CONFIG", str(gang.folder / "muster.toml"))
    with taken(ports.first), taken(ports.last):
        gang.launch("n0", sys.executable, "-c", WAIT)
        assert await gang.exit_code("n0") == 69
    said = (gang.folder / "n0.err").read_text()
    assert f"muster-agent: no port is free from {ports.first} to {ports.last} on this node: muster.toml has" in said
    assert "Traceback" not in said


async def test_an_agent_with_tls_listens_on_ports_of_the_range_only(
    gang: Gang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One port is for TLS, the other one for pieces in plain text. The coordinator need not answer for that."""
    ports, folder = free_ports(2), gang.folder
    (folder / "authority.pem").write_bytes(Authority.create("site").pem)
    settings = f'agent_ports = "{ports}"\nconnections = "tls"\ntls_authority = "{folder}/authority.pem"\n'
    (folder / "muster.toml").write_text(settings)
    monkeypatch.setenv("MUSTER_CONFIG", str(folder / "muster.toml"))
    gang.address = "127.0.0.2:1"  # with a secret file, what is no loopback address of the settings has TLS
    gang.launch("n0", sys.executable, "-c", WAIT)
    end = clock.monotonic() + WAIT_S
    while len(found := listening_ports(gang)) < 2:
        assert clock.monotonic() < end, (folder / "n0.err").read_text()
    assert found == {ports.first, ports.last}


def listening_ports(gang: Gang) -> set[int]:
    """The TCP ports on which the agent of n0 listens, as the kernel says."""
    try:
        descriptors = Path(f"/proc/{gang.agent_pid('n0')}/fd")
        links = [os.readlink(descriptor) for descriptor in descriptors.iterdir()]
    except (OSError, IndexError):  # it has just started
        return set()
    inodes = {found[1] for link in links if (found := re.fullmatch(r"socket:\[(\d+)\]", link))}
    rows = [row.split() for table in ("tcp", "tcp6") for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == LISTENING and row[9] in inodes}


LISTENING = "0A"
"""The state of a socket that listens, in /proc/net/tcp."""


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize(
    ("host", "reached"),
    [
        ("0.0.0.0", ["127.0.0.1", "::1"]),
        ("", ["127.0.0.1", "::1"]),
        ("127.0.0.1", ["127.0.0.1"]),
        ("[::1]", ["::1"]),
    ],
)
def test_streams_are_taken_at_the_addresses_of_both_families(host: str, reached: list[str]) -> None:
    if not _has_ipv6():
        reached = [address for address in reached if ":" not in address]
    if not reached:
        pytest.skip("this host has no IPv6")
    with listen_for_streams(host, None, backlog=4) as listener:
        for address in reached:
            with socket.create_connection((address, listener.getsockname()[1]), timeout=60):
                listener.accept()[0].close()


def test_streams_take_a_port_of_the_range_and_say_when_none_is_free() -> None:
    ports = free_ports(2)
    first, second = (listen_for_streams("127.0.0.1", ports, backlog=1) for _ in range(2))
    assert {first.getsockname()[1], second.getsockname()[1]} == {ports.first, ports.last}
    with pytest.raises(ListenError, match=f"no port is free from {ports.first} to {ports.last}"):
        listen_for_streams("127.0.0.1", ports, backlog=1)
    first.close()
    second.close()
