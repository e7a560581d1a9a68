"""Which memory a node keeps while its job is requeued, for whom and for how long. Pure bookkeeping; the simulator uses
it too.

What always holds:
- A node keeps memory of one job at a time, and only for the job and user that a prolog named last.
- Memory is handed out once, and only to the user who deposited it.
- Nothing is kept longer than RETENTION_S, or longer than its gang wants it.

Only a rank's own slots are kept. Replicas borrow pieces from those slots, and would double the memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

RETENTION_S = 600.0
"""Seconds for which memory is kept at most."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class JobOwner:
    """A Slurm job and its user."""

    job: int
    uid: int


@dataclass(frozen=True, slots=True)
class KeptEntry(Generic[T]):
    """What one gang deposited: `memory`, kept until the monotonic second `until`. `generation`: the gang's newest at
    that time."""

    owner: JobOwner
    gang: str
    until: float
    memory: T
    generation: int = 0


class Retention(Generic[T]):
    """Everything that one node keeps. The caller releases the memory of an entry that a method returns."""

    def __init__(self) -> None:
        self.prolog_job: JobOwner | None = None
        """The job and user that a prolog named last on this node."""
        self.kept: KeptEntry[T] | None = None

    def refusal(self, owner: JobOwner) -> str:
        """Why nothing of this job and user is kept; empty: it is kept.

        If another job has started, the memory would take space from that job. If no prolog ever named a job on this
        node, it would take space from any job.
        """
        if self.prolog_job is None:
            return "no prolog has named a job on this node: slurm.conf needs Prolog=…/muster-prolog"
        if self.prolog_job.job != owner.job:
            return f"job {self.prolog_job.job} has started on this node since"
        return "" if self.prolog_job.uid == owner.uid else f"job {owner.job} is another user's"

    def keep(self, kept: KeptEntry[T]) -> KeptEntry[T] | None:
        """Keep the entry; return the previous one."""
        before, self.kept = self.kept, kept
        return before

    def hand_out(self, uid: int, gang: str) -> KeptEntry[T] | None:
        """Remove and return what this user's gang deposited here."""
        kept = self.kept
        return self._remove() if kept is not None and (kept.owner.uid, kept.gang) == (uid, gang) else None

    def job_starts(self, owner: JobOwner) -> KeptEntry[T] | None:
        """A job is about to start on this node: remove and return the entry of any other job."""
        self.prolog_job = owner
        return self._remove() if self.kept is not None and self.kept.owner != owner else None

    def remove_obsolete(self, gang: str, generation: int) -> KeptEntry[T] | None:
        """The gang has ended, or runs a generation newer than this one: remove and return its entry."""
        kept = self.kept
        return self._remove() if kept is not None and kept.gang == gang and kept.generation <= generation else None

    def remove_expired(self, now: float) -> KeptEntry[T] | None:
        """Remove and return an entry that has been kept long enough."""
        return self._remove() if self.kept is not None and self.kept.until <= now else None

    def _remove(self) -> KeptEntry[T] | None:
        removed, self.kept = self.kept, None
        return removed
