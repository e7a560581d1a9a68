"""`muster plan` on a login node of a real Slurm: the network, the nodes in service and the places are the cluster's."""

from __future__ import annotations

import json

import pytest

from muster.slurm.testcluster.cluster import CONTROLLER, LOGIN, Cluster

pytestmark = pytest.mark.cluster

JOB = """
name = "planned"
nodes = 4
ranks_per_node = 8
command = ["true"]
run_dir = "/shared/planned"
[parallelism]
tensor = 16
[model]
parameters = 7e9
"""


def test_a_plan_counts_the_nodes_in_service_and_keeps_groups_in_leaves(healthy: Cluster) -> None:
    """Leaves of 3, 2, 3 and 2 nodes, one of them drained: groups of two nodes have a leaf each."""
    healthy.sh(CONTROLLER, "scontrol update nodename=n4 state=drain reason='a fan'")
    healthy.sh(LOGIN, f"cat > /tmp/planned.toml <<'EOF'\n{JOB}EOF")
    plan = json.loads(healthy.sh(LOGIN, "muster plan /tmp/planned.toml --json", user="alice"))
    assert plan["network"].startswith("Slurm's, 9 nodes in service")
    assert {one["group"]: one["level"] for one in plan["traffic"]} == {"tensor": "leaf", "data": "any"}
    assert "network" not in {one["name"] for one in plan["defaults"]}
    shown = healthy.sh(LOGIN, "muster plan /tmp/planned.toml --nodes 16", user="alice")
    assert "a usual one, not Slurm's (Slurm has 9 nodes in service)" in shown
