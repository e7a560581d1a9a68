"""Phrases of the core's reasons, by which the simulator distinguishes facts of one kind.

If the core words a reason anew, an invariant could silently check nothing any more. A test checks that the core still
uses each phrase.
"""

from __future__ import annotations

from enum import StrEnum


class ReasonPhrase(StrEnum):
    """What a reason of the core holds, and what it says of the fact."""

    CAUSE_PROVEN = "trains on without this node"
    """A node is blamed for crashes: the ranks run well without it."""
    BATCH_PROCESS_LOST = "batch process of the job"
    """The job is requeued because nothing is left that would start its agents."""
    BATCH_PROCESS_SILENT = "batch process of the job is silent"
    """The job is requeued because its batch process is silent."""
    KERNEL_ONLY = "its kernel answers, its processes don't"
    NO_ANSWER = "does not answer"
    """A generation is fenced because of a node whose ranks may be alive."""
    AGENT_UNREACHED = "has not reached it"
    """A generation is fenced because it waits for an agent that the coordinator is unable to reach."""
    AGENT_ENDED = "has ended"
    """A node is out of the gang because its agent has ended."""
    AGENT_ANSWERS_NO_HOST = "has not answered anybody"
    """A node is out of the gang because its agent answers no host."""
    RANKS_UNKILLABLE = "could not be killed"
    """A node is unfit because its ranks can't be killed."""
    RANK_SILENT = "has run no Python"
    """A hang is that of one rank, which sends no signs of life."""
    ALL_RANKS_IDLE = "all ranks have been idle"
    """A hang is found by the idleness of all ranks."""
    CHECK_FAILED = "has failed its node check"
    """A node is out of the gang because of its node check."""
    LAUNCH_FAILED = "the launch of the job failed"
    """A job that Slurm holds is released."""
