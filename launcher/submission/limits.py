"""What a site does to a job that is queued: a limit keeps it from starting, or it gets nodes that it must share.

Slurm says both as soon as the job is queued, or refuses the job.

Which limits hold, and what they count, follows from the whole of Slurm's accounts, QOS and partitions. So Slurm is
asked, once it has the job. Spares count towards each of them.
"""

from __future__ import annotations

import re

from muster.launcher.command import print_note
from muster.slurm.client.backends.sbatch import Sbatch
from muster.slurm.client.parsing import limits, queued_job
from muster.wording import counted

_OF_TIME = re.compile(r"Wall|Time|Minutes")
"""Limits that more nodes do not reach sooner."""


async def say_doubts(job: int, nodes: int, spares: int) -> None:
    """Prints the lines of `doubts_of`."""
    for words in await doubts_of(job, nodes, spares):
        print_note(f"muster: {words}")


async def doubts_of(job: int, nodes: int, spares: int) -> list[str]:
    """What is said if a limit holds back the job that was just queued, and if the site has given it shared nodes.
    `nodes`: those that train; 0: not known."""
    slurm = Sbatch()
    shown = await slurm.shown("job", str(job))
    how = queued_job.how_shared(shown)
    for partition in filter(None, queued_job.partition(shown).split(",")):
        how = how or queued_job.how_forced(await slurm.shown("partition", partition))
    limit = limit_words(queued_job.reason(shown), job, nodes, spares)
    return [words for words in (limit, sharing_words(how, job)) if words]


def sharing_words(how: str, job: int) -> str:
    """What is said of a job that may share its nodes, as Slurm says with `how`. Empty: it has them alone."""
    if not how:
        return ""
    return (
        f"job {job} may share its nodes with other jobs ({how}), and a node that fails is set DOWN, which ends every "
        "job on it: a plugin of the site, or OverSubscribe=FORCE of the partition, has taken --exclusive away"
    )


def limit_words(reason: str, job: int, nodes: int, spares: int) -> str:
    """What is said of a job that waits for Slurm's `reason`. Empty: it is no limit."""
    if not limits.ANY.fullmatch(reason):
        return ""
    asks = size_words(nodes, spares) if nodes and not _OF_TIME.search(reason) else ""
    size = f", which asks for {asks}" if asks else ""
    return f"the limit {reason} holds back job {job}{size}: muster status {job} says the way out"


def size_words(nodes: int, spares: int) -> str:
    """The nodes that a job asks for: those that train, and spares."""
    if not spares:
        return counted(nodes, "node")
    return f"{counted(nodes + spares, 'node')}, {nodes} to train on and {counted(spares, 'spare')}"
