"""Where a fabric comes from: sets of nodes, Slurm's topologies, generators."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.fabric.model.domain import Domain
from muster.fabric.model.errors import FabricError
from muster.fabric.model.fabric import Fabric
from muster.fabric.model.level import Level
from muster.fabric.model.link import Link
from muster.fabric.sources.nesting import NodeSet, fabric_of
from muster.fabric.sources.slurm_topology import Kind, SlurmTopology, Unit, read_fabric
from muster.fabric.sources.tiers import USUAL_LINKS, Tiers
from muster.fabric.testing.generators import fat_tree, fully_connected, rail_optimised, torus

TIERS = Tiers()


def sets(*groups: str, **names: str) -> list[NodeSet]:
    return [NodeSet(frozenset(group)) for group in groups] + [
        NodeSet(frozenset(group), name) for name, group in names.items()
    ]


def shape(domain: Domain) -> object:
    """The tree as nested lists of levels and nodes."""
    return [domain.level.word, "".join(sorted(domain.own_nodes)), *map(shape, domain.children)]


def test_the_set_that_holds_another_one_is_above_it() -> None:
    fabric = fabric_of(sets("abcd", "ab", "cd"), "abcd", TIERS)
    assert shape(fabric.root) == ["any", "", ["leaf", "ab"], ["leaf", "cd"]]


def test_three_tiers_are_leaf_pod_and_any() -> None:
    fabric = fabric_of(sets("ab", "cd", "ef", "abcd", "abcdef"), "abcdef", TIERS)
    assert shape(fabric.root) == ["any", "", ["pod", "", ["leaf", "ab"], ["leaf", "cd"]], ["leaf", "ef"]]
    assert fabric.link("a", "c") == USUAL_LINKS[Level.POD]


def test_one_switch_for_all_is_a_leaf_and_trees_that_nothing_joins_have_a_root() -> None:
    assert shape(fabric_of(sets("ab"), "ab", TIERS).root) == ["any", "", ["leaf", "ab"]]
    assert shape(fabric_of(sets("ab", "cd"), "abcd", TIERS).root) == ["any", "", ["leaf", "ab"], ["leaf", "cd"]]


def test_a_node_in_no_set_is_attached_to_the_root() -> None:
    fabric = fabric_of(sets("ab"), "abz", TIERS)
    assert shape(fabric.root) == ["any", "z", ["leaf", "ab"]]
    assert fabric.level_between("a", "z") is Level.ANY


def test_switches_with_the_same_nodes_are_one_domain() -> None:
    fabric = fabric_of(sets(s1="ab", s2="ab", spine1="abcd", spine2="abcd", s3="cd"), "abcd", TIERS)
    assert shape(fabric.root) == ["any", "", ["leaf", "ab"], ["leaf", "cd"]]
    assert fabric.root.children[0].name == "s1,s2"
    assert fabric.root.name == "spine1,spine2"


def test_domains_are_in_the_natural_order_of_their_names() -> None:
    fabric = fabric_of(sets(s10="ab", s9="cd", s1="ef"), "abcdef", TIERS)
    assert [child.name for child in fabric.root.children] == ["s1", "s9", "s10"]


def test_an_nvlink_domain_is_inside_the_leaf_with_the_same_nodes() -> None:
    fabric = fabric_of([NodeSet(frozenset("ab"), nvlink=True), *sets("ab", "cd")], "abcd", TIERS)
    assert shape(fabric.root) == ["any", "", ["leaf", "", ["nvlink", "ab"]], ["leaf", "cd"]]
    assert fabric.level_between("a", "b") is Level.NVLINK


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (sets(s1="ab", s2="bc"), "s1 and s2 share b, and neither holds the other"),
        (sets("abcz"), "nodes that the cluster does not have: z"),
        ([*sets("a"), NodeSet(frozenset("ab"), "rack", nvlink=True)], "within rack, which is an NVLink domain"),
    ],
)
def test_what_is_no_tree_is_refused(wrong: list[NodeSet], words: str) -> None:
    with pytest.raises(FabricError, match=words):
        fabric_of(wrong, "abc", TIERS)


def test_a_tower_of_switches_is_refused() -> None:
    nodes = [f"n{index}" for index in range(40)]
    with pytest.raises(FabricError, match="more than 16 tiers"):
        fabric_of([NodeSet(frozenset(nodes[: size + 1])) for size in range(40)], nodes, TIERS)


def switches(**nodes: str) -> SlurmTopology:
    return SlurmTopology(Kind.TREE, tuple(Unit(name, tuple(below)) for name, below in nodes.items()))


def test_a_topology_that_is_no_tree_becomes_flat_with_a_warning() -> None:
    read = read_fabric(switches(s1="abc", s2="bcd"), "abcd", TIERS)
    assert shape(read.fabric.root) == ["any", "abcd"]
    assert read.warnings == (
        "the topology is taken as flat: s1 and s2 share b, c, and neither holds the other: this is no tree",
    )


def test_a_superpod_without_a_root_is_read_with_one_warning_that_names_what_does_not_fit() -> None:
    """Two nodes that slurm.conf lacks, one node below two leaves, and 19 nodes below none."""
    leaves = {f"s{at}": [f"n{node}" for node in range(at * 8, at * 8 + 8)] for at in range(5)}
    leaves["s0"] += ["x9", "x10"]
    leaves["s1"] += ["n0"]
    topology = SlurmTopology(Kind.TREE, tuple(Unit(name, tuple(nodes)) for name, nodes in leaves.items()))
    login = [f"login{at}" for at in range(1, 20)]
    read = read_fabric(topology, [*(f"n{at}" for at in range(40)), *login], TIERS)
    assert read.warnings == (
        "the topology has 2 nodes that Slurm does not have: x9, x10; "
        "1 node is below two switches, and is taken as below none: n0; "
        f"19 nodes are in no switch or block of the topology: {', '.join(login)}",
    )
    assert [len(leaf.nodes) for leaf in read.fabric.domains(Level.LEAF)] == [7, 8, 8, 8, 8]
    assert read.fabric.level_between("n1", "n7") is Level.LEAF
    assert read.fabric.level_between("n0", "n1") is read.fabric.level_between("n1", "n8") is Level.ANY


def test_a_node_below_two_leaves_is_still_below_their_spine() -> None:
    read = read_fabric(switches(s1="abc", s2="cde", spine="abcdef", core="abcdefghij"), "abcdefghij", TIERS)
    assert shape(read.fabric.root) == ["any", "ghij", ["pod", "cf", ["leaf", "ab"], ["leaf", "de"]]]
    assert read.warnings == ("1 node is below two switches, and is taken as below none: c",)


def test_a_node_below_two_switches_is_below_no_leaf_of_theirs_either() -> None:
    read = read_fabric(switches(A="abc", B="abcde", D="cfghijk"), "abcdefghijk", TIERS)
    assert shape(read.fabric.root) == ["any", "c", ["pod", "de", ["leaf", "ab"]], ["leaf", "fghijk"]]
    assert read.warnings == ("1 node is below two switches, and is taken as below none: c",)


def test_nodes_that_only_one_of_topology_and_slurm_knows_are_told() -> None:
    read = read_fabric(switches(s1="abx", s2="cd"), "abcdz", TIERS)
    assert shape(read.fabric.root) == ["any", "z", ["leaf", "ab"], ["leaf", "cd"]]
    assert read.warnings == (
        "the topology has 1 node that Slurm does not have: x; 1 node is in no switch or block of the topology: z",
    )


def test_a_sites_own_domains_are_merged_and_left_out_if_they_do_not_fit() -> None:
    topology = switches(s1="ab", s2="cd")
    merged = read_fabric(topology, "abcd", TIERS, extra=sets(spine="abcd"))
    assert (merged.fabric.root.name, merged.warnings) == ("spine", ())
    crossing = read_fabric(topology, "abcd", TIERS, extra=sets(rack="bc"))
    assert crossing.fabric == read_fabric(topology, "abcd", TIERS).fabric
    assert "without the site's own switches" in crossing.warnings[0]


def test_slurm_counts_x_fastest() -> None:
    unit = Unit("t", tuple("abcdefghijkl"), (2, 3, 2))
    fabric = read_fabric(SlurmTopology(Kind.TORUS, (unit,)), "abcdefghijkl", TIERS).fabric
    grid = fabric.common("a", "b").grid
    assert grid is not None
    assert [grid.coordinates(node) for node in "abcgl"] == [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 2, 1)]


def test_several_rings_are_domains_of_their_own() -> None:
    units = (Unit("r1", tuple("abcd")), Unit("r2", tuple("efg")))
    fabric = read_fabric(SlurmTopology(Kind.RING, units), "abcdefg", TIERS).fabric
    assert shape(fabric.root) == ["any", "", ["pod", "abcd"], ["pod", "efg"]]
    assert fabric.link("a", "d").latency == USUAL_LINKS[Level.POD].latency
    assert fabric.link("a", "c").latency == 2 * USUAL_LINKS[Level.POD].latency
    assert fabric.level_between("a", "e") is Level.ANY


@pytest.mark.parametrize("dimensions", [(2, 2, 2), (10**9, 10**9, 10**9), (0, 0, 0), (-1, -4, 1)])
def test_a_torus_whose_nodes_do_not_fit_becomes_flat(dimensions: tuple[int, ...]) -> None:
    read = read_fabric(SlurmTopology(Kind.TORUS, (Unit("t", tuple("abcd"), dimensions),)), "abcd", TIERS)
    assert shape(read.fabric.root) == ["any", "abcd"]
    assert "has the positions of 4 nodes" in read.warnings[0]


def test_generators_make_what_their_name_says() -> None:
    assert shape(fat_tree(2, 2).root) == ["any", "", ["leaf", "n0n1"], ["leaf", "n2n3"]]
    pods = fat_tree(2, 2, 3)
    assert (len(pods.nodes), len(pods.domains(Level.POD)), len(pods.domains(Level.LEAF))) == (12, 3, 6)
    slow = fat_tree(2, 2, tiers=Tiers(oversubscription={Level.ANY: 4}))
    assert slow.loaded_link("n0", "n2") == Link(7e-6, 12.5e9 / 4)
    assert fully_connected(3).level_between("n0", "n2") is Level.ANY
    rails = rail_optimised(4, 2, rails=8)
    assert rails.node("n0").nics[7].gpus == (7,)
    assert rails.level_between("n0", "n3") is Level.LEAF
    assert torus(8).link("n0", "n7") == USUAL_LINKS[Level.POD]
    plane = torus(2, 3).common("n0", "n1").grid
    assert plane is not None
    assert plane.coordinates("n5") == (1, 2)


@pytest.mark.parametrize("make", [lambda: fat_tree(), lambda: fat_tree(4), lambda: fat_tree(10**9, 10**9),
                                  lambda: torus(), lambda: torus(1, 1, 1, 1), lambda: torus(0),
                                  lambda: rail_optimised(4, 2, 0), lambda: fully_connected(0)])  # fmt: skip
def test_what_cannot_be_generated_is_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(FabricError):
        make()


@st.composite
def laminar(draw: st.DrawFn) -> list[frozenset[str]]:
    """Random sets of which each pair is disjoint or nested, in random order."""
    nodes = [f"n{index}" for index in range(draw(st.integers(1, 24)))]
    found: list[frozenset[str]] = []

    def split(part: list[str], depth: int) -> None:
        if not part or depth > 4:
            return
        found.append(frozenset(part))
        cut = draw(st.integers(0, len(part)))
        if 0 < cut < len(part):
            split(part[:cut], depth + 1)
            split(part[cut:], depth + 1)

    split(nodes, 0)
    return draw(st.permutations(found))


@given(laminar())
def test_any_nested_sets_become_a_tree_that_keeps_each_of_them(parts: list[frozenset[str]]) -> None:
    nodes = frozenset().union(*parts)
    fabric = fabric_of([NodeSet(part) for part in parts], nodes, TIERS)
    assert {domain.nodes for domain in fabric.root.walk()} == {*parts, nodes}
    for domain in fabric.root.walk():
        assert all(child.level <= domain.level for child in domain.children)
        assert fabric.path(min(domain.nodes))[0] is fabric.root


@given(st.lists(st.frozensets(st.sampled_from("abcdef"), min_size=1), max_size=6))
def test_any_sets_at_all_become_a_tree_or_a_flat_network_with_a_warning(parts: list[frozenset[str]]) -> None:
    topology = SlurmTopology(Kind.TREE, tuple(Unit(f"s{i}", tuple(sorted(part))) for i, part in enumerate(parts)))
    read = read_fabric(topology, "abcdef", TIERS)
    crossing = any(a & b and not a <= b and not b <= a for a in parts for b in parts)
    told = any("taken as flat" in warning or "below two switches" in warning for warning in read.warnings)
    assert crossing == told
    assert read.fabric.nodes == frozenset("abcdef")
    if not crossing:
        assert {domain.nodes for domain in read.fabric.root.walk()} >= set(parts)


@given(laminar())
def test_names_and_their_order_do_not_matter(parts: list[frozenset[str]]) -> None:
    nodes = frozenset().union(*parts)
    one = fabric_of([NodeSet(part, f"s{index}") for index, part in enumerate(parts)], nodes, TIERS)
    other = fabric_of([NodeSet(part, f"s{9 - index}") for index, part in enumerate(parts)], nodes, TIERS)
    assert {(d.level, d.nodes) for d in one.root.walk()} == {(d.level, d.nodes) for d in other.root.walk()}


def test_a_site_of_12500_nodes_is_read_at_once() -> None:
    fabric: Fabric = fat_tree(25, 20, 25)
    assert len(fabric.nodes) == 12_500
    assert fabric.level_between("n0", "n12499") is Level.ANY
