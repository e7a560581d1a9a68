"""What fails around a running job that is neither Muster's nor the GPU's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.cluster import hung_mount

from muster.slurm.testcluster.cluster import CONTROLLER, LOGIN, Cluster
from muster.slurm.testcluster.training import EXAMPLE, SLOW_STEPS, Training, TrainingSpec
from muster.slurm.testcluster.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.long]

HUNG = "/mnt/hung"
# A thread of each rank looks at a mount, as a data loader does.
LOOKS = f"""import threading


def look() -> None:
    while True:
        os.path.exists("{HUNG}/data")
        time.sleep(0.1)


def main() -> None:
    threading.Thread(target=look, daemon=True).start()
"""
# What Lightning and fairseq do on SIGUSR1.
REQUEUES = """import signal
import subprocess


def again(*_: object) -> None:
    if os.environ["RANK"] == "0":
        subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True)


def main() -> None:
    signal.signal(signal.SIGUSR1, again)
"""
DURABLE = 'durable_dir = "/shared/jobs/{0}/durable"'


def script(main: str) -> str:
    """The example with another beginning of main()."""
    return (EXAMPLE / "train.py").read_text().replace("def main() -> None:\n", main, 1)


@contextmanager
def hangs(cluster: Cluster, node: str) -> Iterator[None]:
    """The mount on this node hangs."""
    pid = Path(cluster.proc_path(node)).parts[2]
    argv = cluster.engine.host_argv(sys.executable, hung_mount.__file__, pid, HUNG)
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline().strip() == hung_mount.READY
            yield
        finally:
            cluster.engine.kill(server.pid)


def told(cluster: Cluster, command: str, job: int) -> str:
    return cluster.sh(LOGIN, f"muster {command} {job}", user="alice")


def test_a_rank_that_can_not_be_killed_is_named_and_costs_one_node(healthy: Cluster) -> None:
    spec = TrainingSpec("stuck", nodes=2, spares=2, arguments=SLOW_STEPS, script=script(LOOKS))
    with Training(healthy, spec) as training:
        job = training.submit()
        training.wait_step(10)
        node = training.node_of(1)
        with hangs(healthy, node):
            waits = "cat /proc/$(pgrep -x rank1)/task/*/wchan | grep -o request_wait_answer || true"
            wait_until(lambda: healthy.sh(node, waits), 20, "rank 1 waits for the mount")
            training.kill_rank(0)
            recovery = training.wait_left(node)
            assert recovery["nodes_out"] == [node]
            words = f"ranks on {node} could not be killed within 10 s: process "
            wait_until(lambda: words in healthy.sh(CONTROLLER, f"scontrol show node {node}"), 30, f"{node} is drained")
            reason = healthy.sh(CONTROLLER, f"scontrol show node {node}")
            assert " (rank1) is in state D, in request_wait_answer" in reason
            training.wait_step(int(training.view["step"]) + 10)
            assert {training.node_of(rank) for rank in range(2)}.isdisjoint({node})
        others = {name: state for name, state in healthy.node_states().items() if name != node}
        assert "drain" not in " ".join(others.values())
        assert words in told(healthy, "status", job)


def test_another_slurmd_and_a_reboot_without_a_word(healthy: Cluster) -> None:
    """The ranks go on while slurmd is replaced. A node that reboots is left for a spare, and may run jobs again."""
    spec = TrainingSpec("around", nodes=3, spares=1, arguments=SLOW_STEPS)
    with Training(healthy, spec) as training:
        training.submit()
        training.wait_step(10)
        for node in (training.node_of(0), training.node_of(1)):
            healthy.sh(node, "cp /usr/sbin/slurmd /usr/local/sbin/slurmd")
            healthy.restart_slurmd(node)
            training.wait_step(int(training.view["step"]) + 20)
        assert training.generation == 1
        node = training.node_of(2)
        healthy.crash(node)
        healthy.start_node(node)
        training.wait_left(node)


def test_a_rank_that_requeues_its_job_runs_once(healthy: Cluster) -> None:
    spec = TrainingSpec("again", 2, 0, None, SLOW_STEPS, (DURABLE.format("again"),), script=script(REQUEUES))
    with Training(healthy, spec) as training:
        job = training.submit()
        training.wait_step(10)
        for rank in range(2):
            training.tell_rank(rank, "USR1")
        training.wait(
            lambda view: int(view.get("generation", 0)) > 1 and view["phase"] == "RUNNING", 120, "a second run"
        )
        assert training.steps(1)[-1][0] >= 10
        training.finish()
        view = training.wait_final()
        assert (view["phase"], view.get("recoveries", [])) == ("DONE", [])
        assert training.steps(2)[0][0] == training.steps(1)[-1][0] + 1
        assert "Restarts=1 " in healthy.sh(CONTROLLER, f"scontrol show job -o {job}")


def test_a_job_that_too_few_nodes_are_left_for_says_so_and_starts_once_one_is_repaired(healthy: Cluster) -> None:
    others = f"[slurm]\noptions = ['--exclude={','.join(healthy.nodes[3:])}']"
    settings = (DURABLE.format("few"), "pool_nodes = 0", others)
    with Training(healthy, TrainingSpec("few", 2, 0, None, SLOW_STEPS, settings)) as training:
        job = training.submit()
        gone = []
        for generation in (1, 2):
            training.wait(lambda view, g=generation: int(view.get("generation", 0)) == g, 120, f"run {generation}")
            training.wait_step(1)
            gone.append(training.node_of(1))
            healthy.crash(gone[-1])
            training.wait(lambda view: view.get("phase") == "REQUEUED", 60, "the requeue")
        words = "on which earlier runs of this job failed"
        wait_until(lambda: words in told(healthy, "status", job), 60, "the user is told the way out")
        healthy.repair(gone[0])
        # It may not come to train: Slurm sends a SIGKILL for step 0 that a lost node did not take again a minute later.
        training.wait(lambda view: view.get("phase") in ("GATHERING", "RUNNING"), 120, "it starts again")


@pytest.fixture
def failing(other_settings: Cluster) -> Cluster:
    """The TaskProlog fails on n1."""
    other_settings.set_program("TaskProlog", '#!/bin/sh\n[ "$SLURMD_NODENAME" != n1 ] || exit 3\n')
    return other_settings


def test_a_task_prolog_that_fails_costs_a_node_and_no_gather_timeout(failing: Cluster) -> None:
    """The login host says that the disk of durable_dir is full: another one than the nodes have."""
    durable = "/shared/jobs/prolog/durable"
    fill = f"mount -t tmpfs -o size=64k,mode=1777 none {durable}; head -c 64k /dev/zero >{durable}/fill"
    away = f"[slurm]\noptions = ['--exclude={','.join(failing.nodes[3:])}']"
    settings = (DURABLE.format("prolog"), "pool_nodes = 0", "preload = ['json']", away)
    spec = TrainingSpec("prolog", 2, 0, 5, SLOW_STEPS, settings)
    with Training(failing, spec) as training:
        try:
            failing.sh(LOGIN, f"install -d -o alice {durable}; {fill}")
            job = training.submit()
        finally:
            failing.sh(LOGIN, f"umount {durable}")
        assert f"durable_dir = '{durable}' is full" in training.notes
        assert training.wait_final(120)["phase"] == "DONE"
        assert "no agent could start on n1 (exit code 3)" in told(failing, "events", job)
        assert "NodeList=n[0,2] " in failing.sh(CONTROLLER, f"scontrol show job -o {job}")
