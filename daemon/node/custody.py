"""Whose memory a node keeps while its job is requeued, for how long, and what makes way for it: pure bookkeeping.

What holds at all times:
- what a gang has left is given back to the same user alone, once;
- nothing is kept longer than KEPT_S, or than its gang may want it;
- nothing is kept beside another job: its prolog names that job before it starts;
- of no user is the memory of more than USERS_MOST gangs kept, of all together no more than MOST.

The simulator keeps its nodes' memory by these very rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

KEPT_S = 600.0
MOST, USERS_MOST = 32, 8

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kept(Generic[T]):
    """What one gang has left: `memory`, until a moment (seconds) of a clock that never jumps. `generation`: the gang's
    newest one then."""

    uid: int
    gang: str
    job: int
    until: float
    memory: T
    generation: int = 0


class Custody(Generic[T]):
    """All that one node keeps. Whatever a call returns is kept no more: its memory is the caller's to free."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, str], Kept[T]] = {}

    def all(self) -> list[Kept[T]]:
        """Everything that is kept."""
        return list(self._kept.values())

    def refusal(self, uid: int, gang: str) -> str:
        """Why nothing more of this user is kept; empty where it is."""
        others = [key for key in self._kept if key != (uid, gang)]
        if len(others) >= MOST:
            return f"the memory of {MOST} gangs is kept on this node already"
        if sum(of == uid for of, _ in others) >= USERS_MOST:
            return f"the memory of {USERS_MOST} gangs of uid {uid} is kept on this node already"
        return ""

    def keep(self, kept: Kept[T]) -> list[Kept[T]]:
        """Keep it; what the gang had left before makes way."""
        before = self._take_out(lambda k: (k.uid, k.gang) == (kept.uid, kept.gang))
        self._kept[kept.uid, kept.gang] = kept
        return before

    def take(self, uid: int, gang: str) -> Kept[T] | None:
        """What this user's gang has left here."""
        return self._kept.pop((uid, gang), None)

    def job_starts(self, job: int) -> list[Kept[T]]:
        """A job is about to start on the node: what all others have left."""
        return self._take_out(lambda kept: kept.job != job)

    def over(self, gang: str, generation: int) -> list[Kept[T]]:
        """The gang is over, or has started a newer generation than this one."""
        return self._take_out(lambda kept: kept.gang == gang and kept.generation <= generation)

    def expired(self, now: float) -> list[Kept[T]]:
        """What has been kept for long enough."""
        return self._take_out(lambda kept: kept.until <= now)

    def _take_out(self, wanted: Callable[[Kept[T]], bool]) -> list[Kept[T]]:
        out = [kept for kept in self._kept.values() if wanted(kept)]
        for kept in out:
            del self._kept[kept.uid, kept.gang]
        return out
