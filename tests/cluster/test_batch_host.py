"""The first node of a job, which is the batch host and runs rank 0 and srun, can be replaced like any other node."""

import json

import pytest

from muster.slurm.testcluster.cluster import CONTROLLER, LOGIN, Cluster
from muster.slurm.testcluster.training import FATAL_XID_LINE, SLOW_STEPS, SMALL_MODEL, Training, TrainingSpec
from muster.slurm.testcluster.waiting import wait_until

pytestmark = pytest.mark.cluster


def afterok(cluster: Cluster, job: int) -> int:
    """A job of alice that starts after `job` has succeeded."""
    command = f"sbatch --parsable -N1 -o /dev/null --dependency=afterok:{job} --wrap true"
    return int(cluster.sh(LOGIN, command, user="alice"))


def state(cluster: Cluster, job: int) -> str:
    return cluster.sh(CONTROLLER, f"scontrol show job {job} | grep -o 'JobState=[A-Z]*'").partition("=")[2]


def limited(name: str) -> TrainingSpec:
    settings = (f'durable_dir = "/shared/jobs/{name}/durable"', '[slurm]\ntime = "00:30:00"')
    return TrainingSpec(name, nodes=2, spares=0, arguments=SLOW_STEPS, settings=settings)


def stops_before_its_time_limit(cluster: Cluster, training: Training) -> None:
    """The ranks stop at one step, this step is written, and the job's exit code says that the job may continue."""
    training.wait_step(5)
    # Time limits are in minutes. Only a training job can be stopped by plan, so at least half a minute must remain.
    ran = int(cluster.sh(CONTROLLER, f"echo $(($(date +%s) - $(squeue -h -j {training.job} -o %S | date -f - +%s)))"))
    cluster.sh(CONTROLLER, f"scontrol update jobid={training.job} timelimit={(ran + 30) // 60 + 1}")
    view = training.wait_final()
    assert (view["phase"], view["exit_code"]) == ("FAILED", 98)
    assert "time limit" in view["reason"]
    last = training.steps(1)[-1][0]
    training.wait_job_ended()
    assert "ExitCode=98:0" in cluster.sh(CONTROLLER, f"scontrol show job {training.job}")
    saved = sorted(path.name for path in (training.folder / "durable").iterdir())
    assert saved[-1].startswith(f"step_{last:08d}_")


def test_a_fatal_xid_on_node_0_then_its_death_then_a_link_that_stays_down_on_node_2(healthy: Cluster) -> None:
    with Training(healthy, TrainingSpec("batch-host", nodes=3, spares=2, arguments=SLOW_STEPS)) as training:
        job = training.submit()
        following = afterok(healthy, job)
        training.wait_step(15)
        healthy.kmsg("n0", FATAL_XID_LINE)
        generation = int(training.wait_left("n0")["generation"])
        assert "n0" in healthy.sh(CONTROLLER, f"squeue -h -j {job} -o %N | xargs scontrol show hostnames").split()
        healthy.power_off("n0")
        training.wait_step(int(training.view["step"]) + 20)
        assert training.generation == generation, "the death of a node without ranks costs nothing"
        a_link_that_stays_down_is_a_swap(training)
        training.finish()
        view = training.wait_final()
        assert view["phase"] == "DONE", view.get("reason")
        wait_until(lambda: state(healthy, job) == "COMPLETED", 60, f"job {job} ends COMPLETED")
        wait_until(lambda: state(healthy, following) == "COMPLETED", 90, "the afterok job runs")


def a_link_that_stays_down_is_a_swap(training: Training) -> None:
    """From the files of the adapter to the drain, with its reason. No other node is blamed."""
    cluster = training.cluster
    cluster.link_down("n2")
    recovery = training.wait_left("n2")
    assert (recovery["action"], recovery["nodes_out"]) == ("swap", ["n2"])
    reason = "RDMA port 1: link went down and stays down on mlx5_0/1"
    assert recovery["cause"].startswith(reason)
    rows = map(json.loads, cluster.sh(LOGIN, "muster nodes --json", user="alice").splitlines())
    shown = {row["node"]: (row["verdict"], row["reason"]) for row in rows}
    assert shown["n2"] == ("UNFIT", reason)
    assert {shown[node][0] for node in ("n1", "n3", "n4", "n5")} == {"FIT"}
    events = cluster.sh(LOGIN, f"muster events {training.job}", user="alice").splitlines()
    assert any("node n2 is UNFIT" in line and reason in line for line in events)
    drained = lambda: f"muster: [node] {reason}" in cluster.sh(CONTROLLER, "scontrol show node n2")  # noqa: E731
    wait_until(drained, 60, "n2 is drained with the reason")


def test_a_job_whose_batch_host_died_fails_with_its_code(healthy: Cluster) -> None:
    spec = TrainingSpec("fails", nodes=3, spares=1, arguments=SLOW_STEPS, settings=("max_failures = 1",))
    with Training(healthy, spec) as training:
        job = training.submit()
        training.wait_step(10)
        healthy.crash("n0")
        training.wait_left("n0")
        training.kill_rank(2)
        assert training.wait_final()["phase"] == "FAILED"
        wait_until(lambda: state(healthy, job) == "FAILED", 60, f"job {job} ends FAILED")
        shown = healthy.sh(CONTROLLER, f"scontrol show job {job}")
        assert "ExitCode=93:0" in shown
        assert "Requeue=0" in shown


def test_a_partition_of_node_0_that_heals_changes_nothing(healthy: Cluster) -> None:
    """The partition heals after Slurm has noticed it. Then slurmctld and every slurmd restart. The job trains on.

    During the partition, the job beside it reaches its time limit.
    """
    with (
        Training(healthy, TrainingSpec("healing", nodes=3, spares=1, arguments=SLOW_STEPS)) as training,
        Training(healthy, limited("limited")) as beside,
    ):
        job = training.submit()
        training.wait_step(15)
        beside.submit()
        healthy.partition("n0")
        training.wait_left("n0")
        stops_before_its_time_limit(healthy, beside)
        wait_until(lambda: healthy.node_states()["n0"].endswith("*"), 120, "n0 answers Slurm no more")
        healthy.heal("n0")
        # The batch script and its srun remain until Slurm ends them. Their command lines contain the agent's name.
        agent = "pgrep -u alice -f 'python3 [^ ]*/muster-agent run' || true"
        wait_until(lambda: healthy.sh("n0", agent) == "", 30, "its agent has left")
        healthy.restart_slurmctld()
        for node in healthy.nodes:
            healthy.restart_slurmd(node)
        step = int(training.view["step"])
        training.wait_step(step + 30)
        recoveries = training.view["recoveries"]
        assert [recovery["nodes_out"] for recovery in recoveries if recovery.get("nodes_out")] == [["n0"]], recoveries
        assert state(healthy, job) == "RUNNING"
        training.cancel()
        wait_until(lambda: state(healthy, job) == "CANCELLED", 30, f"job {job} is cancelled")


@pytest.mark.long  # a minute until srun gives up
def test_a_batch_host_may_fail_before_the_gang_has_gathered(healthy: Cluster) -> None:
    """One batch host reboots at once, so Slurm notices nothing: the job keeps its nodes, but nobody starts agents on
    them, and the job is requeued. Another one is cut off until srun has given up: srun is started again.
    """
    # srun waits up to a minute for a node that it cannot reach. The gang must wait longer than srun.
    timeout = ("gather_timeout = 300",)
    rebooted = TrainingSpec("at-once", nodes=2, spares=1, steps=40, arguments=SMALL_MODEL, settings=timeout)
    cut_off = TrainingSpec("cut-off", 2, 1, 40, SMALL_MODEL, timeout, user="bob")
    with Training(healthy, rebooted) as first, Training(healthy, cut_off) as second:
        host = _batch_host(healthy, second)
        healthy.partition(host)
        dies = _batch_host(healthy, first)
        healthy.crash(dies)
        healthy.start_node(dies)
        output = second.folder / f"slurm-{second.job}.out"

        def given_up() -> bool:  # or srun was quicker than the fault, and the gang goes on without this node
            return "srun has ended" in output.read_text() or second.view.get("phase") in ("RUNNING", "DONE")

        wait_until(given_up, 60, "srun has given up")
        healthy.heal(host)
        for training in (first, second):
            view = training.wait_final(180)
            assert view["phase"] == "DONE", view.get("reason")
            training.wait_job_ended()


def _batch_host(cluster: Cluster, training: Training) -> str:
    """Submits the job, and waits until it runs. Returns its batch host."""
    job = training.submit()
    host = f"squeue -h -j {job} -t R -o %B"
    wait_until(lambda: cluster.sh(CONTROLLER, host) != "", 30, f"job {job} runs")
    return cluster.sh(CONTROLLER, host).strip()
