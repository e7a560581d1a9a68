"""Under load the coordinator gives up those who watch, and never a node or an agent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.shell.load_shedding import NOBODY_IS_GIVEN_UP, LoadShedding, Shedding, SheddingLimits
from muster.daemon.coordinator.slurm.local_slurm import LocalSlurm
from muster.daemon.testing.scripted_world import DEADLINE_S, ScriptedWorld
from muster.daemon.transport.channel import open_channel
from muster.fabric.sources.node_reports import NodeReport
from muster.launcher.coordinator_client import CoordinatorClient
from muster.v1 import api_pb2
from muster.v1.api_pb2_grpc import MusterStub

LIMITS = SheddingLimits(refuse_s=0.25, end_s=0.5, samples=3, calm_samples=4)
NEVER_CALM = SheddingLimits(samples=3, calm_samples=10_000)
"""With these limits, the true lag of the test ends nothing."""
REF = api_pb2.GangRef(gang_id="g1")
MANY_S = 10.0
"""Seconds of lag above all limits."""


def _levels(*lags: float) -> list[Shedding]:
    shedding = LoadShedding(LIMITS)
    found = []
    for lag in lags:
        shedding.note(lag)
        found.append(shedding.level)
    return found


def test_one_late_timer_gives_nobody_up() -> None:
    assert set(_levels(0, 60, 0, 0, 60, 60, 0)) == {Shedding.NOTHING}


def test_watchers_under_way_end_after_new_ones_are_refused() -> None:
    assert _levels(0.3, 0.3, 0.3, 0.6, 0.6, 0.6)[2:] == [Shedding.NEW_WATCHERS] * 3 + [Shedding.ALL_WATCHERS]


def test_shedding_ends_after_a_calm_time_only() -> None:
    levels = _levels(0.6, 0.6, 0.6, 0.1, 0.1, 0.1, 0.2, 0.1, 0.1, 0.1, 0.1)
    assert levels[2:] == [Shedding.ALL_WATCHERS] * 8 + [Shedding.NOTHING]


def test_a_change_is_told_once() -> None:
    shedding = LoadShedding(LIMITS)
    assert [shedding.note(lag) for lag in (1, 1, 1, 1, 0, 0, 0, 0, 0)] == [
        *[False, False, True, False],
        *[False, False, False, True, False],
    ]


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[ScriptedWorld]:
    """A coordinator with one gang, whose shedding never ends by itself."""
    made = ScriptedWorld.create(tmp_path)
    made.settings["shedding"] = NEVER_CALM
    await made.start_coordinator()
    await made.start_agents(["n1", "n2"])
    await made.wait_for_facts(facts.MemberJoined, 2)
    yield made
    await made.close()


def _overload(world: ScriptedWorld, limits: SheddingLimits = NEVER_CALM) -> None:
    assert world.coordinator
    for _ in range(limits.samples):
        world.coordinator.engine.note_lag(MANY_S)


async def test_watchers_end_and_are_refused_while_nodes_and_agents_are_served(world: ScriptedWorld) -> None:
    async with open_channel(world.address, world.credentials) as channel, asyncio.timeout(DEADLINE_S):
        api = MusterStub(channel)
        watch, follow = api.Watch(REF), api.Events(api_pb2.EventsRequest(gang=REF, follow=True))
        await watch.read()
        while not (await follow.read()).sentinel:  # type: ignore[union-attr]
            pass
        _overload(world)
        again, anew = api.Watch(REF), api.Events(api_pb2.EventsRequest(gang=REF, follow=True))
        for call in (watch, follow, again, anew):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in call:
                    pass
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "try again" in str(refused.value.details())
        assert (await api.Describe(REF)).gang_id == "g1"
        await world.agents["n1"].ping(7)
        await world.agents["n1"].wait_until(lambda: 7 in world.agents["n1"].pongs)
        await world.send_signal("n3", 79)
        await world.wait_for_facts(facts.NodeJudged)


async def test_a_local_run_on_a_busy_workstation_goes_on(tmp_path: Path) -> None:
    """Its only watcher is the run itself, which would end the training."""
    world = ScriptedWorld.create(tmp_path)
    world.settings |= {"shedding": NEVER_CALM, "slurm": LocalSlurm()}
    try:
        await world.start_coordinator()
        assert world.coordinator
        _overload(world, NOBODY_IS_GIVEN_UP)
        assert world.coordinator.engine.shedding.level is Shedding.NOTHING
    finally:
        await world.close()


async def test_a_watcher_that_was_given_up_comes_again(world: ScriptedWorld) -> None:
    assert world.coordinator
    told: list[str] = []
    asked = asyncio.Event()

    def note(words: str) -> None:
        told.append(words)
        asked.set()

    async def follow() -> None:
        async for view in client.follow(REF, note):
            views.append(view)
            seen.set()

    views: list[api_pb2.GangView] = []
    seen = asyncio.Event()
    async with (
        CoordinatorClient(world.address, world.credentials, busy_pause_s=0.01) as client,
        asyncio.timeout(DEADLINE_S),
    ):
        following = asyncio.create_task(follow())
        await seen.wait()
        _overload(world)
        await asked.wait()
        seen.clear()
        for _ in range(NEVER_CALM.calm_samples):
            world.coordinator.engine.note_lag(0.0)
        await seen.wait()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    assert "too much to do" in told[0]
    assert views[-1].gang_id == "g1"


async def test_a_watcher_is_woken_for_the_nodes_of_its_gang_only(world: ScriptedWorld) -> None:
    """All nodes of a site may attach at once: each would otherwise cost a view for every watcher."""
    assert world.coordinator
    engine = world.coordinator.engine
    with engine.gang_subscribers.subscribe("g1") as woken:
        for node, wakes in (("elsewhere", False), ("n1", True)):
            for event in (
                events.NodeAttached(node, "b", "i", "127.0.0.1:1", ()),
                events.NodeDisconnected(node, "i"),
                events.NodeSignalled(node, "unfit", "a fault", "NVRM: Xid"),
                events.NodeHardwareReported(node, NodeReport()),
            ):
                woken.clear()
                engine.post(event)
                assert woken.changed.is_set() is wakes, event
