"""The one place where events enter: decide, journal, act.

`Engine.post` hands an event to the core, writes the facts that follow to the journal, and only then acts on them:
orders to agents, calls to Slurm, probes, the timer. All on one thread and without waiting: a rank's exit becomes
its neighbours' FENCE within one turn of the event loop. Carrying out is idempotent: `start` does what is still owed.

Where the journal can't be written, or the core fails, the engine stops acting for good and `failed` says why: agents
train on without it, and the next start takes up where the journal ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.limits import Limits
from muster.daemon.coordinator.core.state.turn import ProbeRequest
from muster.daemon.coordinator.journal.journal import Journal, Record
from muster.daemon.coordinator.leadership.steady_clock import SteadyClock
from muster.daemon.coordinator.shell.agent_streams import AgentStream, AgentStreams
from muster.daemon.coordinator.shell.event_processing import take
from muster.daemon.coordinator.shell.order_dispatch import OrderBook
from muster.daemon.coordinator.shell.probes import Prober
from muster.daemon.coordinator.shell.subscriptions import Followers, Watchers
from muster.daemon.coordinator.slurm.owed_calls import SlurmCalls
from muster.daemon.transport.identity import Credentials
from muster.slurm.client.lease_guard import no_lease
from muster.slurm.client.types import Slurm

_log = logging.getLogger(__name__)
_facts_log = logging.getLogger("muster.facts")

PULSE_S = 0.25
ASLEEP_S = 1.0
"""A coordinator that stood still for longer has heard nobody meanwhile: that is its own silence, not theirs."""


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
        before_acting: Callable[[], object] = no_lease,
    ) -> None:
        """`state` is what `journal` holds. `before_acting` is called between writing and acting, and does not return
        where another coordinator may act."""
        self.clock = clock or SteadyClock(journal.last_at)
        self.core = Core(state, self.clock.now(), limits)
        self.journal = journal
        self.streams = AgentStreams()
        call_later = asyncio.get_running_loop().call_later
        self._orders = OrderBook(self.core.state, journal.term, self.streams.of, call_later)
        self.followers = Followers()
        self.watchers = Watchers()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._before_acting = before_acting
        self._calls = SlurmCalls(slurm, self.post)
        self._prober = Prober(credentials, self.streams, journal.term, self.post)
        self._waiting: deque[events.Event] = deque()
        self._busy = False
        self._timer: asyncio.TimerHandle | None = None
        self._due: float | None = None
        self._awake_at = self.clock.now()
        self._pulse: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """Events are taken: the engine was started and has neither failed nor been closed."""
        return self._pulse is not None and not self.failed.done()

    def start(self) -> None:
        """Begin: carry out what is owed since before the restart."""
        self._awake_at = self.clock.now()
        self._pulse = asyncio.create_task(self._feel_pulse())
        self._calls.start_owed(self.core.state)
        self.post(events.Tick())

    async def aclose(self) -> None:
        """Stop taking events; agents keep running."""
        if not self.failed.done():
            self.failed.set_result(None)
        self.failed.exception()  # whoever closes has seen it
        self._orders.close()
        if self._timer:
            self._timer.cancel()
        if self._pulse:
            self._pulse.cancel()
            await asyncio.gather(self._pulse, return_exceptions=True)
        await self._calls.aclose()
        await self._prober.aclose()

    def post(self, event: events.Event) -> None:
        """Take `event`, decide, journal, act. Never waits, never raises; dropped when the engine is not running."""
        self._waiting.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._waiting and self.running:
                self._take(self._waiting.popleft())
        except Exception as error:  # noqa: BLE001  # the top of all that streams, calls and timers bring in
            self._fail(error)
        finally:
            self._waiting.clear()
            self._busy = False

    def tell(self, stream: AgentStream) -> None:
        """Send the agent behind `stream` its order."""
        self._orders.tell(stream)

    def _take(self, event: events.Event) -> None:
        now = self.clock.now()
        self._wake_up(now)
        take(self.core, self.journal, self, event, now, events.stored_text)
        if not isinstance(event, events.AgentHeard | events.BatchHeard | events.NodeHeard):
            self.watchers.touch(getattr(event, "gang", ""))

    # -- what `turnover.take` has carried out --

    def before_acting(self) -> None:
        """See turnover.Hands."""
        self._before_acting()

    def publish(self, records: Sequence[Record]) -> None:
        """See turnover.Hands."""
        for record in records:
            self.followers.publish(record)
            _facts_log.info("%s%s", f"{record.gang}: " if record.gang else "", record.text)

    def order(self, facts: Sequence[facts.Fact]) -> None:
        """See turnover.Hands."""
        self._orders.follow(facts)

    def drop(self, decided: Sequence[facts.Fact]) -> None:
        """See turnover.Hands. A cut link would leave such a stream open for ever."""
        for fact in decided:
            if isinstance(fact, facts.MemberOut) and not fact.alive:
                self.streams.drop(fact.gang, fact.node)

    def call(self) -> None:
        """See turnover.Hands."""
        self._calls.start_owed(self.core.state)

    def ask(self, ask: ProbeRequest) -> None:
        """See turnover.Hands."""
        self._prober.start(ask)

    def arm(self, due: float | None, now: float) -> None:
        """See turnover.Hands."""
        if due == self._due:
            return
        self._due = due
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if due is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, due - now), self._tick)

    def report(self, bug: str) -> None:
        """See turnover.Hands."""
        _log.error("a bug of Muster: %s", bug)

    def _tick(self) -> None:
        self._due = self._timer = None
        self.post(events.Tick())

    async def _feel_pulse(self) -> None:
        while True:
            await asyncio.sleep(PULSE_S)
            self._wake_up(self.clock.now())

    def _wake_up(self, now: float) -> None:
        """Notice before anything is decided that this process has stood still."""
        if now - self._awake_at > ASLEEP_S:
            _log.warning("stood still for %.1f s; contacts before that don't count", now - self._awake_at)
            self.core.observed.since = now
        self._awake_at = now

    def _fail(self, error: BaseException) -> None:
        self._orders.close()
        _log.critical("not safe to go on: %s", error, exc_info=error)
        if not self.failed.done():
            self.failed.set_exception(error)
