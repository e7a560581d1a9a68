"""The servers of a node: musterd's, and an agent's with its checkpoint service. Strangers and the owner call them.

After each input: both answer an honest caller, strangers have stored nothing, and no bug was logged.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import grpc.aio

from fuzzing.servers import calls
from fuzzing.servers.health import BugLog
from muster.checkpoint.store.checkpoint_service import CheckpointService
from muster.checkpoint.testing.no_transport import NoTransport
from muster.daemon.agent.failure_detector.peers import AgentIdentity, PeerChannels, PeerService, make_agent_server
from muster.daemon.node.daemon import make_probe_server
from muster.daemon.testing.chosen_users import ChosenUser
from muster.daemon.transport import call_binding
from muster.daemon.transport.channel import bind, open_channel
from muster.daemon.transport.server_limits import agent_limits
from muster.v1 import common_pb2, common_pb2_grpc

OWNER, OTHER = 1001, 1002
CALLERS = (None, OTHER, OWNER)
_SERVERS = (call_binding.name_of_agent("g1", "n1"), call_binding.name_of_node_daemon("n1"))
METHODS = (
    *map("/muster.v1.PeerService/{}".format, ("Link", "Offer", "Fetch", "Stored", "Committed")),
    "/muster.v1.ProbeService/Ping",
    "/muster.v1.PeerService/OpenSink",
)
"""The kept inputs name a method by its place, so a new one comes last."""


class _Node:
    """An agent of OWNER, and a musterd."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._log = BugLog()
        self._user = ChosenUser(OWNER)
        self._open = AsyncExitStack()
        self._loop.run_until_complete(self._start())

    async def _start(self) -> None:
        identity = AgentIdentity("g1", "n1", "i", OWNER)
        self._shards = CheckpointService(
            "g1", "n1", PeerChannels(self._user, "g1", plain_text=True).stub_for, NoTransport(), lambda: None
        )
        service = PeerService(identity, self._shards, lambda: None)
        agent = make_agent_server(self._user, agent_limits(members=2), identity, service)
        musterd = make_probe_server(self._user, "n1", "i")
        self._plain, self._honest = [], []
        for server, name in zip((agent, musterd), _SERVERS, strict=True):
            address = f"127.0.0.1:{bind(server, '127.0.0.1:0')}"
            await server.start()
            self._open.push_async_callback(server.stop, None)
            self._plain.append(grpc.aio.insecure_channel(address))
            self._honest.append(open_channel(address, self._user, server=name))

    def check(self, data: bytes) -> None:
        """One input."""
        self._loop.run_until_complete(self._check(data))

    async def _check(self, data: bytes) -> None:
        before, by_owner = len(self._shards.shards()), False
        for call in calls.calls_of(data, METHODS, len(CALLERS)):
            uid = CALLERS[call.caller]
            by_owner |= uid == OWNER
            user = None if uid is None else self._user.as_uid(uid)
            await calls.make(call, self._plain[0], user, _SERVERS[0])
            if call.method.endswith("/Ping"):
                await calls.make(call, self._plain[1], user, _SERVERS[1])
        for channel in self._honest:
            await self._ask(channel)
        assert by_owner or len(self._shards.shards()) == before, "a stranger has stored a shard"
        self._shards._shard_store.drop(lambda _: True, "the input has ended")
        self._log.check()

    async def _ask(self, channel: grpc.aio.Channel) -> None:
        async with asyncio.timeout(calls.DEADLINE_S):
            reply = await common_pb2_grpc.ProbeServiceStub(channel).Ping(common_pb2.PingRequest(nonce="x"))
        assert reply.nonce == "x"


_nodes: list[_Node] = []


def check(data: bytes) -> None:
    """`data` as a sequence of calls. The first input starts the servers."""
    if not _nodes:
        _nodes.append(_Node())
    _nodes[0].check(data)
