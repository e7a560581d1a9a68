"""A coordinator that can't write its journal stops and says so; it acts on no fact that is not in the journal."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.journal.journal import JournalError
from muster.daemon.testing.scripted_world import NODES, ScriptedWorld
from muster.node_health import NodeHealth

NO_ROOM = "CREATE TRIGGER full BEFORE INSERT ON facts BEGIN SELECT RAISE(ABORT, 'database or disk is full'); END"

NO_ROOM_FOR_NODE_HEALTH = NO_ROOM.replace("ON facts BEGIN", "ON facts WHEN NEW.name = 'NodeJudged' BEGIN")
"""There is room for the registration of a node daemon, and none for the facts that follow from its signal."""


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[ScriptedWorld]:
    """A job of three nodes runs in Slurm; no coordinator yet."""
    made = ScriptedWorld.create(tmp_path)
    yield made
    await made.close()


def _alter(world: ScriptedWorld, sql: str) -> None:
    db = sqlite3.connect(world.folder / "journal.db")
    with db:
        db.execute(sql)
    db.close()


async def test_an_order_is_not_sent_when_its_facts_could_not_be_written(world: ScriptedWorld) -> None:
    await world.start_coordinator()
    await world.start_agents(NODES)
    await world.wait_for_duty("RUN 1", ["n1", "n2"])
    await world.wait_for_facts(facts.GenerationStarted)
    coordinator, orders_before = await world.running_coordinator(), len(world.agents["n2"].orders)
    _alter(world, NO_ROOM)
    await world.agents["n1"].end_ranks(-9)
    with pytest.raises(JournalError, match=r"can't write the journal .*journal\.db: database or disk is full"):
        await coordinator.wait()
    assert not coordinator.engine.running
    await world.stop_coordinator()
    assert len(world.agents["n2"].orders) == orders_before
    assert world.agents["n2"].duty == "RUN 1"
    # There is room again: the next start continues from the end of the journal.
    _alter(world, "DROP TRIGGER full")
    await world.start_coordinator()
    await world.wait_for_duty("RUN 2", ["n1", "n2"])


async def test_a_signal_that_could_not_be_written_is_not_confirmed(world: ScriptedWorld) -> None:
    await world.start_coordinator()
    _alter(world, NO_ROOM_FOR_NODE_HEALTH)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await world.send_signal("n1", 79)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert refused.value.details() == "the coordinator is stopping: it did not process the last message"
    assert world.coordinator
    with pytest.raises(JournalError, match="disk is full"):
        await world.coordinator.wait()
    await world.stop_coordinator()
    # The daemon still has the signal and sends it again to the next coordinator.
    _alter(world, "DROP TRIGGER full")
    await world.start_coordinator()
    await world.send_signal("n1", 79)
    assert world.coordinator.engine.core.state.node("n1").health is NodeHealth.UNFIT
