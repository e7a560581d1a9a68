"""A job that Slurm is about to end: its ranks stop at a step, the step is written, and the job continues from it.

The job continues from memory if its nodes have kept it, else from durable storage.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from muster.slurm.testcluster.cluster import CONTROLLER, LOGIN, Cluster
from muster.slurm.testcluster.training import SLOW_STEPS, Training, TrainingSpec
from muster.slurm.testcluster.waiting import wait_until

pytestmark = pytest.mark.cluster

GRACE_S = 30


@pytest.fixture(scope="module")
def preempting(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with a second partition, whose jobs preempt those of the first one."""
    cluster.restore_all()
    spec = cluster.spec
    urgent = f"PartitionName=urgent Nodes=n[0-{spec.nodes - 1}] PriorityTier=10 State=UP"
    extra = (*spec.extra, "PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE", urgent)
    cluster.reconfigure(extra=extra)
    cluster.sh(CONTROLLER, f"scontrol update PartitionName=main GraceTime={GRACE_S}")
    yield cluster
    cluster.restore_all()
    cluster.reconfigure(spec)


def training_job(cluster: Cluster, name: str, nodes: int, *settings: str) -> Training:
    return Training(cluster, TrainingSpec(name, nodes=nodes, spares=0, arguments=SLOW_STEPS, settings=settings))


def durable(name: str) -> str:
    return f'durable_dir = "/shared/jobs/{name}/durable"'


def goes_on_where_it_stopped(training: Training, origin: str) -> None:
    """The next generation begins with the step after the last one of the generation before, from `origin`."""
    training.wait(lambda v: v.get("phase") == "REQUEUED", 60, "REQUEUED")
    stopped = training.steps(1)[-1][0]
    training.wait_step(stopped + 1, 240)
    training.finish()
    view = training.wait_final()
    assert view["phase"] == "DONE", view.get("reason")
    assert training.steps(training.generation)[0][0] == stopped + 1
    events = training.cluster.exec(LOGIN, "muster", "events", str(training.job), user=training.spec.user).stdout
    start = f"generation {training.generation} starts from {origin.format(step=stopped)}"
    assert [line for line in events.splitlines() if start in line], events
    training.wait_job_ended()


@pytest.mark.long  # the next one is the same without durable storage
def test_a_job_that_an_operator_requeues_loses_no_step(preempting: Cluster) -> None:
    with training_job(preempting, "requeue", 3, durable("requeue")) as training:
        job = training.submit()
        training.wait_step(10)
        preempting.sh(CONTROLLER, f"scontrol requeue {job}")
        goes_on_where_it_stopped(training, "memory at step {step} ")


def test_a_requeued_job_without_durable_storage_continues_from_kept_memory(preempting: Cluster) -> None:
    with training_job(preempting, "memory", 2) as training:
        job = training.submit()
        training.wait_step(10)
        preempting.sh(CONTROLLER, f"scontrol requeue {job}")
        goes_on_where_it_stopped(training, "memory at step {step} ")


def test_a_job_that_ran_in_between_on_one_node_has_that_nodes_memory(preempting: Cluster) -> None:
    with training_job(preempting, "between", 2, durable("between")) as training:
        job = training.submit()
        training.wait_step(10)
        node = training.node_of(1)
        preempting.sh(CONTROLLER, f"scontrol requeue {job}; scontrol hold {job}")
        training.wait(lambda v: v.get("phase") == "REQUEUED", 60, "REQUEUED")
        preempting.sh(LOGIN, f"su alice -c 'srun -w {node} -N1 --exclusive true'")
        assert "freed: the memory of gang between" in preempting.logs(node, "musterd")
        preempting.sh(CONTROLLER, f"scontrol release {job}")
        goes_on_where_it_stopped(training, "/shared/jobs/between/durable/step_{step:08d}_g1_")


def test_a_preempted_job_is_saved_within_its_grace_time_and_makes_room_at_once(preempting: Cluster) -> None:
    with training_job(preempting, "preempted", 3, durable("preempted")) as training:
        training.submit()
        training.wait_step(10)
        urgent = "sbatch --parsable -p urgent -N10 --exclusive -o /dev/null --wrap 'sleep 3'"
        number = preempting.sh(LOGIN, f'su alice -c "{urgent}"').strip()
        shown = f"scontrol show job {number}"
        wait_until(lambda: "JobState=RUNNING" in preempting.sh(CONTROLLER, shown), GRACE_S - 10, "the other job starts")
        goes_on_where_it_stopped(training, "/shared/jobs/preempted/durable/step_{step:08d}_g1_")


def test_a_job_that_was_stopped_and_saved_goes_on_when_it_is_submitted_again(preempting: Cluster) -> None:
    settings = (durable("again"), "requeue = false")
    with training_job(preempting, "again", 2, *settings) as first:
        job = first.submit()
        first.wait_step(10)
        preempting.sh(CONTROLLER, f"scancel --signal=TERM {job}")
        view = first.wait_final()
        assert (view["phase"], view["exit_code"]) == ("FAILED", 98), view.get("reason")
        stopped = first.steps(1)[-1][0]
        first.wait_job_ended()
    with training_job(preempting, "again", 2, *settings) as second:
        second.submit()
        assert f"goes on at step {stopped} from /shared/jobs/again/durable/" in second.notes
        assert f"job {job} (again), the last run of this job, has not finished" in second.notes
        words = ("muster", "submit", "/shared/jobs/again/job.toml")
        refused = preempting.exec(LOGIN, *words, user=second.spec.user, check=False)
        assert refused.rc == 64
        assert f"job {second.job} (again) is the same job" in refused.stderr
        another = "cd /shared/jobs/again; (cat job.toml; echo 'env.LR = \"3\"') >../again.toml"
        preempting.sh(LOGIN, another)
        words = ("muster", "submit", "/shared/jobs/again.toml", "--", "--hold")
        afresh = preempting.exec(LOGIN, *words, user=second.spec.user)
        assert f"starts at step 0: job {second.job} (again) is " in afresh.stderr
        differs = "has the same durable_dir, and is another job: its env.LR differs"
        assert f"{differs}. --resume {second.job} goes on at step {stopped}" in afresh.stderr
        preempting.exec(LOGIN, "muster", "cancel", afresh.stdout.split()[-1], user=second.spec.user)
        second.wait_step(stopped + 1)
        second.finish()
        view = second.wait_final()
        assert view["phase"] == "DONE", view.get("reason")
        assert second.steps(1)[0][0] == stopped + 1
        second.wait_job_ended()


@pytest.mark.long
def test_a_suspended_job_and_one_that_gets_a_signal_for_its_ranks_go_on_from_memory(healthy: Cluster) -> None:
    """Slurm stops and signals agents, too: they are silent for longer than every limit, and none of them ends."""
    with training_job(healthy, "suspended", 3) as training:
        job = str(training.submit())
        training.wait_step(15)
        healthy.exec(CONTROLLER, "scontrol", "suspend", job)
        wait_until(
            lambda: "Slurm to resume" in healthy.sh(LOGIN, f"muster status {job}", user="alice"), 20, "it is told"
        )
        time.sleep(20)
        assert training.generation == 1
        healthy.exec(CONTROLLER, "scontrol", "resume", job)
        assert int(training.wait_recovered(2)["step_restored"]) >= 15
        healthy.exec(LOGIN, "scancel", "--signal=ALRM", job, user="alice")
        recovery = training.wait_recovered(3)
        assert (recovery["action"], int(recovery["step_restored"]) > 15) == ("restart in place", True)
        assert "Restarts=0" in healthy.sh(CONTROLLER, f"scontrol show job {job}")
        training.finish()
        assert training.wait_final()["phase"] == "DONE", training.view.get("reason")
