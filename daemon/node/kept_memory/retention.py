"""Whose memory a node keeps while its job is requeued, for how long, and what makes way for it: pure bookkeeping.

What holds at all times:
- something is kept of one job at a time, the one that a prolog has named last, and of its user alone;
- what a gang has left is given back to that user alone, once;
- nothing is kept longer than RETENTION_S, or than its gang may want it.

The simulator keeps its nodes' memory by these very rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

RETENTION_S = 600.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class JobOwner:
    """A Slurm job and its user."""

    job: int
    uid: int


@dataclass(frozen=True, slots=True)
class KeptEntry(Generic[T]):
    """What a gang has left: `memory`, until a moment (seconds) of a clock that never jumps. `generation`: the gang's
    newest one then."""

    owner: JobOwner
    gang: str
    until: float
    memory: T
    generation: int = 0


class Retention(Generic[T]):
    """All that one node keeps. Whatever a call returns is kept no more: its memory is the caller's to let go."""

    def __init__(self) -> None:
        self.prolog_job: JobOwner | None = None
        """Whom a prolog has named last on this node."""
        self.kept: KeptEntry[T] | None = None

    def refusal(self, owner: JobOwner) -> str:
        """Why nothing of this job and user is kept; empty where it is.

        Where another job has started since, it would stand beside that; where no prolog calls at all, not even for this
        job before it ran, beside whatever comes.
        """
        if self.prolog_job is None:
            return "no prolog has named a job on this node: slurm.conf needs Prolog=…/muster-prolog"
        if self.prolog_job.job != owner.job:
            return f"job {self.prolog_job.job} has started on this node since"
        return "" if self.prolog_job.uid == owner.uid else f"job {owner.job} is another user's"

    def keep(self, kept: KeptEntry[T]) -> KeptEntry[T] | None:
        """Keep it; what was left before makes way."""
        before, self.kept = self.kept, kept
        return before

    def hand_out(self, uid: int, gang: str) -> KeptEntry[T] | None:
        """What this user's gang has left here."""
        kept = self.kept
        return self._out() if kept is not None and (kept.owner.uid, kept.gang) == (uid, gang) else None

    def job_starts(self, owner: JobOwner) -> KeptEntry[T] | None:
        """A job is about to start on the node: what another one has left."""
        self.prolog_job = owner
        return self._out() if self.kept is not None and self.kept.owner != owner else None

    def remove_obsolete(self, gang: str, generation: int) -> KeptEntry[T] | None:
        """The gang is over, or has started a newer generation than this one."""
        kept = self.kept
        return self._out() if kept is not None and kept.gang == gang and kept.generation <= generation else None

    def remove_expired(self, now: float) -> KeptEntry[T] | None:
        """What has been kept for long enough."""
        return self._out() if self.kept is not None and self.kept.until <= now else None

    def _out(self) -> KeptEntry[T] | None:
        out, self.kept = self.kept, None
        return out
