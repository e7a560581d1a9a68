"""Faults of the hosts on a real Slurm: munged stops, slurmctld stops. Training goes on, and nobody is blamed."""

from __future__ import annotations

import json

import pytest

from muster.slurm.testcluster.cluster import COORDINATOR, Cluster
from muster.slurm.testcluster.spec import CONTROLLER
from muster.slurm.testcluster.training import SLOW_STEPS, Training, TrainingSpec
from muster.slurm.testcluster.waiting import wait_until

pytestmark = pytest.mark.cluster


def health_of_nodes(cluster: Cluster) -> dict[str, str]:
    """The health of each node that Muster knows, as an operator sees it."""
    lines = cluster.exec(CONTROLLER, "muster", "nodes", "--json", check=False).stdout.splitlines()
    nodes = [json.loads(line) for line in lines]
    return {node["node"]: node["verdict"] for node in nodes if node.get("musterd_attached")}


def wait_attached_and_fit(training: Training) -> None:
    cluster = training.cluster
    wait_until(lambda: set(health_of_nodes(cluster)) == set(cluster.nodes), 60, "every musterd is attached again")
    assert set(health_of_nodes(cluster).values()) == {"FIT"}


@pytest.fixture
def patient(other_settings: Cluster) -> Cluster:
    """A cluster on which slurmctld waits a minute, not 10 s, before it sets a node DOWN that cannot prove who it is."""
    other_settings.reconfigure(slurmd_timeout=60)
    return other_settings


def test_training_outlives_munged(patient: Cluster) -> None:
    """On a compute node, on the coordinator's node, and during a restart of the coordinator."""
    with Training(patient, TrainingSpec("munge", nodes=3, spares=1, arguments=SLOW_STEPS)) as training:
        training.submit()
        training.wait_step(20)
        node = training.node_of(1)
        seats = [training.node_of(rank) for rank in range(3)]
        patient.stop_service(node, "munged")
        before = training.generation
        training.kill_rank(2)
        generation = int(training.wait_recovered(before + 1)["generation"])
        patient.stop_service(CONTROLLER, "munged")
        made = len(training.steps(generation))
        wait_until(
            lambda: len(training.steps(generation)) >= made + 30,
            120,
            "30 steps without munged on the coordinator's node",
        )
        patient.start_service(CONTROLLER, "munged")
        # From now on neither the agent nor the musterd of the node can attach.
        patient.restart_coordinator()
        training.wait(lambda view: view.get("phase") == "RUNNING", 60, "the coordinator is back")
        missing = f"node {node} answers others"
        made = len(training.steps(generation))
        wait_until(lambda: len(training.steps(generation)) >= made + 40, 240, "steps with an agent that can't attach")
        patient.start_service(node, "munged")
        wait_attached_and_fit(training)
        assert missing not in str(training.view)
        training.kill_rank(0)
        assert training.wait_recovered(generation + 1).get("nodes_out", []) == []
        assert [training.node_of(rank) for rank in range(3)] == seats


def test_recovery_works_without_slurmctld(healthy: Cluster) -> None:
    """A rank crashes and a node dies while slurmctld is down. Slurm is told as soon as it is back."""
    with Training(healthy, TrainingSpec("ctld", nodes=3, spares=1, arguments=SLOW_STEPS)) as training:
        training.submit()
        training.wait_step(20)
        unknown, back = "can't get the jobs from Slurm", "Slurm answers for its jobs again"
        said_before = {words: healthy.logs(CONTROLLER, COORDINATOR).count(words) for words in (unknown, back)}

        def said(words: str) -> int:
            """How often since then: other tests on this cluster have slurmctld fail, too."""
            return healthy.logs(CONTROLLER, COORDINATOR).count(words) - said_before[words]

        healthy.stop_service(CONTROLLER, "slurmctld")
        before = training.generation
        training.kill_rank(2)
        training.wait_recovered(before + 1)
        dead = training.node_of(1)
        healthy.crash(dead)
        assert training.wait_left(dead)["nodes_out"] == [dead]
        wait_until(lambda: said(unknown), 60, "the coordinator says what is wrong")
        healthy.start_service(CONTROLLER, "slurmctld")
        drained = f"scontrol show node {dead} || true"
        wait_until(lambda: "DRAIN" in healthy.sh(CONTROLLER, drained), 120, f"{dead} is drained")
        before = len(training.steps(3))
        wait_until(lambda: len(training.steps(3)) >= before + 30, 120, "training goes on")
        assert said(unknown) <= 3
        wait_until(lambda: said(back), 60, "the coordinator says that it is over")
