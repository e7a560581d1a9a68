"""A limit of the site that keeps a job from starting: Slurm names it as soon as the job is queued, or refuses the job.

Which limits hold, and what they count, follows from the whole of Slurm's accounts, QOS and partitions. So Slurm is
asked, once it has the job. Spares count towards each of them.
"""

from __future__ import annotations

import re

from muster.launcher.command import print_note
from muster.slurm.client.backends.sbatch import Sbatch
from muster.slurm.client.parsing import limits
from muster.wording import counted

_OF_TIME = re.compile(r"Wall|Time|Minutes")
"""Limits that more nodes do not reach sooner."""


async def say_limit(job: int, nodes: int, spares: int) -> None:
    """Prints the line of `limit_of`."""
    if words := await limit_of(job, nodes, spares):
        print_note(f"muster: {words}")


async def limit_of(job: int, nodes: int, spares: int) -> str:
    """What is said if a limit holds back the job that was just queued. `nodes`: those that train; 0: not known."""
    return limit_words(await Sbatch().pending_reason(job), job, nodes, spares)


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
