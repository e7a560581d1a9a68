"""Other networks than a tree, each on a cluster of its own: what Slurm does there, and what `muster topo` shows.

The other topologies are kept as recorded texts (tests/unit/test_slurm_client_topology.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from muster.slurm.cluster.cluster import CONTROLLER, LOGIN, Cluster
from muster.slurm.cluster.spec import ClusterSpec
from muster.slurm.image.engine import Outcome

pytestmark = pytest.mark.cluster


@pytest.fixture
def network(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster of 8 nodes in two groups, with the topology that the test names, and without Muster's daemons."""
    suite = request.config.getoption("--suite")
    if suite == "trixie":
        pytest.skip("Slurm 24.11 has neither several topologies nor tori")
    with Cluster.up(ClusterSpec(nodes=8, leaves=2, topology=request.param, daemons=False)) as cluster:
        yield cluster


def sbatch(cluster: Cluster, *options: str) -> Outcome:
    command = ("sbatch", "--chdir=/tmp", "--output=/dev/null", "--test-only", *options, "--wrap", "true")
    return cluster.exec(LOGIN, *command, user="alice", check=False)


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
