"""The journal comes first: the coordinator does nothing that the journal does not hold.

A replay of the journal gives the durable state.
"""

from __future__ import annotations

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState, Gang
from muster.daemon.coordinator.journal.journal import Journal
from muster.simulator.invariants.violation import require
from muster.v1 import agent_pb2 as pb

SNAPSHOT_SAMPLE_INTERVAL = 16
"""One of this many snapshots is read back."""


class JournalInvariant:
    """What was journaled before the coordinator acts, and what a crashed coordinator leaves to the next one."""

    def __init__(self) -> None:
        self._journaled_serials: dict[str, int] = {}
        self._journaled_calls = 0
        self._snapshots = 0
        self._state_at_crash: DurableState | None = None

    def journaled(self, state: DurableState) -> None:
        """The journal holds every fact behind this durable state."""
        for gang in state.gangs.values():
            self._journaled_serials[gang.id] = gang.order_serial
        self._journaled_calls = max(self._journaled_calls, state.last_call)
        self._state_at_crash = state

    def order_sent(self, gang: Gang, order: pb.Order) -> None:
        """The coordinator sends an order."""
        require(
            order.serial <= self._journaled_serials.get(gang.id, 0),
            f"{gang.id}: an order goes out before it is journaled",
        )

    def slurm_call_started(self, call: facts.SlurmCallOwed) -> None:
        """The coordinator starts a call to Slurm."""
        require(call.call <= self._journaled_calls, f"Slurm call {call.call} is made before it is journaled")

    def coordinator_crashed(self, state: DurableState, written: bool) -> None:
        """The coordinator ends with this durable state. `written`: the journal holds all of it."""
        self._state_at_crash = state if written else None

    def coordinator_restarted(self, state: DurableState, journal: Journal) -> None:
        """A new coordinator has replayed the journal."""
        require(state == journal.load(use_snapshot=False), "the snapshot differs from a replay of the journal")
        require(
            self._state_at_crash is None or state == self._state_at_crash,
            "the journal lacks facts of the crashed coordinator",
        )

    def snapshot_taken(self, state: DurableState, journal: Journal) -> None:
        """The journal holds a new snapshot. Some snapshots are read back."""
        self._snapshots += 1
        if self._snapshots % SNAPSHOT_SAMPLE_INTERVAL == 0:
            require(journal.load() == state, "the snapshot differs from the durable state")

    def run_settled(self, state: DurableState, journal: Journal) -> None:
        """The durable state of the last coordinator is what the next one would start with."""
        require(journal.load(use_snapshot=False) == state, "a replay of the journal differs from the durable state")
