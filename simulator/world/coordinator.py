"""The coordinator's shell in virtual time: streams, probes, Slurm calls and the timer.

Core, journal and `process_event` are the real ones. The process can crash before and after each write of the journal
and before each action: `world.crash_countdown` counts these points down. After a crash a new Coordinator starts with
the journal alone.
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
from muster.daemon.coordinator.core.turn.turn import ProbeRequest
from muster.daemon.coordinator.journal.history import Record
from muster.daemon.coordinator.journal.journal import Journal
from muster.daemon.coordinator.shell.engine import SUSPENDED_S
from muster.daemon.coordinator.shell.event_processing import process_event
from muster.daemon.coordinator.shell.order_dispatch import OrderDispatcher
from muster.daemon.coordinator.slurm.owed_calls import make_call
from muster.daemon.coordinator.slurm.watch import JOB_POLL_INTERVAL_S, NODE_POLL_INTERVAL_S, SlurmWatch, node_seen
from muster.simulator.environment.machine import Process
from muster.simulator.environment.network import COORDINATOR, STREAM_END, Stream
from muster.simulator.environment.unreliable_slurm import DelayedSlurm, run_without_waiting
from muster.slurm.client.deadline import DEFAULT_TIMEOUT_S
from muster.slurm.client.errors import SlurmRefused, SlurmUnavailable
from muster.v1 import agent_pb2 as pb

if TYPE_CHECKING:
    from muster.simulator.world.agent import Agent
    from muster.simulator.world.node_daemon import NodeDaemon
    from muster.simulator.world.world import World

SNAPSHOT_INTERVALS = (1, 5, 40)
"""Facts between two journal snapshots, whatever their size. Each life of a coordinator uses one of these."""
_PROBE_RETRY_S = 0.15
"""Seconds between two attempts of one probe."""


class CoordinatorCrashed(Exception):
    """The coordinator's process ends at this point."""


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
    """One life of the coordinator. It accepts connections as soon as it exists."""

    def __init__(self, world: World, folder: Path, lease_term: int) -> None:
        super().__init__(world.schedule, None)
        self.world = world
        snapshot_interval = world.rng.choice(SNAPSHOT_INTERVALS)
        self.journal = Journal(folder, snapshot_interval, snapshot_share=0.0, lease_term=lease_term)
        self.core = Core(self.journal.load(), self._clock(), world.limits)
        self.agent_streams: dict[tuple[str, str], Stream] = {}
        self._daemon_streams: dict[str, Stream] = {}
        self._orders = OrderDispatcher(self.core.state, self.journal.term, self._recipients, self._call_later)
        self._watch = SlurmWatch(DelayedSlurm(world.slurm, world.rng), self.core.state, self.post_event)
        self._events: deque[events.Event] = deque()
        self._is_processing = False
        self._timer = 0
        self._started_calls: set[int] = set()
        self._call_queues: dict[str, deque[facts.SlurmCallOwed]] = {}

    def start(self) -> None:
        """Execute the calls that are owed to Slurm, and start to poll Slurm."""
        self._run_guarded(self.start_slurm_calls)
        if self.world.fabric is not None:
            self.post_event(self.world.fabric)  # it is read before the first new agent may attach
        self.post_event(events.Tick())
        self.call_later(0.1, self._start_lookup, self._watch.poll_jobs, JOB_POLL_INTERVAL_S)
        self.call_later(0.2, self._start_lookup, self._watch.poll_nodes, NODE_POLL_INTERVAL_S)

    def listens(self) -> bool:
        """The coordinator accepts new connections."""
        return self.alive

    def _clock(self) -> float:
        return max(self.schedule.now, self.journal.last_at)

    # -- events --

    def sees_in_service(self, node: str) -> bool:
        """The watch on Slurm takes the node for one in service, as soon as it looks."""
        return node_seen(node, self.world.cluster.nodes()[node]).in_service

    def post_event(self, event: events.Event) -> None:
        """Process an event: decide, journal, act. An ended coordinator ignores it."""
        self._events.append(event)
        if self._is_processing:
            return
        self._is_processing = True
        while self._events and self.alive:
            self._run_guarded(self._process, self._events.popleft())
        self._is_processing = False

    def _process(self, event: events.Event) -> None:
        self.world.coverage.count_event(event)
        if self.world.trace:
            self.world.note(f"    {event}")
        process_event(self.core, self, self, event, self._clock(), _cause)

    def _run_guarded(self, action: Any, *args: Any) -> None:
        try:
            action(*args)
        except CoordinatorCrashed as crash:
            self.world.crash_coordinator(str(crash))

    def _crash_point(self, crash_point: str) -> None:
        world = self.world
        if world.crash_countdown is not None:
            world.crash_countdown -= 1
            if world.crash_countdown <= 0:
                world.crash_countdown = None
                raise CoordinatorCrashed(crash_point)

    def die(self) -> None:
        """The process has ended; its kernel closes its connections."""
        self.alive = False
        self.journal.close()
        for stream in [*self.agent_streams.values(), *self._daemon_streams.values()]:
            stream.close_coordinator_side()

    # -- event_processing.JournalWriter --

    def append(self, facts: Sequence[facts.Fact], at: float, cause: str) -> list[Record]:
        """Write facts. The process may crash before or after."""
        self._crash_point(f"before the journal has {len(facts)} facts of {cause}")
        records = self.journal.append(facts, at, cause)
        self.world.observer.journaled(self.core, facts, at)
        self._crash_point(f"after the journal has {len(facts)} facts of {cause}")
        return records

    def snapshot_if_due(self, state: DurableState) -> bool:
        """See the journal's method of the same name."""
        taken = self.journal.snapshot_if_due(state)
        if taken:
            self.world.observer.snapshot_taken(state, self.journal)
        return taken

    # -- event_processing.Executor --

    def confirm_leadership(self) -> None:
        """The simulator has no lease: one coordinator starts after the other has ended."""

    def publish(self, records: Sequence[Record]) -> None:
        """Nothing to do: the transcript holds the facts themselves."""

    def send_orders(self, decided: Sequence[facts.Fact]) -> None:
        """See event_processing.Executor."""
        self._orders.send_changes(decided)

    def close_streams(self, decided: Sequence[facts.Fact]) -> None:
        """See event_processing.Executor."""
        for fact in decided:
            if isinstance(fact, facts.MemberRemoved) and not fact.alive:
                stream = self.agent_streams.pop((fact.gang, fact.node), None)
                if stream is not None:
                    stream.close_coordinator_side()

    def start_slurm_calls(self) -> None:
        """See event_processing.Executor."""
        for call in sorted(self.core.state.owed.values(), key=lambda call: call.call):
            if call.call not in self._started_calls:
                self._crash_point(f"before Slurm call {call.call}")
                self._started_calls.add(call.call)
                self.world.observer.slurm_call_started(call)
                queue = self._call_queues.setdefault(call.gang, deque())
                queue.append(call)
                if len(queue) == 1:
                    self.call_later(self._slurm_delay_s(), self._try_call, call, 0.25)

    def start_probe(self, probe_request: ProbeRequest) -> None:
        """See event_processing.Executor."""
        self._crash_point(f"before probe {probe_request.probe}")
        for witness in probe_request.witnesses:
            if witness in (AGENT, MUSTERD):
                self.call_later(
                    0.002, self._probe, probe_request, witness, self.schedule.now + probe_request.deadline_s, False
                )
            elif stream := self.agent_streams.get((probe_request.gang, witness)):
                stream.down.send((self.journal.term, "probe", probe_request))

    def set_timer(self, due: float | None, now: float) -> None:
        """See event_processing.Executor."""
        self._timer += 1
        if due is not None:
            self.call_later(max(0.0, due - now), self._timer_fired, self._timer)

    def report_bug(self, bug: str) -> None:
        """See event_processing.Executor."""
        self.world.observer.core_bug_reported(bug)

    def _timer_fired(self, number: int) -> None:
        if number == self._timer:
            self.post_event(events.Tick())

    def _recipients(self, gang: str) -> list[_Recipient]:
        return [_Recipient(self, stream) for (id, _), stream in self.agent_streams.items() if id == gang]

    def _call_later(self, delay: float, action: Callable[[str], None], gang: str) -> None:
        self.call_later(delay, self._run_guarded, action, gang)

    def send(self, stream: Stream, message: pb.CoordinatorMessage) -> None:
        """Send an order. The process may crash before."""
        gang, node, _ = stream.key
        self._crash_point(f"before the order for {node}")
        self.world.observer.order_sent(self.core.state.gangs[gang], message.order)
        stream.last_order = message
        stream.down.send((message.term, "order", message.order))

    # -- Slurm --

    def _slurm_delay_s(self) -> float:
        return 0.01 + self.world.slurm.max_delay_s * self.world.rng.random()

    def _try_call(self, call: facts.SlurmCallOwed, pause: float) -> None:
        """Make one call to Slurm. The answer takes some time."""
        slurm, before = self.world.slurm, self.world.cluster.nodes().get(call.node)
        try:
            run_without_waiting(slurm.run_unreliably(make_call(slurm, call, self.core.state)))
        except SlurmRefused as refused:
            self.call_later(self._slurm_delay_s(), self._call_answered, call, str(refused))
        except SlurmUnavailable:
            self.call_later(pause, self._try_call, call, min(2 * pause, 5.0))
        else:
            self.call_later(self._slurm_delay_s(), self._call_answered, call, None)
        if before is not None and before.drained and not self.world.cluster.nodes()[before.name].drained:
            self.world.observer.drain_lifted(before)

    def _call_answered(self, call: facts.SlurmCallOwed, error: str | None) -> None:
        queue = self._call_queues[call.gang]
        queue.popleft()
        self._started_calls.discard(call.call)
        if queue:
            self.call_later(self._slurm_delay_s(), self._try_call, queue[0], 0.25)
        self.post_event(events.SlurmAnswered(call.gang, call.call, error))

    def _start_lookup(self, probe_request: Callable[[], Coroutine[Any, Any, None]], every_s: float) -> None:
        self._continue_lookup(probe_request(), probe_request, every_s)

    def _continue_lookup(
        self, lookup: Coroutine[Any, Any, None], probe_request: Callable[[], Coroutine[Any, Any, None]], every_s: float
    ) -> None:
        """Ask Slurm, or process its answer, however old the answer is."""
        try:
            lookup.send(None)
        except StopIteration:
            self.call_later(every_s, self._start_lookup, probe_request, every_s)
        else:
            self.call_later(
                min(self._slurm_delay_s(), DEFAULT_TIMEOUT_S), self._continue_lookup, lookup, probe_request, every_s
            )

    # -- agents --

    def receive_from_agent(self, stream: Stream, message: Any) -> None:
        """Process a message from an agent's stream."""
        gang, node, incarnation = stream.key
        if message is STREAM_END:
            if self.agent_streams.get((gang, node)) is stream:
                del self.agent_streams[gang, node]
                self.post_event(events.AgentDisconnected(gang, node, incarnation))
            return
        match message:
            case ("ping", sent_at):
                stream.down.send((self.journal.term, "pong", sent_at))
                self.post_event(events.AgentHeartbeat(gang, node))
            case ("status", status):
                self.world.observer.status_received(gang, status)
                self.post_event(events.AgentReported(gang, node, incarnation, status))
            case ("hello", agent, status):
                self._admit_agent(stream, agent, status)
            case (_, event):
                self.post_event(event)

    def _admit_agent(self, stream: Stream, agent: Agent, status: events.AgentStatus) -> None:
        """Admit an agent like the coordinator's agent service does: by the journal if it knows the agent, else by
        Slurm."""
        identity = agent.identity
        gang = self.core.state.gangs.get(identity.gang)
        answer = self.world.jobs.dismissal_reason(gang, agent.node, identity)
        if answer is None:
            stream.close_coordinator_side()
        elif answer:
            stream.down.send((self.journal.term, "dismissed", answer))
        else:
            before = self.agent_streams.get((identity.gang, agent.node))
            self.agent_streams[identity.gang, agent.node] = stream
            if before is not None and before is not stream:
                before.close_coordinator_side()
            if gang is None:
                self.post_event(self.world.jobs.registration(identity.gang))
            self.world.observer.agent_attached(identity.gang, status)
            self.post_event(
                events.AgentAttached(
                    identity.gang, agent.node, identity.job, identity.restarts, identity.incarnation, f"{agent.node}:9",
                    identity.on_batch_host, agent.machine.leaf, status, identity.pool_request,
                    own_nodes=identity.own_nodes,
                )
            )  # fmt: skip
            if (
                self.alive
                and identity.gang in self.core.state.gangs
                and self.agent_streams.get((identity.gang, agent.node)) is stream
            ):
                self._run_guarded(self._orders.send_to, _Recipient(self, stream))

    # -- node daemons --

    def receive_from_daemon(self, stream: Stream, message: Any) -> None:
        """Process a message from a node daemon's stream."""
        node, incarnation = stream.key
        if message is STREAM_END:
            if self._daemon_streams.get(node) is stream:
                del self._daemon_streams[node]
                self.post_event(events.NodeDisconnected(node, incarnation))
            return
        match message:
            case ("hello", daemon):
                self._register_daemon(stream, daemon)
            case ("heartbeat", checked):
                self.post_event(events.NodeHeartbeat(node))
                self.world.kept_memory.drop_unwanted(node, self.core.state)
                wanted = self.core.wanted_check(node, self._clock())
                if checked is not None and checked[0] == wanted:
                    self.post_event(events.NodeCheckReported(node, *checked))
                stream.down.send((self.journal.term, "check", wanted))
                return
            case ("signal", event):
                self.post_event(event)
        stream.down.send((self.journal.term, "answer", message[1] if message[0] == "signal" else None))

    def _register_daemon(self, stream: Stream, daemon: NodeDaemon) -> None:
        node, incarnation = stream.key
        before = self._daemon_streams.get(node)
        if before is not None and before is not stream:
            before.close_coordinator_side()
        self._daemon_streams[node] = stream
        self.post_event(events.NodeAttached(node, f"boot{daemon.machine.boot_count}", incarnation, f"{node}:7071"))

    # -- probes --

    def _probe(self, probe_request: ProbeRequest, witness: str, until: float, accepted: bool) -> None:
        """Probe like the coordinator's probe client: retry until an answer, a refusal by the kernel, or the
        deadline."""
        world = self.world
        gang = probe_request.gang if witness == AGENT else None
        address = probe_request.peer_address if witness == AGENT else probe_request.probe_address
        silence = world.reachability(COORDINATOR, probe_request.node, gang) if address else Silence.NO_ANSWER
        if silence is None or silence is Silence.CLOSED:
            self._probe_answered(probe_request, witness, silence)
            return
        accepted |= silence is Silence.KERNEL_ONLY
        now = self.schedule.now
        if now >= until or not address:
            self._probe_answered(probe_request, witness, Silence.KERNEL_ONLY if accepted else Silence.NO_ANSWER)
        else:
            self.call_later(
                min(_PROBE_RETRY_S, until - now + 0.001), self._probe, probe_request, witness, until, accepted
            )

    def _probe_answered(self, probe_request: ProbeRequest, witness: str, silence: Silence | None) -> None:
        self.post_event(
            events.ProbeAnswered(probe_request.gang, probe_request.probe, witness, probe_request.node, silence)
        )

    # -- standing still --

    def resume_after_stall(self, since: float) -> None:
        """The process stood still since `since`. It resumes and notices the pause."""
        self.stopped = False
        if self.schedule.now - since > SUSPENDED_S:
            self.core.observed.observing_since = self.schedule.now
        self.resume()


def _cause(event: events.Event) -> str:
    return type(event).__name__
