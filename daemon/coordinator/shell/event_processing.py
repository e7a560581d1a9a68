"""The processing of one event, in the order that safety needs: decide, journal, confirm leadership, act.

The engine and the simulator both call `process_event`, so a simulated crash at any of its lines is a real crash.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.turn.turn import ProbeRequest
from muster.daemon.coordinator.journal.history import Record


class JournalWriter(Protocol):
    """The part of the journal that event processing needs (journal.Journal)."""

    def append(self, decided: Sequence[facts.Fact], at: float, cause: str) -> list[Record]: ...
    def snapshot_if_due(self, state: DurableState) -> bool: ...


class Executor(Protocol):
    """Carries out what the core decided. Every method is idempotent: a restarted coordinator may repeat each action."""

    def confirm_leadership(self) -> None:
        """Do not return if another coordinator may act: this machine may have been suspended a moment ago."""
        ...

    def publish(self, records: Sequence[Record]) -> None:
        """Show the written records to the subscribers of the journal."""
        ...

    def send_orders(self, decided: Sequence[facts.Fact]) -> None:
        """Send new orders to the agents whose orders `decided` changes."""
        ...

    def close_streams(self, decided: Sequence[facts.Fact]) -> None:
        """Close the streams of nodes that `decided` removes from their gang and that are silent or have left the job,
        and all streams of a gang whose job has ended."""
        ...

    def start_slurm_calls(self) -> None:
        """Start every owed Slurm call that is not under way."""
        ...

    def start_probe(self, request: ProbeRequest) -> None:
        """Start a round of probes."""
        ...

    def set_timer(self, due: float | None, now: float) -> None:
        """Post a Tick at `due` (seconds), and at no other time."""
        ...

    def report_bug(self, bug: str) -> None:
        """Report a fault that the core found in its own rules to the operator."""
        ...


def process_event(
    core: Core,
    journal: JournalWriter,
    executor: Executor,
    event: events.Event,
    now: float,
    cause: Callable[[events.Event], str],
) -> None:
    """Decide on `event` at `now`, journal the decision, then carry it out. `cause` describes the event in words.

    Raises:
        JournalError: the decision could not be journaled, and nothing was done; or everything was done, and a snapshot
            could not be written. In both cases the owner of `core` must stop.
    """
    outcome = core.decide(event, now)
    for bug in outcome.bugs:
        executor.report_bug(bug)
    if outcome.facts:
        records = journal.append(outcome.facts, now, cause(event))
        executor.confirm_leadership()
        executor.publish(records)
        executor.send_orders(outcome.facts)
        executor.close_streams(outcome.facts)
        executor.start_slurm_calls()
    for request in outcome.probe_requests:
        executor.start_probe(request)
    executor.set_timer(outcome.next_tick_at, now)
    journal.snapshot_if_due(core.state)
