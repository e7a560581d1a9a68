"""What Slurm prints of its topology, and the fabric that results.

The files of slurm_topologies were recorded on Slurm 26.05.5, with the clusters that `ClusterSpec(topology=...)` starts.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.fabric.model.level import Level
from muster.fabric.sources.slurm_topology import Kind, SlurmTopology, Unit, read_fabric
from muster.fabric.sources.tiers import Tiers
from muster.slurm.client.backends.commands import CliSlurm
from muster.slurm.client.parsing import records, segments, topology_conf, topology_text
from muster.slurm.client.parsing.hostlist import collapse, expand
from muster.slurm.client.types import Unknown

RECORDED = Path(__file__).parent / "slurm_topologies"
PARTITIONS = {
    "partitions": [
        {"name": "main", "topology": "", "nodes": {"configured": "n[0-15]"}},
        {"name": "block", "topology": "block", "nodes": {"configured": "n[0-15]"}},
        {"name": "flat", "topology": "flat", "nodes": {"configured": "n[0-1]"}},
    ]
}


class Controller:
    """A folder with a `scontrol` that prints what was recorded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "partitions").write_text(json.dumps(PARTITIONS, indent=1))

    def answers(self, **texts: str) -> CliSlurm:
        """`topoconf`, `topology`, and `topology_NAME`; a text that begins with "error:" goes to stderr."""
        lines = ['case "$*" in', f'"--json show partition") cat {self.folder}/partitions;;']
        for key, text in texts.items():
            (self.folder / key).write_text(text.removeprefix("error:"))
            to = " >&2" if text.startswith("error:") else ""
            lines.append(f'"show {key.replace("_", " ")}") cat {self.folder}/{key}{to};;')
        path = self.folder / "scontrol"
        path.write_text("\n".join(["#!/bin/sh", *lines, '*) echo "invalid entity:topoconf" >&2; exit 1;;', "esac", ""]))
        path.chmod(0o755)
        return CliSlurm(self.folder)

    async def recorded(self, name: str) -> tuple[SlurmTopology, ...]:
        texts = {kind: (RECORDED / f"{name}.{kind}").read_text() for kind in ("topoconf", "topology")}
        found = await self.answers(**texts).topologies()
        assert not isinstance(found, Unknown), found
        return found


@pytest.fixture
def controller(tmp_path: Path) -> Controller:
    return Controller(tmp_path)


async def test_a_recorded_tree(controller: Controller) -> None:
    (tree,) = await controller.recorded("tree")
    assert (tree.kind, tree.name, tree.default) == (Kind.TREE, "", True)
    fabric = read_fabric(tree, expand("n[0-7]"), Tiers()).fabric
    assert [sorted(leaf.nodes) for leaf in fabric.domains(Level.LEAF)] == [
        ["n0", "n1"], ["n2", "n3"], ["n4", "n5"], ["n6", "n7"]
    ]  # fmt: skip


async def test_a_recorded_flat_network(controller: Controller) -> None:
    assert await controller.recorded("flat") == (SlurmTopology(Kind.FLAT),)


async def test_recorded_blocks(controller: Controller) -> None:
    (blocks,) = await controller.recorded("block")
    assert (blocks.kind, blocks.base_block) == (Kind.BLOCK, 4)
    fabric = read_fabric(blocks, expand("n[0-15]"), Tiers()).fabric
    assert [(pod.name, len(pod.children)) for pod in fabric.domains(Level.POD)] == [("b[0-1]", 2), ("b[2-3]", 2)]


async def test_a_recorded_ring(controller: Controller) -> None:
    (ring,) = await controller.recorded("ring")
    fabric = read_fabric(ring, expand("n[0-15]"), Tiers()).fabric
    grid = fabric.common("n0", "n15").grid
    assert grid
    assert (grid.dimensions, grid.hops("n0", "n15"), grid.hops("n0", "n8")) == ((16,), 1, 8)


async def test_a_recorded_torus_has_positions_and_shapes(controller: Controller) -> None:
    (torus,) = await controller.recorded("torus")
    unit = torus.units[0]
    assert (torus.kind, torus.name, unit.dimensions) == (Kind.TORUS, "torus", (4, 2, 2))
    assert unit.shapes == ((2, 1, 1), (2, 2, 1), (2, 2, 2), (4, 2, 1), (4, 2, 2))
    grid = read_fabric(torus, expand("n[0-15]"), Tiers()).fabric.common("n0", "n1").grid
    assert grid
    # As SLURM_TOPOLOGY_ADDR said in a job there: t0:1:0:0.n1, t0:0:1:0.n4, t0:1:1:0.n5.
    assert [grid.coordinates(node) for node in ("n1", "n4", "n5")] == [(1, 0, 0), (0, 1, 0), (1, 1, 0)]


async def test_several_recorded_topologies(controller: Controller) -> None:
    texts = {
        "topoconf": (RECORDED / "several.topoconf").read_text(),
        "topology_tree": (RECORDED / "several.topology").read_text(),
        "topology_block": (RECORDED / "several.topology.block").read_text(),
    }
    found = await controller.answers(**texts).topologies()
    assert not isinstance(found, Unknown), found
    assert [(one.name, one.kind, one.default, one.partitions) for one in found] == [
        ("tree", Kind.TREE, True, ()),
        ("block", Kind.BLOCK, False, ("block",)),
        ("flat", Kind.FLAT, False, ("flat",)),
    ]
    assert [len(one.members) for one in found] == [16, 16, 2]
    assert found[1].base_block == 4
    blocks = read_fabric(found[1], expand("n[0-15]"), Tiers()).fabric
    assert blocks.level_between("n0", "n3") is Level.LEAF
    assert blocks.level_between("n0", "n7") is Level.POD
    assert blocks.level_between("n0", "n8") is Level.ANY


async def test_an_older_slurm_knows_no_topoconf(controller: Controller) -> None:
    found = await controller.answers(topology=(RECORDED / "tree.topology").read_text()).topologies()
    assert not isinstance(found, Unknown)
    assert [one.kind for one in found] == [Kind.TREE]


async def test_an_error_is_not_a_flat_network(controller: Controller) -> None:
    """Slurm exits with 0 after it."""
    words = "slurm_load_topo error: Requested topology configuration is not available"
    found = await controller.answers(topology=f"error:{words}").topologies()
    assert isinstance(found, Unknown)
    assert "not available" in found.reason


async def test_a_kind_that_slurm_does_not_print_is_flat(controller: Controller) -> None:
    texts = {"topoconf": (RECORDED / "several.topoconf").read_text(), "topology_tree": "", "topology_block": "x"}
    found = await controller.answers(**texts).topologies()
    assert not isinstance(found, Unknown)
    assert [one.kind for one in found] == [Kind.FLAT] * 3
    assert found[0].problem == "Slurm says it is of kind tree, and prints flat"
    assert "unknown form" in found[1].problem


REGIONS = """
- topology: t
  torus3d:
    toruses:
    - name: t0
      dims: {x: 2, y: 2, z: 2}
      regions:
      - anchor: {x: 0, y: 0, z: 0}
        dims: {x: 2, y: 1, z: 1}
        nodes: a[1-2]
      - anchor: {x: 1, y: 0, z: 1}
        dims: {x: 1, y: 2, z: 1}
        nodes: b[1-2]
"""


def test_regions_of_a_torus_leave_positions_empty() -> None:
    (torus,) = topology_conf.read(REGIONS)
    assert torus.units[0].nodes == ("a1", "a2", "", "", "", "b1", "", "b2")
    fabric = read_fabric(torus, ["a1", "a2", "b1", "b2"], Tiers()).fabric
    grid = fabric.common("a1", "b2").grid
    assert grid
    assert grid.coordinates("b2") == (1, 1, 1)
    assert grid.hops("a1", "b2") == 3


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (REGIONS.replace("x: 1, y: 0, z: 1", "x: 1, y: 1, z: 1"), "a region of 1x2x1 at 1,1,1 has 2 nodes"),
        (REGIONS.replace("a[1-2]", "a[1-3]"), "a region of 2x1x1 at 0,0,0 has 3 nodes"),
        (
            REGIONS.replace("dims: {x: 2, y: 2, z: 2}", "dims: {x: 99999, y: 99999, z: 9}"),
            "more than 1000000 positions",
        ),
        (REGIONS.replace("dims: {x: 2, y: 2, z: 2}", "dims: {x: -2, y: 2, z: 2}"), "dims has x = '-2'"),
        (REGIONS.replace("dims: {x: 2, y: 2, z: 2}", "dims: 5"), "dims is '5'"),
        (REGIONS.replace("name: t0", "nickname: t0"), "name is None"),
    ],
)
def test_a_torus_that_is_none_is_flat_and_says_why(text: str, problem: str) -> None:
    (torus,) = topology_conf.read(text)
    assert (torus.kind, torus.units) == (Kind.FLAT, ())
    assert problem in torus.problem


@pytest.mark.parametrize("text", ["a: [", "5", "- 5", "x: 1", "- tree: {switches: [{}]}", "[" * 3000, "- &a [*a]"])
def test_a_text_that_is_no_list_of_topologies_is_refused(text: str) -> None:
    with pytest.raises(records.UnknownForm):
        topology_conf.read(text)


def test_the_default_comes_first() -> None:
    """A vendor's file for clouds gives one the name of a plugin."""
    tree = "{topology: topology/tree, tree: {switches: [{switch: s0, nodes: n0}]}, cluster_default: true}"
    text = "- {topology: a, flat: true}\n- " + tree
    assert [(one.name, one.default) for one in topology_conf.read(text)] == [("topology/tree", True), ("a", False)]


def test_switches_are_a_tree() -> None:
    read = topology_text.read(
        "SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n[0-1]\n"
        "SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n[2-3]\n"
        "SwitchName=spine Level=1 LinkSpeed=1 Nodes=n[0-3] Switches=s[0-1]\n"
    )
    assert read == SlurmTopology(
        Kind.TREE, (Unit("s0", ("n0", "n1")), Unit("s1", ("n2", "n3")), Unit("spine", ("n0", "n1", "n2", "n3")))
    )


def test_aggregated_blocks_are_pods() -> None:
    read = topology_text.read(
        "BlockName=b1 BlockIndex=0 Nodes=n[0-1] BlockSize=2\n"
        "BlockName=b2 BlockIndex=1 Nodes=n[2-3] BlockSize=2\n"
        "BlockName=b3 BlockIndex=2 Nodes=n[4-5] BlockSize=2\n"
        "AggregatedBlock=b[1-2] BlockIndex=3 Nodes=n[0-3] BlockSize=4\n"
    )
    assert (read.kind, read.base_block) == (Kind.BLOCK, 2)
    fabric = read_fabric(read, [f"n{index}" for index in range(6)], Tiers()).fabric
    assert fabric.level_between("n0", "n1") is Level.LEAF
    assert fabric.level_between("n0", "n3") is Level.POD
    assert fabric.level_between("n0", "n4") is Level.ANY


def test_blocks_whose_nodes_are_yet_to_come_are_no_blocks() -> None:
    lines = [f"BlockName=b{at} BlockIndex={at} Nodes={f'n[{at * 2}-{at * 2 + 1}]' if at < 8 else ''} BlockSize=18"
             for at in range(128)]  # fmt: skip
    pods = ["AggregatedBlock=b[0-31] BlockIndex=128 Nodes=n[0-15] BlockSize=576",
            *(f"AggregatedBlock=b{at} BlockIndex={at} Nodes=(null) BlockSize=576" for at in (32, 64, 96))]  # fmt: skip
    blocks = topology_text.read("\n".join([*lines, *pods]))
    assert (blocks.kind, blocks.base_block, len(blocks.units)) == (Kind.BLOCK, 18, 9)
    read = read_fabric(blocks, expand("n[0-15]"), Tiers())
    assert read.warnings == ()
    assert [len(leaf.nodes) for leaf in read.fabric.domains(Level.LEAF)] == [2] * 8


BLOCKS = "".join(f"BlockName=b{at} BlockIndex={at} Nodes=n[{at * 3}-{at * 3 + 2}] BlockSize=3\n" for at in range(3))


@pytest.mark.parametrize(
    ("nodes", "segment", "words"),
    [
        (
            "n[0-2,3-4,6]",
            2,
            "Slurm gave 3 + 2 + 1 nodes of the blocks b0, b1, b2, which splits 1 of 3 segments",
        ),
        ("n[0-1,3-4,6-7]", 2, ""),
        ("n[0-5]", 3, ""),
        ("n[0-1,3-4,6-7]", 3, "Slurm gave 2 + 2 + 2 nodes of the blocks b0, b1, b2, which splits 2 of 2 segments"),
        ("n[0-2,3-4,6]", 1, ""),
        ("n[0-2,3-4],x9", 2, ""),  # nothing is known of x9
        ("n[0-5]", 6, ""),  # larger than a block, and there are no aggregated ones
    ],
)
def test_segments_that_slurm_has_split_are_named(nodes: str, segment: int, words: str) -> None:
    found = segments.split_segments(BLOCKS, expand(nodes), segment)
    assert (words in found) if words else not found


def test_a_segment_larger_than_a_block_is_one_of_an_aggregated_block() -> None:
    text = BLOCKS + "AggregatedBlock=b[0-1] BlockIndex=3 Nodes=n[0-5] BlockSize=6\n"
    assert segments.split_segments(text, expand("n[0-1,3-4]"), 4) == ""
    assert segments.split_segments(BLOCKS.replace("BlockName", "SwitchName"), expand("n[0-2,3]"), 2) == ""


def test_a_segment_is_in_one_of_the_smallest_blocks_that_hold_it() -> None:
    lines = [
        f"{kind}=b{first} Nodes=n[{first}-{first + size - 1}] BlockSize={size}\n"
        for kind, size in (("BlockName", 3), ("AggregatedBlock", 6), ("AggregatedBlock", 12))
        for first in range(0, 12, size)
    ]
    text = "".join(lines)
    found = segments.split_segments(text, expand("n[0-1,6-7]"), 4)
    assert "Slurm gave 2 + 2 nodes of the blocks b0, b6, which splits 1 of 1 segment" in found
    assert segments.split_segments(text, expand("n[0-1,3-4]"), 4) == ""
    assert segments.split_segments(text, expand("n[0-1,6-7]"), 8) == ""


def test_a_ring_keeps_its_order() -> None:
    read = topology_text.read("RingName=r1 Nodes=n[0,2,1,3] RingSize=4\n")
    assert read == SlurmTopology(Kind.RING, (Unit("r1", ("n0", "n2", "n1", "n3")),))


def test_no_topology_is_a_flat_one_without_a_problem() -> None:
    assert topology_text.read("No topology information available\n") == SlurmTopology(Kind.FLAT)
    assert topology_text.read("") == SlurmTopology(Kind.FLAT)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("FancyName=f Nodes=n1", "a line of an unknown form: 'FancyName=f Nodes=n1'"),
        ("SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n[0-", "a bracket is not closed"),
        ("SwitchName=s0 Nodes=n[0-99999999]", "has more than 65536 numbers"),
        ("SwitchName=s0 Nodes=n1\nBlockName=b Nodes=n2", "several kinds of topology at once"),
        ("SwitchName=s Nodes=n[1-65000]\n" * 17, "names more than 1048576 nodes, tier by tier"),
        ("TorusName=t Dims=2x1x1 Nodes=n[0-1]", "does not print the positions in a torus"),
    ],
)
def test_what_is_not_understood_is_flat_and_says_why(text: str, problem: str) -> None:
    read = topology_text.read(text)
    assert (read.kind, read.units) == (Kind.FLAT, ())
    assert problem in read.problem


@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=4), st.booleans(), st.data())
def test_whatever_tree_slurm_prints_comes_back(sizes: list[list[int]], padded: bool, data: st.DataObject) -> None:
    """Pods of leaves of so many nodes, as lines in any order."""
    names = iter(f"n{index:03d}" if padded else f"n{index}" for index in range(99))
    pods = [[[next(names) for _ in range(size)] for size in leaves] for leaves in sizes]
    lines, parts = [], []
    for p, pod in enumerate(pods):
        for at, leaf in enumerate(pod):
            lines.append(f"SwitchName=s{p}x{at} Level=0 LinkSpeed=1 Nodes={collapse(leaf)}")
            parts.append(frozenset(leaf))
        below = [node for leaf in pod for node in leaf]
        lines.append(f"SwitchName=p{p} Level=1 LinkSpeed=1 Nodes={collapse(below)} Switches=s{p}x[0-{len(pod) - 1}]")
        parts.append(frozenset(below))
    text = "\n".join(data.draw(st.permutations(lines)))
    nodes = frozenset().union(*parts)
    read = read_fabric(topology_text.read(text), nodes, Tiers())
    assert read.warnings == ()
    assert {domain.nodes for domain in read.fabric.root.walk()} == {*parts, nodes}


@given(st.text(st.sampled_from("SwitchNameBlock=[]0-9n, \n"), max_size=60))
def test_no_text_fails(text: str) -> None:
    topology = topology_text.read(text)
    assert (topology.kind is not Kind.FLAT) or not topology.units
    assert all(unit.nodes for unit in topology.units)
