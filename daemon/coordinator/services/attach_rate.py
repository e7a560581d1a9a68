"""How often one agent or node daemon may attach as somebody new. Each such attach writes facts into the journal.

A process that attaches again, as what the journal knows, writes no fact. It may do that as often as its network fails,
so honest processes never meet this limit: a node starts a new agent or boots a few times in an hour.
"""

from __future__ import annotations

from collections.abc import Hashable

from muster.daemon.coordinator.services.rpc_errors import resource_exhausted

BURST = 20
"""Attaches as somebody new that may follow each other at once."""
INTERVAL_S = 60.0
"""Seconds after which one more is allowed."""
SWEEP_AT = 1024
"""Entries from which on those that count nothing any more are removed: again when twice as many as were left are there,
so that a site whose nodes all attach at once does not look through all of them for each."""


class AttachRate:
    """Counts the attaches of each identity: a node, or a node of a gang."""

    def __init__(self) -> None:
        self._free_at: dict[Hashable, float] = {}  # when all that was counted is forgotten (seconds)
        self._sweep_at = SWEEP_AT

    def note(self, identity: Hashable, what: str, now: float) -> None:
        """Note that `identity` attaches as somebody new. `what`: that identity in words.

        Raises:
            RpcAbort: it has done so too often.
        """
        if len(self._free_at) >= self._sweep_at:
            self._free_at = {key: at for key, at in self._free_at.items() if at > now}
            self._sweep_at = max(SWEEP_AT, 2 * len(self._free_at))
        free_at = max(self._free_at.get(identity, now), now) + INTERVAL_S
        if free_at - now > BURST * INTERVAL_S:
            raise resource_exhausted(
                f"{what} has attached as a new process {BURST} times within minutes: once in {INTERVAL_S:g} s is "
                "allowed in the long run"
            )
        self._free_at[identity] = free_at
