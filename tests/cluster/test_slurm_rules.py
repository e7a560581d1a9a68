"""The Slurm rules that recovery depends on, tested on a real Slurm: one rule in each test.

The rules of the batch host come first. The batch host is the first node of a job. It runs the batch script and its
srun, and it is the only node that Slurm cannot remove from the job.

The rules are Slurm's. They change with Slurm, not with Muster, so `make test-long` tests them and `make test` does not.
"""

from __future__ import annotations

import re
import time

import pytest

from muster.slurm.testcluster.cluster import CONTROLLER, LOGIN, Cluster
from muster.slurm.testcluster.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.long]

NODES = "n[0-3]"
FOUR = (f"-w{NODES}", "-N4")
NO_KILL = (*FOUR, "--no-kill")

# What every task of these jobs does: a mark in the shared folder, five times a second.
BEAT = "while :; do echo >>/shared/$SLURM_JOB_ID.$(hostname); sleep 0.2; done"
BEATING = f"srun --no-kill bash -c '{BEAT}'"

# slurm_complete_job of Slurm's own library, as slurmstepd calls it; see slurm_step_id_t in slurm.h. Up to 25.05,
# whose API is 43, it takes a job id.
COMPLETE = """
import ctypes, sys
class StepId(ctypes.Structure):
    _fields_ = [("sluid", ctypes.c_uint64), ("job_id", ctypes.c_uint32),
                ("step_het_comp", ctypes.c_uint32), ("step_id", ctypes.c_uint32)]
slurm = ctypes.CDLL("/usr/lib/x86_64-linux-gnu/slurm-wlm/libslurmfull.so", mode=ctypes.RTLD_GLOBAL)
slurm.slurm_init(None)
none = 0xFFFFFFFE
slurm.slurm_api_version.restype = ctypes.c_long
old = slurm.slurm_api_version() >> 16 <= 43
job = ctypes.c_uint32(int(sys.argv[1])) if old else ctypes.byref(StepId(0, int(sys.argv[1]), none, none))
sys.exit(slurm.slurm_complete_job(job, ctypes.c_uint32(int(sys.argv[2]))) != 0)
"""


@pytest.fixture
def newer(healthy: Cluster) -> Cluster:
    """A cluster whose Slurm has what came with 25.11."""
    if healthy.spec.suite == "trixie":
        pytest.skip("Slurm 24.11 has neither requeue_delay nor expedited requeues")
    return healthy


class Job:
    """A job of alice."""

    def __init__(self, cluster: Cluster, script: str, *options: str) -> None:
        self.cluster = cluster
        done = cluster.exec(
            *(LOGIN, "sbatch", "--parsable", "--output=/shared/%j.out", *options),
            user="alice",
            stdin=f"#!/bin/bash\n{script}\n".encode(),
        )
        self.id = done.stdout.strip()

    def field(self, name: str) -> str:
        shown = self.cluster.sh(CONTROLLER, f"scontrol show job -o {self.id}")
        return re.findall(rf"\b{name}=(\S*)", shown)[0]

    @property
    def state(self) -> str:
        return self.field("JobState")

    def started(self) -> Job:
        """Waits until the job runs and every task writes its heartbeat."""
        self.reaches("RUNNING", 20)
        wait_until(lambda: len(list(self.cluster.shared.glob(f"{self.id}.n*"))) == 4, 20, "all tasks beat")
        return self

    def reaches(self, state: str, within: float) -> None:
        wait_until(lambda: self.state == state, within, f"job {self.id} is {state}", every=0.1)

    def beats(self, *nodes: str) -> dict[str, bool]:
        """The nodes whose tasks are alive, from 0.8 s of observation."""
        marks = [self.cluster.shared / f"{self.id}.{node}" for node in nodes]
        before = [mark.stat().st_size for mark in marks]
        time.sleep(0.8)
        return {n: m.stat().st_size > b for n, m, b in zip(nodes, marks, before, strict=True)}


def test_the_tasks_outlive_the_batch_host_and_the_job_runs_on(healthy: Cluster) -> None:
    job = Job(healthy, BEATING, *NO_KILL).started()
    healthy.power_off("n0")
    drain_and_down(healthy, "n0")
    assert (job.state, job.field("NodeList"), job.field("BatchHost")) == ("RUNNING", "n[1-3]", "n0")
    assert job.beats("n1", "n2", "n3") == {"n1": True, "n2": True, "n3": True}


def test_no_node_can_be_removed_after_the_batch_host_has_died(healthy: Cluster) -> None:
    job = Job(healthy, BEATING, *NO_KILL).started()
    shrink = ("scontrol", "update", f"jobid={job.id}")
    healthy.exec(LOGIN, *shrink, "nodelist=n[0-2]", user="alice")
    assert job.field("NodeList") == "n[0-2]"
    healthy.power_off("n0")
    drain_and_down(healthy, "n0")
    refused = healthy.exec(LOGIN, *shrink, "nodelist=n1", user="alice", check=False)
    assert "Invalid node name specified" in refused.stderr
    drain_and_down(healthy, "n2")
    assert (job.state, job.field("NodeList")) == ("RUNNING", "n1")


def test_a_live_batch_host_cannot_be_removed(healthy: Cluster) -> None:
    job = Job(healthy, BEATING, *NO_KILL).started()
    refused = healthy.exec(
        *(LOGIN, "scontrol", "update", f"jobid={job.id}", "nodelist=n[1-3]"), user="alice", check=False
    )
    assert refused.rc != 0
    assert job.field("NodeList") == NODES


def test_drain_stays_when_a_downed_node_registers_again(healthy: Cluster) -> None:
    drain_and_down(healthy, "n7")
    healthy.restart_slurmd("n7")
    wait_until(lambda: healthy.node_states()["n7"] == "drained", 15, "n7 is drained, no longer down")


def test_a_partitioned_batch_host_comes_back_and_the_job_runs_on(healthy: Cluster) -> None:
    """The node was removed from the job during the partition. Then slurmctld and every slurmd restart."""
    job = Job(healthy, BEATING, *NO_KILL).started()
    healthy.partition("n0")
    drain_and_down(healthy, "n0")
    healthy.heal("n0")
    wait_until(lambda: not job.beats("n0")["n0"], 15, "Slurm ends the task on the former batch host")
    if healthy.spec.suite == "trixie":  # before 25.11.6 it ends the batch script, too
        job.reaches("FAILED", 30)
        return
    healthy.restart_slurmctld()
    for node in healthy.nodes:
        healthy.restart_slurmd(node)
    # The batch script lives until that slurmd registers, which may have happened before the restart.
    told = f"grep 'Registered JobId={job.id} .* on wrong node n0' /var/log/muster/slurmctld.log || true"
    wait_until(
        lambda: healthy.sh(CONTROLLER, told), 15, "slurmctld sees the batch step on a node that is not the job's"
    )
    assert (job.state, job.field("NodeList"), job.field("Restarts")) == ("RUNNING", "n[1-3]", "0")
    assert job.beats("n1", "n2", "n3") == {"n1": True, "n2": True, "n3": True}
    unwanted = "pgrep -f '[s]lurm_script' || true"
    wait_until(lambda: not healthy.sh("n0", unwanted), 10, "Slurm ends the batch script there")
    assert job.state == "RUNNING"


def test_the_end_of_a_batch_script_on_a_former_batch_host_ends_the_job(healthy: Cluster) -> None:
    """So the script must outlive its srun, and wait until the gang is final."""
    job = Job(healthy, f"{BEATING} & while [ ! -e /tmp/end-$SLURM_JOB_ID ]; do sleep 0.1; done; exit 3", *NO_KILL)
    job.started()
    healthy.partition("n0")
    drain_and_down(healthy, "n0")
    healthy.sh("n0", f"touch /tmp/end-{job.id}")
    time.sleep(1)
    assert job.state == "RUNNING"
    healthy.heal("n0")
    wait_until(lambda: job.field("ExitCode") == "3:0", 20, "the old batch host's report ends the job")
    job.reaches("FAILED", 20)


@pytest.fixture
def impatient(other_settings: Cluster) -> Cluster:
    """A cluster that notices a missing batch script 5 s after the job's start; the default is 20 s.

    Slurm adds the message timeout (10 s) to BatchStartTimeout (10 s).
    """
    other_settings.reconfigure(extra=("BatchStartTimeout=1", "MessageTimeout=4"))
    return other_settings


def registers_until_requeued(cluster: Cluster, job: Job) -> None:
    def requeued() -> bool:
        cluster.restart_slurmd("n0")
        return job.field("Restarts") == "1"

    wait_until(requeued, 40, "the job is requeued", every=2)
    assert f"Batch JobId={job.id} missing from batch node n0" in cluster.logs(CONTROLLER, "slurmctld")


def test_a_batch_host_that_reboots_before_it_is_downed_requeues_the_job(impatient: Cluster) -> None:
    job = Job(impatient, BEATING, *NO_KILL).started()
    impatient.crash("n0")
    impatient.start_node("n0")
    registers_until_requeued(impatient, job)


def test_a_batch_host_that_is_downed_and_reboots_does_no_harm(impatient: Cluster) -> None:
    job = Job(impatient, BEATING, *NO_KILL).started()
    impatient.crash("n0")
    drain_and_down(impatient, "n0")
    impatient.repair("n0")
    time.sleep(6)
    impatient.restart_slurmd("n0")
    time.sleep(2)
    assert (job.state, job.field("Restarts"), job.field("NodeList")) == ("RUNNING", "0", "n[1-3]")


def test_a_former_batch_host_that_is_merged_back_requeues_the_job(impatient: Cluster) -> None:
    job = Job(impatient, BEATING, *NO_KILL).started()
    impatient.power_off("n0")
    drain_and_down(impatient, "n0")
    impatient.repair("n0")
    said = impatient.sh("n1", f"salloc -N1 -w n0 --dependency=expand:{job.id} --no-shell 2>&1", user="alice")
    helper = re.findall(r"job allocation (\d+)", said)[0]
    merge = f"scontrol update jobid={helper} numnodes=0; scontrol update jobid={job.id} numnodes=ALL"
    impatient.sh("n1", f"cd /tmp && {merge}", user="alice")
    # n0 may register at once, without a restart: then the job has lost its nodes again before anybody can look.
    registers_until_requeued(impatient, job)


def test_a_job_whose_batch_host_died_is_ended_with_its_exit_code(healthy: Cluster) -> None:
    """Nobody else reports the job's end. Without this call the job stays RUNNING for ever."""
    good = Job(healthy, "srun --no-kill sleep 2", "-wn[0-3]", "-N4", "--no-kill")
    bad = Job(healthy, "srun --no-kill sleep 2", "-wn[4-7]", "-N4", "--no-kill")
    after_good = Job(healthy, "true", "-N1", f"--dependency=afterok:{good.id}")
    after_bad = Job(healthy, "true", "-N1", f"--dependency=afternotok:{bad.id}")
    for job, batch_host in ((good, "n0"), (bad, "n4")):
        job.reaches("RUNNING", 20)
        healthy.power_off(batch_host)
        drain_and_down(healthy, batch_host)
    time.sleep(4)
    assert (good.state, bad.state) == ("RUNNING", "RUNNING")

    def complete(job: Job, status: int, user: str) -> int:
        code = str(status << 8)  # as wait(2) encodes it
        return healthy.exec("n1", "python3", "-c", COMPLETE, job.id, code, user=user, check=False).rc

    assert complete(good, 0, "bob") == 1
    assert complete(good, 0, "alice") == 0
    assert complete(bad, 7, "alice") == 0
    good.reaches("COMPLETED", 30)  # the steps' ends wait some 9 s for their dead srun
    bad.reaches("FAILED", 30)
    assert bad.field("ExitCode") == "7:0"
    after_good.reaches("COMPLETED", 20)
    after_bad.reaches("COMPLETED", 20)


def test_down_takes_a_node_from_a_no_kill_job_and_requeues_only_with_the_last(healthy: Cluster) -> None:
    job = Job(healthy, "srun --no-kill sleep 60", "-wn[4-5]", "-N2", "--no-kill", "--requeue")
    job.reaches("RUNNING", 20)
    drain_and_down(healthy, "n5")
    assert (job.state, job.field("NodeList"), job.field("Restarts")) == ("RUNNING", "n4", "0")
    drain_and_down(healthy, "n4")
    wait_until(lambda: job.field("Restarts") == "1", 10, "the job is requeued with its last node")


def test_an_expedited_requeue_restarts_at_once_on_a_spare_node(newer: Cluster) -> None:
    job = Job(newer, BEATING, *FOUR[1:], "--requeue=expedite").started()
    lost = newer.sh(CONTROLLER, f"scontrol show hostnames {job.field('NodeList')}").split()[2]
    newer.power_off(lost)
    drain_and_down(newer, lost)
    # Much sooner than a plain requeue would start the job (two minutes).
    wait_until(lambda: (job.field("Restarts"), job.state) == ("1", "RUNNING"), 20, "it runs again")


def test_an_expedited_requeue_holds_a_job_that_failed_by_itself(newer: Cluster) -> None:
    job = Job(newer, "exit 5", "-N1", "--requeue=expedite")
    job.reaches("REQUEUE_HOLD", 15)
    assert job.field("ExitCode") == "5:0"


def test_a_signal_reaches_every_process_of_a_step(healthy: Cluster) -> None:
    loop = "for i in {1..600}; do sleep 0.2; done"
    note = "echo {0} >>/shared/$SLURM_JOB_ID.signals"
    trap = 'trap "{0}" USR1; {0}'
    task = f"{trap.format(note.format('task'))}; ({trap.format(note.format('child'))}; {loop}) & {loop}"
    batch = f"trap '{note.format('batch')}' USR1; srun bash -c '{task}' & wait; wait; wait; wait; wait"
    job = Job(healthy, batch, "-N2")
    job.reaches("RUNNING", 20)
    path = healthy.shared / f"{job.id}.signals"

    def expect(*words: str) -> None:
        """Exactly these have written a word: one too many would be there when the next ones are expected."""
        wait_until(lambda: path.exists() and sorted(path.read_text().split()) == [*words], 20, f"{words} have written")
        healthy.sh(CONTROLLER, f": >/shared/{path.name}")

    def signal(*options: str) -> None:
        healthy.exec(LOGIN, "scancel", "--signal=USR1", *options, job.id, user="alice")

    processes = ("child", "child", "task", "task")
    expect(*processes)  # each is ready for the signal
    signal()
    expect(*processes)
    signal("--full")
    expect("batch", *processes)
    signal("--batch")
    expect("batch")
    signal()
    expect(*processes)
    healthy.exec(LOGIN, "scancel", job.id, user="alice")


def test_a_failing_prolog_drains_the_node_and_holds_the_job(other_settings: Cluster) -> None:
    cluster = other_settings
    cluster.set_program("Prolog", '#!/bin/sh\n[ "$SLURMD_NODENAME" != n6 ]\n')
    job = Job(cluster, "srun true", "-wn6", "-N1")
    wait_until(lambda: cluster.node_states()["n6"] == "drained", 15, "n6 is drained")
    wait_until(lambda: job.field("Reason") == "launch_failed_requeued_held", 15, "the job is held")


@pytest.mark.usefixtures("newer")
def test_a_requeue_waits_121_seconds_unless_requeue_delay_says_less(other_settings: Cluster) -> None:
    cluster = other_settings
    cluster.reconfigure(requeue_delay=None)
    slow = Job(cluster, "sleep 60", "-N1")
    slow.reaches("RUNNING", 20)
    cluster.exec(CONTROLLER, "scontrol", "requeue", slow.id)
    wait_until(lambda: slow.field("Reason") == "BeginTime", 10, "it waits for its begin time")
    cluster.reconfigure(requeue_delay=1)
    quick = Job(cluster, "sleep 60", "-N1")
    quick.reaches("RUNNING", 20)
    cluster.exec(CONTROLLER, "scontrol", "requeue", quick.id)
    wait_until(lambda: (quick.field("Restarts"), quick.state) == ("1", "RUNNING"), 10, "it runs again")
    assert slow.state == "PENDING"


def drain_and_down(cluster: Cluster, node: str) -> None:
    for state in ("drain", "down"):  # in this order: a node that is only down registers itself back to idle
        cluster.exec(CONTROLLER, "scontrol", "update", f"nodename={node}", f"state={state}", "reason=test")
