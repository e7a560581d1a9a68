"""What one caller with a valid credential can cost through its stream: memory, time of others, lines of the log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.state.stored_names import stored_class
from muster.daemon.coordinator.services.caller_limits import BURST as BURST_OF_AGENTS
from muster.daemon.coordinator.services.caller_limits import INTERVAL_S, FactRate
from muster.daemon.coordinator.services.stream_reading import MessageRate, read_messages
from muster.daemon.coordinator.shell.agent_streams import MAX_WAITING_PROBES, AgentOutbox
from muster.daemon.host import clock
from muster.daemon.testing.scripted_agent import ScriptedAgent
from muster.daemon.testing.scripted_world import DEADLINE_S, ScriptedWorld, spec
from muster.daemon.transport.calls.call_refused import CallRefused
from muster.daemon.transport.channel import credential_metadata, open_channel
from muster.daemon.transport.server_limits import COORDINATOR, StreamLimits, coordinator_share
from muster.v1 import agent_pb2 as pb
from muster.v1 import agent_pb2_grpc, api_pb2, api_pb2_grpc, node_pb2, node_pb2_grpc

BURST = 50
PAUSED = StreamLimits(messages_per_s=1e-6, burst=BURST)
"""After BURST messages a stream is read on after a million seconds."""


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[ScriptedWorld]:
    """A job of three nodes runs in Slurm. No coordinator has started yet."""
    made = ScriptedWorld.create(tmp_path)
    yield made
    await made.close()


async def _outbox(stream: AgentOutbox) -> list[pb.CoordinatorMessage]:
    """All messages that wait. Closes the stream."""
    stream.close()
    found = []
    while (message := await stream.next_message()) is not None:
        found.append(message)
    return found


async def test_what_waits_for_an_agent_that_does_not_read_is_bounded() -> None:
    """The attack: an agent pings without reading the answers."""
    stream = AgentOutbox("g1", "n1", "a")
    for number in range(1000):
        stream.put(pb.CoordinatorMessage(pong=pb.AgentPing(seq=number)))
        stream.put(pb.CoordinatorMessage(order=pb.Order(serial=number)))
        stream.put(pb.CoordinatorMessage(probe=pb.ProbeOrder(node="n2", probe_id=number)))
    order, probe, pong = await _outbox(stream)
    assert (order.order.serial, probe.probe.probe_id, pong.pong.seq) == (999, 999, 999)


async def test_probes_of_many_nodes_do_not_fill_an_outbox() -> None:
    stream = AgentOutbox("g1", "n1", "a")
    for number in range(1000):
        stream.put(pb.CoordinatorMessage(probe=pb.ProbeOrder(node=f"n{number}", probe_id=number)))
    found = [message.probe.probe_id for message in await _outbox(stream)]
    assert found == list(range(1000 - MAX_WAITING_PROBES, 1000))


async def _ping(world: ScriptedWorld, node: str, seqs: range) -> None:
    """Ping, and wait for each answer."""
    agent = world.agents[node]
    async with asyncio.timeout(DEADLINE_S):
        for seq in seqs:
            await agent.ping(seq)
            await agent.wait_until(lambda seq=seq: seq in agent.pongs)  # type: ignore[misc]


async def test_a_flood_is_read_slowly_and_nobody_else_waits(world: ScriptedWorld) -> None:
    """The attack: an agent sends pings as fast as it can."""
    world.settings["stream_limits"] = PAUSED
    await world.start_coordinator()
    await world.start_agents(["n1", "n2"])
    await world.wait_for_facts(facts.MemberJoined, 2)
    flooder = world.agents["n1"]
    for seq in range(5 * BURST):  # what the window of a stream takes
        await flooder.ping(seq)
    await _ping(world, "n2", range(BURST // 2))
    assert flooder.pongs
    assert max(flooder.pongs) < BURST
    assert [stream.done() for stream in world.streams_of("n1")] == [False]


async def _attach_once(world: ScriptedWorld, incarnation: str) -> bool:
    """Attach an agent on n1 until its first order, then close. False: the attach is refused."""
    agent = ScriptedAgent("n1", spec(), world.credentials, batch_host=True, incarnation=incarnation)
    await agent.open()
    try:
        return await _is_ordered(world, agent)
    finally:
        await agent.die()


async def _is_ordered(world: ScriptedWorld, agent: ScriptedAgent) -> bool:
    stream = asyncio.create_task(agent.attach(world.address))
    ordered = asyncio.create_task(agent.wait_until(lambda: bool(agent.orders)))
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.wait({stream, ordered}, return_when=asyncio.FIRST_COMPLETED)
        if not ordered.done():
            ordered.cancel()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stream
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            return False
        agent.close_stream()
        await asyncio.gather(stream, return_exceptions=True)
        while world.coordinator and world.coordinator.engine.streams.get("g1", "n1"):  # noqa: ASYNC110  # see below
            await asyncio.sleep(0)  # one turn of the loop: the coordinator notes the end of the stream in this loop
    return True


async def test_new_agents_of_one_node_write_a_limited_number_of_facts(world: ScriptedWorld) -> None:
    """The attack: an owner attaches and detaches in a loop, as another agent each time. Honest reconnects are free."""
    await world.start_coordinator()
    began = clock.monotonic()
    found = [await _attach_once(world, str(number)) for number in range(2 * BURST_OF_AGENTS)]
    allowed_later = int((clock.monotonic() - began) / INTERVAL_S)
    assert found[:BURST_OF_AGENTS] == [True] * BURST_OF_AGENTS
    assert sum(found[BURST_OF_AGENTS:]) <= allowed_later
    written = _facts_but_of_slurm(world)
    last = max(number for number, attached in enumerate(found) if attached)
    assert all([await _attach_once(world, str(last)) for _ in range(2 * BURST_OF_AGENTS)])
    assert _facts_but_of_slurm(world) == written


def _facts_but_of_slurm(world: ScriptedWorld) -> list[str]:
    """The facts so far, in words, without what Slurm said of the job: it is asked every two seconds."""
    assert world.coordinator
    records = world.coordinator.engine.journal.history("", 0, 10_000)
    return [record.text for record in records if record.name != stored_class(facts.JobChanged)]


def test_a_node_may_be_started_anew_once_a_minute_for_ever() -> None:
    rate = FactRate()
    for minute in range(10_000):
        rate.note("n1", "n1", 60.0 * minute)
    for _ in range(BURST_OF_AGENTS - 1):
        rate.note("n1", "n1", 60.0 * 9_999)
    with pytest.raises(CallRefused, match="n1 has attached as a new process 20 times"):
        rate.note("n1", "n1", 60.0 * 9_999)
    rate.note("n2", "n2", 60.0 * 9_999)


async def _say(*sizes: int) -> AsyncIterator[node_pb2.NodeMessage]:
    for size in sizes:
        yield node_pb2.NodeMessage(signal=node_pb2.Signal(text="x" * size))


async def test_messages_above_the_rate_wait_and_none_is_lost() -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    messages = _say(*[0] * (BURST + 3))
    found = [message async for message in read_messages(messages, PAUSED, sleep)]
    assert len(found) == BURST + 3
    assert [round(wait / 1e6) for wait in waits][-3:] == [1, 2, 3]


def test_a_message_costs_by_its_size_and_time_pays() -> None:
    rate = MessageRate(StreamLimits(messages_per_s=10.0, burst=2, bytes_per_message=100), 0.0)
    assert rate.note(0, 0.0) == 0.0
    assert rate.note(300, 0.0) == pytest.approx(0.3)
    assert rate.note(0, 0.3) == pytest.approx(0.1)
    assert [rate.note(0, 100.0) for _ in range(2)] == [0.0, 0.0]  # a long pause gives a burst, and no more
    assert rate.note(0, 100.0) == pytest.approx(0.1)


def test_a_gang_with_short_steps_is_never_slowed() -> None:
    """Ranks with steps of 20 ms: a status each 0.25 s. During a suspicion: a ping each 0.25 s, and probe results."""
    rate = MessageRate(StreamLimits(), 0.0)
    status_bytes = 128 * 1024  # more than 8 ranks and their shards need
    for tick in range(4 * 3600):
        assert rate.note(status_bytes, tick / 4) == 0.0
        assert rate.note(100, tick / 4) == 0.0
    assert MessageRate(StreamLimits(), 0.0).note(COORDINATOR.message_bytes, 0.0) == 0.0


def test_a_node_with_hundreds_of_ranks_is_never_slowed() -> None:
    """The largest status of an honest agent, four times a second: 1,024 ranks, shards, ends of stderr."""
    rate = MessageRate(StreamLimits(), 0.0)
    for tick in range(4 * 3600):
        assert rate.note(1024 * 1024, tick / 4) == 0.0
        assert rate.note(100, tick / 4) == 0.0


def test_a_suspicion_of_a_large_gang_is_never_slowed() -> None:
    """All probe orders that can wait for an agent are answered at once, and its other messages follow."""
    rate = MessageRate(StreamLimits(), 0.0)
    assert [rate.note(100, 0.0) for _ in range(MAX_WAITING_PROBES)] == [0.0] * MAX_WAITING_PROBES
    assert rate.note(1024 * 1024, 0.0) == 0.0


def test_largest_messages_as_fast_as_they_are_read_leave_most_of_a_second_to_others() -> None:
    """The attack: an owner sends statuses of 1 MiB. One of them takes up to 50 ms to read, check and convert."""
    rate, now, read = MessageRate(StreamLimits(), 0.0), 0.0, 0
    while now < 600.0:
        now += rate.note(1024 * 1024, now)
        read += 1
    assert read < 600 * 7


@pytest.mark.parametrize("service", ["AgentService", "NodeService"])
@pytest.mark.parametrize("says_hello", [False, True], ids=["nothing", "hello only"])
async def test_a_stream_that_says_nothing_ends(world: ScriptedWorld, service: str, says_hello: bool) -> None:
    """Half-open connections, and callers that only hold a place."""
    world.settings.update(
        stream_limits=StreamLimits(silent_s=0.05),
        heartbeat_s=0.01,
        share_of=lambda method: replace(coordinator_share(method), first_message_s=DEADLINE_S if says_hello else 0.05),
    )
    await world.start_coordinator()
    if says_hello and service == "AgentService":
        await world.start_agents(["n1"])
        [stream] = world.streams_of("n1")
        world.tasks.discard(stream)
        ended: Any = stream
    else:
        ended = _hold_open(world, service, says_hello)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ended
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert (caught.value.details() or "").startswith("no message for" if says_hello else "the first message")


async def _hold_open(world: ScriptedWorld, service: str, says_hello: bool) -> None:
    async with open_channel(world.address, world.credentials) as channel:
        stubs = {"AgentService": agent_pb2_grpc.AgentServiceStub, "NodeService": node_pb2_grpc.NodeServiceStub}
        stub: Any = stubs[service](channel)  # type: ignore[no-untyped-call]
        hello = node_pb2.NodeMessage(hello=node_pb2.NodeHello(node="n3", incarnation="d"))
        call = stub.Attach(metadata=await credential_metadata(channel, f"/muster.v1.{service}/Attach", hello))
        if says_hello:
            await call.write(hello)
        async for _ in call:
            pass


def _flood_of_facts(world: ScriptedWorld) -> None:
    """Write 8 MiB of the job's facts: far more than the buffers of a connection hold."""
    assert world.coordinator
    engine = world.coordinator.engine
    records = engine.journal.append([facts.PhaseChanged("g1", Phase.GATHERING, "x" * 4096)] * 1000, 1e6, "y" * 4096)
    engine.publish(records)


async def _read_to_end(call: Any) -> None:
    while await call.read():
        pass


@pytest.mark.parametrize("live", [False, True], ids=["history", "live"])
async def test_a_client_that_reads_no_events_loses_its_stream_and_what_waits_for_it(
    world: ScriptedWorld, live: bool
) -> None:
    """The attack: a client on a real connection asks for events and never reads them."""
    world.settings["stream_limits"] = StreamLimits(unread_s=0.2)
    await world.start_coordinator()
    await world.start_agents(["n1"])
    await world.wait_for_facts(facts.MemberJoined)
    assert world.coordinator
    subscribers = world.coordinator.engine.journal_subscribers
    if not live:
        _flood_of_facts(world)
    async with open_channel(world.address, world.credentials) as channel:
        stub: Any = api_pb2_grpc.MusterStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Events(api_pb2.EventsRequest(gang=api_pb2.GangRef(slurm_job_id=1), follow=True))
        async with asyncio.timeout(DEADLINE_S):
            await call.read()
            if live:
                while not (await call.read()).sentinel:
                    pass
                _flood_of_facts(world)
            assert subscribers.count == 1
            while subscribers.count:  # noqa: ASYNC110  # see below
                await asyncio.sleep(0)  # one turn of the loop: the coordinator ends the stream in this loop
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await _read_to_end(call)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert caught.value.details() == "no message was read for 0.2 s: open another stream"


async def test_an_agent_that_reads_no_orders_loses_its_stream(world: ScriptedWorld) -> None:
    """The attack: an agent sends statuses on a real connection, and never reads what the coordinator answers."""
    world.settings["stream_limits"] = StreamLimits(unread_s=0.2)
    await world.start_coordinator()
    assert world.coordinator
    streams = world.coordinator.engine.streams
    agent = ScriptedAgent("n1", spec(), world.credentials, batch_host=True)
    await agent.open()
    async with open_channel(world.address, world.credentials) as channel, asyncio.timeout(DEADLINE_S):
        stub: Any = agent_pb2_grpc.AgentServiceStub(channel)  # type: ignore[no-untyped-call]
        hello = pb.AgentHello(
            gang_id="g1", slurm_job_id=1, node="n1", incarnation="a", peer_address=agent.address, spec=spec()
        )
        first = pb.AgentMessage(hello=hello)
        call = stub.Attach(metadata=await credential_metadata(channel, "/muster.v1.AgentService/Attach", first))
        await call.write(first)
        await call.write(pb.AgentMessage(status=pb.AgentStatus()))
        await call.read()
        while stream := streams.get("g1", "n1"):
            stream.put(pb.CoordinatorMessage(order=pb.Order(reason="x" * 32768)))
            await asyncio.sleep(0)  # one turn of the loop, in which the coordinator sends
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _read_to_end(call)
    await agent.die()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert (caught.value.details() or "").startswith("no message was read for 0.2 s")
