"""The core and the site's fabric: seats, buddies and witnesses follow it; a change is named and used next."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.fact_text import describe
from muster.daemon.coordinator.core.turn.communication import fabric_of_gang
from muster.daemon.coordinator.services import conversion, job_specs
from muster.exit_codes import EXIT_NO_NODES
from muster.fabric.model.fabric import Fabric
from muster.fabric.model.node import Node
from muster.fabric.sources.nesting import NodeSet, fabric_of
from muster.fabric.sources.tiers import Tiers
from muster.simulator.scenario import Scenario
from muster.v1 import common_pb2


def site(*leaves: str, details: Sequence[Node] = ()) -> Fabric:
    """One leaf for each argument, which names its nodes: "n0 n1"."""
    sets = [NodeSet(frozenset(nodes.split()), f"leaf{number}") for number, nodes in enumerate(leaves)]
    return fabric_of(sets, [node for one in sets for node in one.nodes], Tiers(), details)


def seen(*fabrics: Fabric, warnings: tuple[str, ...] = ()) -> events.FabricSeen:
    names = ("", "second", "third")
    return events.FabricSeen(tuple(
        events.TopologySeen(fabric, not number, (names[number],) if number else (), warnings)
        for number, fabric in enumerate(fabrics)
    ))  # fmt: skip


def started(world: Scenario) -> list[str]:
    generation = world.gang.newest.generation + 1
    world.run_until(lambda: world.gang.newest.stepped_generation == generation)
    return [seat.node for seat in world.gang.roster.seats]


PAIRS = ("n0 n3", "n1 n4", "n2 n5")
"""Not the leaves of `Scenario`, which are those of even and of odd nodes."""


def test_tensor_groups_follow_what_slurm_says_now() -> None:
    world = Scenario(4, 2, tensor=2, fabric=seen(site(*PAIRS)))
    seats = started(world)
    assert {frozenset(seats[:2]), frozenset(seats[2:])} <= {frozenset(pair.split()) for pair in PAIRS}
    assert world.gang.roster.members["n3"].leaf == "leaf0"


def test_the_part_of_the_gangs_nodes_is_noted_once_before_the_first_start() -> None:
    world = Scenario(3, 1, fabric=seen(site("n0 n2 x0", "n1 n3 x1", "x2")))
    started(world)
    (noted,) = world.facts(facts.FabricNoted)
    assert noted.fabric.nodes == ("n0", "n1", "n2", "n3")
    assert describe(noted) == "the network of the gang's nodes: 2 leaves"
    kinds = [type(fact) for _, fact in world.journal]
    assert kinds[kinds.index(facts.FabricNoted) + 1] is facts.GenerationStarted
    world.crash("n1")
    started(world)
    assert len(world.facts(facts.FabricNoted)) == 1


def test_a_flat_network_is_not_worth_a_fact() -> None:
    world = Scenario(3, 1, fabric=seen(fabric_of([], ["n0", "n1", "n2", "n3"], Tiers())))
    started(world)
    assert world.facts(facts.FabricNoted) == []


def test_a_change_is_named_and_the_next_placement_uses_it() -> None:
    world = Scenario(2, 2, tensor=2, fabric=seen(site("n0 n1 n2", "n3")))
    assert sorted(started(world)) == ["n0", "n1"]
    world.see_fabric(seen(site("n0 n3", "n1 n2")))
    assert world.facts(facts.FabricNoted)[-1].changes == (
        "leaf leaf0 no longer joins n0, n1, n2",
        "leaf leaf1 no longer joins n3",
        "leaf leaf0 now joins n0, n3",
        "leaf leaf1 now joins n1, n2",
    )
    assert describe(world.facts(facts.FabricNoted)[-1]).startswith("the network of the gang's nodes has changed: leaf ")
    assert world.gang.roster.members["n3"].leaf == "leaf0"
    world.crash("n1")
    assert sorted(started(world)) == ["n0", "n3"]


def test_a_switch_that_is_renamed_has_its_new_name_from_the_next_start_on() -> None:
    """Fabrics are equal whatever the names of their domains are."""
    world = Scenario(2, 0, fabric=seen(site("n0", "n1")))
    started(world)
    renamed = fabric_of(
        [NodeSet(frozenset({f"n{number}"}), f"rack{number}") for number in (0, 1)], ["n0", "n1"], Tiers()
    )
    world.see_fabric(seen(renamed))
    assert len(world.facts(facts.FabricNoted)) == 1
    world.kill_rank("n1")
    started(world)
    assert {node: member.leaf for node, member in world.gang.roster.members.items()} == {"n0": "rack0", "n1": "rack1"}
    assert world.facts(facts.FabricNoted)[-1].changes == ()


def test_groups_that_a_change_has_torn_are_named_until_the_next_change() -> None:
    traffic = (events.GroupTraffic("tensor", 1000.0, 1e9, "leaf"),)
    world = Scenario(2, 0, tensor=2, traffic=traffic, fabric=seen(site("n0 n1")))
    started(world)
    world.see_fabric(seen(site("n0", "n1")))
    words = "tensor groups of 2 nodes: 1 of 1 spans 2 leaves"
    assert describe(world.facts(facts.FabricNoted)[-1]).endswith(f"; wider than [placement] asks now: {words}")
    assert world.gang.roster.wider_groups == words
    world.see_fabric(seen(site("n0 n1")))
    assert world.gang.roster.wider_groups == ""


def test_a_change_elsewhere_is_no_news_for_the_gang() -> None:
    world = Scenario(2, 0, fabric=seen(site("n0", "n1", "x0")))
    started(world)
    world.see_fabric(seen(site("n0", "n1 x0")))
    assert len(world.facts(facts.FabricNoted)) == 1


def test_a_restarted_coordinator_has_the_fabric_of_its_gangs_before_slurm_answers() -> None:
    world = Scenario(4, 2, tensor=2, fabric=seen(site(*PAIRS)))
    before = started(world)
    world.world.fabric = None
    world.restart_coordinator()
    world.crash(before[0])
    after = started(world)
    assert {frozenset(after[:2]), frozenset(after[2:])} <= {frozenset(pair.split()) for pair in PAIRS}
    assert DurableState.load(world.core.state.dump()).gangs["g"].roster.fabric == world.gang.roster.fabric


def test_a_topology_that_can_not_be_read_leaves_the_leaves_of_the_attach_with_a_warning() -> None:
    world = Scenario(4, 0, tensor=2, fabric=events.FabricSeen(problem="slurmctld is away"))
    seats = started(world)
    assert {frozenset(seats[:2]), frozenset(seats[2:])} == {frozenset({"n0", "n2"}), frozenset({"n1", "n3"})}
    (noted,) = world.facts(facts.FabricNoted)
    assert describe(noted) == "the network of the gang's nodes: 2 leaves; WARNING: slurmctld is away"


def test_warnings_of_a_flat_network_are_named() -> None:
    flat = fabric_of([], ["n0", "n1"], Tiers())
    world = Scenario(2, 0, fabric=seen(flat, warnings=("the topology is taken as flat: it has a loop",)))
    started(world)
    (noted,) = world.facts(facts.FabricNoted)
    assert describe(noted).endswith("nodes: flat; WARNING: the topology is taken as flat: it has a loop")


def test_the_topology_is_that_of_the_jobs_partition() -> None:
    world = Scenario(2, 0, fabric=seen(site("n0 n1"), site("n0", "n1")))
    started(world)
    gang, observed = world.gang, world.core.observed
    assert len(fabric_of_gang(gang, observed).root.children) == 1
    observed.gang("g").partition = "second"
    assert len(fabric_of_gang(gang, observed).root.children) == 2
    observed.gang("g").partition = "other"
    assert len(fabric_of_gang(gang, observed).root.children) == 1


def test_buddies_and_witnesses_are_in_other_racks_and_on_other_power_feeds() -> None:
    """All nodes are on one leaf."""
    details = [Node(f"n{number}", rack=f"r{number // 2}", power_feed=f"p{number // 4}") for number in range(8)]
    world = Scenario(8, 0, fabric=seen(site(" ".join(f"n{number}" for number in range(8)), details=details)))
    started(world)
    feed = {f"n{number}": number // 4 for number in range(8)}
    for seat in world.gang.roster.seats:
        assert feed[seat.node] != feed[seat.holder]
        assert {feed[peer] for peer in seat.watched_peers} == {1 - feed[seat.node]}


def racked(*racks: str) -> Fabric:
    """All nodes on one leaf, each with a rack."""
    names = [f"n{number}" for number in range(len(racks))]
    return site(" ".join(names), details=[Node(name, rack=rack) for name, rack in zip(names, racks, strict=True)])


def test_spares_are_in_different_racks_where_the_job_asks() -> None:
    fabric = racked("r1", "r1", "r1", "r2", "r2", "r2")
    for words, count in ((("rack",), 2), ((), 1)):
        world = Scenario(4, 2, fabric=seen(fabric), spread_spares=words)
        started(world)
        assert len({fabric.node(seat.node).rack for seat in world.gang.roster.spares}) == count


def test_a_job_whose_requirement_its_nodes_can_not_keep_ends_before_its_first_rank() -> None:
    world = Scenario(3, 0, fabric=seen(racked("r1", "r1", "r1")), spread_replicas=("leaf", "require rack"))
    world.run_until(lambda: world.gang.final)
    assert (world.gang.exit_code, world.facts(facts.GenerationStarted)) == (EXIT_NO_NODES, [])
    assert world.gang.reason == (
        "[placement] requires other nodes than Slurm gave: 3 of 3 pairs of buddies share their rack"
    )


def test_a_requirement_that_a_swap_breaks_is_named_and_the_job_goes_on() -> None:
    world = Scenario(2, 1, fabric=seen(racked("r1", "r2", "r2")), spread_replicas=("require rack",))
    before = started(world)
    assert sorted(before)[0] == "n0"
    world.crash("n0")
    started(world)
    last = world.facts(facts.GenerationStarted)[-1]
    assert last.close_copies == "2 of 2 pairs of buddies share their rack"
    assert "; closer than [placement] requires: 2 of 2 pairs of buddies share their rack" in describe(last)


def test_what_is_spread_comes_from_the_jobs_spec() -> None:
    message = common_pb2.JobSpec(nodes=2, spares=1, ranks_per_node=1)
    usual = job_specs.gang_spec(message)
    assert (usual.spread_replicas, usual.spread_spares) == (("power", "rack", "leaf"), ())
    message.spreading.CopyFrom(common_pb2.Spreading(replicas=["require rack"], spares=["power", "rack"]))
    found = job_specs.gang_spec(message)
    assert (found.spread_replicas, found.spread_spares) == (("require rack",), ("power", "rack"))
    message.spreading.CopyFrom(common_pb2.Spreading())
    assert job_specs.gang_spec(message).spread_replicas == ()


@pytest.mark.parametrize("words", [["shelf"], ["prefer rack"], ["rack"] * 5])
def test_words_that_name_no_failure_domain_are_refused(words: list[str]) -> None:
    message = common_pb2.JobSpec(nodes=2, ranks_per_node=1, spreading=common_pb2.Spreading(spares=words))
    with pytest.raises(conversion.InvalidMessage, match="spreading"):
        job_specs.gang_spec(message)
