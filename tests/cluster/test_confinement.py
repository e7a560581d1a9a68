"""Jobs that Slurm confines, with cgroups, and /tmp and /dev/shm of their own: faults cost no more than elsewhere, and
nothing stays on a node.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from muster.slurm.testcluster.cluster import CONTROLLER, Cluster
from muster.slurm.testcluster.leftovers import wait_nothing_left
from muster.slurm.testcluster.spec import ClusterSpec
from muster.slurm.testcluster.training import SLOW_STEPS, Training, TrainingSpec
from muster.slurm.testcluster.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.long]

# Folders of steps, whatever Slurm calls the folder of a job; each job's folder and mounts; files of users.
_LEFT = """
find /sys/fs/cgroup -type d -name 'step_*'
find /var/spool/private -mindepth 2
grep /var/spool/private/ /proc/1/mountinfo
find /tmp /dev/shm -uid +2000
"""
# Each process of the job: its cgroup for memory, and its mount namespace.
_PROCESSES = r"""
for process in $(pgrep -u alice); do
    group=$(sed -n 's/^[0-9]*:memory://p; s/^0:://p' /proc/$process/cgroup | head -n 1)
    namespace=$(readlink /proc/$process/ns/mnt) && echo "$group $namespace" # else the process has ended
done 2>/dev/null
:
"""


@pytest.fixture(scope="module")
def site(suite: str) -> Iterator[Cluster]:
    """Four nodes with as many processors as this host has: a cpuset holds real ones."""
    cpus = os.cpu_count() or 1
    spec = ClusterSpec(nodes=4, cpus=cpus, confined=True, private_tmp="tmpfs", requeue_delay=1, suite=suite)
    with Cluster.up(spec) as cluster:
        yield cluster


def training_job(site: Cluster, name: str) -> Training:
    return Training(site, TrainingSpec(name, nodes=3, spares=1, arguments=SLOW_STEPS))


def is_confined(training: Training) -> None:
    """All processes are in cgroups of steps, in one mount namespace for each node, which is not the node's."""
    cluster = training.cluster
    for node in cluster.nodes:
        groups, namespaces = zip(*(line.split() for line in cluster.sh(node, _PROCESSES).splitlines()), strict=True)
        assert all("/step_" in group for group in groups), groups
        assert len({*namespaces}) == 1, namespaces
        assert cluster.sh(node, "readlink /proc/1/ns/mnt") not in namespaces


def nothing_is_left(cluster: Cluster) -> None:
    """No process, memory, cgroup, mount or file of a job on any node, and no job in the queue."""
    wait_nothing_left(cluster, 60, in_queue=True)
    left = lambda: "".join(f"{node}: {found}\n" for node in cluster.nodes if (found := cluster.sh(node, f"{_LEFT}:")))  # noqa: E731
    wait_until(lambda: not left(), 30, "nothing is left on any node")


def repeats_no_step(training: Training) -> None:
    repeated = [training.repeated_steps(generation) for generation in range(2, training.generation + 1)]
    assert max(repeated) <= 2, repeated


def test_a_confined_job_survives_crashes_and_leaves_nothing_when_it_is_killed(site: Cluster) -> None:
    with training_job(site, "processes") as training:
        job = training.submit()
        training.wait_step(10)
        is_confined(training)
        generation = training.generation
        training.kill_rank(1)
        training.wait_recovered(generation + 1)
        site.restart_service(training.node_of(1), "musterd", "KILL")
        site.restart_coordinator()
        training.wait_step(int(training.view["step"]) + 20)
        assert training.generation == generation + 1, "ranks do not need the daemons"
        lost = training.node_of(2)
        site.sh(lost, "pkill -KILL -u alice -f 'python3 [^ ]*/muster-agent run'")
        training.wait_recovered(generation + 2)
        repeats_no_step(training)
        site.sh(CONTROLLER, f"scancel {job}.0; scancel {job}")
        training.wait_job_ended()
        nothing_is_left(site)


def test_a_confined_job_survives_its_nodes_and_a_requeue(site: Cluster) -> None:
    with training_job(site, "nodes") as training:
        job = training.submit()
        training.wait_step(10)
        site.crash(dead := training.node_of(1))
        assert training.wait_left(dead)["action"] == "swap"
        repeats_no_step(training)
        site.repair(dead)
        site.sh(CONTROLLER, f"scontrol requeue {job}")
        training.wait(lambda view: view.get("phase") == "REQUEUED", 60, "REQUEUED")
        stopped = training.steps(training.generation)[-1][0]
        training.wait_step(stopped + 10, 240)
        assert training.steps(training.generation)[0][0] == stopped + 1, "it goes on from the memory of its nodes"
        is_confined(training)
        site.power_off(dead := training.node_of(0))
        assert training.wait_left(dead)["action"] == "swap"
        repeats_no_step(training)
        site.repair(dead)
        training.finish()
        view = training.wait_final()
        assert view["phase"] == "DONE", view.get("reason")
        training.wait_job_ended()
        nothing_is_left(site)
