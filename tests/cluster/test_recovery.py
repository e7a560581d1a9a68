"""A training job outlives faults on a real Slurm: what is restored, what Slurm is told, what is left behind."""

from pathlib import Path

import pytest

from muster.slurm.cluster.cluster import CONTROLLER, Cluster
from muster.slurm.cluster.training import SMALL, XID, Training, TrainingSpec
from muster.slurm.cluster.waiting import wait_until

pytestmark = pytest.mark.cluster

BUCKETS = (*SMALL, "--bucket-cap-mb", "0.05")


def slurm_node(cluster: Cluster, node: str) -> str:
    return cluster.sh(CONTROLLER, f"scontrol show node {node}")


def times_downed(cluster: Cluster, node: str) -> int:
    """How often the node was set DOWN. Its state does not always tell: the answer to a ping, given before the node died
    and counted by slurmctld only after that, makes it IDLE+DRAIN ("node_did_resp: node returned to service")."""
    return cluster.logs(CONTROLLER, "slurmctld").count(f"update_node: node {node} state set to DOWN")


def digests(training: Training, ranks: int) -> set[str]:
    return {Path(f"{training.folder}/digest.{rank}").read_text() for rank in range(ranks)}


def run_to_the_end(training: Training) -> None:
    view = training.wait_final(240)
    assert (view["phase"], int(view.get("exit_code", 0))) == ("DONE", 0), view.get("reason")
    training.wait_gone()


def test_a_run_with_three_faults_ends_with_the_same_bits(healthy: Cluster) -> None:
    """A rank, a node and node 0 (the batch host, rank 0): the weights are those of a run without faults."""
    ends: list[set[str]] = []
    for name in ("undisturbed", "disturbed"):
        arguments = (*BUCKETS, "--dropout", "0.1", "--digest", f"/shared/jobs/{name}/digest")
        spares = 2 if name == "disturbed" else 0
        with Training(healthy, TrainingSpec(name, nodes=4, spares=spares, steps=200, arguments=arguments)) as training:
            training.submit()
            if name == "disturbed":
                training.wait_step(30)
                training.kill_rank(2)
                training.wait_recovered(2)
                training.wait_step(70)
                healthy.crash(training.node_of(3))
                training.wait_recovered(3)
                training.wait_step(110)
                assert training.node_of(0) == "n0"
                healthy.power_off("n0")
                training.wait_recovered(4)
            run_to_the_end(training)
            assert training.generation == (4 if name == "disturbed" else 1)
            ends.append(digests(training, 4))
            if name == "disturbed":
                assert [training.redone(g) <= 2 for g in (2, 3, 4)] == [True] * 3
    assert len(ends[0]) == 1
    assert ends[0] == ends[1]


def test_power_loss_and_a_fatal_xid_swap_drain_and_let_go(healthy: Cluster) -> None:
    with Training(healthy, TrainingSpec("swaps", nodes=4, spares=2, steps=90, arguments=BUCKETS)) as training:
        job = training.submit()
        training.wait_step(20)
        dead = training.node_of(2)
        downed_before = times_downed(healthy, dead)
        healthy.power_off(dead)
        recovery = training.wait_recovered(2)
        assert recovery["action"] == "swap"
        assert recovery["nodes_out"] == [dead]
        assert f"{dead} is lost" in recovery["cause"]
        wait_until(lambda: "DRAIN" in slurm_node(healthy, dead), 10, f"{dead} is drained")
        wait_until(lambda: times_downed(healthy, dead) > downed_before, 10, f"{dead} is set DOWN")
        assert "muster:" in slurm_node(healthy, dead)
        unfit = training.node_of(3)
        healthy.kmsg(unfit, XID)
        assert "Xid 79" in training.wait_recovered(3)["cause"]
        assert int(training.view["recoveries"][-1]["step_restored"]) > 20
        wait_until(lambda: "DRAIN" in slurm_node(healthy, unfit), 10, f"{unfit} is drained")
        assert "Xid 79" in slurm_node(healthy, unfit)
        held = lambda: healthy.sh(CONTROLLER, f"squeue -h -j {job} -o %N | xargs -r scontrol show hostnames").split()  # noqa: E731
        wait_until(lambda: unfit not in held() and dead not in held(), 15, f"{unfit} has left the job")
        run_to_the_end(training)
    state = healthy.sh(CONTROLLER, f"scontrol show job {job}")
    assert "JobState=COMPLETED" in state


def test_training_goes_on_without_the_coordinator_and_a_restarted_one_completes_a_recovery(healthy: Cluster) -> None:
    with Training(healthy, TrainingSpec("orphaned", nodes=4, spares=2, steps=150, arguments=BUCKETS)) as training:
        training.submit()
        training.wait_step(15)
        healthy.kill_coordinator()
        before = training.steps(1)[-1][0]
        wait_until(lambda: training.steps(1)[-1][0] >= before + 15, 60, "15 steps without a coordinator")
        dead = training.node_of(1)
        healthy.crash(dead)
        healthy.start_service(CONTROLLER, "muster-coordinator")
        assert training.wait_recovered(2)["nodes_out"] == [dead]
        healthy.kmsg(training.node_of(3), XID)
        healthy.restart_coordinator()
        training.wait_recovered(3)
        run_to_the_end(training)


def test_a_rank_that_hangs_is_restarted_from_memory_and_its_stacks_are_kept(healthy: Cluster) -> None:
    settings = ("hang_after = 5",)
    spec = TrainingSpec("stalled", nodes=3, spares=1, steps=80, arguments=BUCKETS, settings=settings)
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


def test_a_hung_node_is_replaced(healthy: Cluster) -> None:
    with Training(healthy, TrainingSpec("hung", nodes=3, spares=1, steps=60, arguments=BUCKETS)) as training:
        training.submit()
        training.wait_step(10)
        node = training.node_of(1)
        healthy.pause(node)
        assert "hangs" in training.wait_recovered(2)["cause"]
        run_to_the_end(training)
