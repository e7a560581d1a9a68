"""The Slurm client on a real Slurm: the contract with both backends, and the Slurm rules that recovery depends on."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from muster.slurm.client.parsing.hostlist import expand
from muster.slurm.image.recipe import Recipe
from muster.slurm.testcluster.cluster import CONTROLLER, LOGIN, Cluster
from muster.slurm.testcluster.spec import ClusterSpec
from muster.slurm.testcluster.waiting import wait_until

pytestmark = pytest.mark.cluster

CONTRACT = Path(__file__).resolve().parents[1] / "contract"
USER = "alice"
LONGEST_RUN_S = 800


def put_contract(cluster: Cluster) -> str:
    """Copies the contract to the shared folder. Returns its path in the containers."""
    target = cluster.shared / "contract"
    shutil.copytree(CONTRACT, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    return "/shared/contract"


class Runner:
    """The contract's runner on the controller. Does what the runner requests from outside."""

    def __init__(self, cluster: Cluster, *argv: str) -> None:
        self._cluster = cluster
        where = put_contract(cluster)
        self.results: list[dict[str, object]] = []
        self._process = subprocess.Popen(
            cluster.exec_argv(CONTROLLER, "python3", f"{where}/run_slurm_contract.py", *argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def finish(self) -> int:
        """Serves the runner until it ends. Returns the number of failed checks."""
        timer = threading.Timer(LONGEST_RUN_S, self._process.kill)
        timer.start()
        try:
            assert self._process.stdout is not None
            for line in self._process.stdout:
                self._take(json.loads(line))
            return self._process.wait()
        finally:
            timer.cancel()
            self._process.kill()
            self._process.communicate()

    def _take(self, said: dict[str, object]) -> None:
        if "please" not in said:
            self.results.append(said)
            return
        node = str(said["node"])
        if said["please"] == "power_off":
            self._cluster.power_off(node)
        else:
            self._cluster.repair(node)
        assert self._process.stdin is not None
        self._process.stdin.write("done\n")
        self._process.stdin.flush()


@pytest.mark.parametrize("backend", ["cli", "pyslurm"])
def test_contract(healthy: Cluster, backend: str) -> None:
    if backend == "pyslurm" and not Recipe.of(healthy.spec.suite).pyslurm:
        pytest.skip("pyslurm does not build against this Slurm")
    runner = Runner(healthy, backend, USER)
    failed = runner.finish()
    errors = [f"{result['check']}: {result['error']}" for result in runner.results if not result["ok"]]
    assert not errors, "\n".join(errors)
    assert failed == 0
    assert len(runner.results) >= 20


@pytest.mark.parametrize("text", ["n[0-3]", "n[08-11],n1", "r[1-2]n[1-3,7]", "login,n[0-1,5]", "a[1-2]-ib"])
def test_node_lists_are_written_out_as_slurm_does(cluster: Cluster, text: str) -> None:
    names = cluster.exec(CONTROLLER, "scontrol", "show", "hostnames", text).stdout.split()
    assert expand(text) == tuple(names)


@pytest.fixture
def gang(healthy: Cluster) -> str:
    """The id of a --no-kill job that runs on n0 (its batch host), n1 and n2."""
    script = "#!/bin/sh\nsrun --no-kill sleep 600 &\nwait\nexit 5\n"
    (healthy.shared / "gang.sh").write_text(script)
    job = healthy.sh(
        LOGIN, "sbatch --parsable -o /dev/null --no-kill --no-requeue -w n[0-2] /shared/gang.sh", user=USER
    )
    wait_until(lambda: shown(healthy, job)[0] == "RUNNING", 10, "the job runs")
    wait_until(lambda: healthy.sh("n2", "pgrep -x sleep -u alice || true"), 10, "its step runs")
    return job


def shown(cluster: Cluster, job: str) -> tuple[str, str, str]:
    """State, nodes and batch host of a job."""
    state, nodes, host = cluster.sh(CONTROLLER, f"squeue -h -t all -j {job} -o '%T|%N|%B'").split("|")
    return state, nodes, host


def take_down(cluster: Cluster, node: str) -> None:
    for state in ("drain", "down"):
        cluster.exec(CONTROLLER, "scontrol", "update", f"nodename={node}", f"state={state}", "reason=test")


@pytest.mark.long  # a rule of Slurm's own: it changes with Slurm, not with Muster
def test_a_partition_of_the_batch_host_that_heals_leaves_the_job_alone(healthy: Cluster, gang: str) -> None:
    """This also holds if slurmctld and every slurmd restart afterwards. A slurmctld before 26.05 that starts takes the
    first node that is left for the batch host, and a step there keeps the job.
    """
    healthy.partition("n0")
    take_down(healthy, "n0")
    assert shown(healthy, gang) == ("RUNNING", "n[1-2]", "n0")
    healthy.heal("n0")
    healthy.restart_slurmctld()
    for node in healthy.nodes:
        healthy.restart_slurmd(node)
    back = "scontrol show node n0 | grep -o State=[A-Z+_]*"
    wait_until(lambda: healthy.sh(CONTROLLER, back) == "State=IDLE+DRAIN", 40, "n0 is back, still drained")
    # Slurm kills them when the slurmd registers: "Registered StepId=batch on wrong node". It ends nothing else.
    wait_until(lambda: not healthy.sh("n0", "pgrep -u alice || true"), 40, "no process of the job is left on n0")
    assert shown(healthy, gang) == ("RUNNING", "n[1-2]", "n1" if healthy.spec.suite == "trixie" else "n0")
    for node in ("n1", "n2"):
        assert healthy.sh(node, "pgrep -x sleep -u alice")


@pytest.mark.long  # a rule of Slurm's own: it changes with Slurm, not with Muster
def test_the_end_of_a_batch_script_on_a_removed_node_ends_the_job(healthy: Cluster, gang: str) -> None:
    """So Muster does not set an unfit batch host DOWN while it is alive and its gang continues. Slurm before 25.11.6
    ends the script itself, and with it the job.
    """
    take_down(healthy, "n0")
    if healthy.spec.suite != "trixie":
        assert shown(healthy, gang) == ("RUNNING", "n[1-2]", "n0")
        assert healthy.sh("n0", "pgrep -f 'slurmstepd: .[0-9]*.batch'")
        healthy.sh("n0", "pkill -u alice -x srun")
    wait_until(lambda: shown(healthy, gang)[0] == "FAILED", 10, "the job failed")


@pytest.mark.long  # a rule of Slurm's own: it changes with Slurm, not with Muster
def test_a_node_is_removed_from_a_job_with_gpus(suite: str) -> None:
    with Cluster.up(ClusterSpec(nodes=3, gpus=2, daemons=False, suite=suite)) as cluster:
        options = "-N3 --no-kill --gres=gpu:2"
        run = "srun --no-kill sleep 600"
        job = cluster.sh(LOGIN, f"sbatch --parsable -o /dev/null {options} --wrap '{run}'", user=USER)
        wait_until(lambda: shown(cluster, job)[0] == "RUNNING", 10, "the job runs")
        let_go = f"""
import asyncio
from muster.slurm.client.backends.open import open_slurm
async def main():
    slurm = await open_slurm()
    await slurm.remove_node({job}, "n1")
asyncio.run(main())
"""
        cluster.exec(CONTROLLER, "python3", "-c", let_go)
        assert shown(cluster, job) == ("RUNNING", "n[0,2]", "n0")
