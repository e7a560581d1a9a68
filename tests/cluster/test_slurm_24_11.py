"""Slurm 24.11: a job that loses a rank, a node, and the node of its batch script; then the client without pyslurm.

It is a short set, and all but Slurm is what the other tests have. `make test-long` runs the tests of this folder on
Debian 13, which has this Slurm.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.cluster.test_batch_host import state
from tests.cluster.test_recovery import BUCKETS, run_to_the_end
from tests.cluster.test_slurm_contract import USER, Runner

from muster.slurm.testcluster.cluster import CONTROLLER, Cluster
from muster.slurm.testcluster.spec import ClusterSpec
from muster.slurm.testcluster.training import Training, TrainingSpec
from muster.slurm.testcluster.waiting import wait_until

pytestmark = pytest.mark.cluster


@pytest.fixture
def older() -> Iterator[Cluster]:
    with Cluster.up(ClusterSpec(nodes=6, suite="trixie", only_slurm=True)) as cluster:
        yield cluster


def test_a_job_outlives_faults_and_the_client_keeps_its_contract(older: Cluster) -> None:
    assert "24.11" in older.sh(CONTROLLER, "slurmctld -V")
    with Training(older, TrainingSpec("older", nodes=3, spares=2, arguments=BUCKETS)) as training:
        job = training.submit()
        training.wait_step(10)
        killed_in = training.generation
        training.kill_rank(2)
        assert training.wait_recovered(killed_in + 1)["action"] == "restart in place"
        for dead in (training.node_of(1), "n0"):
            older.power_off(dead)
            recovery = training.wait_left(dead)
            assert (recovery["action"], recovery["nodes_out"]) == ("swap", [dead])
        run_to_the_end(training)
    wait_until(lambda: state(older, job) == "COMPLETED", 90, f"job {job} ends COMPLETED")
    older.restore_all()
    runner = Runner(older, "cli", USER)
    failed = runner.finish()
    assert failed == 0, [result for result in runner.results if not result["ok"]]
    assert len(runner.results) >= 20
