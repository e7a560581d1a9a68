"""For how long ranks have sent no sign of life.

A rank's library sends a sign of life each second, from a thread of its own (`signs_of_life` in
`checkpoint/training/rank_signals`). Every other message of the rank counts as one, too. In a silent rank no Python
thread runs: one of them keeps the GIL, or the process is stopped.

Silence is counted in seconds in which this agent ran. So time in which the whole node stood still is no silence of a
rank. A rank without a first sign is not watched, and a rank in a declared phase is not silent.
"""

from collections.abc import Callable, Collection

COUNT_INTERVAL_S = 1.0
"""Seconds between two calls of `count_second`."""
FIRST_REPORTED_S = 4
"""The shortest silence that is reported, in seconds: several signs were missed."""


class RankSilences:
    """The silences of the ranks of one node, in one generation.

    Args:
        on_change: called when `reported` returns something new.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._silent_s: dict[int, int] = {}

    def note_sign(self, rank: int) -> None:
        """The rank has sent a sign of life. It is watched from its first one on."""
        before = self._silent_s.get(rank)
        self._silent_s[rank] = 0
        if before is None or before >= FIRST_REPORTED_S:
            self._on_change()

    def note_message(self, rank: int) -> None:
        """The rank has sent another message."""
        if rank in self._silent_s:
            self.note_sign(rank)

    def forget(self, rank: int) -> None:
        """The rank sends no more signs of life."""
        if self._silent_s.pop(rank, None) is not None:
            self._on_change()

    def count_second(self, in_phase: Collection[int]) -> None:
        """A second has passed. `in_phase`: the ranks in a declared phase."""
        before = self.reported()
        self._silent_s = {rank: 0 if rank in in_phase else s + 1 for rank, s in self._silent_s.items()}
        if self.reported() != before:
            self._on_change()

    def watched(self) -> Collection[int]:
        """The ranks that have sent a sign of life."""
        return self._silent_s.keys()

    def reported(self) -> dict[int, int]:
        """Seconds of silence of each watched rank: 0, 4, 8, 16, 32, ... A long silence changes few statuses."""
        return {rank: _rounded_down(seconds) for rank, seconds in self._silent_s.items()}


def _rounded_down(seconds: int) -> int:
    """The last power of two; 0 for a silence that is too short."""
    return 0 if seconds < FIRST_REPORTED_S else 1 << (seconds.bit_length() - 1)
