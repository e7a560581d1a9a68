"""The coordinator reads Slurm's topologies and the site's fabric.toml, and tells the core what has changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.daemon.coordinator.core.state import events
from muster.daemon.coordinator.slurm.fabric_watch import FabricWatch
from muster.daemon.coordinator.slurm.roster import SlurmRoster
from muster.fabric.sources.slurm_topology import Kind, SlurmTopology, Unit
from muster.slurm.client.deadline import DEFAULT_TIMEOUT_S
from muster.slurm.client.fake.fake_cluster import FakeCluster
from muster.slurm.client.fake.fake_slurm import FakeSlurm
from muster.slurm.client.types import Unknown

NODES = ("n1", "n2", "n3", "n4")
LEAVES = {"n1": "s0", "n2": "s0", "n3": "s1", "n4": "s1"}


class Read:
    """A watch with what it has posted."""

    def __init__(self, folder: Path) -> None:
        self.slurm = FakeSlurm(FakeCluster(NODES, now=lambda: 0.0, leaves=LEAVES))
        self.file = folder / "fabric.toml"
        self.posted: list[events.FabricSeen] = []
        self.watch = FabricWatch(self.slurm, SlurmRoster(self.slurm), self.posted.append, self.file)

    async def again(self) -> events.FabricSeen:
        await self.watch.read()
        return self.posted[-1]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    return Read(tmp_path)


async def test_slurms_leaves_and_the_sites_racks_are_one_fabric(read: Read) -> None:
    read.file.write_text('[racks]\nr1 = "n[1-3]"\n')
    seen = await read.again()
    (only,) = seen.topologies
    assert [only.fabric.leaf_name(node) for node in NODES] == ["s0", "s0", "s1", "s1"]
    assert [only.fabric.node(node).rack for node in NODES] == ["r1", "r1", "r1", ""]
    assert (only.warnings, seen.problem) == ((), "")


async def test_only_a_change_is_posted(read: Read) -> None:
    await read.again()
    await read.again()
    assert len(read.posted) == 1
    read.slurm.cluster.leaves = LEAVES | {"n2": "s1"}
    seen = await read.again()
    assert len(read.posted) == 2
    assert seen.topologies[0].fabric.leaf_name("n2") == "s1"


async def test_a_switch_that_is_renamed_is_posted_for_views_show_its_name(read: Read) -> None:
    await read.again()
    read.slurm.cluster.leaves = {node: leaf.upper() for node, leaf in LEAVES.items()}
    assert (await read.again()).topologies[0].fabric.leaf_name("n1") == "S0"


async def test_a_silent_slurm_is_named_once_and_takes_nothing_back(read: Read) -> None:
    read.slurm.unavailable_reason = "slurmctld is away"
    assert await read.again() == events.FabricSeen(problem="the network's topology is not known: slurmctld is away")
    read.slurm.unavailable_reason = ""
    known = await read.again()
    assert known.topologies
    read.slurm.unavailable_reason = "slurmctld is away again"
    assert await read.again() is known


async def test_a_file_that_has_become_wrong_is_named_and_its_last_content_holds(read: Read) -> None:
    read.file.write_text('[racks]\nr1 = "n[1-3]"\n')
    await read.again()
    read.file.write_text('[racks]\nr1 = "n[1-9]"\n')
    (only,) = (await read.again()).topologies
    assert only.warnings == (
        f"{read.file}: racks.r1: Slurm has no node n5, n6, n7, n8, n9; what it said before that, if anything, still"
        " holds",
    )
    assert only.fabric.node("n1").rack == "r1"


async def test_a_topology_that_can_not_be_understood_is_flat_with_a_warning(read: Read) -> None:
    class Strange(FakeSlurm):
        async def topologies(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> tuple[SlurmTopology, ...] | Unknown:
            return (SlurmTopology(Kind.TREE, (Unit("s0", ("n1", "n2", "n3")), Unit("s1", ("n2", "n3", "n4")))),)

    slurm = Strange(read.slurm.cluster)
    watch = FabricWatch(slurm, SlurmRoster(slurm), read.posted.append, None)
    await watch.read()
    (only,) = read.posted[-1].topologies
    assert only.fabric.root.children == ()
    assert only.warnings[0].startswith("the topology is taken as flat: s0 and s1 share n2, n3")


async def test_a_new_agent_waits_for_the_first_reading_only(read: Read) -> None:
    await read.watch.wait_until_known(60.0)
    assert len(read.posted) == 1
    read.slurm.cluster.leaves = {}
    await read.watch.wait_until_known(60.0)
    assert len(read.posted) == 1
    await read.watch.wait_until_known(0.0)
    assert len(read.posted) == 2


async def test_a_file_that_was_edited_is_read_at_once(read: Read) -> None:
    await read.watch.wait_until_known(60.0)
    read.file.write_text('[racks]\nr1 = "n1"\n')
    await read.watch.wait_until_known(60.0)
    assert read.posted[-1].topologies[0].fabric.node("n1").rack == "r1"
