"""Probes: the coordinator tells an answering process from a mute one, an ended one and an unreachable node."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from muster.daemon.coordinator.core.state import events
from muster.daemon.coordinator.core.state.events import Silence
from muster.daemon.coordinator.core.turn.turn import ProbeRequest
from muster.daemon.coordinator.shell.agent_streams import AgentOutbox, AgentStreams
from muster.daemon.coordinator.shell.probes import Prober
from muster.daemon.testing.scripted_agent import ScriptedAgent
from muster.daemon.testing.scripted_world import spec
from muster.daemon.transport.call_binding import name_of_agent
from muster.daemon.transport.identity import Credentials, IdentityUnavailable, Proof, SecretCredentials
from muster.daemon.transport.reachability import Probed, Reachability, probe, try_connection


@pytest.fixture
def credentials(tmp_path: Path) -> SecretCredentials:
    return SecretCredentials.create(tmp_path / "secret")


@pytest_asyncio.fixture
async def agent(credentials: SecretCredentials) -> AsyncIterator[ScriptedAgent]:
    """An agent that answers probes."""
    made = ScriptedAgent("n1", spec(), credentials)
    await made.open()
    yield made
    await made.die()


def _probed(address: str, node: str) -> Probed:
    """The agent of gang g1 on `node`."""
    return Probed(address, node, name_of_agent("g1", node))


async def test_a_probe_of_an_agent_that_answers(agent: ScriptedAgent, credentials: Credentials) -> None:
    assert await probe(_probed(agent.address, "n1"), credentials, 2.0) is None


async def test_a_probe_of_a_process_that_has_ended(agent: ScriptedAgent, credentials: Credentials) -> None:
    await agent.die()
    assert await probe(_probed(agent.address, "n1"), credentials, 2.0) is Reachability.REFUSED


async def test_a_probe_of_a_process_that_does_not_answer(credentials: Credentials) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:  # the kernel accepts, and no process reads
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        assert await probe(_probed(address, "n1"), credentials, 0.3) is Reachability.ACCEPTED


@contextmanager
def full(listening: socket.socket) -> Iterator[None]:
    """A listener with a full backlog drops packets, as a cut link does."""
    with ExitStack() as callers:
        for _ in range(4):
            caller = callers.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(listening.getsockname())
        yield


async def test_a_probe_that_no_kernel_answers(credentials: Credentials) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listening, full(listening):
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        assert await probe(_probed(address, "n1"), credentials, 0.3) is Reachability.NO_ANSWER


async def test_a_probe_over_a_link_that_is_repaired_in_time(agent: ScriptedAgent, credentials: Credentials) -> None:
    """The packets of the first ping are lost, and the kernel would retransmit them too late."""
    host, port = agent.address.rsplit(":", 1)
    forwarding: set[Any] = set()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        forwarding.add(asyncio.current_task())
        with ExitStack() as ends:
            ends.callback(writer.transport.abort)
            theirs, ours = await asyncio.open_connection(host, int(port))
            ends.callback(ours.transport.abort)
            await asyncio.gather(pump(reader, ours), pump(theirs, writer))

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(4096):
                writer.write(data)
        writer.close()

    with socket.create_server(("127.0.0.1", 0), backlog=0) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        with full(listening):
            asking = asyncio.ensure_future(probe(_probed(address, "n1"), credentials, 2.9))
            assert (
                await try_connection(address, 1.2) is Reachability.NO_ANSWER
            )  # the kernel retransmits after 1 s and after 3 s
        async with await asyncio.start_server(forward, sock=listening):
            assert await asking is None
            for task in forwarding:
                task.cancel()
            await asyncio.gather(*forwarding, return_exceptions=True)


async def test_the_last_answer_of_a_dying_kernel_counts(credentials: Credentials) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listening:
        listening.setblocking(False)
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        asking = asyncio.ensure_future(probe(_probed(address, "n1"), credentials, 1.0))
        accepted, _ = await asyncio.get_running_loop().sock_accept(listening)
        with accepted, full(listening):
            assert await asking is Reachability.NO_ANSWER


async def test_a_probe_without_an_address(credentials: Credentials) -> None:
    assert await probe(_probed("", "n1"), credentials, 2.0) is Reachability.NO_ANSWER


async def test_a_port_that_is_too_large_is_not_taken_for_another(
    agent: ScriptedAgent, credentials: Credentials
) -> None:
    host, _, port = agent.address.rpartition(":")
    probed = _probed(f"{host}:{int(port) + 65536}", "n1")
    assert await probe(probed, credentials, 2.0) is Reachability.NO_ANSWER


async def test_a_probe_of_an_address_that_another_node_has_now(agent: ScriptedAgent, credentials: Credentials) -> None:
    assert await probe(_probed(agent.address, "n2"), credentials, 0.3) is Reachability.ACCEPTED


class NoMunge:
    """Credentials on a host whose munged is down."""

    def issue(self, payload: str) -> str:
        raise IdentityUnavailable("munged does not answer")

    def check(self, token: str) -> Proof:
        raise IdentityUnavailable("munged does not answer")


async def test_a_probe_without_credentials_is_no_evidence(agent: ScriptedAgent) -> None:
    with pytest.raises(IdentityUnavailable):
        await probe(_probed(agent.address, "n1"), NoMunge(), 2.0)


async def test_a_process_whose_own_munged_is_down_is_alive(credentials: Credentials) -> None:
    """Otherwise a node whose munged has stopped is taken for HUNG: it is drained, and its job loses it."""
    without_munged = ScriptedAgent("n1", spec(), NoMunge())
    await without_munged.open()
    assert await probe(_probed(without_munged.address, "n1"), credentials, 2.0) is None
    await without_munged.die()


async def test_every_witness_probes(agent: ScriptedAgent, credentials: Credentials) -> None:
    posted: asyncio.Queue[events.Event] = asyncio.Queue()
    streams = AgentStreams()
    witness = AgentOutbox("g1", "n2", "i")
    streams.add(witness)
    prober = Prober(credentials, streams, 3, posted.put_nowait)
    prober.start(ProbeRequest(7, "g1", "n1", ("agent", "musterd", "n2", "n3"), agent.address, "", 2.0))
    order = await witness.next_message()
    assert order
    assert (order.term, order.probe.probe_id, order.probe.node, order.probe.deadline_ms) == (3, 7, "n1", 2000)
    async with asyncio.timeout(120):
        answers = [await posted.get() for _ in range(2)]
    assert {(a.witness, a.silence) for a in answers if isinstance(a, events.ProbeAnswered)} == {
        ("agent", None),
        ("musterd", Silence.NO_ANSWER),
    }
    await prober.aclose()


@pytest.mark.parametrize("address", ["x", "..:1", "dns:///n1:1", "127.0.0.1:99999"])
async def test_a_probe_of_what_is_no_address_is_answered(credentials: Credentials, address: str) -> None:
    """The attack: an agent's address that can't be parsed. A probe without an answer stays open for 60 s."""
    posted: asyncio.Queue[events.Event] = asyncio.Queue()
    prober = Prober(credentials, AgentStreams(), 1, posted.put_nowait)
    prober.start(ProbeRequest(1, "g", "n1", ("agent",), address, "", 0.2))
    async with asyncio.timeout(60):
        answer = await posted.get()
    assert isinstance(answer, events.ProbeAnswered)
    assert answer.silence is Silence.NO_ANSWER
    await prober.aclose()
