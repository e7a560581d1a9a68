"""A user's own batch script whose srun becomes the gang, on a real Slurm."""

from __future__ import annotations

import json

import pytest
from tests.cluster.script_training import ScriptTraining, state

from muster.slurm.testcluster.cluster import CONTROLLER, Cluster
from muster.slurm.testcluster.spec import LOGIN
from muster.slurm.testcluster.training import SLOW_STEPS, TrainingSpec
from muster.slurm.testcluster.waiting import wait_until

pytestmark = pytest.mark.cluster

RANKS = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --output=output.txt
set -u
echo "script $SLURM_NNODES $SLURM_JOB_NODELIST $SLURM_NTASKS $(hostname)"
srun --ntasks-per-node=1 --ntasks=$SLURM_NNODES bash -c 'echo staged > /tmp/staged.$SLURM_JOB_ID'
echo "tasks $(srun -l hostname | wc -l)"
srun python3 train.py --until finish {arguments}
echo "code $?"
srun --ntasks-per-node=1 --ntasks=$SLURM_NNODES bash -c 'echo on $(hostname) $(cat /tmp/staged.$SLURM_JOB_ID)'
exit 3
"""

LAUNCHER = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --output=output.txt
set -eo pipefail
trap 'echo trap $?' EXIT
export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
CMD="python3 -u -m torch.distributed.run --nnodes $SLURM_NNODES --nproc_per_node 2 --node_rank \\$SLURM_PROCID \
  --master_addr $MASTER_ADDR --master_port 6000"
CMD="$CMD train.py --until finish {arguments}"
srun --wait=60 --kill-on-bad-exit=1 --jobid $SLURM_JOB_ID bash -c "$CMD" 2>&1 | tee -a log.txt
srun -l hostname
srun -n2 bash -c "echo again torchrun"
"""

SWEEP = """#! /bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2        # an array of one task
#SBATCH --output=output.txt --open-mode=append --array=3 --signal=B:USR1@60 --time=60
handler () { echo "caught $1"; if [ "$1" = TERM ]; then echo bypass; else scontrol requeue $SLURM_JOB_ID; fi; }
trap 'handler USR1' USR1
trap 'handler TERM' TERM
echo "run ${SLURM_RESTART_COUNT:-0} of task $SLURM_ARRAY_TASK_ID"
srun --label python3 -u train.py --until finish ARGUMENTS &
wait $!
"""
SIGNALLED = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --output=output.txt --open-mode=append
trap 'kill -USR1 $call' USR1
srun python3 -u train.py --until finish &
call=$!
until [ -e ready ]; do sleep 0.1; done
srun --nodes=1 --ntasks=1 echo beside
until wait $call; code=$?; [ $code -le 128 ]; do :; done
echo "code $code"
"""
SAYS_USR1 = """
import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: print(f"USR1 on rank {os.environ['SLURM_PROCID']}", flush=True))
print("ready", flush=True)
open("ready", "w").close()
while not os.path.exists("finish"):
    time.sleep(0.1)
sys.exit(5)
"""


STAGING = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --output=output.txt
until [ -e staged ]; do sleep 0.1; done
set -e
srun -N1 -n1 torchrun x || true
sh -c 'exit 4'
srun python3 -u train.py
"""
OF_SBATCH = """#!/bin/bash
#SBATCH --nodes=3 --exclusive --no-kill --output=output.txt
{prefix}muster run --spares=1 --nproc-per-node=2 --no-python python3 train.py --until finish {arguments}
echo "code $?"
"""
OF_PYTHON = """#!/usr/bin/env python3
#SBATCH --nodes=8
print("hello")
"""


def test_srun_python_becomes_the_gang_and_its_helpers_run_where_the_ranks_are(healthy: Cluster) -> None:
    """What the script waits for is killed, then a rank, then a node. The exit code is the gang's, and the lines around
    it run once, as they are."""
    spec = TrainingSpec("ranks", nodes=2, spares=1)
    text = RANKS.format(arguments=" ".join(SLOW_STEPS))
    with ScriptTraining(healthy, spec, text) as training:
        job = training.submit()
        training.wait_step(3)
        healthy.sh("n0", "pkill -KILL -f 'daemon.agent srun'")
        training.train_through_faults(rank=1)
        wait_until(lambda: state(healthy, job) == "FAILED", 60, "the script has ended with its own code, 3")
        assert "ExitCode=3:0" in healthy.sh(CONTROLLER, f"scontrol show job {job}")
        first, tasks, supervised, *_, code, one, another = training.output.splitlines()
        assert first == "script 2 n[0-1] 4 n0"
        assert tasks == "tasks 4", "what the script reads comes from its own nodes"
        assert supervised.startswith("muster: supervised: line 7, srun python3 train.py")
        assert supervised.endswith("on 2 nodes and 1 spare")
        assert "it was killed, and waits for its ranks, which train on" in training.output
        assert code == "code 0"
        assert {one, another} == {"on n0 staged", "on n2 staged"}, "the spare has what a helper has staged"


def test_srun_of_a_launcher_becomes_the_gang(healthy: Cluster) -> None:
    """As users write it: in `bash -c`, through tee. The node that the script runs on goes on with rank 0."""
    spec = TrainingSpec("launcher", nodes=2, spares=1)
    with ScriptTraining(healthy, spec, LAUNCHER.format(arguments=" ".join(SLOW_STEPS))) as training:
        job = training.submit()
        training.train_through_faults(rank=3)
        wait_until(lambda: state(healthy, job) == "COMPLETED", 60, "the script has ended")
        *_, one, other, said, first, second, last = training.output.splitlines()
        assert ({one, other}, last) == ({"0: n0", "1: n2"}, "trap 0")
        assert said.startswith("muster: not supervised: line 10, srun bash -c echo again torchrun: the gang ")
        assert first == second == "again torchrun"
        assert seen(healthy, job)["unsupervised"].startswith("line 10, srun bash -c echo again torchrun: the gang ")
        assert "step 5 " in (training.folder / "log.txt").read_text()


def test_what_a_script_does_before_its_launch_is_shown(healthy: Cluster) -> None:
    """Its staging fails. Beside it, a script of Python, whose srun nobody can supervise, waits for a node and ends."""
    with ScriptTraining(healthy, TrainingSpec("early", nodes=2, spares=1), STAGING) as training:
        job = training.submit()
        (training.folder / "train.py.sbatch").write_text(OF_PYTHON)
        inside = "cd /shared/jobs/early && muster submit train.py.sbatch"
        said = healthy.exec(LOGIN, "bash", "-c", inside, user="alice")
        other = int(said.stdout.removeprefix("Submitted batch job "))
        wait_until(lambda: seen(healthy, job)["waiting_for"] == "a launch: its script runs", 30, "the script runs")
        assert seen(healthy, other)["waiting_for"].startswith(f"Slurm to start job {other}")
        (training.folder / "staged").touch()
        view = training.wait_final()
        words = "its script has ended with exit code 4, before a launch that is supervised"
        assert (view["phase"], view["reason"]) == ("FAILED", f"Slurm ended job {job}: FAILED: {words}")
        assert view["unsupervised"].startswith("line 5, srun torchrun x: it has not as many tasks on each")
        wait_until(lambda: seen(healthy, other)["phase"] == "DONE", 30, "the other script has ended")
        assert seen(healthy, other)["unsupervised"].startswith("line 1: python3 runs the script")


def seen(cluster: Cluster, job: int) -> dict[str, str]:
    """What `muster status` says of a job."""
    found: dict[str, str] = json.loads(cluster.sh(LOGIN, f"muster status --json {job}", user="alice"))
    return {"waiting_for": "", **found}


@pytest.mark.long
def test_a_trap_requeues_the_job_while_the_gang_recovers(healthy: Cluster) -> None:
    """A task of an array, launched in the background. The script's requeue is the only one."""
    text = SWEEP.replace("ARGUMENTS", " ".join(SLOW_STEPS))
    with ScriptTraining(healthy, TrainingSpec("sweep", nodes=2, spares=1), text) as training:
        job = training.submit()
        training.wait_step(5)
        training.kill_rank(1)
        healthy.sh(LOGIN, f"scancel --signal=USR1 --batch {job}", user="alice")
        wait_until(lambda: "run 1 of task 3" in training.output, 60, "the job runs again")
        training.wait(lambda view: view["phase"] == "RUNNING" and int(view["generation"]) > 1, 90, "the gang trains on")
        assert training.finish_done()["gang_id"].endswith("_3")
        wait_until(lambda: state(healthy, job) == "COMPLETED", 60, "the script has ended")
        assert "Restarts=1" in healthy.sh(CONTROLLER, f"scontrol show job {job}")
        assert training.output.count("caught USR1") == 1


@pytest.mark.long
def test_a_signal_for_the_launch_reaches_the_ranks(healthy: Cluster) -> None:
    with ScriptTraining(healthy, TrainingSpec("signalled", nodes=2, spares=1, script=SAYS_USR1), SIGNALLED) as training:
        job = training.submit()
        wait_until(lambda: training.output.count("ready") == 2, 60, "both ranks run")
        healthy.sh(LOGIN, f"scancel --signal=USR1 --batch {job}", user="alice")
        both = {"USR1 on rank 0", "USR1 on rank 1"}
        wait_until(lambda: both <= set(training.output.splitlines()), 60, "both ranks have the signal")
        assert "beside" in training.output.splitlines(), "a helper does not wait for the agents"
        training.finish()
        assert training.wait_final()["phase"] == "FAILED"
        wait_until(lambda: "code 5" in training.output.splitlines(), 60, "the launch has the code of its ranks")


@pytest.mark.long
@pytest.mark.parametrize("loss", ["crash", "power_off"])
def test_a_job_whose_script_was_lost_with_its_node_goes_on_with_its_output_and_has_a_code_of_its_own(
    healthy: Cluster, loss: str
) -> None:
    """What depends on the job does not start."""
    text = RANKS.format(arguments=" ".join(SLOW_STEPS)).replace("python3 train.py", "--label python3 -u train.py")
    with ScriptTraining(healthy, TrainingSpec(f"lost-{loss}", nodes=2, spares=1), text) as training:
        job = training.submit()
        after = healthy.sh(LOGIN, f"sbatch --parsable --dependency=afterok:{job} --wrap true", user="alice").strip()
        training.wait_step(5)
        getattr(healthy, loss)("n0")
        training.wait_left("n0")
        training.finish_done()
        wait_until(lambda: state(healthy, job) == "FAILED", 60, "the job has ended")
        assert "ExitCode=91:0" in healthy.sh(CONTROLLER, f"scontrol show job {job}")
        assert state(healthy, int(after)) == "PENDING"
        before, mark, behind = training.output.partition(
            "muster: the script's node n0 is lost: n1 goes on with the output of ranks\n"
        )
        assert mark
        assert "0: step 5 " in before
        logs = {path.stem[4:]: path.read_text() for path in training.folder.glob("muster-runs/logs/*/g2/rank*.log")}
        assert len(logs) == 4
        for rank, log in logs.items():
            copied = [line for line in behind.splitlines() if line.startswith(f"{rank}: ")]
            assert copied[len(copied) - log.count("\n") :] == [f"{rank}: {line}" for line in log.splitlines()]
        healthy.sh(LOGIN, f"scancel {after}", user="alice")


@pytest.mark.long
@pytest.mark.parametrize(("prefix", "code"), [("", 0), ("srun --no-kill --ntasks-per-node=1 ", 1)])
def test_muster_run_in_a_job_of_sbatch_is_its_launch(healthy: Cluster, prefix: str, code: int) -> None:
    """The job's third node is the spare. An srun around it ends with the code of the task that is lost."""
    spec = TrainingSpec("of-srun" if prefix else "of-sbatch", nodes=2, spares=1)
    text = OF_SBATCH.format(prefix=prefix, arguments=" ".join(SLOW_STEPS))
    with ScriptTraining(healthy, spec, text, "sbatch --parsable") as training:
        job = training.submit()
        training.train_through_faults(rank=1)
        wait_until(lambda: state(healthy, job) == "COMPLETED", 60, "the script has ended")
        assert training.output.splitlines()[-1] == f"code {code}"
