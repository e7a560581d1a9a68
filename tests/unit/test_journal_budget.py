"""What a job and its owner may add to the journal, at a real coordinator: what it refuses, and in which words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.account import counted_bytes
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.policy.policy import Policy
from muster.daemon.testing.scripted_agent import ScriptedAgent
from muster.daemon.testing.scripted_world import DEADLINE_S, ScriptedWorld, spec
from muster.daemon.transport.channel import open_channel
from muster.v1 import api_pb2, api_pb2_grpc

JOB = api_pb2.GangRef(slurm_job_id=1)
MIB = 1024 * 1024


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[ScriptedWorld]:
    """A job of three nodes runs in Slurm. A coordinator has just started, at a site that allows little."""
    made = ScriptedWorld.create(tmp_path)
    path = tmp_path / "policy.toml"
    path.write_text("[limits]\njournal_mib_per_job = 0.25\n")
    made.settings["policy"] = Policy.load(path)
    await made.start_coordinator()
    yield made
    await made.close()


@pytest_asyncio.fixture
async def api(world: ScriptedWorld) -> AsyncIterator[Any]:
    """The public API, as the job's owner calls it."""
    async with open_channel(world.address, world.credentials) as channel:
        yield api_pb2_grpc.MusterStub(channel)


async def _refused(call: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(DEADLINE_S):
            await call
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    return caught.value.details() or ""


def _use_up(world: ScriptedWorld) -> None:
    """Count as many bytes as the job may add."""
    assert world.coordinator
    world.gang.account.journal_use.add(MIB / 4, world.coordinator.engine.clock.now())


async def _training_agents(world: ScriptedWorld) -> None:
    await world.start_agents(["n1", "n2", "n3"], durable_dir="/durable")
    await world.wait_for_duty("RUN 1", ["n1", "n2"])
    for rank, name in enumerate(["n1", "n2"]):
        await world.agents[name].step(3)
        await world.agents[name].report_shards(1, 3, [rank])
    await world.wait_for_facts(facts.FirstStep)


async def test_a_refused_request_says_why_and_when_to_ask_again(world: ScriptedWorld, api: Any) -> None:
    await _training_agents(world)
    _use_up(world)
    words = await _refused(api.Flush(JOB))
    assert words.startswith("the records of this job count 0.2")
    why, when = words.split(". Requests may use half of that: try again in ")
    assert why.endswith(" MiB in the journal, and 0.25 MiB are allowed (journal_mib_per_job)")
    assert int(when.removesuffix(" s")) > 60_000


async def test_a_job_can_be_cancelled_whatever_it_has_used(world: ScriptedWorld, api: Any) -> None:
    await _training_agents(world)
    _use_up(world)
    await api.Cancel(JOB)
    assert world.gang.phase is Phase.CANCELLED


async def test_requests_to_cancel_a_job_whose_gang_is_over_are_limited(world: ScriptedWorld, api: Any) -> None:
    """Slurm may take a while to end the job. Each request until then is a call that Slurm is owed."""
    await world.start_agents(["n1"])
    await world.wait_for_facts(facts.MemberJoined)
    _use_up(world)
    assert world.coordinator
    world.coordinator.engine.post(events.AgentReported("g1", "n1", "n1-a", events.AgentStatus()))
    assert world.gang.phase is Phase.FAILED
    assert (await _refused(api.Cancel(JOB))).endswith("; scancel 1 does the same")


async def test_no_new_agent_joins_a_job_that_has_used_up_its_part_and_a_known_one_does(world: ScriptedWorld) -> None:
    """The attack: agents that are started anew, again and again."""
    await _training_agents(world)
    _use_up(world)
    await world.agents["n3"].die()
    again = ScriptedAgent("n3", spec(), world.credentials, incarnation="again")
    await again.open()
    words = await _refused(again.attach(world.address))
    await again.die()
    assert words.startswith("no new agent may join: the job was recovered too often: the records of this job count 0.2")
    known = world.agents["n2"]
    known.close_stream()
    orders = len(known.orders)
    world.tasks.add(asyncio.create_task(known.attach(world.address)))
    async with asyncio.timeout(DEADLINE_S):
        await known.wait_until(lambda: len(known.orders) > orders)


async def test_a_record_has_no_more_bytes_than_count(world: ScriptedWorld) -> None:
    agent = ScriptedAgent("n1", spec(), world.credentials)
    agent.status.failure = agent.status.notice = "\N{GRINNING FACE}" * 10_000
    await agent.open()
    world.agents["n1"] = agent
    world.tasks.add(asyncio.create_task(agent.attach(world.address)))
    assert world.coordinator
    await world.wait_for_facts(facts.MemberJoined)
    records = world.coordinator.engine.journal.history("", 0, 1000)
    for record in records:
        stored = sum(len(text.encode()) for text in (record.gang, record.node, record.name, record.json, record.text))
        stored += len(record.cause.encode())
        if record.name != "GangRegistered":
            assert stored < counted_bytes(facts.decode(record.name, record.json), 0)
    assert max(len(record.cause.encode()) for record in records) > 4000
