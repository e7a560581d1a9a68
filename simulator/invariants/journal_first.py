"""The journal comes first: nothing is done that it does not hold, and what it holds is the durable state."""

from __future__ import annotations

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState, Gang
from muster.daemon.coordinator.journal.journal import Journal
from muster.simulator.invariants.violation import require
from muster.v1 import agent_pb2 as pb

SNAPSHOT_SAMPLE_INTERVAL = 16
"""One snapshot of so many is read back."""


class JournalInvariant:
    """What was journaled before the coordinator acts, and what it has left to the next one."""

    def __init__(self) -> None:
        self._journaled_serials: dict[str, int] = {}
        self._journaled_calls = 0
        self._snapshots = 0
        self._state_at_crash: DurableState | None = None

    def journaled(self, state: DurableState) -> None:
        """The journal holds all that this durable state was made of."""
        for gang in state.gangs.values():
            self._journaled_serials[gang.id] = gang.serial
        self._journaled_calls = max(self._journaled_calls, state.calls)
        self._state_at_crash = state

    def order_sent(self, gang: Gang, order: pb.Order) -> None:
        """An order goes out."""
        require(
            order.serial <= self._journaled_serials.get(gang.id, 0),
            f"{gang.id}: an order goes out before it is journaled",
        )

    def slurm_call_started(self, call: facts.SlurmOwed) -> None:
        """Slurm is called."""
        require(call.call <= self._journaled_calls, f"Slurm call {call.call} is made before it is journaled")

    def coordinator_crashed(self, state: DurableState, written: bool) -> None:
        """The coordinator dies with this durable state; `written`: the journal holds all of it."""
        self._state_at_crash = state if written else None

    def coordinator_restarted(self, state: DurableState, journal: Journal) -> None:
        """A coordinator has taken up the journal."""
        require(state == journal.load(use_snapshot=False), "the snapshot is not the fold of the journal")
        require(
            self._state_at_crash is None or state == self._state_at_crash, "the journal lacks what its coordinator knew"
        )

    def snapshot_taken(self, state: DurableState, journal: Journal) -> None:
        """The journal holds a new snapshot; some are looked at."""
        self._snapshots += 1
        if self._snapshots % SNAPSHOT_SAMPLE_INTERVAL == 0:
            require(journal.load() == state, "the snapshot is not the ledger")

    def run_settled(self, state: DurableState, journal: Journal) -> None:
        """The last coordinator's durable state is what a next one would begin with."""
        require(journal.load(use_snapshot=False) == state, "the journal is not the ledger")
