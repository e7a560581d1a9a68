"""When the ranks plan their shards anew: before the same snapshot, if the state of any of them has new names or shapes.

To plan is a collective call, and the state may change on one rank alone: an expert gets its optimizer states with the
first token that it is given. A rank that planned by itself would wait for the others, and they for its gradients. So:

1. All ranks look at the same snapshots. A look is one question to the store of their process group. Between two looks
   no rank asks anything.
2. A rank whose state has changed writes that down for the look after the present snapshot, and keeps no step until
   then. All ranks find it there: a step needs every rank's part, and the rank goes on only when the store has answered.
3. If something is written down for a look, each rank waits there until all have come. Then all plan.
4. After the last snapshot there is no look, so all ranks meet at that one.

Ranks that don't come end in an error, not in a hang. In a large job the looks are further apart, and each time that a
plan follows soon after another.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from muster.checkpoint.format.errors import CheckpointError

log = logging.getLogger(__name__)

MEETING_S, LAST_MEETING_S = 600.0, 30.0
"""Seconds that a rank waits for all others at a look, and at the last snapshot, where nothing may have changed."""

RANKS_PER_LOOK = 256
"""Ranks that look at the same snapshot in a job whose ranks look at each one. With more, looks are further apart: the
store answers some 100,000 questions a second, so that the looks take 3 ms of a step at most."""

SOON, MOST_DOUBLINGS = 8, 4
"""A plan that follows within so many looks doubles the distance of the looks, up to so many times; as many looks
without a plan undo that."""

_ALL, _GONE = "all", "gone"


class Store(Protocol):
    """What all ranks can write to and read from (torch.distributed's Store). All but `wait` are answered at once."""

    def add(self, key: str, amount: int) -> int: ...
    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Waits until all keys have values.

        Raises:
            RuntimeError: not in time.
        """


@dataclass(frozen=True)
class RanksWithStore:
    """This rank, the number of all ranks, and the store that they share."""

    rank: int
    world_size: int
    store: Store


class JointPlanning:
    """This rank's part in planning anew.

    Args:
        join_group: returns this rank's place among others, at the first snapshot; None: the rank is alone.
        meeting_s, last_meeting_s: for how long a rank waits for the others, and at the last snapshot.
    """

    def __init__(
        self,
        join_group: Callable[[], RanksWithStore | None],
        meeting_s: float = MEETING_S,
        last_meeting_s: float = LAST_MEETING_S,
    ) -> None:
        self._meeting_s, self._last_meeting_s = meeting_s, last_meeting_s
        self._join_group = join_group
        self._group: RanksWithStore | None = None
        self._snapshots = 0
        self._next_look = 0
        self._doublings = 0
        self._planned_at = 0
        self._asked_for = 0
        """The look for which this rank has written its change down."""
        self._has_lost_store = False

    def begin(self) -> None:
        """All ranks have planned for the first time."""
        self._group = self._join_group()
        self._next_look = self._spacing()

    def is_due(self, change: str, *, last: bool) -> bool:
        """Whether all ranks plan before this snapshot. All ranks ask this at the same snapshots, all but the first.

        Args:
            change: the name of what has changed in this rank's state since the last plan; empty: nothing has.
            last: no snapshot follows.

        Raises:
            CheckpointError: some rank's state has changed, and not all ranks have come to plan.
        """
        if self._group is None:
            return bool(change)
        if self._has_lost_store:
            return False
        self._snapshots += 1
        try:
            return self._is_due_at_last(self._group, change) if last else self._is_due_before(self._group, change)
        except RuntimeError as error:  # what torch.distributed raises if the store is gone, as at the end of rank 0
            log.log(logging.INFO if last else logging.WARNING, "no rank will plan again: %s", error)
            self._has_lost_store = True
            return False

    def _is_due_before(self, group: RanksWithStore, change: str) -> bool:
        """Whether all ranks plan before a snapshot that is not the last one."""
        due = self._snapshots == self._next_look and self._is_due_at_look(group)
        if not due and change and self._asked_for < self._next_look:
            self._asked_for = self._next_look
            self._write_down(group, change)
        return due

    def _is_due_at_look(self, group: RanksWithStore) -> bool:
        look = str(self._next_look)
        due = group.store.check([look])
        if due and not _meet(group, look, self._meeting_s):
            raise CheckpointError(
                f"{_changed(group, look)}, and not all {group.world_size} ranks came to the same snapshot within "
                f"{self._meeting_s:.0f} s to plan it together: call Checkpoint.step on all ranks with the same numbers"
            )
        soon = self._snapshots - self._planned_at < SOON * self._spacing()
        if due or not soon:
            self._doublings = min(self._doublings + 1, MOST_DOUBLINGS) if soon else 0
        if due:
            self._planned_at = self._snapshots
        self._next_look += self._spacing()
        return due

    def _is_due_at_last(self, group: RanksWithStore, change: str) -> bool:
        if change and self._asked_for < self._next_look:
            self._write_down(group, change)
        look = str(self._next_look)
        return _meet(group, f"last {self._snapshots}", self._last_meeting_s) and group.store.check([look])

    def _write_down(self, group: RanksWithStore, change: str) -> None:
        look = str(self._next_look)
        group.store.set(f"{look} change", f"{change} of rank {group.rank}")
        group.store.add(look, 1)  # waits for the answer of the store, as set does not

    def _spacing(self) -> int:
        """Snapshots between two looks."""
        ranks = self._group.world_size if self._group is not None else 1
        return -(-ranks // RANKS_PER_LOOK) << self._doublings


def _meet(group: RanksWithStore, place: str, timeout_s: float) -> bool:
    """Wait until all ranks have come. Returns the same on all ranks: whether they have, in time."""
    if group.store.add(f"{place} ranks", 1) == group.world_size:
        return _decide(group, place, _ALL)
    try:
        group.store.wait([f"{place} decided"], timedelta(seconds=timeout_s))
    except RuntimeError:  # what torch.distributed raises after the time, and if the store is gone
        return _decide(group, place, _GONE)
    return group.store.get(f"{place} outcome") == _ALL.encode()


def _decide(group: RanksWithStore, place: str, outcome: str) -> bool:
    """Say what the outcome is, unless another rank has said it before. Returns whether all ranks have come."""
    decided = group.store.compare_set(f"{place} outcome", "", outcome)
    # torch's store without libuv wakes up nobody who waits for a key that compare_set has made.
    group.store.set(f"{place} decided", "")
    return decided == _ALL.encode()


def _changed(group: RanksWithStore, look: str) -> str:
    return f"names or shapes of the state have changed, the first {group.store.get(f'{look} change').decode()}"
