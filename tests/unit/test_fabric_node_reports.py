"""The fabric, refined with what nodes report of themselves; the place of one rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.fabric.groups.axes import Axes, AxesError
from muster.fabric.groups.rank_groups import GroupKind, rank_groups
from muster.fabric.groups.rank_place import axes_of_world, coordinates, group_of
from muster.fabric.model.fabric import Fabric
from muster.fabric.model.level import Level
from muster.fabric.model.link import Link
from muster.fabric.model.node import Nic, Node
from muster.fabric.sources.nesting import NodeSet, fabric_of
from muster.fabric.sources.node_reports import NodeReport, refine
from muster.fabric.sources.tiers import Tiers

NODES = [f"n{at}" for at in range(8)]


def two_leaves(*details: Node) -> Fabric:
    leaves = [NodeSet(frozenset(NODES[:4]), "s0"), NodeSet(frozenset(NODES[4:]), "s1")]
    return fabric_of(leaves, NODES, Tiers(), details)


def in_domains(**domains: str) -> dict[str, NodeReport]:
    return {node: NodeReport(nvlink_domain=domain) for node, domain in domains.items()}


def test_nodes_of_one_nvlink_domain_are_one_domain_below_their_leaf() -> None:
    refined = refine(two_leaves(), in_domains(n0="c.1", n1="c.1", n2="c.2", n3="c.2", n4="c.3"))
    assert refined.warnings == ()
    assert [sorted(domain.nodes) for domain in refined.fabric.domains(Level.NVLINK)] == [["n0", "n1"], ["n2", "n3"]]
    assert refined.fabric.level_between("n0", "n1") is Level.NVLINK
    assert refined.fabric.level_between("n0", "n2") is Level.LEAF
    assert refined.fabric.level_between("n4", "n5") is Level.LEAF


def test_a_leaf_whose_nodes_are_all_in_one_domain_is_kept() -> None:
    fabric = refine(two_leaves(), in_domains(n0="c", n1="c", n2="c", n3="c")).fabric
    assert fabric.level_between("n0", "n3") is Level.NVLINK
    assert fabric.domain("n0", Level.LEAF).name == "s0"


def test_on_a_flat_network_the_domains_are_all_there_is() -> None:
    fabric = refine(fabric_of([], NODES, Tiers()), in_domains(n0="c", n5="c")).fabric
    assert fabric.level_between("n0", "n5") is Level.NVLINK
    assert fabric.level_between("n0", "n1") is Level.ANY


@pytest.mark.parametrize("nodes", [("n3", "n4"), tuple(NODES)])
def test_a_domain_that_crosses_leaves_is_left_out_with_a_warning(nodes: tuple[str, ...]) -> None:
    refined = refine(two_leaves(), in_domains(**dict.fromkeys(nodes, "c")))
    assert refined.fabric == two_leaves()
    assert len(refined.warnings) == 1
    assert "is left out" in refined.warnings[0]


def test_what_the_site_says_stays() -> None:
    site = [NodeSet(frozenset({"n0", "n1"}), "d", nvlink=True), NodeSet(frozenset(NODES[:4]), "s0")]
    own = Node("n0", gpus=4, nics=(Nic("mlx5_9"),), rack="r1")
    fabric = fabric_of(site, NODES, Tiers(), [own])
    reports = {
        "n0": NodeReport(4, (0, 0, 1, 1), (Nic("mlx5_0", (0,)),), "c"),
        "n1": NodeReport(8, nvlink_domain="c"),
        "n2": NodeReport(nvlink_domain="c"),
        "elsewhere": NodeReport(8),
    }
    refined = refine(fabric, reports).fabric
    assert [sorted(domain.nodes) for domain in refined.domains(Level.NVLINK)] == [["n0", "n1"]]
    assert refined.node("n0") == Node("n0", gpus=4, sockets=(0, 0, 1, 1), nics=(Nic("mlx5_9"),), rack="r1")
    assert refined.node("n1").gpus == 8
    other_count = refine(fabric, {"n0": NodeReport(8, (0,) * 8)}).fabric
    assert other_count.node("n0") == own


def test_a_site_s_speed_of_nvlink_counts() -> None:
    fast = Tiers({Level.NVLINK: Link(1e-6, 900e9)})
    fabric = refine(two_leaves(), in_domains(n0="c", n1="c"), fast).fabric
    assert fabric.link("n0", "n1").bandwidth == 900e9


def test_adapters_that_are_slower_than_the_tier_slow_the_node_s_link() -> None:
    site = Node("n2", uplink=Link(5e-6, 4e9))
    reports = {
        "n0": NodeReport(adapter_bandwidth=2.5e9),
        "n1": NodeReport(adapter_bandwidth=50e9),  # a tier is never faster than the site says
        "n2": NodeReport(adapter_bandwidth=10e9),
        "n3": NodeReport(adapter_bandwidth=1e9, nvlink_domain="c"),
    }
    fabric = refine(two_leaves(site), reports).fabric
    assert [link and link.bandwidth for link in (fabric.node(node).uplink for node in NODES[:5])] == [
        2.5e9, None, 4e9, 1e9, None,
    ]  # fmt: skip
    assert fabric.link("n0", "n1").bandwidth == 2.5e9
    assert fabric.link("n1", "n4").bandwidth == 12.5e9


def test_reports_of_nothing_change_nothing() -> None:
    assert refine(two_leaves(), {}).fabric == two_leaves()
    assert refine(two_leaves(), {"n0": NodeReport()}).fabric == two_leaves()


@given(st.dictionaries(st.sampled_from([*NODES, "other"]), st.sampled_from(["", "a", "b", "c"])))
def test_whatever_nodes_report_there_is_a_fabric_of_the_same_nodes(domains: dict[str, str]) -> None:
    refined = refine(two_leaves(), in_domains(**domains))
    assert refined.fabric.nodes == frozenset(NODES)
    for domain in refined.fabric.domains(Level.NVLINK):
        assert len({domains[node] for node in domain.nodes}) == 1


degrees = st.integers(1, 4)


@given(degrees, degrees, degrees, degrees, st.sampled_from(["tp-cp-ep-dp-pp", "cp-tp-dp-ep-pp", "dp-tp-cp-ep-pp"]))
def test_the_group_of_one_rank_is_the_one_that_all_groups_show(
    tensor: int, context: int, data: int, pipeline: int, order: str
) -> None:
    expert = 2 if (data * context) % 2 == 0 else 1
    world = tensor * context * data * pipeline
    axes = axes_of_world(world, tensor=tensor, context=context, expert=expert, pipeline=pipeline, order=order)
    if axes is None:
        return  # the pipelines of dense and expert layers would differ
    assert axes.data == data
    for kind in GroupKind:
        for group in rank_groups(axes, kind):
            assert {group_of(axes, kind, rank) for rank in group} == {group}


def test_the_coordinates_of_a_rank() -> None:
    axes = Axes(tensor=2, data=4, pipeline=2)
    assert {axis.word: at for axis, at in coordinates(axes, 13).items()} == {
        "tensor": 1,
        "context": 0,
        "data": 2,
        "pipeline": 1,
    }
    with_experts = Axes(tensor=2, data=4, expert=2)
    assert {axis.word: at for axis, at in coordinates(with_experts, 3).items()}["expert"] == 1


def test_degrees_that_fit_no_world_have_no_axes() -> None:
    assert axes_of_world(6, tensor=4, context=1, expert=1, pipeline=1) is None
    assert axes_of_world(6, tensor=2, context=0, expert=0, pipeline=0) == Axes(tensor=2, data=3)
    assert axes_of_world(6, tensor=1, context=1, expert=4, pipeline=1) is None
    with pytest.raises(AxesError):
        Axes(expert=4, data=6)
