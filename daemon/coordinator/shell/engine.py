"""The engine: every event enters here, is decided, journaled and acted on.

`Engine.post` gives an event to the core, writes the facts that follow to the journal, and only then acts on them:
orders to agents, calls to Slurm, probes, the timer. All of this happens on one thread and without waiting, so a rank's
exit becomes the other agents' FENCE within one iteration of the event loop. Acting is idempotent: `start` carries out
what was still owed before a restart.

If the journal can't be written, or the core fails, the engine stops for good and `failed` says why. Ranks train on
without the coordinator, and the next start continues from the end of the journal.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.limits import Limits
from muster.daemon.coordinator.core.turn.turn import ProbeRequest
from muster.daemon.coordinator.journal.history import Record
from muster.daemon.coordinator.journal.journal import Journal
from muster.daemon.coordinator.journal.timed_journal import TimedJournal
from muster.daemon.coordinator.leadership.steady_clock import SteadyClock
from muster.daemon.coordinator.shell.agent_streams import AgentOutbox, AgentStreams
from muster.daemon.coordinator.shell.event_processing import process_event
from muster.daemon.coordinator.shell.link_rates import LinkRates
from muster.daemon.coordinator.shell.load_shedding import LoadShedding, Shedding, SheddingLimits
from muster.daemon.coordinator.shell.order_dispatch import OrderDispatcher
from muster.daemon.coordinator.shell.probes import Prober
from muster.daemon.coordinator.shell.subscriptions import GangSubscribers, JournalSubscribers
from muster.daemon.coordinator.slurm.owed_calls import OwedCalls
from muster.daemon.host.clock_steps import ClockSteps
from muster.daemon.host.process import log_format
from muster.daemon.transport.identity import Credentials
from muster.daemon.transport.tls import Trust
from muster.slurm.client.deadline import no_lease
from muster.slurm.client.types import Slurm

_log = logging.getLogger(__name__)
_facts_log = logging.getLogger("muster.facts")

SUSPENSION_CHECK_S = 0.25
"""Seconds between two checks whether this process was suspended."""
SUSPENDED_S = 1.0
"""A coordinator that did not run for longer than this was suspended. It heard no agent meanwhile, which is no evidence
against the agents."""


_SHEDDING_WORDS = {
    Shedding.NOTHING: "the load is over: watchers are admitted again",
    Shedding.NEW_WATCHERS: "too much to do: no new watchers are admitted",
    Shedding.ALL_WATCHERS: "too much to do: all watchers end, and no new ones are admitted",
}


class Engine:
    """The running coordinator, without its servers."""

    def __init__(
        self,
        journal: Journal,
        state: DurableState,
        slurm: Slurm,
        credentials: Credentials,
        clock: SteadyClock | None = None,
        limits: Limits | None = None,
        confirm_leadership: Callable[[], object] = no_lease,
        trust: Trust | None = None,
        shedding: SheddingLimits | None = None,
    ) -> None:
        """`state` is the replay of `journal`. `confirm_leadership` is called after writing and before acting; it does
        not return if another coordinator may act. `trust`: whom to take for a node's daemon or an agent; None: plain
        text."""
        self.clock = clock or SteadyClock(journal.last_at)
        self.limits = limits or Limits()
        self.core = Core(state, self.clock.now(), self.limits)
        self.journal = journal
        self.streams = AgentStreams()
        self.links = LinkRates()
        self.on_facts: list[Callable[[Sequence[facts.Fact]], None]] = []
        """Are told what was decided, once it is carried out. They must not raise."""
        call_later = asyncio.get_running_loop().call_later
        self._orders = OrderDispatcher(self.core.state, journal.term, self.streams.of_gang, call_later)
        self.journal_subscribers = JournalSubscribers()
        self.gang_subscribers = GangSubscribers()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.shedding = LoadShedding(shedding or SheddingLimits())
        self._confirm_leadership = confirm_leadership
        self._owed_calls = OwedCalls(slurm, self.post)
        self._timed_journal = TimedJournal(journal, lambda: self.clock.now())
        self._unread_write_s = 0.0
        """Seconds of writes since the event loop last read messages."""
        self._prober = Prober(
            credentials, self.streams, journal.term, self.post, trust, lambda: self._timed_journal.total_s
        )
        self._queue: deque[events.Event] = deque()
        self._processing = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due: float | None = None
        self._last_ran_at = self.clock.now()
        self._suspension_check: asyncio.Task[None] | None = None

    @property
    def journal_write_s(self) -> float:
        """Seconds that all writes into the journal have taken."""
        return self._timed_journal.total_s

    @property
    def running(self) -> bool:
        """Whether events are processed: the engine was started and has neither failed nor been closed."""
        return self._suspension_check is not None and not self.failed.done()

    def start(self) -> None:
        """Start to process events, and carry out what was owed before the restart."""
        self._last_ran_at = self.clock.now()
        self._timed_journal.start()
        self._suspension_check = asyncio.create_task(self._check_for_suspension())
        self._owed_calls.start_owed(self.core.state)
        self.post(events.Tick())

    async def aclose(self) -> None:
        """Stop to process events. Agents keep running."""
        if not self.failed.done():
            self.failed.set_result(None)
        self.failed.exception()  # marks the exception as retrieved: the caller has read it
        self._orders.close()
        self._timed_journal.stop()
        if self._timer:
            self._timer.cancel()
        if self._suspension_check:
            self._suspension_check.cancel()
            await asyncio.gather(self._suspension_check, return_exceptions=True)
        await self._owed_calls.aclose()
        await self._prober.aclose()

    def post(self, event: events.Event) -> None:
        """Process `event`. Never blocks, never raises. The event is dropped if the engine is not running."""
        self._queue.append(event)
        if self._processing:
            return
        self._processing = True
        try:
            while self._queue and self.running:
                self._process(self._queue.popleft())
        except Exception as error:  # noqa: BLE001  # top level of everything that streams, calls and timers post
            self._fail(error)
        finally:
            self._queue.clear()
            self._processing = False

    def send_order(self, stream: AgentOutbox) -> None:
        """Send the agent of `stream` its current order."""
        self._orders.send_to(stream)

    def _process(self, event: events.Event) -> None:
        now = self.clock.now()
        self._note_running(now)
        written_s = self._timed_journal.total_s
        process_event(self.core, self._timed_journal, self, event, now, events.stored_text)
        self._note_writes(self._timed_journal.total_s - written_s)
        self._notify_watchers(event)

    def _notify_watchers(self, event: events.Event) -> None:
        """Wake the watchers of the gangs whose views the event may have changed: those of all gangs only if need be,
        because all nodes of a site may attach at once."""
        match event:
            case events.AgentHeartbeat() | events.BatchHeartbeat() | events.NodeHeartbeat():
                pass
            case (
                events.NodeAttached()
                | events.NodeDisconnected()
                | events.NodeSignalled()
                | events.NodeHardwareReported()
            ):
                self._notify_watchers_of_node(event.node)
            case _:
                self.gang_subscribers.notify(getattr(event, "gang", ""))

    def _notify_watchers_of_node(self, node: str) -> None:
        """Wake the watchers of the gangs that have `node`, or whose job has it: no other view shows it."""
        for id in self.gang_subscribers.watched():
            gang = self.core.state.gangs.get(id)
            if gang and (node in gang.roster.members or node in gang.slurm.job_nodes):
                self.gang_subscribers.notify(id)

    # -- event_processing.Executor --

    def confirm_leadership(self) -> None:
        """See event_processing.Executor."""
        self._confirm_leadership()

    def publish(self, records: Sequence[Record]) -> None:
        """See event_processing.Executor."""
        for record in records:
            self.journal_subscribers.publish(record)
            if record.gang:
                self.gang_subscribers.notify(record.gang, decided=True)
            words = f"{record.gang}: " if record.gang else ""
            _facts_log.info("%s%s", words, record.text, extra=self._about(record))

    def _about(self, record: Record) -> dict[str, Any]:
        """What the line of a record is about, in the log."""
        gang = self.core.state.gangs.get(record.gang)
        of_gang = {"gang": gang.id, "job": gang.slurm.job, "generation": gang.newest.generation} if gang else {}
        return log_format.about(fact=record.name, **of_gang, **({"node": record.node} if record.node else {}))

    def send_orders(self, decided: Sequence[facts.Fact]) -> None:
        """See event_processing.Executor."""
        self._orders.send_changes(decided)
        for listener in self.on_facts:
            listener(decided)

    def close_streams(self, decided: Sequence[facts.Fact]) -> None:
        """See event_processing.Executor. Without this, the stream of a cut link would stay open for ever."""
        for fact in decided:
            if isinstance(fact, facts.MemberRemoved) and not fact.alive:
                self.streams.drop(fact.gang, fact.node)
            elif isinstance(fact, facts.JobEnded):
                for stream in [*self.streams.of_gang(fact.gang)]:
                    self.streams.drop(fact.gang, stream.node)
                self.links.forget(fact.gang)

    def start_slurm_calls(self) -> None:
        """See event_processing.Executor."""
        self._owed_calls.start_owed(self.core.state)

    def start_probe(self, request: ProbeRequest) -> None:
        """See event_processing.Executor."""
        self._prober.start(request)

    def set_timer(self, due: float | None, now: float) -> None:
        """See event_processing.Executor."""
        if due == self._timer_due:
            return
        self._timer_due = due
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if due is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, due - now), self._tick)

    def report_bug(self, bug: str) -> None:
        """See event_processing.Executor."""
        _log.error("a bug of Muster: %s", bug)

    def _tick(self) -> None:
        self._timer_due = self._timer = None
        self.post(events.Tick())

    async def _check_for_suspension(self) -> None:
        steps = ClockSteps(lambda: -self.clock.ahead_s())
        while True:
            before = self.clock.now()
            await asyncio.sleep(SUSPENSION_CHECK_S)
            now = self.clock.now()
            self._note_running(now)
            self._timed_journal.note_calm()
            steps.note()
            self.note_lag(now - before - SUSPENSION_CHECK_S - self._unread_write_s)  # no watcher makes a disk slow
            self._unread_write_s = 0.0

    def note_lag(self, lag_s: float) -> None:
        """Note by how many seconds a timer of the event loop came late. Above the limits, watchers are given up."""
        if not self.shedding.note(lag_s):
            return
        _log.warning("%s; the event loop is %.2f s late", _SHEDDING_WORDS[self.shedding.level], lag_s)
        if self.shedding.level is Shedding.ALL_WATCHERS:
            self.gang_subscribers.notify("", decided=True)
            self.journal_subscribers.end_all()

    def _note_running(self, now: float) -> None:
        """Note that this process runs. After a suspension, earlier contacts no longer count as recent."""
        if now - self._last_ran_at > SUSPENDED_S:
            _log.warning(
                "this process was suspended for %.1f s: contacts from before do not count", now - self._last_ran_at
            )
            self.core.observed.observing_since = now
        self._last_ran_at = now

    def _note_writes(self, took_s: float) -> None:
        """Note that the journal was written for `took_s`. Messages that arrived meanwhile are not read yet, so after
        long writes earlier contacts no longer count as recent."""
        self._last_ran_at += took_s
        self._unread_write_s += took_s
        if self._unread_write_s > SUSPENDED_S:
            self.core.observed.observing_since = self.clock.now()

    def _fail(self, error: BaseException) -> None:
        self._orders.close()
        _log.critical("not safe to go on: %s", str(error) or type(error).__name__, exc_info=error)
        if not self.failed.done():
            self.failed.set_exception(error)
