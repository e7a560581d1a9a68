"""The fabric: which domain a node is in, which link two nodes have, what they fail together with."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.fabric.model.domain import Domain
from muster.fabric.model.errors import FabricError, UnknownNode
from muster.fabric.model.fabric import Fabric
from muster.fabric.model.grid import Grid
from muster.fabric.model.level import Level
from muster.fabric.model.link import Link
from muster.fabric.model.node import GPU_LINK, FailureDomain, Node, natural_order

LEAF_LINK, SPINE_LINK, NVLINK = Link(5e-6, 50e9), Link(7e-6, 25e9), Link(1e-6, 450e9)


def leaf(*nodes: str, name: str = "") -> Domain:
    return Domain(Level.LEAF, frozenset(nodes), LEAF_LINK, name=name)


def whole(*children: Domain, oversubscription: float = 1.0) -> Domain:
    nodes = frozenset().union(*(child.nodes for child in children))
    return Domain(Level.ANY, nodes, SPINE_LINK, children, oversubscription)


TWO_LEAVES = Fabric(whole(leaf("a", "b"), leaf("c", "d"), oversubscription=4))


def test_names_are_counted_as_people_count_them() -> None:
    longest = "n" + "9" * 5000
    counted = sorted(["r1n10", longest, "n10", "n9", "n2", "r1n9", "", "n²", "n\u0663"], key=natural_order)
    assert counted.index("n2") < counted.index("n9") < counted.index("n10") < counted.index(longest)
    assert counted.index("r1n9") < counted.index("r1n10")
    assert natural_order("n10") == natural_order("n010")


def test_the_link_of_two_nodes_is_that_of_their_smallest_common_domain() -> None:
    assert TWO_LEAVES.link("a", "b") == LEAF_LINK
    assert TWO_LEAVES.link("a", "c") == SPINE_LINK
    assert TWO_LEAVES.link("a", "a") == GPU_LINK
    assert [TWO_LEAVES.level_between("a", other) for other in "abc"] == [Level.NODE, Level.LEAF, Level.ANY]


def test_oversubscription_counts_when_every_node_sends() -> None:
    assert TWO_LEAVES.loaded_link("a", "c") == Link(7e-6, 25e9 / 4)
    assert TWO_LEAVES.loaded_link("a", "b") == LEAF_LINK


def test_a_message_takes_latency_plus_size_over_bandwidth() -> None:
    assert Link(5e-6, 12.5e9).time(2**30) == pytest.approx(0.0859043, rel=1e-6)


def test_a_missing_tier_holds_everybody_and_a_missing_nvlink_domain_nobody() -> None:
    flat = Fabric(Domain(Level.ANY, frozenset("ab"), LEAF_LINK))
    assert flat.domain("a", Level.LEAF) == flat.domain("b", Level.LEAF) == flat.root
    assert TWO_LEAVES.domain("a", Level.POD) == TWO_LEAVES.root
    assert flat.domain("a", Level.NVLINK).nodes == {"a"}
    assert TWO_LEAVES.domain("a", Level.NODE).link == GPU_LINK


def test_nvlink_across_nodes_passes_no_network_adapter() -> None:
    domain = Domain(Level.NVLINK, frozenset("ab"), NVLINK)
    rack = Domain(Level.LEAF, frozenset("abc"), LEAF_LINK, (domain,))
    fabric = Fabric(whole(rack, leaf("d")), (Node("a", uplink=Link(5e-6, 1e9)),))
    assert fabric.link("a", "b") == NVLINK
    assert fabric.link("a", "c") == Link(5e-6, 1e9)
    assert fabric.domain("b", Level.NVLINK) == domain
    assert fabric.domain("b", Level.LEAF) == rack


def test_a_slow_uplink_slows_all_that_crosses_it_and_nothing_else() -> None:
    slow = Domain(Level.LEAF, frozenset("ab"), LEAF_LINK, uplink=Link(5e-6, 2e9))
    fabric = Fabric(whole(slow, leaf("c")))
    assert fabric.link("a", "b") == LEAF_LINK
    assert fabric.link("a", "c") == fabric.link("c", "a") == Link(7e-6, 2e9)


def test_a_domain_is_known_by_its_nodes_and_not_by_its_name() -> None:
    assert leaf("a", "b", name="s1") == leaf("b", "a", name="s2")
    assert hash(Fabric(whole(leaf("a", name="x")))) == hash(Fabric(whole(leaf("a", name="y"))))
    assert leaf("a", "b") != leaf("a", "c")


def test_an_unknown_node_is_an_error_that_names_it() -> None:
    with pytest.raises(UnknownNode, match="no node 'x'"):
        TWO_LEAVES.link("a", "x")


def test_what_two_nodes_fail_with() -> None:
    details = (Node("a", rack="r1", power_feed="p1"), Node("b", rack="r2", power_feed="p1"), Node("c", rack="r1"))
    fabric = Fabric(whole(leaf("a", "b"), leaf("c", "d")), details)
    assert fabric.shared_failure_domains("a", "b") == {FailureDomain.LEAF, FailureDomain.POWER}
    assert fabric.shared_failure_domains("a", "c") == {FailureDomain.RACK}
    assert fabric.shared_failure_domains("c", "d") == {FailureDomain.LEAF}
    assert FailureDomain.NODE in fabric.shared_failure_domains("d", "d")


def test_on_a_flat_network_no_leaf_is_shared_as_a_failure_domain() -> None:
    assert Fabric(Domain(Level.ANY, frozenset("ab"), LEAF_LINK)).shared_failure_domains("a", "b") == frozenset()


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Link(-1, 1), "a latency of -1 s"),
        (lambda: Link(float("nan"), 1), "a latency of nan s"),
        (lambda: Link(0, float("inf")), "a bandwidth of inf B/s"),
        (lambda: Link(0, 0), "a bandwidth of 0 B/s"),
        (lambda: whole(leaf("a"), leaf("a", "b")), "share a node"),
        (lambda: Domain(Level.LEAF, frozenset("a"), LEAF_LINK, (leaf("a", "b"),)), "has nodes that"),
        (lambda: Domain(Level.NVLINK, frozenset("a"), LEAF_LINK, (leaf("a", name="s"),)), r"s \(leaf\) lies in"),
        (lambda: Domain(Level.LEAF, frozenset("a"), LEAF_LINK, oversubscription=0.5), "oversubscribed 0.5:1"),
        (lambda: Fabric(leaf("a")), "the root of a fabric is leaf"),
        (lambda: Fabric(whole(leaf("a")), (Node("b"),)), "not in the network"),
        (lambda: Fabric(whole(leaf("a")), (Node("a"), Node("a"))), "described twice"),
        (lambda: Grid((2, 2), ("a", "b", "c")), "2x2 has 4 positions, and 3 were given"),
        (lambda: Grid((), ()), "no dimension"),
        (lambda: Grid((2**40, 2**40), ()), "more than 1000000 positions"),
        (lambda: Grid((2,), ("a", "a")), "node a has two positions"),
    ],
)
def test_what_no_cluster_has_is_refused(build: object, words: str) -> None:
    assert callable(build)
    with pytest.raises(FabricError, match=words):
        build()


def ring(size: int) -> Fabric:
    nodes = tuple(f"n{index}" for index in range(size))
    return Fabric(Domain(Level.ANY, frozenset(nodes), LEAF_LINK, grid=Grid((size,), nodes)))


def test_in_a_ring_each_hop_adds_its_latency_and_shares_its_links() -> None:
    fabric = ring(8)
    assert fabric.link("n0", "n7") == LEAF_LINK
    assert fabric.link("n0", "n3") == Link(3 * 5e-6, 50e9)
    assert fabric.loaded_link("n0", "n3") == Link(3 * 5e-6, 50e9 / 3)


def test_the_last_dimension_of_a_torus_varies_fastest() -> None:
    grid = Grid((2, 3), ("a", "b", "c", "d", "e", "f"))
    assert grid.coordinates("f") == (1, 2)
    assert grid.hops("a", "c") == 1  # around the edge
    assert grid.hops("a", "e") == 2


def test_a_position_without_a_node_is_no_node() -> None:
    assert Grid((3,), ("a", "", "b")).hops("a", "b") == 1
    with pytest.raises(UnknownNode):
        Grid((3,), ("a", "", "b")).hops("a", "")


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_hops_are_a_distance(sizes: list[int], data: st.DataObject) -> None:
    count = 1
    for size in sizes:
        count *= size
    names = tuple(f"n{index}" for index in range(count))
    grid = Grid(tuple(sizes), names)
    a, b, c = (data.draw(st.sampled_from(names)) for _ in range(3))
    assert grid.hops(a, a) == 0
    assert grid.hops(a, b) == grid.hops(b, a)
    assert grid.hops(a, c) <= grid.hops(a, b) + grid.hops(b, c)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_levels_between_three_nodes_of_a_tree_are_an_ultrametric(sizes: list[int], data: st.DataObject) -> None:
    names = iter(f"n{index}" for index in range(99))
    fabric = Fabric(whole(*(leaf(*(next(names) for _ in range(size))) for size in sizes)))
    nodes = sorted(fabric.nodes)
    a, b, c = (data.draw(st.sampled_from(nodes)) for _ in range(3))
    assert fabric.level_between(a, b) == fabric.level_between(b, a)
    assert fabric.level_between(a, c) <= max(fabric.level_between(a, b), fabric.level_between(b, c))
    assert (fabric.domain(a, Level.LEAF) == fabric.domain(b, Level.LEAF)) == (fabric.level_between(a, b) <= Level.LEAF)


def test_every_level_has_a_word_and_comes_back_from_it() -> None:
    assert [Level.of(level.word) for level in Level] == list(Level)
    with pytest.raises(ValueError, match="'rack' is no level: choose one of accelerator, node, nvlink, leaf, pod, any"):
        Level.of("rack")
