"""A standby coordinator on a second management node takes over. The old leader stops acting."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from muster.slurm.testcluster.cluster import CONTROLLER, COORDINATOR, LOGIN, Cluster
from muster.slurm.testcluster.spec import STANDBY, ClusterSpec
from muster.slurm.testcluster.training import FATAL_XID_LINE, SLOW_STEPS, Training, TrainingSpec
from muster.slurm.testcluster.waiting import wait_until

pytestmark = pytest.mark.cluster

BUCKETS = (*SLOW_STEPS, "--bucket-cap-mb", "0.05")


@pytest.fixture
def pair(suite: str) -> Iterator[Cluster]:
    """A new cluster with two management nodes and six compute nodes."""
    with Cluster.up(ClusterSpec(nodes=6, standby=True, suite=suite)) as cluster:
        yield cluster


def pid(cluster: Cluster, host: str) -> str:
    return cluster.sh(host, f"cat /run/cluster/{COORDINATOR}.pid 2>/dev/null || true")


def terms(cluster: Cluster, host: str) -> list[str]:
    """The terms in which the coordinator of that host was the leader, oldest first."""
    return cluster.sh(host, f"sed -n 's/.*listens on port .* term //p' /var/log/muster/{COORDINATOR}.log").split()


def wait_served(cluster: Cluster, host: str, term: str) -> None:
    wait_until(lambda: terms(cluster, host)[-1:] == [term], 30, f"{host} serves, term {term}")
    wait_until(lambda: cluster.exec(LOGIN, "muster", "nodes", check=False).rc == 0, 10, "commands find it")


def test_a_standby_takes_over_and_the_old_leader_stops_acting(pair: Cluster) -> None:
    with Training(pair, TrainingSpec("pair", nodes=3, spares=3, arguments=BUCKETS)) as training:
        training.submit()
        training.wait_step(10)
        assert (terms(pair, CONTROLLER), terms(pair, STANDBY)) == (["1"], [])
        # The leader is frozen in the middle of a recovery. The standby completes the recovery.
        frozen, dead = pid(pair, CONTROLLER), training.node_of(1)
        pair.crash(dead)
        pair.freeze_coordinator(CONTROLLER)
        wait_served(pair, STANDBY, "2")
        assert training.wait_left(dead)["nodes_out"] == [dead]
        # The old leader exits before it does anything else. Its restarted process is the standby.
        pair.thaw_coordinator(CONTROLLER)
        wait_until(lambda: pid(pair, CONTROLLER) not in ("", frozen), 10, f"{CONTROLLER}'s coordinator is started anew")
        assert terms(pair, CONTROLLER) == ["1"]
        # The new standby takes over when the new leader is killed.
        unfit = training.node_of(2)
        pair.kill_coordinator(STANDBY)
        pair.kmsg(unfit, FATAL_XID_LINE)
        wait_served(pair, CONTROLLER, "3")
        assert training.wait_left(unfit)["nodes_out"] == [unfit]
        wait_until(lambda: "Xid 79" in pair.sh(CONTROLLER, f"scontrol show node {unfit}"), 10, f"{unfit} is drained")
        # A leader that is stopped releases the lease, so the standby does not wait. It completes the swap that the
        # owner has requested.
        pair.start_service(STANDBY, COORDINATOR)
        wait_until(lambda: pid(pair, STANDBY) != "", 10, f"{STANDBY}'s coordinator is started")
        unwanted = training.node_of(1)
        command = ("muster", "swap", "--no-wait", str(training.job), unwanted)
        wait_until(lambda: pair.exec(LOGIN, *command, user="alice", check=False).rc == 0, 60, "the swap is planned")
        pair.stop_service(CONTROLLER, COORDINATOR, "TERM")
        wait_served(pair, STANDBY, "4")
        recovery = training.wait_left(unwanted)
        assert (recovery["action"], recovery["nodes_out"]) == ("planned swap", [unwanted])
        assert training.repeated_steps(int(recovery["generation"])) == 0
        assert "DRAIN" not in pair.sh(CONTROLLER, f"scontrol show node {unwanted}")
        training.cancel()
