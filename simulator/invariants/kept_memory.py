"""Invariant 7: a node keeps memory only for a gang that may come back.

It keeps the memory for ten minutes at most, and never beside another job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.node.kept_memory.retention import KeptEntry
from muster.simulator.invariants.violation import require

if TYPE_CHECKING:
    from muster.simulator.world.agent import Agent


class KeptMemoryInvariant:
    """The runs of each gang's job that were requeued."""

    def __init__(self) -> None:
        self._requeued: set[tuple[str, int]] = set()

    def gang_requeued(self, gang: Gang) -> None:
        """The gang comes back."""
        self._requeued.add((gang.id, gang.slurm.restart_count))

    def shards_handed_over(self, agent: Agent) -> None:
        """An agent hands its shards to its node's daemon."""
        gang = agent.identity.gang
        require(
            (gang, agent.identity.restarts) in self._requeued or agent.failure,
            f"invariant 7: {agent.node} keeps memory of {gang}, and the gang does not come back",
        )

    def prolog_finished(self, node: str, job: int, kept: KeptEntry[Any] | None) -> None:
        """A job's first process is about to start on a node that keeps this memory."""
        foreign_gang = kept.gang if kept is not None and kept.owner.job != job else ""
        require(
            not foreign_gang, f"invariant 7: job {job} starts on {node}, which still keeps memory of {foreign_gang}"
        )

    def kept_memory_checked(self, node: str, now: float, kept: KeptEntry[Any] | None) -> None:
        """A node keeps this memory at this time."""
        expired_gang = kept.gang if kept is not None and kept.until <= now else ""
        require(not expired_gang, f"invariant 7: {node} keeps memory of {expired_gang} for too long")
