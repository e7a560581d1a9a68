"""What one event leads to, in the order that is law: decide, journal, see that one may, act.

The engine and the simulator both go through `take`, so a crash at any of its lines is a crash of the real order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.turn import ProbeRequest
from muster.daemon.coordinator.journal.journal import Record


class Pages(Protocol):
    """The journal, as far as an event needs it (journal.Journal)."""

    def append(self, facts: Sequence[facts.Fact], at: float, cause: str) -> list[Record]: ...
    def snapshot_if_due(self, state: DurableState) -> bool: ...


class Hands(Protocol):
    """Who carries out. Each of these may be repeated after a restart and harms nobody twice."""

    def before_acting(self) -> None:
        """Do not return where another coordinator may act: this one's machine may have stood still just now."""
        ...

    def publish(self, records: Sequence[Record]) -> None:
        """Show what was written to whoever follows the journal."""
        ...

    def order(self, facts: Sequence[facts.Fact]) -> None:
        """Tell the agents of the gangs that `facts` are about what they shall do now."""
        ...

    def drop(self, facts: Sequence[facts.Fact]) -> None:
        """End the streams of nodes that are out and silent."""
        ...

    def call(self) -> None:
        """Start every Slurm call that is owed and not under way."""
        ...

    def ask(self, ask: ProbeRequest) -> None:
        """Start a round of probes."""
        ...

    def arm(self, due: float | None, now: float) -> None:
        """Post a Tick at `due` (seconds), and at no other time."""
        ...

    def report(self, bug: str) -> None:
        """Tell the operator of a fault that the core found in its own rules."""
        ...


def take(
    core: Core, pages: Pages, hands: Hands, event: events.Event, now: float, cause: Callable[[events.Event], str]
) -> None:
    """Decide on `event` at `now`, write what was decided, then carry it out. `cause` puts the event in words.

    Raises:
        JournalError: nothing was done about it; or all was, and a snapshot can't be written. Who holds `core` stops.
    """
    outcome = core.decide(event, now)
    for bug in outcome.bugs:
        hands.report(bug)
    if outcome.facts:
        records = pages.append(outcome.facts, now, cause(event))
        hands.before_acting()
        hands.publish(records)
        hands.order(outcome.facts)
        hands.drop(outcome.facts)
        hands.call()
    for ask in outcome.asks:
        hands.ask(ask)
    hands.arm(outcome.due, now)
    pages.snapshot_if_due(core.state)
