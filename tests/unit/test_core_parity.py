"""Parity groups, and lost shards that the core has rebuilt from parities."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.checkpoint.redundancy.parity import Parity
from muster.daemon.coordinator.core.recovery import restore_plan, shard_sources
from muster.daemon.coordinator.core.recovery.shard_sources import Rebuildable
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.events import CombinedShards, Shard, Version
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.turn.communication import failure_domains_of
from muster.daemon.coordinator.services.conversion import InvalidMessage, status
from muster.daemon.coordinator.services.views import gang_view
from muster.daemon.coordinator.shell.orders import Orders, source_messages
from muster.fabric.sources.nesting import fabric_of_leaves
from muster.simulator.scenario import Scenario
from muster.v1.agent_pb2 import TIER_OWN, TIER_PARITY, AgentStatus, ParityStatus

VERSION = Version(1, 5)


def held(*ranks: int) -> dict[str, list[Shard]]:
    return {f"n{rank}": [Shard(rank, VERSION, primary=True, digest=f"d{rank}")] for rank in ranks}


def part(ranks: tuple[int, ...], number: int) -> CombinedShards:
    others = [rank if place != number else -1 for place, rank in enumerate(ranks)]
    digests = tuple(f"d{rank}" if rank >= 0 else "" for rank in others)
    return CombinedShards(ranks, VERSION, number, digests, tuple(9 * (rank >= 0) for rank in others))


def parts(ranks: tuple[int, ...], *numbers: int) -> dict[str, list[CombinedShards]]:
    return {f"n{ranks[number]}": [part(ranks, number)] for number in numbers}


def rebuildable(
    shards: dict[str, list[Shard]], combined: dict[str, list[CombinedShards]], leaving: Sequence[str] = ()
) -> list[Rebuildable]:
    return shard_sources.rebuildable(Parity(3), shards, combined, leaving)


def test_a_lost_shard_is_rebuilt_from_all_parts_that_it_is_in_and_all_shards_in_these() -> None:
    (found,) = rebuildable(held(0, 2, 3), parts((0, 1, 2, 3), 0, 2, 3))
    assert found.shard == Shard(1, VERSION, primary=False, digest="d1", size=9)
    assert found.nodes == ("n0", "n2", "n3")
    assert [(source.node, source.digest) for source in found.sources()] == [("n0", "d1"), ("n2", ""), ("n3", "")]
    assert rebuildable(held(0, 2), parts((0, 1, 2, 3), 0, 2, 3)) == []
    assert rebuildable(held(0, 2, 3), parts((0, 1, 2, 3), 0, 3)) == []
    assert rebuildable(held(0, 1, 2, 3), parts((0, 1, 2, 3), 0, 1, 2, 3)) == []


def test_parts_that_have_combined_other_shards_are_of_no_use() -> None:
    wrong = held(0, 2)
    wrong["n2"] = [replace(wrong["n2"][0], digest="other")]
    assert rebuildable(wrong, parts((0, 1, 2), 0, 2)) == []
    parities = parts((0, 1, 2), 0, 2)
    parities["n2"] = [replace(parities["n2"][0], digests=("d0", "other", ""))]
    assert rebuildable(held(0, 2), parities) == []
    older = {"n0": [replace(part((0, 1, 2), 0), version=Version(1, 4))], "n2": [part((0, 1, 2), 2)]}
    assert rebuildable(held(0, 2), older) == []


def test_a_node_may_hold_several_parts_of_one_parity() -> None:
    parities = {"n0": [part((0, 1, 2), 2), part((0, 1, 2), 0)]}
    (found,) = rebuildable(held(0, 2), parities)
    messages = source_messages(found.sources())
    assert [(source.node, source.parity_part) for source in messages] == [("n0", 0), ("n0", 2)]
    for lost in range(4):
        others = [rank for rank in range(4) if rank != lost]
        (found,) = rebuildable(held(*others), parts((0, 1, 2, 3), *others))
        named = [(source.node, source.parity_part) for source in source_messages(found.sources())]
        assert named == [(f"n{rank}", rank) for rank in others]


def test_a_node_that_leaves_is_used_last() -> None:
    parities = {**parts((0, 1, 2), 0, 2), "a": [part((0, 1, 2), 2)]}
    assert rebuildable(held(0, 2), parities)[0].nodes == ("n0", "a")
    assert rebuildable(held(0, 2), parities, ["a"])[0].nodes == ("n0", "n2")


@given(st.data())
def test_whatever_an_agent_reports_is_refused_or_answered(data: st.DataObject) -> None:
    """An agent is a process of the user. What it says of parts must not end the coordinator."""
    ranks = data.draw(st.lists(st.integers(0, 2), max_size=4))
    count = data.draw(st.sampled_from([len(ranks), 2]))
    digests, sizes = [["d0", "d1", "", "other"][number % 4] for number in range(count)], [9] * count
    number = data.draw(st.integers(0, 4))
    message = ParityStatus(ranks=ranks, version={"generation": 1, "step": 5}, part=number, digests=digests, bytes=sizes)
    with suppress(InvalidMessage):
        combined = status(AgentStatus(parities=[message]), ()).combined
        assert len(set(ranks)) == len(ranks) >= 2
        rebuildable(held(*data.draw(st.sets(st.integers(0, 2)))), {"n0": list(combined)})


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(3, 9))
def test_each_node_is_in_one_group_whose_nodes_share_as_few_leaves_as_possible(leaves: list[int], most: int) -> None:
    """`leaves`: how many nodes each of them has."""
    nodes = [f"l{leaf}n{number}" for leaf, count in enumerate(leaves) for number in range(count)]
    fabric = fabric_of_leaves({node: node.partition("n")[0] for node in nodes})
    groups = Parity(most).protect(nodes, failure_domains_of(fabric)).groups
    assert sorted(node for group in groups for node in group) == sorted(nodes if len(nodes) > 1 else [])
    assert {len(group) for group in groups} <= set(range(2, most + 1))
    for group in groups:
        together = [sum(node.startswith(f"l{leaf}n") for node in group) for leaf in range(len(leaves))]
        assert all(count <= -(-size // len(groups)) for count, size in zip(together, leaves, strict=True))


def test_groups_stay_with_the_newcomer_in_the_place_of_the_lost_node() -> None:
    nodes = [f"n{number}" for number in range(6)]
    fabric = fabric_of_leaves({node: "a" for node in [*nodes, "spare"]})
    groups = (("n0", "n3", "n1"), ("n4", "n2", "n5"))
    before = {node: "spare" if node == "n3" else node for node in nodes}
    ranked = list(before.values())
    apart = failure_domains_of(fabric)
    kept = Parity(3).protect(ranked, apart, groups, before).groups
    assert kept == (("n0", "spare", "n1"), ("n4", "n2", "n5"))
    assert Parity(3).protect(ranked[:5], apart, groups, None).groups != kept


def trained(nodes: int, spares: int, **spec: object) -> Scenario:
    """A gang that has committed some steps."""
    world = Scenario(nodes, spares, **{"group_nodes": 3, **spec})  # type: ignore[arg-type]
    world.run_until(lambda: world.gang.phase is Phase.RUNNING and world.core.observed.gang("g").step_number >= 5)
    return world


def test_a_lost_nodes_rank_is_rebuilt_in_the_next_generation() -> None:
    world = trained(3, 1, sharded=True)
    assert all(not seat.holders for seat in world.gang.roster.seats)
    (group,) = world.gang.restore.protection_groups
    assert sorted(group) == sorted(seat.node for seat in world.gang.roster.seats)
    lost = next(seat for seat in world.gang.roster.seats if seat.group_rank == 1).node
    world.power_off(lost)
    world.run_until(lambda: world.gang.newest.generation == 2)
    (started,) = [fact for fact in world.facts(facts.GenerationStarted) if fact.generation == 2]
    assert started.version is not None
    rank_on = {seat.node: seat.group_rank for seat in started.seats}
    ranks = tuple(rank_on[node] for node in started.protection_groups[0])
    assert [bool(source.combined_ranks) for source in started.sources] == [False, True, False]
    order = Orders(world.gang).for_node(started.seats[0].node)
    assert [list(message.nodes) for message in order.parity_groups] == [list(started.protection_groups[0])]
    of_rank = [(source.node, source.tier, bool(source.digest)) for source in order.restore.sources if source.rank == 1]
    assert {node for node, _, _ in of_rank} == set(group) - {lost}
    assert [(tier, first) for _, tier, first in of_rank] == [(TIER_PARITY, True), (TIER_PARITY, False)]
    assert all(tuple(s.parity_ranks) == ranks for s in order.restore.sources if s.tier == TIER_PARITY)
    assert {source.rank for source in order.restore.sources if source.tier == TIER_OWN} == {0, 2}
    world.run_until(lambda: world.core.observed.gang("g").step_number > started.version.step)


def test_status_names_the_nodes_of_each_parity_and_no_copies() -> None:
    world = trained(3, 1)
    view = gang_view(world.core.state, world.core.observed, world.gang, world.now).checkpoint
    assert [tuple(group.nodes) for group in view.parity_groups] == list(world.gang.restore.protection_groups)
    assert view.copies == 0


def test_a_job_that_ends_because_a_node_is_lost_has_its_last_step_written() -> None:
    world = trained(3, 0, durable_dir="/d", requeue=True)
    world.power_off(world.gang.roster.seats[1].node)
    world.run_until(lambda: bool(world.facts(facts.FlushEnded)))
    (ordered,) = world.facts(facts.FlushOrdered)
    (rebuilt,) = {source.rank for source in ordered.sources if source.combined_ranks}
    assert rebuilt == world.gang.roster.seats[1].group_rank
    assert world.gang.checkpoint.durable_version == ordered.version


def test_fewer_ranks_put_sharded_state_together_from_whole_shards_only() -> None:
    world = trained(3, 0, sharded=True, min_nodes=2)
    world.power_off(world.gang.roster.seats[2].node)
    world.run_until(lambda: world.gang.newest.generation == 2)
    (started,) = [fact for fact in world.facts(facts.GenerationStarted) if fact.generation == 2]
    assert (len(started.seats), started.version, started.sources) == (2, None, ())


def sources_by_rank(gang: Gang) -> dict[int, set[str]]:
    """The nodes that the restore plan of the running generation names for each rank's shard."""
    found: dict[int, set[str]] = {}
    for source in Orders(gang).for_node(gang.roster.seats[0].node).restore.sources:
        found.setdefault(source.rank, set()).add(source.node)
    return found


def test_fewer_replicas_get_a_lost_shard_from_a_parity_with_ranks_that_are_no_more() -> None:
    world = trained(4, 0, group_nodes=4, min_nodes=3)
    places = [seat.node for seat in world.gang.roster.seats]
    world.power_off(places[0])
    world.run_until(lambda: world.gang.newest.generation == 2)
    (started,) = [fact for fact in world.facts(facts.GenerationStarted) if fact.generation == 2]
    assert started.version is not None
    assert len(started.seats) == 3
    assert {source.rank: bool(source.combined_ranks) for source in started.sources} == {0: True, 1: False, 2: False}
    assert sources_by_rank(world.gang) == {0: set(places[1:]), **{rank: {places[rank]} for rank in (1, 2, 3)}}
    restored = started.version.step
    world.run_until(lambda: world.core.observed.gang("g").step_number > restored)
    assert world.gang.newest.generation == 2


def test_after_a_growth_a_flush_does_without_a_parity_that_combines_ranks_which_wrote_nothing() -> None:
    """Three ranks wrote the version, and a fourth one has started from it."""
    for lost, ranks, found in ((1, (0, 1, 2), [1]), (1, (0, 1, 2, 3), []), (3, (0, 1, 2, 3), [])):
        others = [rank for rank in ranks if rank != lost]
        shards, parities = held(*others), parts(ranks, *(ranks.index(rank) for rank in others))
        turn: Any = SimpleNamespace(
            gang=SimpleNamespace(
                ranks_of=lambda version: 3,
                roster=SimpleNamespace(members={}),
                spec=SimpleNamespace(redundancy=Parity(4)),
            ),
            shards_in_memory=lambda shards=shards: shards,
            combined_in_memory=lambda parities=parities: parities,
        )
        assert [one.shard.rank for one in restore_plan.with_rebuilt(turn)[1]] == found
        (rebuilt,) = restore_plan.with_rebuilt(turn, 4)[1]
        combined = shard_sources.combined_sources(shards, VERSION, rebuilt.sources(), 3, frozenset())
        assert {(source.rank, source.node) for source in combined} == {(r, f"n{r}") for r in others if r >= 3}


@pytest.mark.parametrize("fails", [False, True])
def test_fewer_ranks_go_on_from_sharded_state_that_was_rebuilt_and_flushed_before(fails: bool) -> None:
    world = trained(3, 0, sharded=True, min_nodes=2, durable_dir="/d")
    world.world.durable_storage.fails_until = 1e9 if fails else 0.0
    world.power_off(world.gang.roster.seats[2].node)
    world.run_until(lambda: world.gang.newest.generation == 2)
    (ordered,) = world.facts(facts.FlushOrdered)
    (ended,) = world.facts(facts.FlushEnded)
    (started,) = [fact for fact in world.facts(facts.GenerationStarted) if fact.generation == 2]
    assert {source.rank: bool(source.combined_ranks) for source in ordered.sources} == {0: False, 1: False, 2: True}
    assert (len(started.seats), started.version) == (2, None)
    assert bool(started.durable_path) != fails
    assert started.durable_path == ended.path
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    assert world.facts(facts.FirstStep)[-1].step == (1 if fails else ordered.version.step + 1)
