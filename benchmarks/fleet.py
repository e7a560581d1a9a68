"""Training gangs for measurements of the coordinator: the events of their agents, passed to a real core.

Nothing is sent over a network. The measurement decides when agents report, and agents report what their orders require.
Time is virtual.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.events import AgentStatus, RankState, Shard, Silence, Version
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.turn.turn import Outcome, ProbeRequest

RANKS_PER_NODE = 8
LEAF_NODES = 32
"""Nodes on one leaf switch."""


@dataclass
class Fleet:
    """One core and all its decisions. `on_outcome` gets each event and its outcome, as the coordinator's shell
    would."""

    core: Core = field(default_factory=lambda: Core(DurableState(), 1000.0))
    now: float = 1000.0
    decided: list[tuple[float, list[facts.Fact]]] = field(default_factory=list)
    on_outcome: Callable[[events.Event, Outcome], None] = lambda event, outcome: None
    cpu_s: float = 0.0
    """CPU seconds of this process in the core and in `on_outcome`."""

    def post(self, event: events.Event) -> Outcome:
        """Passes an event to the core, at the current virtual time."""
        start = time.process_time()
        outcome = self.core.decide(event, self.now)
        self.on_outcome(event, outcome)
        self.cpu_s += time.process_time() - start
        if outcome.facts:
            self.decided.append((self.now, outcome.facts))
        return outcome

    def train(self, nodes: int, gangs: int) -> list[TrainingGang]:
        """Starts `gangs` gangs on `nodes` nodes, each with one spare, and lets all of them train."""
        names = [f"node{number:05d}" for number in range(nodes)]
        share = [names[nodes * i // gangs : nodes * (i + 1) // gangs] for i in range(gangs)]
        made = [TrainingGang(self, f"gang{i:04d}", 10_000 + i, own) for i, own in enumerate(share)]
        for gang in made:
            gang.begin()
        return made


@dataclass
class TrainingGang:
    """The agents of one gang on `nodes`. At first, the last `spares` nodes have no ranks."""

    fleet: Fleet
    id: str
    job: int
    nodes: Sequence[str]
    spares: int = 1
    version: Version = field(default_factory=lambda: Version(1, 0))
    """The newest snapshot: generation and finished steps."""
    silent: set[str] = field(default_factory=set)

    @property
    def gang(self) -> Gang:
        """The gang in the durable state."""
        return self.fleet.core.state.gangs[self.id]

    def begin(self) -> None:
        """From the submission to the first finished step."""
        spec = events.GangSpec(len(self.nodes) - self.spares, self.spares, RANKS_PER_NODE, durable_dir="/durable")
        self.fleet.post(events.GangSubmitted(self.id, self.job, 1000, self.id, spec, '{"run_dir":"/run/gang"}'))
        for node in self.nodes:
            self.fleet.post(events.NodeAttached(node, "boot", "d1", f"{node}:7071"))
            self.attach(node)
        self.report_all()
        self.advance(1)

    def attach(self, node: str) -> None:
        """The node's agent opens its stream."""
        position = self.nodes.index(node)
        leaf = f"leaf{int(node.lstrip('node')) // LEAF_NODES}"
        event = events.AgentAttached(
            self.id, node, self.job, 0, "a1", f"{node}:9000", position == 0, leaf, self.status(node)
        )
        self.fleet.post(event)

    def report_all(self) -> None:
        """Every responsive agent reports its status, once for each order that changed it."""
        for phase in (Phase.PREFLIGHT, Phase.RECOVERING, Phase.STARTING, Phase.RUNNING):
            if self.gang.phase is phase:
                for event in self.reports():
                    self.fleet.post(event)

    def reports(self) -> list[events.Event]:
        """The reports that responsive agents would send now."""
        return [events.AgentReported(self.id, n, "a1", self.status(n)) for n in self.nodes if n not in self.silent]

    def advance(self, steps: int) -> None:
        """Every rank finishes `steps` steps and takes a snapshot."""
        self.version = Version(self.gang.newest.generation, self.version.step + steps)
        self.report_all()

    def status(self, node: str) -> AgentStatus:
        """The current status of the agent on `node`."""
        gang = self.fleet.core.state.gangs.get(self.id)
        if gang is None or gang.phase is Phase.GATHERING:
            return AgentStatus()
        fencing = gang.phase in (Phase.PREFLIGHT, Phase.RECOVERING)
        store = fencing and gang.recovery.next_store_node == node
        seat = next((seat for seat in gang.roster.seats if seat.node == node), None)
        first = seat.group_rank * RANKS_PER_NODE if seat else 0
        own = range(first, first + RANKS_PER_NODE) if seat else range(0)
        step = self.version.step
        ranks = tuple(RankState(rank, gang.newest.generation, True, step=step, progressed=step > 0) for rank in own)
        return AgentStatus(
            fenced_generation=max(gang.recovery.fenced_generation, 0),
            ranks=() if fencing else ranks,
            shards=self._shards(gang, seat),
            store_port=20_000 + gang.newest.generation if store else 0,
            store_generation=gang.recovery.fenced_generation + 1 if store else 0,
            heard_s=dict.fromkeys(self.silent, 3.0) if seat and fencing else {},
            order_serial=gang.order_serial,
        )

    def _shards(self, gang: Gang, seat: facts.Seat | None) -> tuple[Shard, ...]:
        """The node's own shards and its copies of the buddy's shards, of the newest step."""
        if seat is None or not self.version.step:
            return ()
        count = len(gang.roster.seats)
        held_ranks = [((seat.group_rank - back) % count, back == 0) for back in (0, 1)]
        return tuple(
            Shard(place * RANKS_PER_NODE + local, self.version, own, f"{self.version.step:032x}")
            for place, own in held_ranks
            for local in range(RANKS_PER_NODE)
        )

    # Silent failures

    def fail_node(self, node: str) -> None:
        """A node fails silently: from the accusations to the order that starts the next generation."""
        self.silent.add(node)
        watchers = [seat.node for seat in self.gang.roster.seats if node in seat.watched_peers]
        asks = [ask for w in watchers for ask in self._accuse(w, node)]
        while not self._starting():
            before = self.gang.phase
            for ask in asks:
                self._answer(ask)
            if self.gang.phase is not before:
                self.report_all()
            asks = [] if self._starting() else self._tick()

    def _starting(self) -> bool:
        return self.gang.phase is Phase.STARTING

    def fail_nodes(self, nodes: Sequence[str], seconds: float) -> None:
        """A switch fails: the streams of `nodes` break, and nobody has contact to them for `seconds`."""
        self.silent.update(nodes)
        asks = [
            ask
            for node in nodes
            for ask in self.fleet.post(events.AgentDisconnected(self.id, node, "a1")).probe_requests
        ]
        end = self.fleet.now + seconds
        while self.fleet.now < end:
            if any(self._behind(node) for node in self.nodes):
                self.report_all()
            asks = [following for ask in asks for following in self._answers(ask)] + self._tick()

    def _behind(self, node: str) -> bool:
        """An agent that can has not told of its newest order yet."""
        return (
            node not in self.silent
            and self.fleet.core.observed.gang(self.id).status(node).fenced_generation
            < self.gang.recovery.fenced_generation
        )

    def _answers(self, ask: ProbeRequest) -> list[ProbeRequest]:
        answers = [
            events.ProbeAnswered(self.id, ask.probe, witness, ask.node, Silence.NO_ANSWER)
            for witness in ask.witnesses
            if witness not in self.silent
        ]
        return [following for event in answers for following in self.fleet.post(event).probe_requests]

    def _accuse(self, witness: str, node: str) -> list[ProbeRequest]:
        return self.fleet.post(events.PeerAccused(self.id, witness, node, Silence.NO_ANSWER)).probe_requests

    def _answer(self, ask: ProbeRequest) -> None:
        """All witnesses report no answer, at the deadline of the probe."""
        self.fleet.now += ask.deadline_s
        for witness in ask.witnesses:
            self.fleet.post(events.ProbeAnswered(self.id, ask.probe, witness, ask.node, Silence.NO_ANSWER))

    def _tick(self) -> list[ProbeRequest]:
        self.fleet.now += 0.05
        return self.fleet.post(events.Tick()).probe_requests
