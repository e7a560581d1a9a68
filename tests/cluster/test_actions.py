"""What administrators and users do to a running job with Slurm's own commands (docs/operations/actions.md).

The tests share one job. Each leaves it training, but for the last one.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from muster.slurm.testcluster.cluster import CONTROLLER, LOGIN, Cluster
from muster.slurm.testcluster.training import SLOW_STEPS, Training, TrainingSpec
from muster.slurm.testcluster.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.long]


@pytest.fixture(scope="module")
def training(cluster: Cluster) -> Iterator[Training]:
    """Two nodes with ranks and three spares. slurm.conf changes while it trains."""
    cluster.restore_all()
    before = cluster.spec
    settings = ('durable_dir = "/shared/jobs/actions/durable"', 'slurm.time = "1:00:00"')
    spec = TrainingSpec("actions", nodes=2, spares=3, arguments=SLOW_STEPS, settings=settings)
    with Training(cluster, spec) as training:
        training.submit()
        user(training, "scontrol update jobid={job} comment=mine")
        training.wait_step(10)
        cluster.reconfigure(extra=(*before.extra, "RebootProgram=/bin/true"))
        yield training
    cluster.restore_all()
    cluster.reconfigure(before)


def administrator(training: Training, words: str) -> str:
    return training.cluster.sh(CONTROLLER, words.format(job=training.job))


def user(training: Training, words: str) -> str:
    return training.cluster.sh(LOGIN, words.format(job=training.job), user=training.spec.user)


def set_node(training: Training, node: str, state: str) -> None:
    administrator(training, f"scontrol update nodename={node} state={state} reason=dimm")


def spares(training: Training) -> list[str]:
    return [str(node["node"]) for node in training.view["nodes"] if node["role"] == "spare"]


def trains_on(training: Training, generation: int) -> None:
    """It trains in `generation`, and no node is blamed."""
    training.wait_step(int(training.view["step"]) + 20)
    assert training.generation == generation
    assert {node["verdict"] for node in training.view["nodes"]} == {"FIT"}


def status_says(training: Training, words: str) -> None:
    wait_until(lambda: words in user(training, "muster status {job}"), 20, f"muster status says: {words}")


def no_step_is_lost(training: Training, generation: int) -> None:
    """`generation` begins behind the last step of the one before."""
    assert training.steps(generation)[0][0] == training.steps(generation - 1)[-1][0] + 1


def test_what_concerns_only_the_queue_disturbs_no_rank(training: Training) -> None:
    generation = training.generation
    user(training, "scontrol update jobid={job} jobname=other nice=100; scontrol hold {job}")
    administrator(training, "scontrol update jobid={job} priority=7; scontrol hold {job}")
    user(training, "scancel --batch --signal=USR1 {job}")
    trains_on(training, generation)
    administrator(training, "scontrol release {job}")


def test_the_end_follows_a_time_limit_that_is_changed(training: Training) -> None:
    generation, end = training.generation, float(training.view["run_ends_s"])
    administrator(training, "scontrol update jobid={job} timelimit=2:00:00")
    training.wait(lambda view: abs(float(view.get("run_ends_s", 0)) - end - 3600) < 5, 20, "the end is an hour later")
    trains_on(training, generation)


def test_a_signal_that_ends_ranks_costs_no_node(training: Training) -> None:
    generation = training.generation + 1
    user(training, "scancel --signal=USR1 {job}")
    assert training.wait_recovered(generation)["action"] == "restart in place"
    trains_on(training, generation)


def test_ranks_leave_a_node_that_is_to_fail_and_a_drained_spare_comes_last(training: Training) -> None:
    drained, *_ = spares(training)
    bad, generation = training.node_of(1), training.generation + 1
    set_node(training, drained, "drain")
    status_says(training, "drained in Slurm: dimm")
    set_node(training, bad, "fail")
    recovery = training.wait_recovered(generation)
    assert (recovery["action"], recovery["nodes_out"]) == ("planned swap", [bad])
    assert drained not in recovery["nodes_in"]
    no_step_is_lost(training, generation)
    status_says(training, f"an administrator drains {bad}: state FAIL in Slurm, dimm")
    set_node(training, drained, "undrain")
    set_node(training, bad, "resume")
    trains_on(training, generation)


def test_ranks_stay_on_a_node_that_waits_for_its_reboot(training: Training) -> None:
    node, generation = training.node_of(1), training.generation
    administrator(training, f"scontrol reboot asap nextstate=resume reason=kernel {node}")
    status_says(training, "drained in Slurm: kernel")
    trains_on(training, generation)
    administrator(training, f"scontrol cancel_reboot {node}")


def test_a_node_that_is_set_down_is_replaced_and_not_blamed(training: Training) -> None:
    node, generation = training.node_of(1), training.generation + 1
    set_node(training, node, "down")
    assert training.wait_recovered(generation)["nodes_out"] == [node]
    status_says(training, f"job {training.job} no longer has {node}")
    trains_on(training, generation)


def test_a_held_requeue_waits_for_its_release(training: Training) -> None:
    generation = training.generation + 1
    administrator(training, "scontrol requeuehold {job}")
    training.wait(lambda view: view["phase"] == "REQUEUED", 60, "REQUEUED")
    status_says(training, "held since its requeue")
    administrator(training, "scontrol release {job}")
    training.wait_step(training.steps(generation - 1)[-1][0] + 1, 240)
    no_step_is_lost(training, generation)
    trains_on(training, generation)


def test_a_cancelled_step_of_the_agents_goes_on_from_the_last_durable_checkpoint(training: Training) -> None:
    generation = training.generation + 1
    saved = training.steps(training.generation)[0][0] - 1
    user(training, "scancel {job}.0")
    training.wait_recovered(generation)
    assert training.steps(generation)[0][0] == saved + 1
    trains_on(training, generation)


def test_a_time_limit_that_has_passed_ends_the_job_and_the_step_is_written(training: Training) -> None:
    generation = training.generation
    administrator(training, "scontrol update jobid={job} timelimit=1")
    view = training.wait_final()
    assert (view["phase"], view["exit_code"]) == ("FAILED", 98), view.get("reason")
    step = training.steps(generation)[-1][0]
    assert f"step_{step:08d}_g{generation}_" in user(training, "ls /shared/jobs/actions/durable")
    wait_until(lambda: "JobState=FAILED" in administrator(training, "scontrol show job {job}"), 60, "the job has ended")
    assert "Comment=mine" in administrator(training, "scontrol show job {job}")
