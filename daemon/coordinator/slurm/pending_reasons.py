"""Slurm's reasons why a job does not start, in words: what they mean, and the way out that a person must take. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from muster.daemon.coordinator.core.state.observed_state import HELD_AFTER_LAUNCH
from muster.slurm.client.parsing import limits
from muster.wording import listed

_CANCEL = "muster cancel {job}, and submit it with less"
_WAY_OUT = (
    (
        HELD_AFTER_LAUNCH,
        "held because its launch failed{where}: scontrol release {job} lets it start on other nodes. slurmd's log on "
        "the node that failed says why: a Prolog, for example",
    ),
    (r"JobHeldUser", "held by its user: scontrol release {job} lets it start"),
    (r"job requeued in held state", "held since its requeue: scontrol release {job} lets it start"),
    (r"JobHeldAdmin", "held by an administrator, who alone can release it"),
    (
        r"launch failure limit exceeded requeued held|JobHoldMaxRequeue",
        "held because Slurm has started it too often in vain (MaxBatchRequeue): the log of slurmd on its first node "
        "says why; scontrol release {job} lets it start again",
    ),
    (
        r"user env retrieval failed requeued held",
        "held because a node could not read the user's environment (--export=NONE, --get-user-env): scontrol release "
        "{job} lets it start again",
    ),
    (r"BeginTime", "Slurm starts it later: at its --begin time, or after the delay that follows a requeue"),
    (r"Dependency", "it starts once the jobs that it depends on have ended. scontrol show job {job} names them"),
    (r"Licenses", "it starts once enough of its licences are free. scontrol show licenses"),
    (r"Reservation", "it starts in its reservation. scontrol show reservation says when, and on which nodes"),
    (r"BadConstraints", f"no node has all that the job asks for now: {_CANCEL}"),
    (r"DependencyNeverSatisfied", "the job that it depends on has ended otherwise: muster cancel {job}"),
    (r"PartitionNodeLimit", f"it asks for more nodes than its partition has, or gives to one job: {_CANCEL}"),
    (r"PartitionConfig", f"it asks for more than the partition has or allows: {_CANCEL}, or for another partition"),
    (
        r"PartitionTimeLimit",
        "it asks for more time than the partition gives to one job: scontrol update jobid={job} timelimit=TIME",
    ),
    (r"Partition(Down|Inactive)", "an administrator has closed its partition, and alone can open it"),
    (
        r"ReqNodeNotAvail",
        "a node that it needs is down, drained or reserved: it starts once that is over. sinfo -R says why nodes are "
        "out of service, scontrol show res what is reserved",
    ),
    (r"Reservation ?[dD]eleted", "its reservation is gone: muster cancel {job}, and submit it again"),
    (
        limits.IN_ONE_JOB,
        f"it asks for more than {{whose}} may have in one job: {_CANCEL}. sacctmgr show {{table}} shows the limits",
    ),
    (
        limits.OF_ALL_JOBS,
        "{whose} has reached a limit: it starts once other jobs have ended, unless it asks for more than the limit. "
        "sacctmgr show {table} shows the limits",
    ),
    (r"Invalid(Account|QOS)|(QOS|Account)NotAllowed", "scontrol update jobid={job} account=NAME qos=NAME names others"),
)
"""Slurm's reasons that do not go away soon, and the way out, or where to look."""
_WITHOUT = (
    "too few nodes are left without {nodes}, on which earlier runs of this job failed: it starts once it may use "
    "enough of them again, after ten minutes, or after their repair if they are down or drained (sinfo -R says why). "
    "With fewer nodes: muster cancel {job}, and submit it again"
)


def pending_words(
    reason: str, job: int, failed_on: Sequence[str], excluded: Sequence[str] = (), drained: Sequence[str] = ()
) -> str:
    """The reason, with the way out if there is one that a person must take. Empty for an empty reason.

    Args:
        failed_on: the nodes on which the launch of the job has failed.
        drained: the nodes that Slurm has drained because the launch of some job has failed there.
        excluded: the nodes on which the job may not start, because its earlier runs failed there.
    """
    word = reason.partition(",")[0].replace("_", " ")  # Slurm names nodes after a comma
    if word == "BadConstraints" and excluded:
        return f"{reason}: {_WITHOUT.format(nodes=listed(excluded), job=job)}"
    where = f" (failed launches have drained {listed(drained)})" if drained else ""
    where = f" on {', '.join(failed_on)}" if failed_on else where
    for pattern, way_out in _WAY_OUT:
        if re.fullmatch(pattern, word):
            by_qos = word.startswith("QOS")
            whose, table = ("its QOS", "qos") if by_qos else ("its account", "assoc")
            return f"{reason}: {way_out.format(job=job, where=where, whose=whose, table=table)}"
    return reason
