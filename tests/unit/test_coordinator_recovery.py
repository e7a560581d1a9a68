"""The whole coordinator on loopback: real streams, credentials and journal; scripted agents; Slurm in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc.aio
import pytest
import pytest_asyncio

from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.journal.history import Record
from muster.daemon.coordinator.journal.journal import Journal
from muster.daemon.testing.scripted_world import DEADLINE_S, NODES, ScriptedWorld
from muster.slurm.client.states import NodeState
from muster.v1 import agent_pb2


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[ScriptedWorld]:
    """A job of three nodes runs in Slurm; no coordinator yet."""
    made = ScriptedWorld.create(tmp_path)
    yield made
    await made.close()


async def test_a_gang_gathers_runs_and_is_done(world: ScriptedWorld) -> None:
    await world.start_coordinator()
    await world.start_agents(NODES)
    await world.wait_for_duty("RUN 1", ["n1", "n2"])
    await world.wait_for_duty("HOLD 1", ["n3"])
    order = world.agents["n2"].orders[-1]
    assert [(place.rank, place.node) for place in order.places] == [(0, "n1"), (1, "n2")]
    assert (order.world_size, order.master_addr, order.master_port) == (2, "127.0.0.1", 20001)
    assert [member.node for member in order.members] == list(NODES)
    for name in ("n1", "n2"):
        await world.agents[name].step()
    await world.wait_for_facts(facts.FirstStep)
    assert world.gang.phase is Phase.RUNNING
    for name in ("n1", "n2"):
        await world.agents[name].end_ranks(0)
    await world.wait_for_duty("EXIT 1", NODES)
    assert (world.gang.phase, world.gang.exit_code) == (Phase.DONE, 0)


async def test_a_crashed_rank_is_started_again_from_memory(world: ScriptedWorld) -> None:
    await world.start_coordinator()
    await world.start_agents(NODES)
    await world.wait_for_duty("RUN 1", ["n1", "n2"])
    for rank, name in enumerate(["n1", "n2"]):
        await world.agents[name].step(5)
        await world.agents[name].report_shards(1, 5, [rank])
    await world.agents["n2"].end_ranks(-9, "Traceback\nMemoryError")
    await world.wait_for_duty("RUN 2", ["n1", "n2"])
    restore = world.agents["n1"].orders[-1].restore
    assert (restore.version.generation, restore.version.step) == (1, 5)
    assert [(s.rank, s.node, s.digest) for s in restore.sources] == [(0, "n1", "0@5"), (1, "n2", "1@5")]
    assert world.gang.recovery.recoveries[-1].cause == "rank 1 on n2 was ended by signal 9: MemoryError"
    assert world.agents["n1"].orders[-1].master_port == 20002


async def test_a_fatal_signal_swaps_the_node_and_drains_it(world: ScriptedWorld) -> None:
    await world.start_coordinator()
    await world.start_agents(NODES)
    await world.wait_for_duty("RUN 1", ["n1", "n2"])
    for rank, name in enumerate(["n1", "n2"]):
        await world.agents[name].step(5)
        await world.agents[name].report_shards(1, 5, [rank])
    await world.send_signal("n2", 79)
    await world.wait_for_duty("RUN 2", ["n1", "n3"])
    # n2 has the only copy of rank 1's shard, so n2 stays until the restore is complete.
    assert [s.node for s in world.agents["n3"].orders[-1].restore.sources] == ["n1", "n2"]
    assert "n2" in [member.node for member in world.agents["n3"].orders[-1].members]
    await world.wait_for_duty("HOLD 2", ["n2"])
    for name in ("n1", "n3"):
        await world.agents[name].step()
    await world.wait_for_duty("EXIT 2", ["n2"])
    await world.wait_for_facts(facts.SlurmCallSettled, 2)
    assert NodeState.DRAIN in world.cluster.nodes()["n2"].states
    assert "79" in world.cluster.nodes()["n2"].reason
    assert world.cluster.jobs()[1].nodes == ("n1", "n3")


async def test_a_dead_node_is_swapped_and_downed(world: ScriptedWorld) -> None:
    await world.start_coordinator()
    await world.start_agents(NODES)
    await world.wait_for_duty("RUN 1", ["n1", "n2"])
    assert world.coordinator
    world.coordinator.engine.post(events.NodeAttached("n2", "boot", "i", "127.0.0.1:1"))  # nothing listens there now
    for name in ("n1", "n3"):
        world.agents[name].unreachable["n2"] = agent_pb2.SILENCE_NO_ANSWER
    await world.agents["n2"].die()
    await world.wait_for_duty("RUN 2", ["n1", "n3"])
    await world.wait_for_facts(facts.SlurmCallSettled)
    assert world.cluster.nodes()["n2"].down
    assert world.cluster.nodes()["n2"].drained
    assert world.cluster.jobs()[1].nodes == ("n1", "n3")


# -- killed at any journal write -------------------------------------------------------------------------------------


class PowerCut(Exception):
    """Raised in place of the end of the coordinator's process."""


class CrashingJournal(Journal):
    """Crashes its coordinator at the write that reaches `position`: before the write, or after it (`written`)."""

    def __init__(self, folder: Path, position: int, written: bool) -> None:
        super().__init__(folder)
        self._dies_at, self._written = position, written

    def append(self, facts: Sequence[facts.Fact], at: float, cause: str) -> list[Record]:
        dies = self.position < self._dies_at <= self.position + len(facts)
        records = super().append(facts, at, cause) if self._written or not dies else []
        if dies:
            raise PowerCut
        return records


async def _restart_after_crashes(world: ScriptedWorld) -> None:
    """Restart the coordinator after each crash."""
    while True:
        assert world.coordinator
        try:
            await world.coordinator.wait()
        except PowerCut:
            await world.stop_coordinator()
            await world.start_coordinator()


async def _signal_until_removed(world: ScriptedWorld, node: str) -> None:
    """Send the signal on each new stream, as the node daemon does, until the node is removed."""
    while not (await world.running_coordinator()).engine.core.state.gangs["g1"].roster.members[node].removal_reason:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await world.send_signal(node, 79)


async def _run_scenario(world: ScriptedWorld) -> None:
    """Gather, run, lose n2 to a fatal signal, run, lose a rank, run, end as DONE."""
    await world.wait_for_duty("RUN 1", ["n1", "n2"])
    for rank, name in enumerate(["n1", "n2"]):
        await world.agents[name].step(5)
        await world.agents[name].report_shards(1, 5, [rank, 1 - rank])
    await _signal_until_removed(world, "n2")
    await world.wait_for_duty("RUN 2", ["n1", "n3"])
    for rank, name in enumerate(["n1", "n3"]):
        await world.agents[name].step(5)
        await world.agents[name].report_shards(2, 10, [rank, 1 - rank])
    await world.wait_for_duty("EXIT 2", ["n2"])
    await world.agents["n3"].end_ranks(-9)
    await world.wait_for_duty("RUN 3", ["n1", "n3"])
    for name in ("n1", "n3"):
        await world.agents[name].step()
        await world.agents[name].end_ranks(0)
    await world.wait_for_duty("EXIT 3", ["n1", "n3"])


FACT_COUNT = 40
"""More than the facts of the scenario: a position beyond its end is a run without a crash."""
CRASHES = [
    pytest.param(
        position,
        written,
        id=f"{'after' if written else 'before'} {position}",
        marks=[pytest.mark.long] if (position + written) % 2 else [],
    )
    for position in range(1, FACT_COUNT)
    for written in (False, True)
]
"""Each fact, before or after it is written; `make test-long` has both of each."""


@pytest.mark.parametrize(("position", "written"), CRASHES)
async def test_a_recovery_completes_after_a_crash_at_any_write(
    world: ScriptedWorld, position: int, written: bool
) -> None:
    await world.start_coordinator(CrashingJournal(world.folder, position, written))
    restarting = asyncio.create_task(_restart_after_crashes(world))
    await world.start_agents(NODES)
    try:
        async with asyncio.timeout(DEADLINE_S):
            await _run_scenario(world)
    finally:
        restarting.cancel()
        await asyncio.gather(restarting, return_exceptions=True)
    coordinator = await world.running_coordinator()
    await world.wait_for_slurm()
    assert coordinator.engine.journal.position < FACT_COUNT
    gang = coordinator.engine.core.state.gangs["g1"]
    assert (gang.phase, gang.newest.generation, gang.exit_code) == (Phase.DONE, 3, 0)
    assert [(r.generation, r.action, r.step_restored) for r in gang.recovery.recoveries] == [
        (2, "swap", 5),
        (3, "restart in place", 10),
    ]
    assert {s.node for s in gang.roster.seats} == {"n1", "n3"}
    assert NodeState.DRAIN in world.cluster.nodes()["n2"].states
    assert world.cluster.jobs()[1].nodes == ("n1", "n3")
