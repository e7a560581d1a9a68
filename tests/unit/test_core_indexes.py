"""The indexes, kept up to date by each report, equal a fresh count. A report costs the same in a gang of any size."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import fields
from types import FrameType
from typing import Any

import pytest

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.detection import fencing
from muster.daemon.coordinator.core.state import events
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.events import Silence
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.turn.communication import fabric_of_gang
from muster.daemon.coordinator.core.turn.gang_index import GangIndex
from muster.daemon.coordinator.core.turn.state_index import StateIndex
from muster.daemon.coordinator.core.turn.turn import GangTurn, Turn
from muster.simulator.scenario import Scenario

HOW_FAR = (
    "time_fenced_at",
    "reported_since",
    "heartbeat_check_at",
    "to_recount",
    "_ranks",
    "fabric",
    "_in_fabric_order",
    "_serial",
    "_behind",
)
"""Fields that hold the progress of counting, not a count."""
CORE = "coordinator/core/"


def _counts(index: GangIndex) -> dict[str, Any]:
    return {f.name: getattr(index, f.name) for f in fields(GangIndex) if f.name not in HOW_FAR}


def _compare(core: Core) -> None:
    """Every count equals a fresh count."""
    afresh = StateIndex(core.state, core.observed)
    assert core.index.out_of_service == afresh.out_of_service
    for gang in core.state.gangs.values():
        kept, counted, seen = core.index.of(gang), afresh.of(gang), core.observed.gang(gang.id)
        assert _counts(kept) == _counts(counted)
        assert kept.agents_behind(gang, seen) == counted.agents_behind(gang, seen)
        fabric = fabric_of_gang(gang, core.observed)
        assert kept.fabric in (None, fabric)
        assert kept.in_fabric_order(fabric) == counted.in_fabric_order(fabric)
        for node in gang.roster.members:
            assert core.index.gangs_of(node) == afresh.gangs_of(node)


def _accuse(world: Scenario, node: str) -> None:
    world.post_event(events.PeerAccused("g", "n0", node, Silence.CLOSED))


def _restart(world: Scenario, node: str) -> None:
    world.restart_coordinator()


FAULTS: tuple[Callable[[Scenario, str], None], ...] = (
    Scenario.crash, Scenario.power_off, Scenario.pause, Scenario.signal, Scenario.kill_rank, Scenario.kill_agent,
    _restart, _accuse,
)  # fmt: skip


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(n, marks=pytest.mark.long) for n in range(5, 60))])
def test_the_kept_index_equals_a_fresh_count(seed: int) -> None:
    chance = random.Random(seed)
    world = Scenario(chance.randint(2, 5), chance.randint(0, 3), durable_dir="/d", max_failures=99)
    for fault in (*chance.choices(FAULTS, k=3), None):
        moment = world.now + (chance.uniform(1, 6) if fault else 15.0)
        while not _idle(world) and (at := world.world.schedule.next_time()) is not None and at < moment:
            world.world.schedule.step()
            _compare(world.core)
        alive = [name for name, machine in world.machines.items() if machine.powered and not machine.frozen]
        if fault and alive and not _idle(world):
            fault(world, chance.choice(alive))


def _idle(world: Scenario) -> bool:
    gang = world.core.state.gangs.get("g")
    return gang is not None and (gang.final or gang.phase is Phase.REQUEUED)


# -- what an event costs --


def _steps(core: Core, event: events.Event, now: float) -> int:
    """Lines of the core that a decision executes, each turn of a loop counted; garbage collection is not."""
    return _lines(lambda: core.decide(event, now))


def _lines(call: Callable[[], object]) -> int:
    count = 0

    def trace(frame: FrameType, what: str, _: object) -> Any:
        nonlocal count
        count += what == "line"
        return trace if CORE in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def _training(nodes: int) -> Scenario:
    world = Scenario(nodes, 1)
    world.run_until(lambda: world.gang.newest.stepped_generation == 1 and world.core.observed.gang("g").step_number > 2)
    return world


def _costs(nodes: int) -> list[int]:
    """Of what happens all the time in a gang of `nodes` nodes that trains: a report, heartbeats, an agent that comes
    back and one that goes, a node daemon's return, Slurm's answer."""
    world = _training(nodes)
    core, now = world.core, world.now
    status = core.observed.gang("g").agents["n1"].status
    happening = [
        events.AgentReported("g", "n1", "n1-r0", status),
        events.AgentHeartbeat("g", "n1"),
        events.NodeHeartbeat("n1"),
        events.AgentAttached("g", "n1", 1, 0, "n1-r0", "n1:9", False, "s1", status),
        events.AgentDisconnected("g", "n1", "n1-r0"),
        events.AgentAttached("g", "n1", 1, 0, "n1-r0", "n1:9", False, "s1", status),
        events.NodeAttached("n1", "boot1", "d1", "n1:7071"),
        events.SlurmAnswered("g", 99, None),
    ]
    for event in happening:
        core.decide(event, now)  # what is counted once is counted now
    return [_steps(core, event, now) for event in happening]


def test_an_event_costs_the_same_in_a_gang_of_any_size() -> None:
    assert _costs(8) == _costs(40)


def test_a_fence_of_many_nodes_costs_each_answer_the_same() -> None:
    def cost(nodes: int) -> int:
        world = _training(nodes)
        world.kill_rank("n2")
        world.run_until(lambda: world.gang.phase is Phase.RECOVERING)
        answers = [
            events.AgentReported("g", n, f"{n}-r0", events.AgentStatus(fenced_generation=1)) for n in ("n0", "n1")
        ]
        world.core.decide(answers[0], world.now)
        return _steps(world.core, answers[1], world.now)

    assert cost(8) == cost(40)


def test_after_fencing_by_time_a_report_costs_the_same_in_a_gang_of_any_size() -> None:
    def cost(nodes: int) -> int:
        world = Scenario(nodes, 0, pool_nodes=1)  # nobody is in the pool: it waits
        world.run_until(lambda: world.gang.newest.stepped_generation == 1)
        world.power_off("n1")
        world.run_until(lambda: world.gang.phase is Phase.RECOVERING)
        world.run_for(5.0)
        core = world.core
        core.decide(events.AgentReported("g", "n2", "n2-r0", core.observed.gang("g").status("n2")), world.now)
        gang_turn = GangTurn(Turn(core.state, core.observed, core.index, world.now), world.gang)
        assert gang_turn.index.time_fenced_at <= world.now
        gang_turn.index.reported_since.add("n2")
        return _lines(lambda: fencing.ranks_ended_at(gang_turn))

    assert cost(8) == cost(40)


def test_an_arrival_costs_the_same_in_a_gang_of_any_size() -> None:
    def cost(nodes: int) -> int:
        core = Core(DurableState(), 0.0)
        core.decide(events.GangSubmitted("g", 1, 1000, "job", events.GangSpec(nodes, 0), "{}"), 0.0)
        arrivals = [
            events.AgentAttached("g", f"n{i}", 1, 0, "i", f"n{i}:9", i == 0, f"s{i % 2}", events.AgentStatus())
            for i in range(nodes - 1)
        ]
        return [_steps(core, event, 1.0) for event in arrivals][-1]

    assert cost(8) == cost(40)
