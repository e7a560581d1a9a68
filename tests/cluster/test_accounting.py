"""A site with accounting: what sacct tells a user afterwards, limits that spares count towards, preemption by QOS."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.cluster.script_training import state

from muster.slurm.image.engine import EngineError
from muster.slurm.testcluster.cluster import CONTROLLER, LOGIN, Cluster
from muster.slurm.testcluster.spec import ClusterSpec
from muster.slurm.testcluster.training import SLOW_STEPS, Training, TrainingSpec, View
from muster.slurm.testcluster.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.long]

FIELDS = "State,ExitCode,Restarts,Comment,AdminComment,Account,QOS,NNodes"
GRACE_S = {"requeued": 60, "cancelled": 600}
"""Seconds of each QOS whose jobs may be preempted, by its mode."""
QOS = (
    "urgent set priority=1000",
    f"requeued set preemptmode=requeue gracetime={GRACE_S['requeued']}",
    f"cancelled set preemptmode=cancel gracetime={GRACE_S['cancelled']}",
    "suspended set preemptmode=suspend",
    "small set maxtresperjob=node=3",
    "strict set maxtresperjob=node=3 flags=DenyOnLimit",
    "group set grptres=node=3",
    "short set maxwall=10",
    "single set maxjobsperuser=1",
)
URGENT_MAY_END = "/shared/urgent_may_end"
"""Jobs with QOS `urgent` wait for this file."""


@pytest.fixture(scope="module")
def site(suite: str) -> Iterator[Cluster]:
    """Six nodes. Ordinary users see no other user's jobs and usage, and no nodes that their jobs do not have."""
    extra = (
        *("PreemptType=preempt/qos", "PreemptMode=SUSPEND,GANG", "CompleteWait=360", "PrivateData=jobs,usage,nodes"),
        "PartitionName=forced Nodes=ALL OverSubscribe=FORCE:2",
    )
    with Cluster.up(ClusterSpec(nodes=6, requeue_delay=1, accounting=True, extra=extra, suite=suite)) as cluster:
        names = ",".join(line.split()[0] for line in QOS)
        changes = [f"add qos {line}" for line in QOS]
        changes += [
            "modify qos urgent set preempt=requeued,cancelled,suspended",
            f"modify user alice,bob set qos+={names}",
        ]
        cluster.sh(CONTROLLER, "; ".join(["set -e", *(f"sacctmgr -iQ {change}" for change in changes)]))
        yield cluster


@pytest.fixture
def urgent_alone(site: Cluster) -> Iterator[Cluster]:
    """Urgent jobs have a partition of their own: in one partition Slurm would let the two take turns."""
    site.sh(CONTROLLER, "scontrol update partitionname=main oversubscribe=FORCE:1")
    site.sh(CONTROLLER, "scontrol update partitionname=shared prioritytier=10")
    yield site
    site.sh(CONTROLLER, "scancel -u bob; scontrol reconfigure")


def runs(site: Cluster, job: int, user: str = "alice") -> list[dict[str, str]]:
    """What sacct shows of each run of a job, the last run last. Slurm ends a record when a node leaves the job, too."""
    names, *lines = (
        line.split("|") for line in site.sh(LOGIN, f"sacct -DXP -j {job} --format={FIELDS}", user=user).splitlines()
    )
    rows = [dict(zip(names, line, strict=True)) for line in lines]
    return [row for row in rows if row["State"] != "RESIZING"]


def wait_run_ended(site: Cluster, job: int) -> None:
    running = f"squeue -h -t RUNNING -j {job} 2>/dev/null || true"
    wait_until(lambda: not site.sh(CONTROLLER, running), 60, f"the end of this run of job {job}")


def stands_still(view: View) -> bool:
    return str(view.get("waiting_for", "")).startswith("Slurm to resume job")


def training_job(site: Cluster, name: str, spares: int = 0, *settings: str, user: str = "alice") -> Training:
    spec = TrainingSpec(name, nodes=2 + spares, spares=spares, arguments=SLOW_STEPS, settings=settings, user=user)
    return Training(site, spec)


def test_sacct_tells_a_user_how_a_job_ended_and_how_often_it_was_requeued(site: Cluster) -> None:
    durable = 'durable_dir = "/shared/jobs/long/durable"'
    spec = TrainingSpec("long", nodes=2, spares=1, arguments=SLOW_STEPS, settings=(durable, "pool_nodes = 0"))
    failing = TrainingSpec("failing", nodes=2, spares=0, arguments=("--no-such-option",), user="bob")
    with Training(site, spec) as training, Training(site, failing) as other:
        job, others = training.submit(), other.submit("--slurm.comment=mine")
        training.wait_step(20)
        site.crash(swapped := training.node_of(1))
        assert training.wait_recovered(2)["action"] == "swap"
        site.crash(lost := training.node_of(1))
        training.wait(lambda v: v.get("phase") == "REQUEUED", 120, "REQUEUED")
        training.wait(lambda v: v.get("phase") == "RUNNING", 240, "RUNNING")
        training.finish()
        step = training.wait_final()["step"]
        training.wait_job_ended()
        first, last = runs(site, job)
        assert (first["State"], last["State"], last["ExitCode"], last["Restarts"]) == (
            "REQUEUED",
            "COMPLETED",
            "0:0",
            "1",
        )
        assert last["Comment"] == f"muster: DONE at step {step}, 2 recoveries, the last: requeue of {lost}"
        assert f"{lost} left in generation 3 (requeue)" in last["AdminComment"]
        assert f"{swapped} left in generation 2 (swap)" in last["AdminComment"]
        assert (last["Account"], last["QOS"], last["NNodes"]) == ("physics", "normal", "3")
        (failed,) = runs(site, others, "bob")
        assert (failed["State"], failed["ExitCode"], failed["Comment"]) == ("FAILED", "93:0", "mine")
        assert not runs(site, job, "bob")
    site.restore_all()


def test_a_pool_job_says_what_it_is_for_and_goodput_knows_whom_slurm_charges(site: Cluster) -> None:
    with training_job(site, "charged") as training:
        job = training.submit("--slurm.account=biology")
        training.wait_step(10)
        site.crash(training.node_of(1))
        training.wait_recovered(2)
        queue = site.sh(LOGIN, f"squeue -h -o '%A|%j|%a|%k' | grep -v '^{job}[|]'", user="alice")
        assert queue.partition("|")[2] == f"charged|biology|muster: a node for job {job} (charged)"
        training.finish()
        training.wait_final()
        training.wait_job_ended()
        accounts = site.sh(LOGIN, "muster goodput --by account", user="alice").splitlines()
        assert [line for line in accounts if line.startswith("biology\t")], accounts
    site.restore_all()


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (
            "qos=small",
            "the limit QOSMaxNodePerJobLimit holds back job {}, which asks for 4 nodes, 3 to train on and 1 ",
        ),
        (
            "qos=group",
            "the limit QOSGrpNodeLimit holds back job {}, which asks for 4 nodes, 3 to train on and 1 spare: ",
        ),
        ("qos=short", "the limit QOSMaxWallDurationPerJobLimit holds back job {}: muster status {} says the way out"),
        (
            "partition=forced",
            "job {} may share its nodes with other jobs (OverSubscribe=FORCE:2), and a node that fails",
        ),
    ],
)
def test_submit_names_the_limit_that_holds_a_job_back_and_says_if_it_shares_nodes(
    site: Cluster, option: str, says: str
) -> None:
    with training_job(site, "limited", 1) as training:
        job = training.submit(f"--slurm.{option}", "--slurm.time=60")
        assert says.format(job, job) in training.notes
        site.muster(LOGIN, "cancel", str(job), user="alice")


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (
            "qos=strict",
            r"(?s)QOSMaxNodePerJobLimit: .*accounting/QOS policy.*4 nodes, 3 to train on and 1 spare\. sacctmgr",
        ),
        ("account=nosuch", r"(?s)Invalid account or account/partition .*--account=nosuch: sacctmgr show assoc user="),
    ],
)
def test_what_sbatch_refuses_is_said_in_its_words_with_the_command_that_shows_more(
    site: Cluster, option: str, says: str
) -> None:
    with training_job(site, "limited", 1) as training, pytest.raises(EngineError, match=says):
        training.submit(f"--slurm.{option}")


def test_a_job_that_its_qos_lets_be_preempted_is_saved_within_its_grace_and_goes_on(site: Cluster) -> None:
    """Slurm would cancel one of the two for good: Muster requeues it, as job.toml wants. Nobody waits for the end of a
    long grace time, and `CompleteWait` holds nothing up: the nodes are free within seconds.

    Slurm 24.11 takes the end of the next run for one within the grace time, and requeues the first job once more."""
    ended = "PREEMPTED" if site.spec.suite == "trixie" else "COMPLETED"
    jobs = {mode: training_job(site, mode, 0, f'durable_dir = "/shared/jobs/{mode}/durable"') for mode in GRACE_S}
    with jobs["requeued"], jobs["cancelled"]:
        for mode, training in jobs.items():
            training.submit(f"--slurm.qos={mode}")
        for training in jobs.values():
            training.wait_step(10)
        urgent = "sbatch --parsable --qos=urgent -N6 --exclusive -o /dev/null --wrap 'sleep 3'"
        site.sh(LOGIN, urgent, user="bob")
        for training in jobs.values():
            training.wait(lambda v: v.get("phase") == "REQUEUED", 40, "REQUEUED")
        stopped = {mode: training.steps(1)[-1][0] for mode, training in jobs.items()}
        for mode, training in jobs.items():
            training.wait_step(stopped[mode] + 1, 240)
            training.finish()
        for mode, training in jobs.items():
            assert training.wait_final()["phase"] == "DONE"
            assert training.steps(2)[0][0] == stopped[mode] + 1
            wait_run_ended(site, training.job)
            assert [run["State"] for run in runs(site, training.job)] == ["REQUEUED", ended]
    site.restore_all()


def test_a_job_that_its_qos_lets_be_suspended_stands_still_while_the_urgent_one_runs_and_goes_on(
    urgent_alone: Cluster,
) -> None:
    site = urgent_alone
    with training_job(site, "suspended") as training:
        job = training.submit("--slurm.qos=suspended")
        training.wait_step(10)
        nodes = site.sh(LOGIN, f"squeue -h -j {job} -o %N", user="alice")
        waits = f"until [ -e {URGENT_MAY_END} ]; do sleep 0.5; done"
        urgent = f"sbatch --parsable --qos=urgent -p shared -N2 -w {nodes} --exclusive -o /dev/null --wrap '{waits}'"
        other = int(site.sh(LOGIN, urgent, user="bob"))
        training.wait(stands_still, 30, "it is suspended")
        committed = int(training.view["committed"]["step"])
        assert (training.generation, state(site, other)) == (1, "RUNNING")
        site.sh(LOGIN, f"touch {URGENT_MAY_END}")
        assert int(training.wait_recovered(2)["step_restored"]) >= committed
        assert state(site, other).startswith("COMPLET")
        site.exec(LOGIN, "scancel", "--signal=STOP", str(job), user="alice")  # its user may do the same
        training.wait(stands_still, 30, "its user has stopped it")
        site.exec(LOGIN, "scancel", "--signal=CONT", str(job), user="alice")
        training.wait(lambda v: not stands_still(v), 30, "it is told that the job runs")
        training.wait_step(int(training.view["step"]) + 10)
        assert site.sh(CONTROLLER, "sinfo -hR") == ""
        training.finish()
        assert training.wait_final()["phase"] == "DONE"
        training.wait_job_ended()
        assert [run["State"] for run in runs(site, job)] == ["COMPLETED"]
        assert site.sh(LOGIN, f"sacct -nXP -j {job} --format=Suspended", user="alice") > "00:00:00"


def test_a_pool_job_that_a_limit_of_jobs_keeps_from_starting_is_given_up_at_once(site: Cluster) -> None:
    settings = ('durable_dir = "/shared/jobs/single/durable"',)
    with training_job(site, "single", 0, *settings) as training:
        job = training.submit("--slurm.qos=single")
        training.wait_step(10)
        site.crash(training.node_of(1))
        training.wait(lambda v: v.get("phase") == "REQUEUED", 60, "REQUEUED")
        events = site.sh(LOGIN, f"muster events {job}", user="alice")
        assert "no node of the shared pool: the limit QOSMaxJobsPerUserLimit" in events
        training.cancel()
    site.restore_all()
