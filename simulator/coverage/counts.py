"""Counts of what one run or many runs have gone through: transitions, kinds of recovery, faults and events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from muster.daemon.coordinator.core.state import events
from muster.daemon.coordinator.core.state.state_tables import GANG_TRANSITIONS
from muster.node_health import NODE_TRANSITIONS

RECOVERIES = (
    "restart in place",
    "swap",
    "planned swap",
    "pool node joined",
    "pool request failed",
    "fewer replicas",
    "more replicas",
    "pool node gives way",
    "resume from kept memory",
    "restore rebuilt shards",
    "flush rebuilt shards",
    "flush, then requeue",
    "requeue: batch process lost",
    "release after a failed launch",
    "requeue",
    "fail: software",
    "fail: no nodes",
    "fail: never gathered",
    "fail: agent error",
    "fail: last checkpoint",
    "planned stop",
    "planned stop, then end",
    "remove a node before attribution",
    "attribute crashes to a removed node",
    "hang found",
    "straggler found",
    "straggler lasts",
    "withheld by the circuit breaker",
    "fail: observe mode",
)
"""Every kind of recovery, and every way in which a gang ends."""


class Coverage:
    """Counts by kind ("gang", "node", "recovery", "fault", "event") and name."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()

    def count(self, kind: str, name: str) -> None:
        """Count one occurrence."""
        self.counts[kind, name] += 1

    def count_event(self, event: events.Event) -> None:
        """The core has processed an event."""
        self.counts["event", type(event).__name__] += 1

    def merge(self, other: Coverage) -> None:
        """Add the counts of another run."""
        self.counts.update(other.counts)

    def total(self, kind: str) -> int:
        """The sum of all counts of one kind."""
        return sum(number for (of, _), number in self.counts.items() if of == kind)

    def required(self) -> Iterator[tuple[str, str, int]]:
        """Every transition of both state tables and every kind of recovery: its kind, name and count."""
        for kind, transitions in (("gang", GANG_TRANSITIONS), ("node", NODE_TRANSITIONS)):
            for before, after in transitions.items():
                for to in sorted(after):
                    name = f"{before} → {to}"
                    yield kind, name, self.counts[kind, name]
        for recovery in RECOVERIES:
            yield "recovery", recovery, self.counts["recovery", recovery]

    def table(self, seeds: int) -> list[str]:
        """All counts in columns, for a person to read."""
        rows = [f"{kind:9} {name:38} {number:8}" for kind, name, number in self.required()]
        for kind in ("fault", "event"):
            rows += [
                f"{kind:9} {name:38} {number:8}" for (of, name), number in sorted(self.counts.items()) if of == kind
            ]
        events, faults = self.total("event"), self.total("fault")
        return [*rows, f"{seeds} seeds, {events / seeds:.0f} events and {faults / seeds:.1f} faults a seed"]
