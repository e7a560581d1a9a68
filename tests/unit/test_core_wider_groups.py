"""Groups that lie in more leaves or pods than their job asks are named when a generation starts."""

from __future__ import annotations

import pytest

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.events import GangSpec, GroupTraffic
from muster.daemon.coordinator.core.state.fact_text import describe
from muster.daemon.coordinator.core.turn.communication import wider_than_asked
from muster.daemon.coordinator.services.views import gang_view
from muster.fabric.model.fabric import Fabric
from muster.fabric.sources.nesting import NodeSet, fabric_of
from muster.fabric.sources.node_reports import with_nvlink_domains
from muster.fabric.sources.tiers import Tiers
from muster.launcher.output.screen import Screen
from muster.launcher.output.tables import gang_details
from muster.simulator.scenario import Scenario

NODES = [f"n{number}" for number in range(8)]


def network(*switches: str) -> Fabric:
    """The nodes n0, n1, ... below a leaf each, with its pod: "s0 p0"."""
    below: dict[str, set[str]] = {}
    for node, words in zip(NODES, switches, strict=True):
        for switch in words.split():
            below.setdefault(switch, set()).add(node)
    return fabric_of([NodeSet(frozenset(nodes), switch) for switch, nodes in below.items()], NODES, Tiers())


def spec(level: str = "leaf", kind: str = "tensor", **degrees: int) -> GangSpec:
    *required, word = level.split()
    traffic = (GroupTraffic(kind=kind, messages=10, size=1e9, packed_in=word, required=bool(required)),)
    return GangSpec(8, 0, traffic=traffic, **degrees)


PACKED = network(*["s0 p0"] * 4, *["s1 p0"] * 4)
PAIRS = {node: f"c.{at // 2}" for at, node in enumerate(NODES)}
"""NVLink domains of two nodes."""
TORN = network(*["s0 p0"] * 3, "s1 p0", *["s1 p0"] * 3, "s2 p1")


@pytest.mark.parametrize(
    ("asked", "where", "words"),
    [
        (spec(tensor=4), PACKED, ""),
        (spec(tensor=4), TORN, "tensor groups of 4 nodes: 2 of 2 span 2 leaves"),
        (spec(tensor=2), TORN, "tensor groups of 2 nodes: 2 of 4 span 2 leaves"),
        (spec("nvlink", tensor=2), TORN, "tensor groups of 2 nodes: 2 of 4 span 2 leaves"),
        (spec("pod", tensor=4), TORN, "tensor groups of 4 nodes: 1 of 2 spans 2 pods"),
        (spec("any", tensor=4), TORN, ""),
        (spec("leaf", "pipeline", pipeline=2), TORN, "pipeline groups of 2 nodes: 4 of 4 span 2 leaves"),
        (spec(tensor=4), network(*[f"s{number}" for number in range(8)]),
         "tensor groups of 4 nodes: 2 of 2 span 4 leaves"),
        (spec("require nvlink", tensor=2), PACKED,
         "tensor groups of 2 nodes: 4 of 4 are in no NVLink domain of several nodes"),
        (spec("require nvlink", tensor=2), with_nvlink_domains(PACKED, dict.fromkeys(NODES[:2], "c.1")),
         "tensor groups of 2 nodes: 3 of 4 span 2 NVLink domains"),
        (spec("require nvlink", tensor=2), with_nvlink_domains(PACKED, PAIRS), ""),
        (GangSpec(8, 0), TORN, ""),
    ],
)  # fmt: skip
def test_which_groups_are_wider(asked: GangSpec, where: Fabric, words: str) -> None:
    assert wider_than_asked(asked, NODES, where) == words


def test_fewer_nodes_than_the_spec_have_no_groups() -> None:
    assert wider_than_asked(spec(tensor=4), NODES[:4], TORN) == ""


def test_a_flat_network_has_no_leaves() -> None:
    assert wider_than_asked(spec(tensor=4), NODES, network(*[""] * 8)) == ""


def test_a_gang_that_fits_says_nothing() -> None:
    world = Scenario(6, 2, tensor=3)
    world.run_until(lambda: world.gang.newest.stepped_generation == 1)
    assert world.gang.roster.wider_groups == ""


def test_events_say_it_in_words() -> None:
    fact = facts.GenerationStarted(
        "g",
        1,
        (),
        (),
        "n0",
        1,
        None,
        (),
        "",
        0.0,
        "start",
        wider_groups="tensor groups of 4 nodes: 1 of 4 spans 2 leaves",
    )
    assert describe(fact).endswith("; wider than [placement] asks: tensor groups of 4 nodes: 1 of 4 spans 2 leaves")


def asked(kind: str = "tensor") -> tuple[GroupTraffic, ...]:
    return (GroupTraffic(kind=kind, messages=10, size=1e9, packed_in="leaf", required=True),)


def test_it_is_known_before_the_first_step() -> None:
    world = Scenario(6, 0, tensor=6, traffic=asked())  # two leaves of three nodes
    world.run_until(lambda: world.gang.newest.generation == 1)
    assert world.gang.newest.stepped_generation == 0
    assert world.gang.roster.wider_groups == (
        "tensor groups of 6 nodes: 1 of 1 spans 2 leaves; predicted communication of a step: 80.1 ms instead of 80 ms "
        "(less than 1 % more)"
    )
    assert 0 < world.gang.roster.extra_communication_s < 0.001
    view = gang_view(world.core.state, world.core.observed, world.gang, world.now)
    (line,) = [line for line in gang_details(view, Screen()) if line.startswith("placement")]
    assert line == f"placement\twider than asked: {world.gang.roster.wider_groups}"


def test_a_swap_across_leaves_is_noted() -> None:
    world = Scenario(6, 1, tensor=3, traffic=asked())  # n0, n2, n4 and n6 are on one leaf
    world.run_until(lambda: world.gang.newest.stepped_generation == 1)
    assert world.gang.roster.wider_groups == ""
    world.crash("n1")
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    assert world.gang.roster.wider_groups.startswith("tensor groups of 3 nodes: 1 of 2 spans 2 leaves; predicted ")
