"""Limits that hold a job back, and nodes that it must share: what is said as soon as it is queued."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.launcher.spec.spec import Job
from muster.launcher.submission.limits import doubts_of, limit_words, say_doubts
from muster.launcher.submission.refusals import hint_for

SCONTROL = """#!/bin/bash
case "$*" in
"--oneliner show job 7") printf 'JobId=7 Reason=AssocGrpNodeLimit OverSubscribe=OK\\nJobId=8 Reason=None\\n' ;;
"--oneliner show job 9") echo JobId=9 Reason=None Partition=shared OverSubscribe=NO Exclusive=NODE ;;
"--oneliner show job 10") echo JobId=10 Reason=None Partition=own,shared OverSubscribe=NO Exclusive=NODE ;;
"--oneliner show partition own") echo PartitionName=own OverSubscribe=NO ;;
"--oneliner show partition shared") echo PartitionName=shared OverSubscribe=$FORCED ;;
*) exit 1 ;;
esac
"""


@pytest.mark.parametrize(
    "limit",
    [
        "QOSMaxNodePerJobLimit", "AssocGrpNodeLimit", "QOSMaxNodePerUserLimit", "AssocMaxGRESPerJob",
        "QOSMaxGRESPerNode", "MaxGRESPerAccount", "AssocMaxJobsLimit", "PartitionNodeLimit", "PartitionConfig",
        "AssocGrpGRES", "MaxMemPerLimit",
    ],
)  # fmt: skip
def test_a_limit_is_named_with_the_spares_that_count_towards_it(limit: str) -> None:
    assert limit_words(limit, 7, 3, 1) == (
        f"the limit {limit} holds back job 7, which asks for 4 nodes, 3 to train on and 1 spare: "
        "muster status 7 says the way out"
    )


@pytest.mark.parametrize("limit", ["QOSMaxWallDurationPerJobLimit", "PartitionTimeLimit"])
def test_fewer_nodes_do_not_help_against_a_limit_of_time(limit: str) -> None:
    assert limit_words(limit, 7, 3, 1).startswith(f"the limit {limit} holds back job 7: muster status 7")


@pytest.mark.parametrize("reason", ["", "None", "Priority", "Resources", "JobHeldUser", "BeginTime", "Licenses"])
def test_a_job_that_waits_for_nodes_is_held_back_by_no_limit(reason: str) -> None:
    assert limit_words(reason, 7, 3, 1) == ""


async def test_slurm_is_asked_once_it_has_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    await say_doubts(7, 2, 0)
    (tmp_path / "scontrol").write_text(SCONTROL)
    (tmp_path / "scontrol").chmod(0o755)
    for job in (8, 7):
        await say_doubts(job, 2, 0)
    assert capsys.readouterr().err == (
        "muster: the limit AssocGrpNodeLimit holds back job 7, which asks for 2 nodes: muster status 7 says the way "
        "out\nmuster: job 7 may share its nodes with other jobs (OverSubscribe=OK), and a node that fails is set "
        "DOWN, which ends every job on it: a plugin of the site, or OverSubscribe=FORCE of the partition, has taken "
        "--exclusive away\n"
    )


@pytest.mark.parametrize(
    ("of_partition", "how"),
    [("FORCE:4", "OverSubscribe=FORCE:4"), ("FORCE:12", "OverSubscribe=FORCE:12"), ("FORCE:1", ""), ("YES:4", "")],
)
async def test_a_partition_that_forces_its_jobs_to_share_nodes_is_named(
    of_partition: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("FORCED", of_partition)
    (tmp_path / "scontrol").write_text(SCONTROL)
    (tmp_path / "scontrol").chmod(0o755)
    for job in (9, 10):  # the one partition of job 9 is the second of job 10
        said = "".join(await doubts_of(job, 2, 0))
        assert said.startswith(f"job {job} may share its nodes with other jobs ({how})") if how else not said


@pytest.mark.parametrize(
    "refusal",
    [
        "QOSMaxNodePerJobLimit Batch job submission failed: Job violates accounting/QOS policy (job submit limit, "
        "user's size and/or time limits)",
        "Batch job submission failed: Node count specification invalid",
    ],
)
def test_a_refusal_for_a_limit_names_the_spares(refusal: str) -> None:
    job = Job(name="tiny", nodes=3, spares=1, command=["true"], run_dir="/r")
    assert hint_for(refusal, job, ()).startswith("it asks for 4 nodes, 3 to train on and 1 spare. sacctmgr show qos, ")


def test_an_account_that_slurm_does_not_take_is_named() -> None:
    job = Job(name="tiny", nodes=3, command=["true"], run_dir="/r", slurm={"account": "nosuch"})
    words = "Batch job submission failed: Invalid account or account/partition combination specified"
    assert hint_for(words, job, ()).startswith("--account=nosuch: sacctmgr show assoc user=$USER ")
