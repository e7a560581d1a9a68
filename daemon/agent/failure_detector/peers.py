"""Channels to the other agents of the gang, and the services that this agent offers to them.

Callers of PeerService must have the uid of the gang's owner, which is this process's uid (`refuse_other_users`), and
name this gang: an agent of the owner's other job may call an address that its peer had before. ProbeService answers
every caller with a credential. Both follow `muster.daemon.transport.authority_table`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from muster.checkpoint.store.checkpoint_service import CheckpointService
from muster.daemon.agent.failure_detector.version_check import VersionCheck
from muster.daemon.host import clock
from muster.daemon.transport import authority_table, call_binding
from muster.daemon.transport.authority_table import CallerKind
from muster.daemon.transport.calls.call_refused import CallRefused
from muster.daemon.transport.calls.call_share import CallShare
from muster.daemon.transport.channel import credential_metadata, make_server, open_channel, unavailable_error
from muster.daemon.transport.identity import Credentials, IdentityUnavailable, current_method
from muster.daemon.transport.job_limits import MAX_NAME_CHARS
from muster.daemon.transport.reachability import ProbeService
from muster.daemon.transport.server_limits import SHARD_MESSAGE_BYTES, STRANGERS_AT_AGENT, ServerLimits
from muster.daemon.transport.tls import Trust
from muster.v1 import common_pb2_grpc, peer_pb2, peer_pb2_grpc
from muster.v1.agent_pb2 import Order

if TYPE_CHECKING:
    from muster.v1.peer_pb2_grpc import PeerServiceAsyncStub

_Context = Any
OpenSink = Callable[[], Awaitable[peer_pb2.SinkReply]]
"""Awaits one transfer that measures a link, or says why not."""
_REPORT_ANSWERED_S = 10.0


@dataclass(frozen=True, slots=True)
class AgentIdentity:
    """Which agent this is. `uid`: the gang's owner."""

    gang: str
    node: str
    incarnation: str
    uid: int


def refuse_other_users(identity: AgentIdentity, method: str, uid: int) -> str:
    """Why `uid` may not call `method` of this agent; empty: it may. Asked before the call's message is read."""
    kind = CallerKind.OWNER if uid == identity.uid else CallerKind.OTHER_USER
    return "" if authority_table.may_call(method, [kind]) else f"uid {uid} is not the owner of this gang"


class PeerChannels:
    """One channel per agent of `gang`, opened at the first use.

    plain_text: the site says that connections are plain text. Otherwise there is no channel at all before
        `use_authorities`: nobody could be asked to prove a name.
    """

    def __init__(self, credentials: Credentials, gang: str, *, plain_text: bool) -> None:
        self._credentials = credentials
        self._gang = gang
        self._plain_text = plain_text
        self._trust: Trust | None = None
        self._authorities = b""
        self._channels: dict[tuple[str, str], grpc.aio.Channel] = {}
        self._old_channels: list[grpc.aio.Channel] = []

    @property
    def trust(self) -> Trust | None:
        """Whom to take for another agent; None: connections are plain text.

        Raises:
            IdentityUnavailable: connections use TLS, and the coordinator has sent no certificate yet.
        """
        if self._trust is None and not self._plain_text:
            raise IdentityUnavailable("this agent has no certificate yet, so it calls no other agent")
        return self._trust

    def use_authorities(self, authorities: bytes) -> None:
        """From now on, take for another agent who has a certificate of these authorities (PEM).

        If they are others than before, new calls use new channels. Calls under way go on: no peer seems to be gone.
        """
        if authorities == self._authorities:
            return
        self._authorities, self._trust = authorities, Trust(lambda: authorities)
        self._old_channels += self._channels.values()
        self._channels.clear()

    def stub_for(self, node: str, address: str) -> PeerServiceAsyncStub:
        """Return a stub for the agent on `node`, at `address` ("host:port"). Nothing is sent before the first call.

        Raises:
            grpc.aio.AioRpcError: UNAVAILABLE: there is no certificate yet.
        """
        return peer_pb2_grpc.PeerServiceStub(self._channel(node, address))

    async def open_link(self, node: str, address: str, first: peer_pb2.LinkPing) -> Any:
        """Open PeerService.Link to the agent on `node`. Return a call that takes pings and yields pongs. The first ping
        must be `first`.

        Raises:
            grpc.aio.AioRpcError: UNAVAILABLE: there is no certificate yet, or no credential can be made now.
        """
        channel = self._channel(node, address)
        metadata = await credential_metadata(channel, "/muster.v1.PeerService/Link", first)
        return peer_pb2_grpc.PeerServiceStub(channel).Link(metadata=metadata)  # type: ignore[call-arg]  # see above

    def _channel(self, node: str, address: str) -> grpc.aio.Channel:
        try:
            trust = self.trust
        except IdentityUnavailable as error:
            raise unavailable_error(error) from error
        key = (node, address)
        if key not in self._channels:
            self._channels[key] = open_channel(
                address,
                self._credentials,
                trust=trust,
                server=call_binding.name_of_agent(self._gang, node),
                receive_bytes=SHARD_MESSAGE_BYTES,
            )
        return self._channels[key]

    async def close(self) -> None:
        """Close all channels."""
        for channel in (*self._channels.values(), *self._old_channels):
            await channel.close(grace=None)
        self._channels.clear()
        self._old_channels.clear()


class PeerService(peer_pb2_grpc.PeerServiceServicer):
    """Answers the other agents of the gang. `order` returns the newest order, or None before the first."""

    def __init__(
        self,
        identity: AgentIdentity,
        shards: CheckpointService,
        order: Callable[[], Order | None],
        open_sink: OpenSink | None = None,
        versions: VersionCheck | None = None,
    ) -> None:
        self._versions = versions
        self._identity = identity
        self._shards = shards
        self._order = order
        self._open_sink = open_sink
        self._answered_at: dict[str, float] = {}

    async def Link(self, request_iterator: Any, context: _Context) -> AsyncIterator[peer_pb2.LinkPong]:
        """Answer each ping at once."""
        first = True
        async for ping in request_iterator:
            self._check_gang(ping.gang_id)
            pong = self.pong(ping)
            if first and self._versions:
                self._versions.meet_agent(ping.node, ping.release)
                pong.release.CopyFrom(self._versions.release)
            first = False
            yield pong

    def pong(self, ping: peer_pb2.LinkPing) -> peer_pb2.LinkPong:
        """The answer to `ping`."""
        order = self._order()
        generation = order.generation if order is not None else 0
        outcast = self._is_outcast(ping, order)
        if not outcast and ping.gang_id == self._identity.gang:
            self._answered_at[ping.node] = clock.monotonic()
        return peer_pb2.LinkPong(seq=ping.seq, generation=generation, outcast=outcast)

    def answered_ms(self) -> dict[str, int]:
        """Milliseconds since each former member was last answered as a member, for the last `_REPORT_ANSWERED_S`
        seconds.

        Such a node may still count this node among those that it hears, and let its ranks live. The coordinator waits
        until that can't be so.
        """
        order, now = self._order(), clock.monotonic()
        members = {member.node for member in order.members} if order is not None else set()
        ages = {node: now - at for node, at in self._answered_at.items() if node not in members}
        return {node: round(1000 * age) for node, age in ages.items() if age < _REPORT_ANSWERED_S}

    def _is_outcast(self, ping: peer_pb2.LinkPing, order: Order | None) -> bool:
        # An order older than the sender's may not name the sender yet.
        if order is None or ping.gang_id != self._identity.gang or order.generation < ping.generation:
            return False
        return bool(order.members) and all(member.node != ping.node for member in order.members)

    async def Offer(self, request: peer_pb2.ShardOffer, context: _Context) -> peer_pb2.ShardStored:
        self._check_gang(request.gang_id)
        return await self._shards.Offer(request, context)

    async def Fetch(self, request: peer_pb2.FetchRequest, context: _Context) -> AsyncIterator[peer_pb2.ShardOffer]:
        self._check_gang(request.gang_id)
        async with aclosing(self._shards.Fetch(request, context)) as offers:
            async for offer in offers:
                yield offer

    async def Stored(self, request: peer_pb2.StoredReport, context: _Context) -> peer_pb2.PeerAck:
        self._check_gang(request.gang_id)
        return await self._shards.Stored(request, context)

    async def Committed(self, request: peer_pb2.CommitNotice, context: _Context) -> peer_pb2.PeerAck:
        self._check_gang(request.gang_id)
        return await self._shards.Committed(request, context)

    async def OpenSink(self, request: peer_pb2.SinkRequest, context: _Context) -> peer_pb2.SinkReply:
        self._check_gang(request.gang_id)
        if self._open_sink is None:
            return peer_pb2.SinkReply(refused=f"{self._identity.node} takes in no transfers")
        return await self._open_sink()

    def _check_gang(self, gang: str) -> None:
        """Refuse the call of another gang's agent, unless the table allows it. `refuse_other_users` knows the uid."""
        kind = CallerKind.OWNER if gang == self._identity.gang else CallerKind.OTHER_AGENT
        if not authority_table.is_allowed(current_method(), [kind]):
            reason = f"this agent belongs to gang {self._identity.gang}, not {gang[:MAX_NAME_CHARS]}"
            raise CallRefused(grpc.StatusCode.PERMISSION_DENIED, reason)


def make_agent_server(
    credentials: Credentials,
    limits: ServerLimits,
    identity: AgentIdentity,
    service: PeerService,
    strangers: CallShare = STRANGERS_AT_AGENT,
) -> grpc.aio.Server:
    """The server of an agent, with both services. It listens nowhere yet. `strangers`: the calls of other users."""
    names = frozenset({call_binding.name_of_agent(identity.gang, identity.node)})
    refuse = partial(refuse_other_users, identity)

    def share_of(method: str, uid: int | None) -> CallShare:
        return limits.calls if uid == identity.uid else strangers

    server = make_server(credentials, limits, server_names=lambda: names, refuse=refuse, share_of=share_of)
    peer_pb2_grpc.add_PeerServiceServicer_to_server(service, server)
    probes = ProbeService(identity.node, "agent", identity.incarnation)
    common_pb2_grpc.add_ProbeServiceServicer_to_server(probes, server)
    return server


OpenLink = Callable[[str, str, peer_pb2.LinkPing], Awaitable[Any]]
"""The type of `PeerChannels.open_link`."""
