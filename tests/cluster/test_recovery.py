"""A training job survives faults on a real Slurm: what is restored, what Slurm is told, what is left behind."""

from pathlib import Path

import pytest

from muster.slurm.cluster.cluster import CONTROLLER, LOGIN, Cluster
from muster.slurm.cluster.training import FATAL_XID_LINE, PRECURSOR_XID_LINE, SMALL_MODEL, Training, TrainingSpec
from muster.slurm.cluster.waiting import wait_until

pytestmark = pytest.mark.cluster

BUCKETS = (*SMALL_MODEL, "--bucket-cap-mb", "0.05")


def slurm_node(cluster: Cluster, node: str) -> str:
    return cluster.sh(CONTROLLER, f"scontrol show node {node}")


def times_downed(cluster: Cluster, node: str) -> int:
    """How often the node was set DOWN.

    The node's state is not sufficient. A ping answered before the failure may be counted after it. Slurm then shows
    IDLE+DRAIN ("node_did_resp: node returned to service").
    """
    return cluster.logs(CONTROLLER, "slurmctld").count(f"update_node: node {node} state set to DOWN")


def digests(training: Training, ranks: int) -> set[str]:
    return {Path(f"{training.folder}/digest.{rank}").read_text() for rank in range(ranks)}


def run_to_the_end(training: Training) -> None:
    training.finish()
    view = training.wait_final(240)
    assert (view["phase"], int(view.get("exit_code", 0))) == ("DONE", 0), view.get("reason")
    training.wait_job_ended()


def test_a_run_with_faults_and_a_planned_swap_ends_with_the_same_bits(healthy: Cluster) -> None:
    """A rank, a precursor, a node and node 0 (the batch host, rank 0): the weights are those of a run without faults,
    beside it."""

    def spec(name: str, spares: int) -> TrainingSpec:
        arguments = (*BUCKETS, "--dropout", "0.1", "--digest", f"/shared/jobs/{name}/digest")
        return TrainingSpec(name, nodes=3, spares=spares, steps=200, arguments=arguments)

    with Training(healthy, spec("disturbed", 3)) as training, Training(healthy, spec("undisturbed", 0)) as beside:
        training.submit()
        beside.submit()
        training.wait_step(20)
        training.kill_rank(2)
        training.wait_recovered(2)
        training.wait_step(35)
        a_precursor_is_a_planned_swap(training)
        training.wait_step(60)
        healthy.crash(training.node_of(1))
        training.wait_recovered(4)
        training.wait_step(90)
        assert training.node_of(0) == "n0"
        healthy.power_off("n0")
        training.wait_recovered(5)
        for one in (training, beside):
            run_to_the_end(one)
        assert (training.generation, beside.generation) == (5, 1)
        assert [training.repeated_steps(g) <= 2 for g in (2, 4, 5)] == [True] * 3
        assert len(digests(beside, 3)) == 1
        assert digests(training, 3) == digests(beside, 3)


def a_precursor_is_a_planned_swap(training: Training) -> None:
    """The ranks leave the node after a step that none of them repeats, and the node is drained."""
    cluster, node = training.cluster, training.node_of(2)
    cluster.kmsg(node, PRECURSOR_XID_LINE)
    recovery = training.wait_recovered(3)
    assert (recovery["action"], recovery["nodes_out"]) == ("planned swap", [node])
    assert "Xid 64" in recovery["cause"]
    assert training.repeated_steps(3) == 0
    wait_until(lambda: "DRAIN" in slurm_node(cluster, node), 60, f"{node} is drained")
    assert "muster: [node] Xid 64" in slurm_node(cluster, node)


def test_seven_nodes_in_a_row_are_replaced_two_of_them_after_a_coordinator_outage(healthy: Cluster) -> None:
    """Power loss and a fatal Xid: swap, drain and let go. Training goes on without the coordinator, and a restarted one
    completes a recovery. A node that hangs is replaced, too, and so are a node that the job's owner gives back and one
    whose GPU throttles."""
    with Training(healthy, TrainingSpec("swaps", nodes=3, spares=7, arguments=BUCKETS)) as training:
        job = training.submit()
        training.wait_step(20)
        dead, unfit = power_loss_is_a_swap(training), a_fatal_xid_is_a_swap(training)
        held = lambda: healthy.sh(CONTROLLER, f"squeue -h -j {job} -o %N | xargs -r scontrol show hostnames").split()  # noqa: E731
        wait_until(lambda: unfit not in held() and dead not in held(), 60, f"{dead} and {unfit} have left the job")
        trains_without_a_coordinator(training)
        a_hung_node_is_a_swap(training)
        a_node_that_is_given_back_is_a_swap(training, job, held())
        a_gpu_that_throttles_is_a_planned_swap(training)
        run_to_the_end(training)
    shown = healthy.sh(CONTROLLER, f"scontrol show job {job}")
    # A job is COMPLETING for up to a minute after a node of its step has died.
    assert "JobState=COMPLETED" in shown or "JobState=COMPLETING" in shown
    assert "ExitCode=0:0" in shown


def power_loss_is_a_swap(training: Training) -> str:
    """The node without power is replaced, drained and set DOWN."""
    cluster, dead = training.cluster, training.node_of(2)
    downed_before = times_downed(cluster, dead)
    cluster.power_off(dead)
    recovery = training.wait_recovered(2)
    assert recovery["action"] == "swap"
    assert recovery["nodes_out"] == [dead]
    assert f"{dead} is lost" in recovery["cause"]
    wait_until(lambda: "DRAIN" in slurm_node(cluster, dead), 60, f"{dead} is drained")
    wait_until(lambda: times_downed(cluster, dead) > downed_before, 60, f"{dead} is set DOWN")
    assert "muster:" in slurm_node(cluster, dead)
    return dead


def a_fatal_xid_is_a_swap(training: Training) -> str:
    """The node with the Xid is replaced and drained. It is not the batch host, which cannot be removed."""
    cluster, unfit = training.cluster, training.node_of(1)
    cluster.kmsg(unfit, FATAL_XID_LINE)
    assert "Xid 79" in training.wait_recovered(3)["cause"]
    assert int(training.view["recoveries"][-1]["step_restored"]) > 20
    wait_until(lambda: "DRAIN" in slurm_node(cluster, unfit), 60, f"{unfit} is drained")
    assert "Xid 79" in slurm_node(cluster, unfit)
    return unfit


def trains_without_a_coordinator(training: Training) -> None:
    """15 steps at least. A node that dies meanwhile is replaced afterwards, and one that is unfit during a restart."""
    cluster = training.cluster
    cluster.kill_coordinator()
    before = len(training.steps(3))  # may be 0: an agent reports a step before its rank has printed the step
    wait_until(lambda: len(training.steps(3)) >= before + 15, 120, "15 steps without a coordinator")
    dead = training.node_of(1)
    cluster.crash(dead)
    cluster.start_service(CONTROLLER, "muster-coordinator")
    assert training.wait_recovered(4)["nodes_out"] == [dead]
    cluster.kmsg(training.node_of(2), FATAL_XID_LINE)
    cluster.restart_coordinator()
    training.wait_recovered(5)


def a_hung_node_is_a_swap(training: Training) -> None:
    cluster, node = training.cluster, training.node_of(1)
    cluster.pause(node)
    recovery = training.wait_recovered(6)
    assert f"{node} hangs" in recovery["cause"]
    assert recovery["nodes_out"] == [node]


FALSE_AGENT = """
import asyncio
from muster.daemon.coordinator.testing.scripted_agent import ScriptedAgent
from muster.daemon.transport.site_config import Site
from muster.v1.common_pb2 import JobSpec

async def attach():
    site = Site.load()
    agent = ScriptedAgent("{node}", JobSpec(), site.credentials(), gang="{gang}", job={job}, trust=site.trust())
    await agent.open()
    await agent.attach(site.coordinator)
    print(agent.duty, agent.dismissed)

asyncio.run(attach())
"""


def a_node_that_is_given_back_is_a_swap(training: Training, job: int, held: list[str]) -> None:
    """The owner shrinks the job. The node is not blamed, and no process of the owner speaks for the node any more."""
    cluster, node = training.cluster, training.node_of(2)
    left = ",".join(name for name in held if name != node)
    cluster.exec(LOGIN, "scontrol", "update", f"jobid={job}", f"nodelist={left}", user="alice")
    assert training.wait_recovered(7)["nodes_out"] == [node]
    gang = training.view["gang_id"]
    script = FALSE_AGENT.format(node=node, gang=gang, job=job)
    said = cluster.exec(node, "python3", "-c", script, user="alice").stdout
    assert said.strip() == f"node {node} does not belong to job {job} (any more)"
    assert "DRAIN" not in slurm_node(cluster, node)
    assert "DOWN" not in slurm_node(cluster, node)


def a_gpu_that_throttles_is_a_planned_swap(training: Training) -> None:
    """From the sensor of the node to ranks that leave it without repeating a step."""
    cluster, node = training.cluster, training.node_of(1)
    cluster.throttle(node, 2)
    recovery = training.wait_recovered(8)
    assert (recovery["action"], recovery["nodes_out"]) == ("planned swap", [node])
    assert recovery["cause"].startswith("GPU throttled 64: slowed down by the hardware for heat")
    assert training.repeated_steps(8) == 0
    wait_until(lambda: "muster: [node] GPU throttled" in slurm_node(cluster, node), 60, f"{node} is drained")


def test_a_rank_that_hangs_is_restarted_from_memory_and_its_stacks_are_kept(healthy: Cluster) -> None:
    settings = ("hang_after = 5",)
    spec = TrainingSpec("stalled", nodes=3, spares=0, arguments=BUCKETS, settings=settings)
    with Training(healthy, spec) as training:
        training.submit()
        training.wait_step(30)
        seats = [training.node_of(rank) for rank in range(3)]
        training.hang_rank(1)
        recovery = training.wait_recovered(2)
        assert recovery["action"] == "restart in place"
        assert recovery["cause"].startswith("hang: no rank has finished a step for")
        assert int(recovery["step_restored"]) >= 29
        assert [training.node_of(rank) for rank in range(3)] == seats
        assert "T (stopped)" in training.stacks(1, 1)
        assert all("train.py" in training.stacks(1, rank) for rank in (0, 2))
        shown = healthy.exec("login", "muster", "logs", "--stacks", "--rank", "0", str(training.job), user="alice")
        assert shown.stdout == training.stacks(1, 0).replace("\n\n", "\n")
        run_to_the_end(training)
        assert training.generation == 2
    assert all("DRAIN" not in slurm_node(healthy, node) for node in seats)
