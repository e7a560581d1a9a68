"""What has changed from one fabric to another."""

from __future__ import annotations

from dataclasses import replace

from muster.fabric.model.changes import changes
from muster.fabric.model.fabric import Fabric
from muster.fabric.model.level import Level
from muster.fabric.model.link import Link
from muster.fabric.model.node import Node
from muster.fabric.sources.nesting import NodeSet, fabric_of
from muster.fabric.sources.tiers import Tiers
from muster.fabric.testing.generators import fat_tree, torus

TREE = fat_tree(2, 2)


def leaves(*groups: str, nodes: str = "abcd") -> Fabric:
    return fabric_of([NodeSet(frozenset(group), f"s{at}") for at, group in enumerate(groups)], nodes, Tiers())


def test_another_name_is_no_change() -> None:
    assert changes(leaves("ab", "cd"), leaves("cd", "ab")) == ()


def test_a_node_on_another_switch() -> None:
    assert set(changes(leaves("ab", "cd"), leaves("a", "bcd"))) == {
        "leaf s0 no longer joins a, b",
        "leaf s1 no longer joins c, d",
        "leaf s0 now joins a",
        "leaf s1 now joins b, c, d",
    }


def test_a_node_that_leaves_splits_no_switch() -> None:
    assert changes(leaves("ab", "cd"), leaves("ab", "c", nodes="abc")) == ("nodes have left the network: d",)
    assert changes(leaves("ab", "c", nodes="abc"), leaves("ab", "cd")) == ("nodes have joined the network: d",)


def test_a_slower_tier() -> None:
    slow = fat_tree(2, 2, tiers=Tiers({Level.ANY: Link(7e-6, 1e9)}, {Level.ANY: 4}))
    assert changes(TREE, slow) == (
        "pod0: its link has 1 GB/s, 7 µs, and had 12.5 GB/s, 7 µs",
        "pod0 is oversubscribed 4:1, and was 1:1",
    )


def test_a_slower_node_and_another_rack() -> None:
    slow = replace(TREE, details=(Node("n1", uplink=Link(5e-6, 1e9)), Node("n2", rack="r1")))
    assert changes(TREE, slow) == (
        "n1: its link has 1 GB/s, 5 µs, and had the speed of its tier",
        "n2: its GPUs, adapters, rack or power feed have changed",
    )


def test_another_torus_of_the_same_nodes() -> None:
    assert changes(torus(2, 4), torus(4, 2)) == ("nodes of torus have other positions",)
