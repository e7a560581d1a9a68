"""A user on a login node submits, watches, reads and cancels jobs, and gets clear errors if something is missing."""

from __future__ import annotations

import json
import time

import pytest

from muster.slurm.image.engine import Outcome
from muster.slurm.testcluster.cluster import CONTROLLER, COORDINATOR, Cluster
from muster.slurm.testcluster.spec import LOGIN
from muster.slurm.testcluster.waiting import wait_until

pytestmark = pytest.mark.cluster

TOML = """
name = "{name}"
nodes = 2
spares = 1
command = {command}
run_dir = "/shared/{name}/run"
{more}
"""
COUNT = ["sh", "-c", "echo rank $RANK of $WORLD_SIZE; exit 0"]
READS_FOR_EVER = """
import os, socket, time
import torch
import torch.distributed as dist

def read_from_a_dead_server():
    ours, theirs = socket.socketpair()
    ours.recv(1)

dist.init_process_group("gloo")
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
for step in range(1, 4):
    if first and step == 3 and dist.get_rank() == 1:
        print("reads", time.time(), flush=True)
        read_from_a_dead_server()
    dist.all_reduce(torch.ones(1))
    print("step", time.time(), flush=True)
"""
"""A script without a line of the library. In the first generation, rank 1 stops, and rank 0 waits for it."""
SHELL = """
SBATCH_REQUEUE=1 SBATCH_NO_REQUEUE=1 SBATCH_ARRAY_INX=0-3 SBATCH_OPEN_MODE=truncate SBATCH_OUTPUT=/tmp/%j.txt
SBATCH_JOB_NAME=other SBATCH_WAIT=1 SBATCH_EXPORT=NONE SBATCH_GET_USER_ENV=1 SBATCH_TIMELIMIT=60 SBATCH_EXCLUSIVE=user
SBATCH_SIGNAL=USR1@3000 SBATCH_GPUS_PER_NODE=64 SBATCH_SEGMENT_SIZE=7 SBATCH_MEM_PER_CPU=1 SBATCH_INPUT=/nowhere
SBATCH_DISTRIBUTION=arbitrary SBATCH_NO_KILL=0 SBATCH_REQ_SWITCH=1 SBATCH_OVERCOMMIT=1 SBATCH_DEBUG=3
SLURM_TIMELIMIT=1 SRUN_CPUS_PER_TASK=64 SLURM_CPUS_PER_TASK=64 SLURM_MEM_PER_CPU=1 SLURM_MEM_PER_NODE=1
SLURM_DISTRIBUTION=arbitrary SLURM_EXACT=1 SLURM_OVERCOMMIT=1 SLURM_LABELIO=1 SLURM_HOSTFILE=/nowhere SLURM_NTASKS=7
SLURM_EXPORT_ENV=NONE SLURM_JOB_ID=1 SLURM_JOBID=1 SLURM_JOB_NODELIST=n7 SLURM_NNODES=1 SLURM_RESTART_COUNT=3
SLURM_GPUS=64 SLURM_HINT=compute_bound SLURM_NTASKS_PER_NODE=4 SLURM_EXCLUSIVE=1 SLURM_REMOTE_CWD=/nowhere
PYTHONPATH=/shared/variables/other: PYTHONOPTIMIZE=2 PYTHONWARNINGS=error LC_ALL=xx_YY.latin1
SRUN_OUTPUT=/nowhere/x SLURM_STDOUTMODE=/nowhere/x SLURM_TASK_PROLOG=/nowhere/x SLURM_WAIT=1 SLURM_KILL_BAD_EXIT=1
"""
"""Variables of a shell. tests/unit/test_submit_environment.py has all that sbatch and srun read."""
FOR_EVER = ["sh", "-c", "echo rank $RANK is here; exec sleep 600"]


def lay_out(cluster: Cluster, name: str, command: list[str], more: str = "") -> str:
    """Writes a job.toml to the shared folder. Returns its path there."""
    text = TOML.format(name=name, command=json.dumps(command), more=more)
    path = f"/shared/{name}/job.toml"
    cluster.sh(
        LOGIN, f"rm -rf /shared/{name}; mkdir -p /shared/{name}; cat > {path} <<'EOF'\n{text}\nEOF", user="alice"
    )
    return path


def muster(cluster: Cluster, *words: str, user: str = "alice", check: bool = True) -> Outcome:
    """Runs one command on the login node to its end."""
    return cluster.exec(LOGIN, "muster", *words, user=user, check=check)


def submit(cluster: Cluster, *words: str) -> str:
    """Submits the job. Returns its id."""
    return muster(cluster, "submit", *words).stdout.strip()


def slurm_state(cluster: Cluster, job: str) -> str:
    """Slurm's state of the job, after COMPLETING."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        shown = cluster.sh(LOGIN, f"scontrol show job {job} -o")
        state = shown.partition("JobState=")[2].split()[0]
        if state not in ("COMPLETING", "RUNNING", "PENDING"):
            return state
        time.sleep(0.2)
    raise TimeoutError(f"job {job} still runs: {shown}")


def nodes_of(cluster: Cluster, job: str, user: str) -> list[str]:
    """The nodes that `muster nodes` shows to `user` with the job."""
    rows = [json.loads(line) for line in muster(cluster, "nodes", "--json", user=user).stdout.splitlines()]
    assert all(row["verdict"] == "FIT" and row["leaf"] == cluster.spec.leaf_of(row["node"]) for row in rows)
    return [row["node"] for row in rows if int(job) in row["slurm_job_ids"]]


def test_a_local_run_owes_nothing_to_the_settings_of_its_host(cluster: Cluster) -> None:
    """The login node has a site's muster.toml. alice can't read the files of a coordinator's certificate."""
    assert "coordinator =" in cluster.sh(LOGIN, "cat /etc/muster/muster.toml")
    words = ["run", "--local", "--nodes", "1", "--spares", "0", "--", "sh", "-c", "echo rank $RANK is here"]
    done = muster(cluster, *words)
    assert "rank 0 is here" in done.stdout
    assert "muster: DONE" in done.stderr


def test_a_job_from_submission_to_its_end(healthy: Cluster) -> None:
    job = submit(healthy, lay_out(healthy, "count", COUNT))
    followed = muster(healthy, "status", "-f", "--json", job)
    view = json.loads(followed.stdout.splitlines()[-1])
    assert (view["phase"], view["exit_code"], view["slurm_job_ids"]) == ("DONE", 0, [int(job)])
    lines = sorted(muster(healthy, "logs", job).stdout.splitlines())
    assert lines == ["g1 rank 0: rank 0 of 2", "g1 rank 1: rank 1 of 2"]
    assert "generation 1 starts" in muster(healthy, "events", job).stdout
    assert slurm_state(healthy, job) == "COMPLETED"


def test_the_scripts_exit_code_becomes_the_jobs(healthy: Cluster) -> None:
    path = lay_out(healthy, "failing", ["sh", "-c", "echo cannot go on >&2; exit 7"], "max_failures = 1")
    job = submit(healthy, path)
    followed = muster(healthy, "status", "-f", job, check=False)
    assert followed.rc == 93
    assert slurm_state(healthy, job) == "FAILED"
    # The exit code is that of the rank that exits first. The other rank may never have started.
    assert "cannot go on" in muster(healthy, "logs", job).stdout


def test_a_script_without_the_library_that_stops_in_a_socket_is_restarted(
    healthy: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    path = lay_out(healthy, "idle", ["python3", "/shared/idle/train.py"], "hang_after_idle = 10")
    healthy.sh(LOGIN, f"cat > /shared/idle/train.py <<'EOF'\n{READS_FOR_EVER}\nEOF", user="alice")
    job = submit(healthy, path)
    followed = healthy.exec(LOGIN, "muster", "status", "-f", "--json", job, user="alice", timeout=240)
    view = json.loads(followed.stdout.splitlines()[-1])
    assert (view["phase"], view["generation"]) == ("DONE", "2")
    (recovery,) = view["recoveries"]
    assert recovery["action"] == "restart in place"
    assert recovery["cause"].startswith(
        "hang: all ranks have been idle for 10 s or more, and every agent answers; rank 1"
    )
    assert "was in read_from_a_dead_server (train.py:8) while all others waited for other ranks" in recovery["cause"]
    lines = [line.rsplit(" ", 1) for line in muster(healthy, "logs", "--all", job).stdout.splitlines()]
    (stopped_at,) = (float(at) for words, at in lines if words == "g1 rank 1: reads")
    detected_s = recovery["detected_s"] - stopped_at
    first_step_s = min(float(at) for words, at in lines if words == "g2 rank 0: step") - stopped_at
    with capsys.disabled():
        print(f"\nidle ranks were fenced after {detected_s:.1f} s; next step after {first_step_s:.1f} s")


def test_another_user_may_neither_see_nor_cancel_the_job_and_its_owner_leaves_nothing(healthy: Cluster) -> None:
    job = submit(healthy, lay_out(healthy, "mine", FOR_EVER))
    assert "mine" in muster(healthy, "status", job).stdout
    for command in ("status", "cancel"):
        refused = muster(healthy, command, job, user="bob", check=False)
        assert refused.rc == 64
        assert "no such job, or not yours" in refused.stderr
    wait_until(lambda: len(nodes_of(healthy, job, "alice")) == 3, 20, "the owner sees the job's nodes")
    assert nodes_of(healthy, job, "bob") == []
    muster(healthy, "cancel", job)
    assert slurm_state(healthy, job) == "CANCELLED"
    assert muster(healthy, "status", "-f", job, check=False).rc != 0
    for node in healthy.nodes:
        assert "sleep 600" not in healthy.sh(node, "ps -eo args")


def test_an_unreachable_coordinator_queues_nothing_unless_forced(healthy: Cluster) -> None:
    path = lay_out(healthy, "forced", COUNT)
    healthy.kill_coordinator()
    try:
        refused = muster(healthy, "submit", path, check=False)
        assert refused.rc == 69
        assert "does not answer" in refused.stderr
        assert "Nothing was queued" in refused.stderr
        assert healthy.sh(LOGIN, "squeue -h") == ""
        job = submit(healthy, "--force", path)
    finally:
        healthy.start_service(CONTROLLER, COORDINATOR)
    assert slurm_state(healthy, job) == "COMPLETED"
    assert "DONE" in muster(healthy, "status", job).stdout


def test_sbatch_options_and_refusals(healthy: Cluster) -> None:
    path = lay_out(healthy, "options", FOR_EVER)
    job = submit(healthy, path, "--", "--comment", "two words", "--begin=now+3600")
    shown = healthy.sh(LOGIN, f"scontrol show job {job}")
    assert "Comment=two words" in shown
    assert "JobState=PENDING" in shown
    muster(healthy, "cancel", job)
    assert slurm_state(healthy, job) == "CANCELLED"
    refused = muster(healthy, "submit", path, "--", "--partition=nope", check=False)
    assert refused.rc == 64
    assert "Invalid partition" in refused.stderr
    assert healthy.sh(LOGIN, "squeue -h") == ""


def test_variables_of_the_submitting_shell_change_nothing(healthy: Cluster) -> None:
    """A site's, a user's, and those of a job that the shell is a part of. Some of them alone would end the job, or have
    it start again for ever."""
    path = lay_out(healthy, "variables", ["sh", "-c", "echo rank $RANK of $WORLD_SIZE at $HOME, $PYTHONPATH; exit 0"])
    other = "/shared/variables/other/google"  # packages for another interpreter, as modules of many sites have them
    healthy.sh(LOGIN, f"mkdir -p {other}; echo 'raise ImportError(1)' >{other}/__init__.py", user="alice")
    done = healthy.exec(LOGIN, "env", *SHELL.split(), "muster", "submit", path, user="alice")
    assert "SBATCH_EXPORT" in done.stderr, "the user is told"
    job = done.stdout.strip()
    assert slurm_state(healthy, job) == "COMPLETED"
    view = json.loads(muster(healthy, "status", "--json", job).stdout)
    assert (view["phase"], view["name"]) == ("DONE", "variables")
    shown = healthy.sh(LOGIN, f"scontrol show job {job}")
    for words in (
        "JobName=variables",
        "TimeLimit=01:00:00",
        "/shared/variables/run/slurm-",
        "NumNodes=3",
        "Restarts=0",
    ):
        assert words in shown
    log = muster(healthy, "logs", job).stdout
    assert "rank 0 of 2 at /" in log
    assert "rank 1 of 2 at /" in log
    assert "/shared/variables/other:" in log
