"""What is counted as reports come in is what counting afresh gives; a report costs the same in a gang of any size."""

from __future__ import annotations

import random
import sys
from dataclasses import fields
from types import FrameType
from typing import Any

import pytest

from muster.daemon.coordinator.core import events as e
from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.events import Silence
from muster.daemon.coordinator.core.states import Phase
from muster.daemon.coordinator.core.tallies import Tallies
from muster.daemon.coordinator.core.tally import Tally
from muster.daemon.coordinator.rehearsal import Rehearsal

HOW_FAR = ("quiet_at", "many_until", "marked", "_ranks", "_by_fabric")
"""What says how far counting has come, not what was counted."""


def _counts(tally: Tally) -> dict[str, Any]:
    return {f.name: getattr(tally, f.name) for f in fields(Tally) if f.name not in HOW_FAR}


class Recounted(Rehearsal):
    """Counts everything afresh after each event."""

    def post(self, event: e.Event) -> None:
        super().post(event)
        core = self.core
        afresh = Tallies(core.ledger, core.sight)
        assert core.tallies.out == afresh.out
        for gang in core.ledger.gangs.values():
            assert _counts(core.tallies.of(gang)) == _counts(afresh.of(gang)), event
            assert core.tallies.of(gang).by_fabric(gang) == afresh.of(gang).by_fabric(gang)
        for node in self.actors:
            assert core.tallies.homes(node) == afresh.homes(node)


FAULTS = ("crash", "power_off", "pause", "signal", "kill_rank", "kill_agent", "restart_coordinator", "accuse")


@pytest.mark.parametrize("seed", range(30))
def test_counting_as_it_comes_is_counting_afresh(seed: int) -> None:
    chance = random.Random(seed)
    world = Recounted(chance.randint(2, 5), chance.randint(0, 3), durable_dir="/d", max_failures=99)
    for fault in chance.choices(FAULTS, k=3):
        pause = world.now + chance.uniform(1, 4)
        world.run_until(lambda p=pause: world.now >= p or _idle(world), 100)  # type: ignore[misc]
        if not _idle(world):
            _strike(world, fault, chance)
    end = world.now + 15
    world.run_until(lambda: world.now >= end or _idle(world), 100)


def _idle(world: Rehearsal) -> bool:
    return world.gang.final or world.gang.phase is Phase.REQUEUED


def _strike(world: Rehearsal, fault: str, chance: random.Random) -> None:
    node = chance.choice([name for name, actor in world.actors.items() if actor.answers and actor.agent])
    if fault == "restart_coordinator":
        world.restart_coordinator()
    elif fault == "accuse":
        witness = chance.choice(sorted(world.actors))
        world.post(e.NeighbourAccused("g", witness, node, Silence.CLOSED))
    else:
        getattr(world, fault)(node)


def _steps(core: Core, event: e.Event, now: float) -> int:
    """Lines and turns of loops that a decision takes."""
    count = 0

    def trace(frame: FrameType, what: str, _: object) -> Any:
        nonlocal count
        count += what == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        core.decide(event, now)
    finally:
        sys.settrace(before)
    return count


def _costs(nodes: int) -> list[int]:
    """Of a report, a heartbeat, an agent's return and a node daemon's, in a gang of `nodes` nodes that trains."""
    world = Rehearsal(nodes, 1)
    world.run_until(lambda: world.gang.stepped == 1 and world.core.sight.gang("g").step > 2)
    core, now = world.core, world.now
    status = core.sight.gang("g").agents["n1"].status
    attach = e.AgentAttached("g", "n1", 1, 0, "a1", "n1:9", False, "s1", status)
    events = [
        e.AgentReported("g", "n1", "a1", status),
        e.AgentHeard("g", "n1"),
        attach,
        e.NodeAttached("n1", "boot", "d1", "n1:7071"),
    ]
    for event in events:
        core.decide(event, now)  # what is counted once is counted now
    return [_steps(core, event, now) for event in events]


def test_an_event_costs_the_same_in_a_gang_of_any_size() -> None:
    assert _costs(8) == _costs(40)


def test_a_fence_of_many_nodes_costs_each_answer_the_same() -> None:
    def cost(nodes: int) -> int:
        world = Rehearsal(nodes, 1)
        world.run_until(lambda: world.gang.stepped == 1)
        world.kill_rank("n2", 1)
        assert world.gang.phase is Phase.RECOVERING
        core = world.core
        answers = [e.AgentReported("g", n, "a1", e.Status(fenced=1)) for n in ("n0", "n1")]
        core.decide(answers[0], world.now + 0.6)
        return _steps(core, answers[1], world.now + 0.6)

    assert cost(8) == cost(40)
