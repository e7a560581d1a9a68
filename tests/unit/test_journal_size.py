"""What a user's requests add to the journal: a spec is stored once, and what an agent says is cut."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.turn.state_updates import apply
from muster.daemon.coordinator.services import job_specs
from muster.daemon.testing.scripted_agent import ScriptedAgent
from muster.daemon.testing.scripted_world import ScriptedWorld, spec
from muster.daemon.transport.channel import open_channel
from muster.v1 import api_pb2, api_pb2_grpc

SECRET = "correct-horse-battery-staple"


def _rows(world: ScriptedWorld, columns: str, table: str = "facts") -> list[tuple[str, ...]]:
    with closing(sqlite3.connect(world.folder / "journal.db")) as db:
        return db.execute(f"SELECT {columns} FROM {table} ORDER BY position").fetchall()


async def test_the_journal_holds_the_spec_of_a_registered_job_once(world: ScriptedWorld) -> None:
    async with open_channel(world.address, world.credentials) as channel:
        request = api_pb2.RegisterRequest(gang_id="g1", slurm_job_id=1, spec=spec(env={"TOKEN": SECRET}))
        await api_pb2_grpc.MusterStub(channel).Register(request)
    found = _rows(world, "name, json, text, cause")
    assert [name for name, *_ in found] == ["GangRegistered"]
    [(_, json, text, cause)] = found
    assert SECRET in json
    assert SECRET not in text
    assert cause.startswith("GangSubmitted {")
    assert SECRET not in cause


def test_the_durable_state_holds_what_views_show_of_a_spec() -> None:
    wire = spec(env={"TOKEN": SECRET}, run_dir="/run/train")
    event = job_specs.gang_submitted("g1", 1, 1000, wire)
    state = DurableState()
    apply(state, facts.GangRegistered("g1", 1, 1000, "train", event.spec, event.spec_json), 1.0)
    assert SECRET not in state.dump()
    assert state.gangs["g1"].account.shown_spec == '{"run_dir":"/run/train"}'
    assert state.gangs["g1"].account.spec_chars == len(event.spec_json)


async def test_a_status_that_leads_to_a_fact_is_not_kept_whole(world: ScriptedWorld) -> None:
    """Each start of an agent is a fact. Its cause holds the status of the agent, which can have 4 MiB."""
    agent = ScriptedAgent("n1", spec(), world.credentials)
    for number in range(10_000):
        agent.status.heard_ms[f"{number:0200}"] = 1
    await agent.open()
    world.agents["n1"] = agent
    world.tasks.add(asyncio.create_task(agent.attach(world.address)))
    [joined] = await world.wait_for_facts(facts.MemberJoined)
    assert len(joined.cause) < 5000
    assert joined.cause.startswith("AgentAttached {")
