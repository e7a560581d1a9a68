"""A second, healthy node's ranks move after a loss only where that saves more than the transfer of its state takes."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from muster.daemon.coordinator.core.recovery import generation_start
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.events import AgentStatus, GangSpec, Shard, Version
from muster.daemon.coordinator.core.turn import placement
from muster.daemon.coordinator.core.turn.communication import communicating_seats
from muster.daemon.coordinator.core.turn.turn import GangTurn, Turn
from muster.daemon.coordinator.services import conversion
from muster.fabric.placement.maps.refill import STEPS_UNTIL_NEXT_LOSS, MovePrice
from muster.simulator.environment.site_network import network_of
from muster.simulator.scenario import Scenario
from muster.v1 import agent_pb2

PAIRS = {"n0": "s0", "n3": "s0", "n1": "s1", "n4": "s1", "n2": "s2", "n5": "s2"}
"""Six nodes on three leaves. Two leaves carry a tensor group of two nodes each, the third has two spares."""


def lost_one(world: Scenario) -> tuple[list[str], list[str]]:
    """The nodes before and after the loss of the first one."""
    world.run_until(lambda: world.gang.newest.stepped_generation == 1)
    before = [seat.node for seat in world.gang.roster.seats]
    world.run_until(lambda: world.core.observed.gang("g").step_number >= 6)
    world.crash(before[0])
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    return before, [seat.node for seat in world.gang.roster.seats]


def moved(before: list[str], after: list[str]) -> list[int]:
    return [seat for seat, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]


def test_the_other_node_of_a_group_moves_with_it_where_that_pays() -> None:
    world = Scenario(4, 2, tensor=2, fabric=network_of(PAIRS))
    before, after = lost_one(world)
    assert moved(before, after) == [0, 1]
    assert {PAIRS[node] for node in after[:2]} == {"s2"}
    (_, second) = world.facts(facts.GenerationStarted)
    assert second.version is not None
    assert {source.node for source in second.sources if source.rank == 1} == {before[1]}  # its old node still has it


def test_a_doubtful_spare_takes_no_ranks_of_a_healthy_node() -> None:
    world = Scenario(4, 2, tensor=2, fabric=network_of(PAIRS))
    world.run_until(lambda: world.gang.newest.stepped_generation == 1)
    spare = world.gang.roster.spares[0].node
    world.precursor(spare, "record")
    before, after = lost_one(world)
    assert moved(before, after) == [0]
    assert after[0] != spare


def test_while_crashes_are_not_attributed_only_the_node_on_which_they_were_is_left() -> None:
    world = Scenario(4, 2, tensor=2, fabric=network_of(PAIRS))
    world.run_until(lambda: world.gang.newest.stepped_generation == 1)
    before = [seat.node for seat in world.gang.roster.seats]
    world.kill_rank(before[0])
    world.run_until(lambda: world.is_running(2))
    world.kill_rank(before[0])
    world.run_until(lambda: world.gang.newest.stepped_generation == 3)
    after = [seat.node for seat in world.gang.roster.seats]
    assert world.gang.roster.members[before[0]].removed
    assert moved(before, after) == [0]


@pytest.mark.parametrize(("size", "seats"), [(1e6, [0, 1]), (1e18, [0])])
def test_the_size_of_the_state_decides(size: float, seats: list[int]) -> None:
    fabric = network_of(PAIRS).topologies[0].fabric
    before = ["n0", "n3", "n1", "n4"]
    groups = communicating_seats(GangSpec(4, 2, tensor=2))
    after = placement.refill_seats(fabric, before, fabric.nodes - {"n0"}, 4, groups=groups, price=MovePrice(size))
    assert after is not None
    assert moved(before, after) == seats


def price_of(world: Scenario) -> MovePrice | None:
    turn = Turn(world.core.state, world.core.observed, world.core.index, world.now)
    return generation_start.price_of_second_move(GangTurn(turn, world.gang))


def report(world: Scenario, node: str, shards: Iterable[Shard]) -> None:
    world.core.observed.gang("g").agents[node].status = AgentStatus(shards=tuple(shards))


def test_the_price_is_the_newest_state_of_the_node_that_has_most() -> None:
    world = Scenario(2, 1, fabric=network_of({"n0": "s0", "n1": "s0", "n2": "s1"}))
    world.run_until(lambda: world.gang.newest.stepped_generation == 1)
    for node in ("n0", "n1", "n2"):
        report(world, node, ())
    assert price_of(world) is None
    old, new = Version(1, 1), Version(1, 2)
    report(world, "n0", [Shard(0, old, True, "", size=900), Shard(0, new, True, "", size=100)])
    report(
        world,
        "n1",
        [Shard(1, new, True, "", size=40), Shard(2, new, True, "", size=70), Shard(0, new, False, "", size=500)],
    )
    found = price_of(world)
    assert found is not None
    assert (found.state_size, found.unready) == (110, frozenset())


def test_steps_until_the_next_loss_follow_from_the_gangs_size_and_pace() -> None:
    world = Scenario(2, 1, ranks_per_node=1)
    world.run_until(lambda: world.core.observed.gang("g").step_number >= 6)
    found = price_of(world)
    assert found is not None
    step_s = world.core.observed.gang("g").pace.median_step_s
    assert found.most_saved == step_s > 0
    assert found.steps == pytest.approx(6_300 * 3600 * 8 / 2 / step_s)
    assert found.steps > STEPS_UNTIL_NEXT_LOSS


def test_the_size_of_a_shard_comes_from_the_agent() -> None:
    message = agent_pb2.AgentStatus()
    message.shards.add(rank=1, bytes=2**40, digest="d", tier=agent_pb2.TIER_OWN)
    (shard,) = conversion.status(message, ()).shards
    assert shard.size == 2**40
