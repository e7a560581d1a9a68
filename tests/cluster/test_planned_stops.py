"""A job that Slurm is about to end: its ranks stop at a step, that step is written, and the job goes on from there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from muster.slurm.cluster.cluster import CONTROLLER, LOGIN, Cluster
from muster.slurm.cluster.patience import wait_until
from muster.slurm.cluster.training import Training, TrainingSpec

pytestmark = pytest.mark.cluster

SMALL = ("--width", "64", "--layers", "2")
GRACE_S = 30


@pytest.fixture(scope="module")
def preempting(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with a second partition, whose jobs preempt those of the first."""
    cluster.mend()
    spec = cluster.spec
    urgent = f"PartitionName=urgent Nodes=n[0-{spec.nodes - 1}] PriorityTier=10 State=UP"
    extra = (*spec.extra, "PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE", urgent)
    cluster.reconfigure(dataclasses.replace(spec, extra=extra))
    cluster.sh(CONTROLLER, f"scontrol update PartitionName=main GraceTime={GRACE_S}")
    yield cluster
    cluster.mend()
    cluster.reconfigure(spec)


def training_job(cluster: Cluster, name: str, steps: int, *settings: str) -> Training:
    durable = f'durable_dir = "/shared/jobs/{name}/durable"'
    return Training(
        cluster, TrainingSpec(name, nodes=4, spares=0, steps=steps, arguments=SMALL, settings=(durable, *settings))
    )


def goes_on_where_it_stopped(training: Training) -> None:
    """The next generation begins with the step after the last one of the generation before."""
    training.wait(lambda v: v.get("phase") == "REQUEUED", 60, "REQUEUED")
    stopped = training.steps(1)[-1][0]
    view = training.wait_final(240)
    assert view["phase"] == "DONE", view.get("reason")
    assert training.steps(training.generation)[0][0] == stopped + 1
    training.wait_gone()


def test_a_job_that_an_operator_requeues_loses_no_step(preempting: Cluster) -> None:
    with training_job(preempting, "requeue", 120) as training:
        job = training.submit()
        training.wait_step(20)
        preempting.sh(CONTROLLER, f"scontrol requeue {job}")
        goes_on_where_it_stopped(training)


def test_a_preempted_job_is_saved_within_its_grace_time_and_makes_room_at_once(preempting: Cluster) -> None:
    with training_job(preempting, "preempted", 150) as training:
        training.submit()
        training.wait_step(20)
        urgent = "sbatch --parsable -p urgent -N10 --exclusive -o /dev/null --wrap 'sleep 3'"
        number = preempting.sh(LOGIN, f'su alice -c "{urgent}"').strip()
        shown = f"scontrol show job {number}"
        wait_until(lambda: "JobState=RUNNING" in preempting.sh(CONTROLLER, shown), GRACE_S - 10, "the other job starts")
        goes_on_where_it_stopped(training)
