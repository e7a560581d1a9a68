"""What Slurm prints of its topology, and the fabric that results."""

from __future__ import annotations

import pytest

from muster.fabric.model.level import Level
from muster.fabric.sources.slurm_topology import Kind, SlurmTopology, Unit, read_fabric
from muster.fabric.sources.tiers import Tiers
from muster.slurm.client.parsing import topology_text


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
        ("SwitchName=s0 Nodes=n[0-99999999]", "has no number, or more than 65536"),
        ("SwitchName=s0 Nodes=n1\nBlockName=b Nodes=n2", "several kinds of topology at once"),
        ("TorusName=t Dims=2x1x1 Nodes=n[0-1]", "does not print the positions in a torus"),
    ],
)
def test_what_is_not_understood_is_flat_and_says_why(text: str, problem: str) -> None:
    read = topology_text.read(text)
    assert (read.kind, read.units) == (Kind.FLAT, ())
    assert problem in read.problem
