"""Slurm's measured rules in the in-memory cluster, beyond the contract of all backends."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.slurm.client.errors import BatchHostRefused, SlurmRefused
from muster.slurm.client.fake.fake_cluster import FakeCluster
from muster.slurm.client.fake.fake_slurm import FakeSlurm
from muster.slurm.client.parsing.sbatch_request import JobRequest, read_request
from muster.slurm.client.states import JobState
from muster.slurm.client.types import Job


class Clock:
    """A clock that starts at 0, which must not be read as "never"."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cluster(clock: Clock) -> FakeCluster:
    return FakeCluster([f"n{number}" for number in range(1, 6)], now=clock)


GANG = JobRequest(nodes=3, no_kill=True)


def test_slurm_finds_a_lost_node_in_its_own_time(cluster: FakeCluster, clock: Clock) -> None:
    job = cluster.submit(GANG)
    cluster.fail_node("n2")
    clock.time = 15.9
    assert not cluster.nodes()["n2"].not_responding
    clock.time = 16
    assert cluster.nodes()["n2"].not_responding
    clock.time = 28.9
    assert cluster.jobs()[job].nodes == ("n1", "n2", "n3")
    clock.time = 29
    assert cluster.nodes()["n2"].down
    assert cluster.jobs()[job].nodes == ("n1", "n3")
    assert cluster.jobs()[job].state is JobState.RUNNING
    cluster.recover_node("n2")
    assert not cluster.nodes()["n2"].down
    assert cluster.jobs()[job].nodes == ("n1", "n3")


def test_drain_outlives_a_slurmd_that_registers_again(cluster: FakeCluster) -> None:
    cluster.fail_node("n2")
    cluster.down("n2", "why")
    cluster.recover_node("n2")
    node = cluster.nodes()["n2"]
    assert node.drained
    assert not node.down
    assert node.reason == "why"


def test_a_job_that_can_not_lose_a_node_waits_121_seconds(cluster: FakeCluster, clock: Clock) -> None:
    job = cluster.submit(JobRequest(nodes=2))
    cluster.down("n1", "why")
    waiting = cluster.jobs()[job]
    assert (waiting.state, waiting.reason, waiting.restart_count) == (JobState.PENDING, "BeginTime", 1)
    clock.time = 121
    again = cluster.jobs()[job]
    assert (again.state, again.nodes) == (JobState.RUNNING, ("n2", "n3"))


def test_a_batch_script_ends_its_job_from_a_node_set_down_under_it(cluster: FakeCluster) -> None:
    job = cluster.submit(GANG)
    cluster.down("n1", "why")
    assert cluster.jobs()[job].nodes == ("n2", "n3")
    assert cluster.end_batch_script(job, 1)
    assert cluster.jobs()[job].state is JobState.FAILED


def test_nobody_reports_the_end_of_a_job_whose_batch_host_is_dead(cluster: FakeCluster) -> None:
    job = cluster.submit(GANG)
    cluster.fail_node("n1")
    cluster.down("n1", "why")
    assert not cluster.end_batch_script(job)
    with pytest.raises(BatchHostRefused):
        cluster.remove_node(job, "n3")
    cluster.complete(job, 0)
    assert cluster.jobs()[job].state is JobState.COMPLETED


def test_a_partition_of_the_batch_host_that_heals_does_not_end_the_job(cluster: FakeCluster) -> None:
    job = cluster.submit(GANG)
    cluster.fail_node("n1", powered_off=False)
    cluster.down("n1", "why")
    cluster.recover_node("n1")
    assert cluster.jobs()[job].state is JobState.RUNNING
    assert cluster.jobs()[job].nodes == ("n2", "n3")
    assert not cluster.end_batch_script(job)


def test_a_short_partition_changes_nothing(cluster: FakeCluster, clock: Clock) -> None:
    job = cluster.submit(GANG)
    cluster.fail_node("n1", powered_off=False)
    clock.time = 20
    cluster.recover_node("n1")
    assert cluster.jobs()[job].nodes == ("n1", "n2", "n3")
    assert cluster.end_batch_script(job)
    assert cluster.jobs()[job].state is JobState.COMPLETED


def test_a_batch_host_that_reboots_quickly_fails_its_job(cluster: FakeCluster, clock: Clock) -> None:
    job = cluster.submit(JobRequest(nodes=3, no_kill=True, requeue=False))
    cluster.fail_node("n1")
    clock.time = 21
    cluster.recover_node("n1")
    assert cluster.jobs()[job].state is JobState.NODE_FAIL


def test_a_batch_host_that_reboots_as_its_job_starts_is_not_missed(cluster: FakeCluster, clock: Clock) -> None:
    job = cluster.submit(JobRequest(nodes=3, no_kill=True, requeue=False))
    cluster.fail_node("n1")
    clock.time = 19
    cluster.recover_node("n1")
    assert cluster.jobs()[job].state is JobState.RUNNING
    assert not cluster.end_batch_script(job)


def test_time_limit_ends_a_job(cluster: FakeCluster, clock: Clock) -> None:
    job = cluster.submit(JobRequest(time_limit_s=60))
    clock.time = 60
    assert cluster.jobs()[job].state is JobState.TIMEOUT


def test_jobs_wait_for_nodes_and_say_why(cluster: FakeCluster) -> None:
    first = cluster.submit(JobRequest(nodes=4))
    second = cluster.submit(JobRequest(nodes=2))
    assert cluster.jobs()[second].reason == "Resources"
    cluster.cancel(first)
    assert cluster.jobs()[second].nodes == ("n1", "n2")
    with pytest.raises(SlurmRefused, match="not available"):
        cluster.submit(JobRequest(nodes=6))


def test_afterok_never_starts_after_a_failure(cluster: FakeCluster) -> None:
    first = cluster.submit(JobRequest())
    second = cluster.submit(JobRequest(dependency=f"afterok:{first}"))
    third = cluster.submit(JobRequest(dependency=f"afterany:{first}"))
    assert cluster.jobs()[second].reason == "Dependency"
    cluster.end_batch_script(first, 1)
    assert cluster.jobs()[second].reason == "DependencyNeverSatisfied"
    assert cluster.jobs()[third].state is JobState.RUNNING


def test_every_change_of_a_job_is_reported(clock: Clock) -> None:
    told: list[Job] = []
    cluster = FakeCluster(["n1"], now=clock, on_change=told.append)
    cluster.end_batch_script(cluster.submit(JobRequest()))
    assert [job.state for job in told] == [JobState.PENDING, JobState.RUNNING, JobState.COMPLETED]


def test_options_of_a_script_and_of_the_command_line() -> None:
    script = '#!/bin/sh\n#SBATCH --nodes=10 --no-kill  # all\n#SBATCH --job-name "big run"\n#SBATCH -t 1-02:00\n'
    request = read_request(script, ["-N", "2", "-x", "n[1-2]", "--requeue", "--exclusive", "-p", "main"], "/home")
    assert request == JobRequest(
        nodes=2, name="big run", no_kill=True, exclude=("n1", "n2"), time_limit_s=26 * 3600, work_dir="/home"
    )


@pytest.mark.parametrize(
    ("text", "seconds"), [("5", 300), ("1:30", 90), ("2:00:00", 7200), ("1-0", 86400), ("1-2:3:4", 93784)]
)
def test_time_limits(text: str, seconds: int) -> None:
    assert read_request("", [f"--time={text}"], "").time_limit_s == seconds


async def test_submit_reads_the_script(cluster: FakeCluster, tmp_path: Path) -> None:
    slurm = FakeSlurm(cluster)
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\n#SBATCH -N3 --no-kill\n")
    assert await slurm.submit(script, ["-J", "gang"], cwd=tmp_path) == 1
    job = cluster.jobs()[1]
    assert (job.name, len(job.nodes), job.work_dir) == ("gang", 3, str(tmp_path))
    with pytest.raises(SlurmRefused, match="Unable to open"):
        await slurm.submit(tmp_path / "none.sh", cwd=tmp_path)
