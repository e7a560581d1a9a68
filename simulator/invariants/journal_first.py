"""The journal comes first: nothing is done that it does not hold, and what it holds is the durable state."""

from __future__ import annotations

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState, Gang
from muster.daemon.coordinator.journal.journal import Journal
from muster.simulator.world.violation import must
from muster.v1 import agent_pb2 as pb

LOOK_AT_SNAPSHOT = 16
"""One snapshot of so many is read back."""


class JournalFirst:
    """What was journaled before the coordinator acts, and what it has left to the next one."""

    def __init__(self) -> None:
        self._serials: dict[str, int] = {}
        self._calls = 0
        self._snapshots = 0
        self._left: DurableState | None = None

    def written(self, state: DurableState) -> None:
        """The journal holds all that this durable state was made of."""
        for gang in state.gangs.values():
            self._serials[gang.id] = gang.serial
        self._calls = max(self._calls, state.calls)
        self._left = state

    def ordered(self, gang: Gang, order: pb.Order) -> None:
        """An order goes out."""
        must(order.serial <= self._serials.get(gang.id, 0), f"{gang.id}: an order goes out before it is journaled")

    def called(self, call: facts.SlurmOwed) -> None:
        """Slurm is called."""
        must(call.call <= self._calls, f"Slurm call {call.call} is made before it is journaled")

    def crashed(self, state: DurableState, written: bool) -> None:
        """The coordinator dies with this durable state; `written`: the journal holds all of it."""
        self._left = state if written else None

    def restarted(self, state: DurableState, journal: Journal) -> None:
        """A coordinator has taken up the journal."""
        must(state == journal.load(use_snapshot=False), "the snapshot is not the fold of the journal")
        must(self._left is None or state == self._left, "the journal lacks what its coordinator knew")

    def snapshot_taken(self, state: DurableState, journal: Journal) -> None:
        """The journal holds a new snapshot; some are looked at."""
        self._snapshots += 1
        if self._snapshots % LOOK_AT_SNAPSHOT == 0:
            must(journal.load() == state, "the snapshot is not the ledger")

    def end_of_run(self, state: DurableState, journal: Journal) -> None:
        """The last coordinator's durable state is what a next one would begin with."""
        must(journal.load(use_snapshot=False) == state, "the journal is not the ledger")
