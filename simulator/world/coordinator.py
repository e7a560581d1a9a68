"""The coordinator's shell in virtual time: streams, probes, Slurm calls, timer.

Core, journal and `process_event` are real.

It can crash before and after each write of the journal and before each action: `world.crash_after` counts those points
down. What is left then is the journal alone; a new Coordinator takes over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.events import Silence
from muster.daemon.coordinator.core.state.observed_state import AGENT, MUSTERD
from muster.daemon.coordinator.core.state.turn import ProbeRequest
from muster.daemon.coordinator.journal.journal import Journal, Record
from muster.daemon.coordinator.shell.engine import SUSPENDED_S
from muster.daemon.coordinator.shell.event_processing import process_event
from muster.daemon.coordinator.shell.order_dispatch import OrderDispatcher
from muster.daemon.coordinator.slurm.owed_calls import give
from muster.daemon.coordinator.slurm.watch import JOBS_EVERY_S, NODES_EVERY_S, SlurmWatch
from muster.simulator.world.machine import Process
from muster.simulator.world.network import COORDINATOR, END, Stream
from muster.simulator.world.slurm import DistantSlurm, drive
from muster.simulator.world.violation import Violation
from muster.slurm.client.errors import SlurmRefused, SlurmUnavailable
from muster.slurm.client.types import DEFAULT_TIMEOUT_S
from muster.v1 import agent_pb2 as pb

if TYPE_CHECKING:
    from muster.simulator.world.agent import Agent
    from muster.simulator.world.node_daemon import Daemon
    from muster.simulator.world.world import World

SNAPSHOT_EVERY = (1, 5, 40)
"""Facts between two snapshots, however big they are: one of these for each life."""
_KNOCK_AGAIN_S = 0.15


class Crashed(Exception):
    """The coordinator's process ends here."""


@dataclass(frozen=True, slots=True)
class _Recipient:
    """See order_dispatch.OrderRecipient."""

    coordinator: Coordinator
    stream: Stream

    @property
    def gang(self) -> str:
        gang: str = self.stream.key[0]
        return gang

    @property
    def node(self) -> str:
        node: str = self.stream.key[1]
        return node

    @property
    def last_order(self) -> pb.CoordinatorMessage | None:
        message: pb.CoordinatorMessage | None = self.stream.last_order
        return message

    def put(self, message: pb.CoordinatorMessage) -> None:
        self.coordinator.send(self.stream, message)


class Coordinator(Process):
    """One life of the coordinator; it serves as soon as it is made."""

    def __init__(self, world: World, folder: Path, lease_term: int) -> None:
        super().__init__(world.schedule, None)
        self.world = world
        every = world.chance.choice(SNAPSHOT_EVERY)
        self.journal = Journal(folder, every, snapshot_share=0.0, lease_term=lease_term)
        self.core = Core(self.journal.load(), self._clock(), world.limits)
        self.streams: dict[tuple[str, str], Stream] = {}
        self._daemons: dict[str, Stream] = {}
        self._orders = OrderDispatcher(self.core.state, self.journal.term, self._recipients, self._call_later)
        self._watch = SlurmWatch(DistantSlurm(world.slurm, world.chance), self.core.state, self.post)
        self._events: deque[events.Event] = deque()
        self._busy = False
        self._timer = 0
        self._taken: set[int] = set()
        self._queues: dict[str, deque[facts.SlurmOwed]] = {}

    def start(self) -> None:
        """Carry out what is owed, and begin to look at Slurm."""
        self._guarded(self.start_slurm_calls)
        self.post(events.Tick())
        self.later(0.1, self._look, self._watch.look_at_jobs, JOBS_EVERY_S)
        self.later(0.2, self._look, self._watch.look_at_nodes, NODES_EVERY_S)

    def listens(self) -> bool:
        """It takes new connections."""
        return self.alive

    def _clock(self) -> float:
        return max(self.schedule.now, self.journal.last_at)

    # -- events --

    def post(self, event: events.Event) -> None:
        """Take `event`, decide, journal, act. Nothing where it is dead."""
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        while self._events and self.alive:
            self._guarded(self._take, self._events.popleft())
        self._busy = False

    def _take(self, event: events.Event) -> None:
        self.world.tally.event(event)
        if self.world.trace:
            self.world.note(f"    {event}")
        process_event(self.core, self, self, event, self._clock(), _cause)

    def _guarded(self, action: Any, *args: Any) -> None:
        try:
            action(*args)
        except Crashed as crash:
            self.world.coordinator_dies(str(crash))

    def _point(self, where: str) -> None:
        world = self.world
        if world.crash_after is not None:
            world.crash_after -= 1
            if world.crash_after <= 0:
                world.crash_after = None
                raise Crashed(where)

    def die(self) -> None:
        """The process is gone; its kernel closes what it had open."""
        self.alive = False
        self.journal.close()
        for stream in [*self.streams.values(), *self._daemons.values()]:
            stream.close_far()

    # -- event_processing.JournalWriter --

    def append(self, facts: Sequence[facts.Fact], at: float, cause: str) -> list[Record]:
        """Write, and perhaps die before or after."""
        self._point(f"before the journal has {len(facts)} facts of {cause}")
        records = self.journal.append(facts, at, cause)
        self.world.laws.written(self.core, facts, at)
        self._point(f"after the journal has {len(facts)} facts of {cause}")
        return records

    def snapshot_if_due(self, state: DurableState) -> bool:
        """As the journal's."""
        taken = self.journal.snapshot_if_due(state)
        if taken:
            self.world.laws.snapshot_taken(state, self.journal)
        return taken

    # -- event_processing.Executor --

    def confirm_leadership(self) -> None:
        """The lease is not played here: one life begins when the one before is over."""

    def publish(self, records: Sequence[Record]) -> None:
        """The transcript holds the facts themselves."""

    def send_orders(self, decided: Sequence[facts.Fact]) -> None:
        """See event_processing.Executor."""
        self._orders.send_changes(decided)

    def close_streams(self, decided: Sequence[facts.Fact]) -> None:
        """See event_processing.Executor."""
        for fact in decided:
            if isinstance(fact, facts.MemberOut) and not fact.alive:
                stream = self.streams.pop((fact.gang, fact.node), None)
                if stream is not None:
                    stream.close_far()

    def start_slurm_calls(self) -> None:
        """See event_processing.Executor."""
        for call in sorted(self.core.state.owed.values(), key=lambda call: call.call):
            if call.call not in self._taken:
                self._point(f"before Slurm call {call.call}")
                self._taken.add(call.call)
                self.world.laws.called(call)
                queue = self._queues.setdefault(call.gang, deque())
                queue.append(call)
                if len(queue) == 1:
                    self.later(self._slurm_s(), self._give, call, 0.25)

    def start_probe(self, ask: ProbeRequest) -> None:
        """See event_processing.Executor."""
        self._point(f"before probe {ask.probe}")
        for witness in ask.witnesses:
            if witness in (AGENT, MUSTERD):
                self.later(0.002, self._knock, ask, witness, self.schedule.now + ask.deadline_s, False)
            elif stream := self.streams.get((ask.gang, witness)):
                stream.down.put((self.journal.term, "probe", ask))

    def set_timer(self, due: float | None, now: float) -> None:
        """See event_processing.Executor."""
        self._timer += 1
        if due is not None:
            self.later(max(0.0, due - now), self._ring, self._timer)

    def report_bug(self, bug: str) -> None:
        """See event_processing.Executor."""
        raise Violation(bug)

    def _ring(self, number: int) -> None:
        if number == self._timer:
            self.post(events.Tick())

    def _recipients(self, gang: str) -> list[_Recipient]:
        return [_Recipient(self, stream) for (id, _), stream in self.streams.items() if id == gang]

    def _call_later(self, delay: float, action: Callable[[str], None], gang: str) -> None:
        self.later(delay, self._guarded, action, gang)

    def send(self, stream: Stream, message: pb.CoordinatorMessage) -> None:
        """Send an order, and perhaps die before."""
        gang, node, _ = stream.key
        self._point(f"before the order for {node}")
        self.world.laws.ordered(self.core.state.gangs[gang], message.order)
        stream.last_order = message
        stream.down.put((message.term, "order", message.order))

    # -- Slurm --

    def _slurm_s(self) -> float:
        return 0.01 + self.world.slurm.late_s * self.world.chance.random()

    def _give(self, call: facts.SlurmOwed, pause: float) -> None:
        """Try one call; the answer takes a while."""
        slurm = self.world.slurm
        try:
            drive(slurm.whim(give(slurm, call, self.core.state)))
        except SlurmRefused as refused:
            self.later(self._slurm_s(), self._answered, call, str(refused))
        except SlurmUnavailable:
            self.later(pause, self._give, call, min(2 * pause, 5.0))
        else:
            self.later(self._slurm_s(), self._answered, call, None)

    def _answered(self, call: facts.SlurmOwed, error: str | None) -> None:
        queue = self._queues[call.gang]
        queue.popleft()
        self._taken.discard(call.call)
        if queue:
            self.later(self._slurm_s(), self._give, queue[0], 0.25)
        self.post(events.SlurmAnswered(call.gang, call.call, error))

    def _look(self, ask: Callable[[], Coroutine[Any, Any, None]], every_s: float) -> None:
        self._go_on(ask(), ask, every_s)

    def _go_on(
        self, looking: Coroutine[Any, Any, None], ask: Callable[[], Coroutine[Any, Any, None]], every_s: float
    ) -> None:
        """Slurm is asked, or its answer has come, however old it is by now."""
        try:
            looking.send(None)
        except StopIteration:
            self.later(every_s, self._look, ask, every_s)
        else:
            self.later(min(self._slurm_s(), DEFAULT_TIMEOUT_S), self._go_on, looking, ask, every_s)

    # -- agents --

    def hear_agent(self, stream: Stream, message: Any) -> None:
        """What comes up an agent's stream."""
        gang, node, incarnation = stream.key
        if message is END:
            if self.streams.get((gang, node)) is stream:
                del self.streams[gang, node]
                self.post(events.AgentGone(gang, node, incarnation))
            return
        match message:
            case ("ping", sent_at):
                stream.down.put((self.journal.term, "pong", sent_at))
                self.post(events.AgentHeard(gang, node))
            case ("status", status):
                self.world.laws.reported(gang, status)
                self.post(events.AgentReported(gang, node, incarnation, status))
            case ("hello", agent, status):
                self._admit(stream, agent, status)
            case (_, event):
                self.post(event)

    def _admit(self, stream: Stream, agent: Agent, status: events.Status) -> None:
        """As service_agent admits: from the journal what it knows, else from Slurm."""
        post = agent.post
        gang = self.core.state.gangs.get(post.gang)
        answer = self.world.jobs.admits(gang, agent.node, post)
        if answer is None:
            stream.close_far()
        elif answer:
            stream.down.put((self.journal.term, "dismissed", answer))
        else:
            before = self.streams.get((post.gang, agent.node))
            self.streams[post.gang, agent.node] = stream
            if before is not None and before is not stream:
                before.close_far()
            if gang is None:
                self.post(self.world.jobs.submitted(post.gang))
            self.post(
                events.AgentAttached(
                    post.gang, agent.node, post.job, post.restarts, post.incarnation, f"{agent.node}:9",
                    post.batch_host, agent.machine.leaf, status, post.pool,
                )
            )  # fmt: skip
            if (
                self.alive
                and post.gang in self.core.state.gangs
                and self.streams.get((post.gang, agent.node)) is stream
            ):
                self._guarded(self._orders.send_to, _Recipient(self, stream))

    # -- node daemons --

    def hear_daemon(self, stream: Stream, message: Any) -> None:
        """What comes up a node daemon's stream."""
        node, incarnation = stream.key
        if message is END:
            if self._daemons.get(node) is stream:
                del self._daemons[node]
                self.post(events.NodeGone(node, incarnation))
            return
        match message:
            case ("hello", daemon):
                self._welcome(stream, daemon)
            case ("heartbeat", _):
                self.post(events.NodeHeard(node))
                self.world.depots.tell_over(node, self.core.state)
            case ("signal", event):
                self.post(event)
        stream.down.put((self.journal.term, "answer", message[1] if message[0] == "signal" else None))

    def _welcome(self, stream: Stream, daemon: Daemon) -> None:
        node, incarnation = stream.key
        before = self._daemons.get(node)
        if before is not None and before is not stream:
            before.close_far()
        self._daemons[node] = stream
        self.post(events.NodeAttached(node, f"boot{daemon.machine.boot}", incarnation, f"{node}:7071"))

    # -- probes --

    def _knock(self, ask: ProbeRequest, witness: str, until: float, accepted: bool) -> None:
        """As probes.probe: again and again until it answers, its kernel refuses, or the deadline has come."""
        world = self.world
        gang = ask.gang if witness == AGENT else None
        address = ask.peer_address if witness == AGENT else ask.probe_address
        found = world.door(COORDINATOR, ask.node, gang) if address else Silence.NO_ANSWER
        if found is None or found is Silence.CLOSED:
            self._probed(ask, witness, found)
            return
        accepted |= found is Silence.KERNEL_ONLY
        now = self.schedule.now
        if now >= until or not address:
            self._probed(ask, witness, Silence.KERNEL_ONLY if accepted else Silence.NO_ANSWER)
        else:
            self.later(min(_KNOCK_AGAIN_S, until - now + 0.001), self._knock, ask, witness, until, accepted)

    def _probed(self, ask: ProbeRequest, witness: str, found: Silence | None) -> None:
        self.post(events.Probed(ask.gang, ask.probe, witness, ask.node, found))

    # -- standing still --

    def resume(self, since: float) -> None:
        """It stood still since then, goes on, and notices."""
        self.stopped = False
        if self.schedule.now - since > SUSPENDED_S:
            self.core.observed.since = self.schedule.now
        self.go_on()


def _cause(event: events.Event) -> str:
    return type(event).__name__
