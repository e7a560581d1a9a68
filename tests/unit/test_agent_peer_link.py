"""A link to another agent that goes away."""

from __future__ import annotations

import asyncio
import gc
import os
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from muster.daemon.agent.failure_detector.peer_link import LinkCallbacks, LinkEndpoints, PeerLink
from muster.daemon.agent.failure_detector.peers import AgentIdentity, PeerChannels, PeerService, make_agent_server
from muster.daemon.transport.channel import bind
from muster.daemon.transport.identity import SecretCredentials
from muster.daemon.transport.server_limits import agent_limits
from muster.v1.peer_pb2 import LinkPing


async def test_a_peer_that_goes_away_is_told_of_and_leaves_nothing_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    credentials = SecretCredentials.create(tmp_path / "secret")
    before, keeper = asyncio.all_tasks(), _no_keeper()
    identity = AgentIdentity("g", "n1", "a", os.getuid())
    service = PeerService(identity, keeper, lambda: None)
    server = make_agent_server(credentials, agent_limits(members=2), identity, service)
    address = f"127.0.0.1:{bind(server, '127.0.0.1:0')}"
    await server.start()
    channels, answered, closed = PeerChannels(credentials, "g", plain_text=True), asyncio.Event(), asyncio.Event()
    hooks = LinkCallbacks(lambda: 0, lambda node, pong: answered.set(), lambda node: closed.set())
    link = PeerLink(LinkEndpoints("g", "n0", "n1", address), channels.open_link, hooks)
    async with asyncio.timeout(120):
        await answered.wait()
        await server.stop(None)
        await closed.wait()
    link.stop()
    await channels.close()
    mine = asyncio.all_tasks() - before
    await asyncio.wait(mine, timeout=60)
    gc.collect()
    assert not [task for task in mine if not task.done()]
    assert not [record for record in caplog.records if record.name == "asyncio"]


class Refused:
    """A call that is refused in the very turn in which its reader is cancelled: gRPC raises its error then."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()

    def __aiter__(self) -> Refused:
        return self

    async def __anext__(self) -> Any:
        self.begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "refused") from None

    async def write(self, ping: object) -> None:
        pass

    def cancel(self) -> None:
        pass


async def test_a_link_that_is_stopped_as_its_call_is_refused_ends() -> None:
    before, call = asyncio.all_tasks(), Refused()

    async def open_link(node: str, address: str, first: LinkPing) -> Any:
        return call

    link = PeerLink(
        LinkEndpoints("g", "n0", "n1", "127.0.0.1:1"),
        open_link,
        LinkCallbacks(lambda: 0, lambda *_: None, lambda *_: None),
    )
    await call.begun.wait()
    link.stop()
    mine = asyncio.all_tasks() - before
    await asyncio.wait(mine, timeout=60)
    assert not [task for task in mine if not task.done()]


def _no_keeper() -> Any:
    return None
