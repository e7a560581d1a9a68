"""Other networks than a tree, each on a cluster of its own: what Slurm does there, and what `muster topo` shows.

The other topologies are kept as recorded texts (tests/unit/test_slurm_client_topology.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import chain

import pytest

from muster.slurm.client.parsing import hostlist, start_text
from muster.slurm.image.engine import Outcome
from muster.slurm.testcluster import virtual_nodes as virtual
from muster.slurm.testcluster.cluster import CONTROLLER, LOGIN, Cluster
from muster.slurm.testcluster.spec import ClusterSpec
from muster.slurm.testcluster.waiting import wait_until

pytestmark = pytest.mark.cluster


@pytest.fixture
def network(request: pytest.FixtureRequest, suite: str) -> Iterator[Cluster]:
    """A cluster of 8 nodes in two groups, with the topology that the test names, and without Muster's daemons."""
    if suite == "trixie":
        pytest.skip("Slurm 24.11 has neither several topologies nor tori")
    with Cluster.up(ClusterSpec(nodes=8, leaves=2, topology=request.param, daemons=False)) as cluster:
        yield cluster


def sbatch(cluster: Cluster, *options: str) -> Outcome:
    command = ("sbatch", "--chdir=/tmp", "--output=/dev/null", "--test-only", *options, "--wrap", "true")
    return cluster.exec(LOGIN, *command, user="alice", check=False)


JOB = """
name = "packed"
command = "true"
run_dir = "/shared/run"
ranks_per_node = 8
[slurm]
time = "10"
"""


NO_ANSWER = "Slurm does not answer"


def shape(cluster: Cluster, *options: str) -> tuple[list[str], str, set[str]]:
    """What `muster submit` asks Slurm for, what it says, and the nodes that Slurm would give."""
    cluster.exec(LOGIN, "tee", "/tmp/job.toml", user="alice", stdin=JOB.encode())
    submit = lambda: cluster.exec(LOGIN, "muster", "submit", "--dry-run", "/tmp/job.toml", *options, user="alice")  # noqa: E731
    # On a busy host Slurm may take longer than submit waits for it, and then submit asks for no shape, and says so.
    done = wait_until(lambda: None if NO_ANSWER in (done := submit()).stderr else done, 60, "Slurm answers submit")
    tested = cluster.exec(LOGIN, "sbatch", "--chdir=/tmp", "--test-only", user="alice", stdin=done.stdout.encode())
    given = re.findall(r"^#SBATCH (--(?:nodes|switches|segment|exclude)=.*)$", done.stdout, re.MULTILINE)
    return given, done.stderr, set(start_text.read(tested.stderr).nodes)


def occupy(cluster: Cluster, *nodes: str) -> None:
    """Gives each of the nodes a job of half an hour."""
    for node in nodes:
        cluster.exec(LOGIN, "sbatch", "--chdir=/tmp", "--output=/dev/null", "--exclusive", "--time=30",
                     f"--nodelist={node}", "--wrap", "sleep 1800", user="alice")  # fmt: skip
    running = "squeue -h -t RUNNING -o %N"
    wait_until(lambda: sorted(cluster.sh(LOGIN, running, user="alice").split()) == [*nodes], 30, "the jobs run")


def topologies(cluster: Cluster) -> list[dict[str, object]]:
    return [json.loads(line) for line in cluster.sh(LOGIN, "muster topo --json", user="alice").splitlines()]


def block_lines(cluster: Cluster) -> list[str]:
    """The title, the names of blocks and their nodes."""
    title, _, *below = cluster.sh(LOGIN, "muster topo --topology block", user="alice").splitlines()
    return [title, *(line.split("─ ")[1].split()[0] for line in below)]


@pytest.mark.parametrize("network", ["several"], indirect=True)
def test_several_topologies_at_once(network: Cluster) -> None:
    tree, block, flat = topologies(network)
    assert [(one["name"], one["default"], one["partitions"]) for one in (tree, block, flat)] == [
        ("tree", True, []),
        ("block", False, ["block"]),
        ("flat", False, ["flat"]),
    ]
    assert [one["kind"] for one in (tree, block, flat)] == ["tree", "block", "flat"]
    assert [one["warnings"] for one in (tree, block, flat)] == [[], [], []]
    assert block_lines(network) == ["topology block (block, partition block)", "b0", "n[0-3]", "b1", "n[4-7]"]
    refused = sbatch(network, "-p", "block", "-N8", "--segment=3")
    assert "node count must be evenly divisible by segment size" in refused.stderr
    assert sbatch(network, "-p", "block", "-N8", "--segment=4").rc == 0
    pairs, fours, in_blocks = "--parallelism.tensor=16", "--parallelism.tensor=32", "--slurm.partition=block"
    # On an idle cluster, jobs get what their groups ask for.
    given, said, nodes = shape(network, "--nodes=4", fours)
    assert given == ["--nodes=4", "--switches=1@0:05:00"]
    assert nodes in ({"n0", "n1", "n2", "n3"}, {"n4", "n5", "n6", "n7"})
    given, said, nodes = shape(network, "--nodes=2", "--spares=1", pairs, in_blocks)
    assert given == ["--nodes=3", "--segment=3"]
    assert nodes < {"n0", "n1", "n2", "n3"} or nodes < {"n4", "n5", "n6", "n7"}
    # On a fragmented one they wait, or take less.
    occupy(network, "n0", "n4")
    given, said, nodes = shape(network, "--nodes=4", fours)
    assert given == ["--nodes=4"]
    assert said.startswith("muster: relaxes: at most 1 leaf switch would start at ")
    assert nodes.isdisjoint({"n0", "n4"})
    given, said, nodes = shape(network, "--nodes=4", fours, "--placement.if-not-available=wait")
    assert given == ["--nodes=4", "--switches=1@0:05:00"]
    assert said.startswith("muster: waits: ")
    assert nodes & {"n0", "n4"}
    given, said, nodes = shape(network, "--nodes=4", fours, in_blocks)
    assert given == ["--nodes=4", "--segment=2"]
    assert len(nodes & {"n1", "n2", "n3"}) == len(nodes & {"n5", "n6", "n7"}) == 2
    given, said, nodes = shape(network, "--nodes=4", fours, in_blocks, "--placement.tensor=require leaf")
    assert given == ["--nodes=4", "--segment=4"]
    assert nodes & {"n0", "n4"}
    given, said, nodes = shape(network, "--nodes=8", pairs, in_blocks, "--placement.if-not-available=shrink")
    assert given == ["--nodes=4", "--segment=2"]
    assert said.startswith("muster: shrinks to 2 of 4 data-parallel replicas, 4 of 8 nodes: they start now, all would")
    assert nodes.isdisjoint({"n0", "n4"})
    network.sh(LOGIN, "scancel --user=alice", user="alice")
    wait_until(lambda: not network.sh(LOGIN, "squeue --noheader", user="alice"), 30, "all jobs have ended")
    # A site re-cables a node while Slurm runs.
    network.sh(CONTROLLER, "scontrol update nodename=n3 topology=tree:s0,block:b1")
    assert block_lines(network)[1:] == ["b0", "n[0-2]", "b1", "n[3-7]"]
    assert sbatch(network, "-p", "block", "-N8", "--segment=4").rc == 1


@pytest.mark.parametrize("network", ["torus"], indirect=True)
def test_a_torus(network: Cluster) -> None:
    (torus,) = topologies(network)
    assert (torus["name"], torus["kind"], torus["warnings"]) == ("torus", "torus3d", [])
    lines = network.sh(LOGIN, "muster topo -v", user="alice").splitlines()
    assert "torus of 2x2x2" in lines[2]
    positions = {line.split()[1]: line.split()[3] for line in lines[3:]}
    script = 'echo "$SLURMD_NODENAME $SLURM_TOPOLOGY_ADDR"'
    output = network.exec(LOGIN, "srun", "--chdir=/tmp", "-N8", "bash", "-c", script, user="alice").stdout
    slurms = dict(line.split() for line in output.splitlines())
    assert {node: f"t0:{at.replace(',', ':')}.{node}" for node, at in positions.items()} == slurms
    # Slurm has places for the configured shapes only: 1, 2, 4 and 8 nodes.
    refused = network.exec(LOGIN, "sbatch", "--chdir=/tmp", "-N3", "--wrap", "true", user="alice", check=False)
    assert "Requested topology configuration is not available" in refused.stderr
    assert "Requested node configuration is not available" in sbatch(network, "-N3").stderr  # --test-only says less
    assert sbatch(network, "-N4").rc == 0
    given, _, nodes = shape(network, "--nodes=2", "--spares=1", "--parallelism.tensor=16")
    assert given == ["--nodes=4"]
    assert len(nodes) == 4
    words = ("muster", "submit", "--dry-run", "/tmp/job.toml", "--nodes=3")
    refused = network.exec(LOGIN, *words, user="alice", check=False)
    assert "the torus takes jobs of these numbers of nodes: 1, 2, 4, 8" in refused.stderr
    assert "choose spares = 1. Nothing was queued" in refused.stderr


RACKS = [virtual.names(144)[at : at + 18] for at in range(0, 144, 18)]
LEAVES = [virtual.names(144)[at : at + 9] for at in range(0, 144, 9)]


@pytest.fixture
def site(suite: str) -> Iterator[Cluster]:
    """A controller with 144 virtual nodes: racks of 18, or 16 leaves in 4 pods, or rings of 16."""
    if suite == "trixie":
        pytest.skip("Slurm 24.11 has one topology at a time")
    networks = {
        "racks": [*virtual.blocks(RACKS, (18, 72))],
        "pods": [*virtual.tree(LEAVES, leaves_of_pod=4)],
        "rings": [*virtual.rings([virtual.names(144)[at : at + 16] for at in range(0, 144, 16)])],
    }
    with Cluster.up(virtual.cluster_of(144, networks)) as cluster:
        yield cluster


def busy(cluster: Cluster, partition: str, *node_lists: str) -> None:
    """Gives nodes to jobs of half an hour."""
    for nodes in node_lists:
        count = len(hostlist.expand(nodes))
        cluster.exec(LOGIN, "sbatch", "--chdir=/tmp", "--output=/dev/null", "--exclusive", "--time=30", f"-N{count}",
                     "-p", partition, f"--nodelist={nodes}", "--wrap", "true", user="alice")  # fmt: skip
    states = "squeue -h -o %t"
    wait_until(lambda: set(cluster.sh(LOGIN, states, user="alice").split()) == {"CF"}, 30, "the jobs have their nodes")


def test_racks_pods_and_rings(site: Cluster) -> None:
    # Two nodes of each rack are busy. Segments of 16 start at once, what wants the whole of a rack waits.
    racks = ("--slurm.partition=racks", "--ranks-per-node=4")
    busy(site, "racks", *(f"{rack[0]},{rack[9]}" for rack in RACKS))
    given, said, nodes = shape(site, *racks, "--nodes=30")
    assert given == ["--nodes=32", "--segment=16"]
    assert said.startswith("muster: asks for segments of 16 nodes, each within one rack-scale domain, starts now")
    assert sorted(len(nodes.intersection(rack)) for rack in RACKS) == [0, 0, 0, 0, 0, 0, 16, 16]
    given, _, nodes = shape(site, *racks, "--nodes=40")
    assert given == ["--nodes=40", "--segment=4"]
    assert {len(nodes.intersection(rack)) % 4 for rack in RACKS} == {0}
    assert shape(site, *racks, "--nodes=3")[0] == ["--nodes=3", "--segment=1"]
    given, said, _ = shape(site, *racks, "--nodes=18", "--parallelism.tensor=72", "--placement.if-not-available=wait")
    assert given == ["--nodes=18", "--segment=18"]
    assert said.startswith("muster: waits: segments of 18 nodes, each within one leaf would start at ")
    site.sh(LOGIN, "scancel --user=alice", user="alice")
    wait_until(lambda: not site.sh(LOGIN, "squeue --noheader", user="alice"), 30, "all jobs have ended")
    # Slurm keeps to no pod: the first leaf has room, and then it takes what fills leaves best.
    pods = ("--slurm.partition=pods", "--ranks-per-node=4", "--nodes=20")
    of_pod = [{*chain(*LEAVES[at : at + 4])} for at in range(0, 16, 4)]
    busy(site, "pods", *(leaf[0] for leaf in LEAVES[:4]), *(f"{leaf[0]},{leaf[1]},{leaf[2]}" for leaf in LEAVES[4:8]))
    _, _, nodes = shape(site, *pods)
    assert [len(nodes & pod) for pod in of_pod] != [20, 0, 0, 0]
    in_pod = ("--parallelism.tensor=80", "--placement.tensor=require pod")
    given, said, nodes = shape(site, *pods, *in_pod)
    assert given[0] == "--nodes=20"
    assert given[1].startswith("--exclude=r[")
    assert "nodes of pod pod" in said
    assert sorted(len(nodes & pod) for pod in of_pod) == [0, 0, 0, 20]
    # A ring has 16 nodes at most.
    rings = ("--dry-run", "/tmp/job.toml", "--slurm.partition=rings", "--nodes=17")
    refused = site.exec(LOGIN, "muster", "submit", *rings, user="alice", check=False)
    assert "nodes + spares = 17: a job is in one ring, and the largest ring has 16 nodes" in refused.stderr
    assert "Requested node configuration is not available" in sbatch(site, "-p", "rings", "-N17").stderr
    assert sbatch(site, "-p", "rings", "-N16").rc == 0
