"""Measures the link to another agent's node: one short transfer of bytes that mean nothing, because a user asks for it.

The coordinator orders the sender, and the sender asks the receiver's PeerService for a sink: a port that takes one
connection for some seconds, and a token that the connection must begin with. So both sides have proved who they are
before any byte flows, although the bytes themselves are plain text. They are nothing but zeros.

A transfer is bounded on both sides, whatever the other one does: `MOST_BYTES` and `SEND_S` at the sender, `RECEIVE_S`
at the receiver, and one transfer at a time at each. The receiver counts, from the first bytes to the last, so what
waits in the sender's buffers does not count. Threads move the bytes: no heartbeat waits for them.

Each side also says what the link is rated for: the negotiated speed of its network interface, which the kernel shows to
every user. Virtual interfaces (veth, tap) show made-up numbers, so only adapters and bonds of them count. What can't be
read is not known.
"""

from __future__ import annotations

import asyncio
import fcntl
import hmac
import ipaddress
import re
import secrets
import selectors
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio

from muster.daemon.agent import listening
from muster.daemon.host import clock
from muster.daemon.host.port_range import PortRange
from muster.daemon.preflight.processor_wait import ProcessorWait
from muster.daemon.transport.channel import ListenError
from muster.daemon.transport.site_config import split_address
from muster.v1 import peer_pb2
from muster.v1.agent_pb2 import LinkMeasurement, MeasureOrder

if TYPE_CHECKING:
    from muster.v1.peer_pb2_grpc import PeerServiceAsyncStub

MOST_BYTES = 256 << 20
"""Bytes of one transfer at most: 20 ms of a link of 100 Gb/s."""
SEND_S = 0.5
"""Seconds for which the sender fills the link at most."""
RECEIVE_S = 3.0
"""Seconds from the first byte after which the receiver has counted enough: buffers before a slow link empty slowly."""
CONNECT_S = 5.0
"""Seconds within which the sender must connect."""
ENDING_S = 1.5
"""Seconds that a request waits for the transfer before it, which may have been answered and not closed yet."""
ANSWER_S = CONNECT_S + RECEIVE_S
"""Seconds after which the sender gives the transfer up."""
_BLOCK_BYTES = 1 << 20
_TOKEN_BYTES = 16
_COUNT = struct.Struct("!Qd?d")
"""The receiver's answer: bytes, seconds, whether other processes wanted its cores, and the speed of its interface."""
_SIOCGIFADDR = 0x8915
"""The ioctl that reads an interface's IPv4 address (linux/sockios.h)."""
_MBIT = re.compile(r"[0-9]{1,8}")

StubFor = Callable[[str, str], "PeerServiceAsyncStub"]
"""Returns a stub for the agent on a node at an address."""


class LinkMeter:
    """One agent's part in measurements.

    Args:
        gang, node: the gang and the node of this agent.
        host: the local address to listen on, as of the agent's server.
        ports: the site's ports for agents; None: any free one.
        most_bytes: of one transfer.
        ending_s: for how long a new transfer waits for the end of another one.
    """

    def __init__(
        self,
        gang: str,
        node: str,
        host: str,
        ports: PortRange | None,
        most_bytes: int = MOST_BYTES,
        ending_s: float = ENDING_S,
    ) -> None:
        self._gang, self._node, self._host, self._ports = gang, node, host, ports
        self._most_bytes, self._ending_s = most_bytes, ending_s
        self._receiving: asyncio.Task[None] | None = None

    async def open_sink(self) -> peer_pb2.SinkReply:
        """Awaits one transfer, or says why not: this node takes in another one, or no port is free."""
        if self._receiving is not None:
            await asyncio.wait({self._receiving}, timeout=self._ending_s)
        if self._receiving is not None and not self._receiving.done():
            return peer_pb2.SinkReply(refused=f"{self._node} takes in another transfer: try again")
        try:
            listener = listening.listen_for_streams(self._host, self._ports, backlog=1)
        except ListenError as error:
            return peer_pb2.SinkReply(refused=f"{self._node}: {error}")
        token = secrets.token_bytes(_TOKEN_BYTES)
        self._receiving = asyncio.create_task(asyncio.to_thread(_receive, listener, token, self._most_bytes))
        return peer_pb2.SinkReply(port=listener.getsockname()[1], token=token)

    async def measure(self, order: MeasureOrder, stub_for: StubFor) -> LinkMeasurement:
        """Sends to the node of the order. Never raises: the answer says what went wrong."""
        try:
            stub = stub_for(order.node, order.peer_address)
            sink = await stub.OpenSink(peer_pb2.SinkRequest(gang_id=self._gang, node=self._node), timeout=CONNECT_S)
            if sink.refused:
                return LinkMeasurement(number=order.number, error=sink.refused)
            host = split_address(order.peer_address)[0]
            found = await asyncio.to_thread(_send, host, sink.port, sink.token, self._most_bytes)
        except grpc.aio.AioRpcError as error:
            words = error.details() or error.code().name
            return LinkMeasurement(number=order.number, error=f"{order.node} does not answer {self._node}: {words}")
        except OSError as error:
            words = error.strerror or str(error) or "it takes too long"
            return LinkMeasurement(number=order.number, error=f"{self._node} can't send to {order.node}: {words}")
        found.number = order.number
        return found


def _receive(listener: socket.socket, token: bytes, most_bytes: int) -> None:
    """Takes one connection, counts what comes, and answers with the count. A connection without the token gets none."""
    with listener, suppress(OSError):  # the sender sees that no answer comes
        listener.settimeout(CONNECT_S)
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(RECEIVE_S)
            if not hmac.compare_digest(_read_exactly(connection, _TOKEN_BYTES), token):
                return
            cores = ProcessorWait()
            total, seconds = _count(connection, most_bytes)
            connection.sendall(_COUNT.pack(total, seconds, cores.is_shared(), _rated(connection)))
            connection.shutdown(socket.SHUT_WR)
            _drain(connection)


def _read_exactly(connection: socket.socket, size: int) -> bytes:
    """The next `size` bytes, or fewer if the sender ends."""
    found = b""
    while len(found) < size and (part := connection.recv(size - len(found))):
        found += part
    return found


def _count(connection: socket.socket, most_bytes: int) -> tuple[int, float]:
    """Bytes and seconds from the first bytes to the last ones. The first ones only start the clock."""
    buffer = bytearray(_BLOCK_BYTES)
    if not connection.recv_into(buffer):
        return 0, 0.0
    started = ended = clock.monotonic()
    total = 0
    while ended - started < RECEIVE_S and total < most_bytes:
        try:
            size = connection.recv_into(buffer)
        except TimeoutError:  # nothing came for long: the clock has run on, and the link has carried nothing
            ended = clock.monotonic()
            break
        if not size:
            break
        total, ended = total + size, clock.monotonic()
    return total, ended - started


def _drain(connection: socket.socket) -> None:
    """Reads what is still on its way: to close at once would reset the connection, and the answer with it."""
    buffer, until = bytearray(_BLOCK_BYTES), clock.monotonic() + 1.0
    while clock.monotonic() < until and connection.recv_into(buffer):
        pass


def _rated(connection: socket.socket) -> float:
    """The speed of this side's interface."""
    return rated_bytes_per_s(str(connection.getsockname()[0]))


def _send(host: str, port: int, token: bytes, most_bytes: int) -> LinkMeasurement:
    """Sends for a moment. Returns what the receiver has counted, and what both sides say of themselves.

    Raises:
        OSError: the receiver can't be reached, or has not answered in time.
    """
    with socket.create_connection((host, port), timeout=CONNECT_S) as connection:
        connection.sendall(token)
        connection.setblocking(False)
        answer, cores = b"", ProcessorWait()
        block = memoryview(bytes(_BLOCK_BYTES))
        started, sent, sending = clock.monotonic(), 0, True
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE)
            while len(answer) < _COUNT.size:
                passed = clock.monotonic() - started
                if sending and (passed >= SEND_S or sent >= most_bytes):
                    sending = False
                    connection.shutdown(socket.SHUT_WR)
                    selector.modify(connection, selectors.EVENT_READ)
                if passed > ANSWER_S:
                    raise TimeoutError
                for _, events in selector.select(timeout=0.1):
                    if events & selectors.EVENT_READ:
                        part = connection.recv(_COUNT.size - len(answer))
                        if not part:
                            raise ConnectionError(0, "the receiver has closed the connection")
                        answer += part
                    elif sending:
                        sent += connection.send(block)
        received, seconds, shared, rated = _COUNT.unpack(answer)
        speeds = [speed for speed in (rated, _rated(connection)) if speed > 0]
    shared |= cores.is_shared()
    return LinkMeasurement(bytes=received, seconds=seconds, cores_shared=shared, rated=min(speeds, default=0.0))


def rated_bytes_per_s(address: str, root: Path = Path("/")) -> float:
    """Bytes a second of the interface with this IP address, in one direction; 0 if it is not known."""
    name = interface_of(address)
    folder = root / "sys/class/net" / name
    if not name or not any((folder / kind).exists() for kind in ("device", "bonding")):
        return 0.0
    with suppress(OSError, ValueError):
        text = (folder / "speed").read_text().strip()  # Mb/s; -1, or an error, while the link is down
        return int(text) * 1e6 / 8 if _MBIT.fullmatch(text) else 0.0
    return 0.0


def interface_of(address: str, proc_net: Path = Path("/proc/net")) -> str:
    """The name of the interface with this IP address; empty if no interface is found."""
    try:
        wanted = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(wanted, ipaddress.IPv6Address):
        if wanted.ipv4_mapped is None:
            return _ipv6_interface(wanted, proc_net / "if_inet6")
        wanted = wanted.ipv4_mapped
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an IPv4 address
                found = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if found[20:24] == wanted.packed:
                    return name
    return ""


def _ipv6_interface(wanted: ipaddress.IPv6Address, table: Path) -> str:
    with suppress(OSError):
        for line in table.read_text().splitlines():
            words = line.split()
            if len(words) == 6 and words[0] == wanted.packed.hex():
                return words[5]
    return ""
