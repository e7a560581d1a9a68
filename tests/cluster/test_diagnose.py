"""`muster diagnose` on a real Slurm: links shaped with `tc tbf`, groups torn over leaves, earlier generations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from muster.slurm.cluster.cluster import Cluster
from muster.slurm.cluster.spec import LOGIN
from muster.slurm.cluster.training import SLOW_STEPS, Training, TrainingSpec
from muster.slurm.cluster.waiting import wait_until

pytestmark = pytest.mark.cluster

# No leaf of the shared cluster has four nodes: the tensor group is torn.
SETTINGS = (
    "parallelism.tensor = 4",
    'placement.tensor = "leaf"',
    "model.parameters = 1e9",
    'slurm.options = ["--nodelist=n[0-4]"]',
)
RATE = "30mbit"
"""3.75 MB/s, far below what any two containers reach, on however busy a machine."""


@contextmanager
def shaped(cluster: Cluster, node: str) -> Iterator[None]:
    """From now on the node sends slowly. It receives as before."""
    cluster.sh(node, f"tc qdisc add dev eth0 root tbf rate {RATE} burst 64kb latency 400ms")
    try:
        yield
    finally:
        cluster.sh(node, "tc qdisc del dev eth0 root")


def diagnose(cluster: Cluster, job: int, *options: str) -> dict[str, Any]:
    shown = cluster.exec(LOGIN, "muster", "diagnose", str(job), "--json", *options, user="alice", timeout=180).stdout
    found: dict[str, Any] = json.loads(shown)
    return found


def test_a_shaped_link_a_torn_group_and_a_faster_generation_are_named(healthy: Cluster) -> None:
    spec = TrainingSpec("diagnosed", nodes=4, spares=1, arguments=SLOW_STEPS, settings=SETTINGS)
    with Training(healthy, spec) as training:
        job = training.submit()
        training.wait_step(48)
        fast = diagnose(healthy, job)
        nodes = [training.node_of(rank) for rank in range(4)]
        (torn,) = fast["torn_groups"]
        assert (torn["ranks"], torn["nodes"]) == ([0, 1, 2, 3], nodes)
        assert (torn["asked"], torn["found"]) == ("leaf", "any")
        assert {healthy.spec.leaf_of(node) for node in nodes} < set(torn["switches"])
        assert fast["step_s"] == pytest.approx(fast["compute_s"] + fast["wait_s"], rel=0.5)
        assert fast["predicted"]["step_s"] > 0
        training.kill_rank(0)
        training.wait_recovered(2)
        slow_node = training.node_of(2)
        with shaped(healthy, slow_node):
            training.wait_step(training.steps(1)[-1][0] + 48)
            slow = diagnose(healthy, job, "--measure")
            text = healthy.exec(LOGIN, "muster", "diagnose", str(job), user="alice").stdout
        named = slow["slow_links"][0]
        assert (named["nodes"], named["side"]) == ([slow_node], "sends"), slow["links"]
        assert named["bytes_per_s"] < 3 * 3.75e6
        assert f"SLOW: {slow_node} sends slowly" in text
        assert f"muster swap {job} {slow_node}" in text
        earlier = slow["earlier"]
        assert (earlier["job"], earlier["generation"]) == (job, 1)
        assert earlier["share"] == pytest.approx(earlier["step"] / slow["step_s"])
        assert earlier["share"] < 0.9
        assert slow["wait_s"] > 2 * fast["wait_s"]
        refused = healthy.exec(LOGIN, "muster", "diagnose", str(job), "--measure", user="bob", check=False)
        assert (refused.rc, "belongs to uid" in refused.stderr) == (77, True)
        training.cancel()
    wait_until(lambda: diagnose(healthy, job)["phase"] == "CANCELLED", 30, "the gang has ended")
    text = healthy.exec(LOGIN, "muster", "diagnose", str(job), user="alice").stdout
    assert "how fast it is now: it is CANCELLED, and no rank trains" in text
    assert "its last generation, 2, took " in text
