"""The measurement of a link between two agents, on loopback: real sockets, and a peer that answers as an agent does."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from muster.daemon.agent.link_meter import ENDING_S, LinkMeter, interface_of, rated_bytes_per_s
from muster.v1.agent_pb2 import MeasureOrder
from muster.v1.peer_pb2 import SinkReply, SinkRequest

ORDER = MeasureOrder(number=3, node="n2", peer_address="127.0.0.1:1")


def meter(node: str, ending_s: float = ENDING_S) -> LinkMeter:
    return LinkMeter("g", node, "127.0.0.1", None, most_bytes=8 << 20, ending_s=ending_s)


class Peer:
    """The stub of an agent on n2."""

    def __init__(self, meter: LinkMeter) -> None:
        self.meter = meter
        self.replies: list[SinkReply] = []
        self.token = b""

    async def OpenSink(self, request: SinkRequest, timeout: float) -> SinkReply:  # as gRPC names it
        assert (request.gang_id, request.node) == ("g", "n1")
        self.replies.append(await self.meter.open_sink())
        reply = SinkReply()
        reply.CopyFrom(self.replies[-1])
        reply.token = self.token or reply.token
        return reply


def stub_for(peer: Any) -> Any:
    return lambda node, address: peer if (node, address) == ("n2", "127.0.0.1:1") else None


async def test_the_receiver_counts_what_came() -> None:
    receiver, sender = (meter(node) for node in ("n2", "n1"))
    for _ in range(2):  # the sink is free again
        found = await sender.measure(ORDER, stub_for(Peer(receiver)))
        assert (found.number, found.error) == (3, "")
        assert 0 < found.bytes <= (8 << 20) + (1 << 20)
        assert 0 < found.seconds < 10


async def test_a_connection_without_the_token_is_told_nothing() -> None:
    peer = Peer(meter("n2"))
    peer.token = b"x" * 16
    found = await meter("n1").measure(ORDER, stub_for(peer))
    assert found.bytes == 0
    assert found.error.startswith("n1 can't send to n2: ")


async def test_one_transfer_at_a_time() -> None:
    receiver = meter("n2", ending_s=0.01)
    reply = await receiver.open_sink()
    assert (await receiver.open_sink()).refused == "n2 takes in another transfer: try again"
    found = await meter("n1").measure(ORDER, stub_for(Peer(receiver)))
    assert found.error == "n2 takes in another transfer: try again"
    with socket.create_connection(("127.0.0.1", reply.port)):
        pass  # ends the wait


async def test_an_agent_that_can_not_be_called_is_named() -> None:
    class Gone:
        async def OpenSink(self, request: SinkRequest, timeout: float) -> SinkReply:  # as gRPC names it
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, details="refused")

    found = await meter("n1").measure(ORDER, stub_for(Gone()))
    assert found.error == "n2 does not answer n1: refused"

    class Closed:
        async def OpenSink(self, request: SinkRequest, timeout: float) -> SinkReply:  # as gRPC names it
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            return SinkReply(port=port, token=b"y" * 16)

    async with asyncio.timeout(60):
        found = await meter("n1").measure(ORDER, stub_for(Closed()))
    assert found.error == "n1 can't send to n2: Connection refused"


def test_the_speed_of_an_adapter_is_known_and_that_of_a_virtual_interface_is_not(tmp_path: Path) -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.77") == interface_of("no address") == ""
    folder = tmp_path / "sys/class/net/lo"
    folder.mkdir(parents=True)
    (folder / "speed").write_text("100000\n")
    assert rated_bytes_per_s("127.0.0.1", tmp_path) == 0.0
    (folder / "device").mkdir()
    assert rated_bytes_per_s("127.0.0.1", tmp_path) == 12.5e9
    assert rated_bytes_per_s("::ffff:127.0.0.1", tmp_path) == 12.5e9
    for text in ("-1", "", "fast"):
        (folder / "speed").write_text(text)
        assert rated_bytes_per_s("127.0.0.1", tmp_path) == 0.0


def test_the_interface_of_an_address_of_ipv6(tmp_path: Path) -> None:
    (tmp_path / "if_inet6").write_text("20010db8000000000000000000000005 02 40 00 80     ib0\n")
    assert interface_of("2001:db8::5", tmp_path) == "ib0"
    assert interface_of("2001:db8::6", tmp_path) == ""
    assert interface_of("2001:db8::5", tmp_path / "none") == ""
