"""The record of a fabric, which the journal holds, and the part of a fabric that a gang's nodes are on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from muster.fabric.model.fabric import Fabric
from muster.fabric.model.level import Level
from muster.fabric.model.link import Link
from muster.fabric.model.node import Nic, Node
from muster.fabric.model.record import FabricRecord, record_of
from muster.fabric.sources.nesting import NodeSet, fabric_of
from muster.fabric.sources.tiers import Tiers
from muster.fabric.testing.generators import fat_tree, fully_connected, rail_optimised, torus

STORED = TypeAdapter(FabricRecord)
FABRICS = st.one_of(
    st.builds(fat_tree, st.integers(1, 4), st.integers(1, 4), st.integers(1, 3)),
    st.builds(rail_optimised, st.integers(1, 4), st.integers(1, 3), st.integers(1, 4)),
    st.builds(torus, st.integers(1, 4), st.integers(1, 4)),
    st.builds(fully_connected, st.integers(1, 5)),
)


def names(fabric: Fabric) -> list[str]:
    return [domain.name for domain in fabric.root.walk()]


@given(FABRICS, st.sets(st.integers(0, 12), min_size=1))
def test_a_stored_record_is_the_same_fabric_with_the_same_names(fabric: Fabric, numbers: set[int]) -> None:
    for one in (fabric, fabric.part(f"n{number}" for number in numbers)):
        record = record_of(one)
        read = STORED.validate_json(STORED.dump_json(record))
        assert read == record
        assert (read.fabric, names(read.fabric)) == (one, names(one))


def test_what_is_known_of_nodes_is_in_the_record_once() -> None:
    known = Node("", gpus=8, nics=(Nic("mlx5_0", (0, 1)),), uplink=Link(5e-6, 1e9), rack="r1", power_feed="a")
    nodes = [
        Node(f"n{number}", known.gpus, (), known.nics, known.gpu_link, known.uplink, "r1", "a") for number in (0, 1, 3)
    ]
    fabric = Fabric(fat_tree(2, 2).root, tuple(nodes))
    record = record_of(fabric)
    assert [(one.details, one.nodes) for one in record.details] == [(known, ((0, 2), (3, 1)))]
    assert record.fabric == fabric


def test_a_thousand_nodes_take_thirty_kilobytes() -> None:
    text = STORED.dump_json(record_of(fat_tree(25, 8, 5)))
    assert len(text) < 30_000


@given(FABRICS, st.sets(st.integers(0, 12), min_size=2))
def test_links_and_domains_of_a_part_are_those_of_the_whole(fabric: Fabric, numbers: set[int]) -> None:
    wanted = {f"n{number}" for number in numbers}
    part = fabric.part(wanted)
    assert part.nodes == wanted
    known = sorted(wanted & fabric.nodes)
    for one in known:
        assert part.node(one) == fabric.node(one)
        assert part.leaf_name(one) == fabric.leaf_name(one)
        for other in known:
            assert part.loaded_link(one, other) == fabric.loaded_link(one, other)
            assert part.shared_failure_domains(one, other) == fabric.shared_failure_domains(one, other)


def test_a_node_that_the_whole_lacks_is_attached_to_the_root() -> None:
    part = fat_tree(2, 2).part(["n0", "n1", "new"])
    assert part.path("new") == (part.root,)
    assert part.level_between("n0", "new") is Level.ANY
    assert part.leaf_name("new") == ""


def test_the_order_keeps_domains_together() -> None:
    sets = [NodeSet(frozenset(nodes.split()), name) for name, nodes in
            (("s10", "n1 n2"), ("s2", "n3 n10"), ("pod", "n1 n2 n3 n10"))]  # fmt: skip
    fabric = fabric_of(sets, ["n1", "n2", "n3", "n10", "n0"], Tiers())
    assert list(fabric.order) == ["n3", "n10", "n1", "n2", "n0"]
    assert sorted(fabric.order.values()) == list(range(5))
