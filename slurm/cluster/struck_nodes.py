"""Who may be drained: nodes that were struck, until that is history.

A verdict may come late: a coordinator stood still, another one took over, a node was cut off when it was struck and
told of it once it was mended. So a node is let off only when nothing has been held against it for `FORGIVEN_S` running:
it is mended, in service in Slurm, and FIT to Muster. Whoever is drained after that was drained for nothing.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

FORGIVEN_S = 30.0
"""A coordinator stands still for 12 s at most; where it is replaced the other one serves after 9 s, and has heard all
nodes some seconds later; silence is a verdict after some 5 s."""


class Guilt:
    """The nodes that may be drained now. Times are seconds of a clock of the caller's."""

    def __init__(self) -> None:
        self._held: dict[str, float] = {}  # when something was held against it last

    def __contains__(self, node: str) -> bool:
        """Whether `node` may be drained."""
        return node in self._held

    def strike(self, node: str, now: float) -> None:
        """It is struck."""
        self._held[node] = now

    def look(self, blameless: AbstractSet[str], now: float) -> list[str]:
        """Nothing is held against the `blameless` as of `now`. Returns those that are let off."""
        self._held.update((node, now) for node in self._held if node not in blameless)
        let_off = [node for node, at in self._held.items() if now - at >= FORGIVEN_S]
        for node in let_off:
            del self._held[node]
        return let_off
