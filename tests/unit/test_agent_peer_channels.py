"""Channels to other agents: none in plain text, unless the site or the other agent says so in words."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from muster.daemon.agent.failure_detector.peers import PeerChannels
from muster.daemon.testing.scripted_world import DEADLINE_S
from muster.daemon.transport import call_binding
from muster.daemon.transport.authority import Authority
from muster.daemon.transport.channel import bind, make_server
from muster.daemon.transport.identity import IdentityUnavailable, Proof, SecretCredentials
from muster.daemon.transport.reachability import Probed, probe
from muster.daemon.transport.server_limits import agent_limits
from muster.v1 import peer_pb2, peer_pb2_grpc

OFFER = peer_pb2.ShardOffer(gang_id="g1", node="n1", rank=3)
PING = peer_pb2.LinkPing(gang_id="g1", node="n2", seq=1)


class Stranger(peer_pb2_grpc.PeerServiceServicer):
    """Listens in plain text at the address of an agent. It notes and accepts every credential."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.address = ""

    def issue(self, payload: str) -> str:
        raise AssertionError("it calls nobody")

    def check(self, token: str) -> Proof:
        self.tokens.append(token)
        server, first = call_binding.name_of_agent("g1", "n1"), OFFER.SerializeToString()
        payload = call_binding.payload_of_call("/muster.v1.PeerService/Offer", server, first)
        return Proof(os.getuid(), os.getgid(), payload)

    async def Offer(self, request: peer_pb2.ShardOffer, context: Any) -> peer_pb2.ShardStored:
        return peer_pb2.ShardStored(refused="full")


@pytest.fixture
async def stranger() -> AsyncIterator[Stranger]:
    made, names = Stranger(), frozenset({call_binding.name_of_agent("g1", "n1")})
    server = make_server(made, agent_limits(members=2), server_names=lambda: names)
    peer_pb2_grpc.add_PeerServiceServicer_to_server(made, server)
    made.address = f"127.0.0.1:{bind(server, '127.0.0.1:0')}"
    await server.start()
    yield made
    await server.stop(None)


@pytest.fixture
def credentials(tmp_path: Path) -> SecretCredentials:
    return SecretCredentials.create(tmp_path / "secret")


async def test_an_agent_calls_no_other_one_before_it_has_a_certificate(
    stranger: Stranger, credentials: SecretCredentials
) -> None:
    """The attack: an agent without a certificate yet shows its owner's credential to whoever listens."""
    channels = PeerChannels(credentials, "g1", plain_text=False)

    async def offer() -> object:
        return await channels.stub_for("n1", stranger.address).Offer(OFFER)

    for call in (offer(), channels.open_link("n1", stranger.address, PING)):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert refused.value.details() == "this agent has no certificate yet, so it calls no other agent"
    probed = Probed(stranger.address, "n1", call_binding.name_of_agent("g1", "n1"))
    with pytest.raises(IdentityUnavailable):
        await probe(probed, credentials, DEADLINE_S, channels.trust)
    await channels.close()
    assert stranger.tokens == []


async def test_an_agent_with_a_certificate_shows_no_credential_in_plain_text(
    stranger: Stranger, credentials: SecretCredentials
) -> None:
    channels = PeerChannels(credentials, "g1", plain_text=False)
    channels.use_authorities(Authority.create("the coordinator's").pem)
    with pytest.raises(grpc.aio.AioRpcError):
        await channels.stub_for("n1", stranger.address).Offer(OFFER)
    await channels.close()
    assert stranger.tokens == []


async def test_a_site_may_say_that_its_connections_are_plain_text(
    stranger: Stranger, credentials: SecretCredentials
) -> None:
    channels = PeerChannels(credentials, "g1", plain_text=True)
    assert (await channels.stub_for("n1", stranger.address).Offer(OFFER)).refused == "full"
    await channels.close()
