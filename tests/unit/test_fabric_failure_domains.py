"""Copies and witnesses in other failure domains: leaf switches, racks and power feeds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from muster.fabric.model.fabric import Fabric
from muster.fabric.model.node import FailureDomain, Node
from muster.fabric.placement.failure_domains import MOST_STEPS, FailureDomains
from muster.fabric.sources.nesting import NodeSet, fabric_of
from muster.fabric.sources.tiers import Tiers
from muster.fabric.testing.generators import fat_tree, fully_connected


def site(leaves: str, racks: str = "", feeds: str = "") -> Fabric:
    """A letter for each node n0, n1, ...: its leaf, its rack, its power feed."""
    names = [f"n{number}" for number in range(len(leaves))]
    sets = [NodeSet(frozenset(n for n, at in zip(names, leaves, strict=True) if at == leaf), leaf) for leaf in leaves]
    every = zip(names, racks or " " * len(names), feeds or " " * len(names), strict=True)
    details = [Node(name, rack=rack.strip(), power_feed=feed.strip()) for name, rack, feed in every]
    return fabric_of(sets, names, Tiers(), details)


def buddies(fabric: Fabric) -> dict[str, str]:
    apart = FailureDomains(fabric)
    ring = apart.ring(fabric.nodes)
    return {node: apart.next_apart(ring, at, 1)[0] for at, node in enumerate(ring)}


def test_buddies_are_on_other_leaves() -> None:
    found = buddies(fat_tree(4, 3))
    assert all(fat_tree(4, 3).leaf_name(node) != fat_tree(4, 3).leaf_name(other) for node, other in found.items())


def test_racks_and_power_feeds_count_beside_leaves() -> None:
    """Each leaf has two racks, and each rack has nodes of both feeds."""
    fabric = site("aaaabbbb", racks="11223344", feeds="xyxyxyxy")
    for node, other in buddies(fabric).items():
        assert not fabric.shared_failure_domains(node, other)


def test_where_all_nodes_share_a_feed_it_keeps_none_apart() -> None:
    fabric = site("aabb", racks="1122", feeds="xxxx")
    for node, other in buddies(fabric).items():
        assert fabric.shared_failure_domains(node, other) == {FailureDomain.POWER}


def test_a_buddy_that_shares_a_rack_is_better_than_one_that_shares_rack_and_leaf() -> None:
    fabric = site("aab", racks="111", feeds="xyz")
    assert buddies(fabric)["n0"] == "n2"


@given(st.text("ab", min_size=2, max_size=9), st.data())
def test_a_buddy_shares_as_little_as_possible(leaves: str, data: st.DataObject) -> None:
    size = len(leaves)
    fabric = site(leaves, data.draw(st.text("12", min_size=size, max_size=size)),
                  data.draw(st.text("xy", min_size=size, max_size=size)))  # fmt: skip
    for node, other in buddies(fabric).items():
        shared = {one: len(fabric.shared_failure_domains(node, one)) for one in fabric.nodes - {node}}
        assert shared[other] == min(shared.values())


def test_the_ring_has_each_node_once() -> None:
    fabric = site("aaaab", racks="12121", feeds="xxyyx")
    assert sorted(FailureDomains(fabric).ring(fabric.nodes)) == sorted(fabric.nodes)


def test_a_network_without_domains_needs_few_steps_also_for_many_nodes() -> None:
    fabric = fully_connected(3 * MOST_STEPS)
    apart = FailureDomains(fabric)
    ring = apart.ring(fabric.nodes)
    assert apart.next_apart(ring, len(ring) - 1, 2) == ring[:2]


def test_where_racks_are_not_known_the_ring_changes_leaves_all_the_same() -> None:
    fabric = site("aaabbb")
    ring = FailureDomains(fabric).ring(fabric.nodes)
    assert [fabric.leaf_name(node) for node in ring] == ["a", "b"] * 3
