"""A gang in virtual time: the real core and its real orders, agents and nodes played by a few lines each.

`Rehearsal` plays the world for the core without clock, socket or process: agents obey orders after a small delay, ranks
step, nodes die in every way that the fault verbs name. Time moves only when `run_until` is called, events happen in a
fixed order, so one script gives one transcript. Tests and the documentation's transcripts are made with it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from muster.daemon.coordinator.core import events as e
from muster.daemon.coordinator.core import facts as f
from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.events import Shard, Silence, Version
from muster.daemon.coordinator.core.ledger import Gang, Ledger, apply
from muster.daemon.coordinator.core.turn import Ask
from muster.daemon.coordinator.core.verdict import MUSTERD
from muster.daemon.coordinator.orders import order_for
from muster.v1 import agent_pb2 as pb

HOP_S = 0.002
STEP_S = 0.2
START_S = 0.5
ACCUSE_S = 1.25


@dataclass(slots=True)
class Actor:
    """One node: its kernel, its daemon, its agent and the agent's ranks."""

    node: str
    leaf: str
    batch_host: bool
    kernel: bool = True  # powered and reachable
    frozen: bool = False
    agent: bool = True
    incarnation: int = 1
    fenced: int = 0
    generation: int = 0
    ranks: list[int] = field(default_factory=list)
    exits: dict[int, int] = field(default_factory=dict)
    step: int = 0
    stepped: bool = False
    store: int = 0
    shards: dict[tuple[int, bool, int], Version] = field(default_factory=dict)
    heard: dict[str, float] = field(default_factory=dict)
    flushed: int = 0
    failure: str = ""
    left: bool = False

    @property
    def answers(self) -> bool:
        """Its processes answer."""
        return self.kernel and not self.frozen


class Rehearsal:
    """One gang of `nodes` + `spares` nodes on two leaves, one rank a node."""

    def __init__(self, nodes: int, spares: int, **spec: object) -> None:
        self.now = 1000.0
        self.core = Core(Ledger(), self.now)
        self.journal: list[tuple[float, f.Fact]] = []
        self.slurm: list[f.SlurmOwed] = []
        self.refusals: dict[str, str] = {}
        self.spec = e.GangSpec(nodes, spares, **spec)  # type: ignore[arg-type]
        self.actors = {f"n{i}": Actor(f"n{i}", f"s{i % 2}", i == 0) for i in range(nodes + spares)}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._due: float | None = None
        self._called: set[int] = set()
        self.post(e.GangSubmitted("g", 1, 1000, "job", self.spec, "{}"))
        for actor in self.actors.values():
            self.post(e.NodeAttached(actor.node, "boot", "d1", f"{actor.node}:7071"))
            self._later(HOP_S, lambda a=actor: self._attach(a))  # type: ignore[misc]

    @property
    def gang(self) -> Gang:
        """The gang in the ledger."""
        return self.core.ledger.gangs["g"]

    def facts(self, kind: type[f.Fact]) -> list[f.Fact]:
        """All journaled facts of a kind, oldest first."""
        return [fact for _, fact in self.journal if isinstance(fact, kind)]

    def folded(self) -> Ledger:
        """The ledger that the journal alone gives."""
        ledger = Ledger()
        for at, fact in self.journal:
            apply(ledger, fact, at)
        return ledger

    # -- time --

    def run_until(self, condition: Callable[[], bool], limit_s: float = 60.0) -> None:
        """Let time pass until `condition` holds.

        Raises:
            TimeoutError: it does not hold within `limit_s` seconds of virtual time; the transcript is in the message.
        """
        end = self.now + limit_s
        while not condition():
            at = min(self._queue[0][0] if self._queue else end, self._due if self._due is not None else end)
            if at >= end:
                raise TimeoutError("\n".join(self.transcript()))
            self.now = max(self.now, at)
            if self._due is not None and self._due <= self.now:
                self._due = None
                self.post(e.Tick())
            elif self._queue:
                heapq.heappop(self._queue)[2]()

    def transcript(self) -> list[str]:
        """The journal, one line a fact, times relative to the start."""
        return [f"{at - 1000.0:8.3f} {fact}" for at, fact in self.journal]

    def _later(self, delay: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now + delay, self._count, action))

    def post(self, event: e.Event) -> None:
        """Give the core an event now and carry out what follows."""
        outcome = self.core.decide(event, self.now)
        self.journal.extend((self.now, fact) for fact in outcome.facts)
        self._due = outcome.due
        if outcome.facts:
            self._act()
        for ask in outcome.asks:
            self._ask(ask)

    def restart_coordinator(self) -> None:
        """The coordinator dies and comes back with its journal alone; agents attach anew."""
        self.core = Core(self.folded(), self.now)
        self._called.clear()
        self._act()
        for actor in self.actors.values():
            if actor.agent and actor.answers and not actor.left:
                self.post(e.NodeAttached(actor.node, "boot", "d1", f"{actor.node}:7071"))
                self._later(0.1, lambda a=actor: self._attach(a))  # type: ignore[misc]

    def _act(self) -> None:
        for call in list(self.core.ledger.owed.values()):
            if call.call not in self._called:
                self._called.add(call.call)
                self.slurm.append(call)
                self._later(0.01, lambda c=call: self._settle(c))  # type: ignore[misc]
        for actor in self.actors.values():
            if actor.agent and not actor.left:
                self._later(HOP_S, lambda a=actor: self._order(a))  # type: ignore[misc]

    def _settle(self, call: f.SlurmOwed) -> None:
        self.post(e.SlurmAnswered(call.gang, call.call, self.refusals.get(call.verb)))

    # -- agents --

    def _attach(self, actor: Actor) -> None:
        if actor.agent and actor.answers:
            address = f"{actor.node}:9"
            status = self._status(actor)
            name = f"a{actor.incarnation}"
            self.post(e.AgentAttached("g", actor.node, 1, 0, name, address, actor.batch_host, actor.leaf, status))
            self._order(actor)

    def _report(self, actor: Actor) -> None:
        if actor.agent and actor.answers:
            self.post(e.AgentReported("g", actor.node, f"a{actor.incarnation}", self._status(actor)))

    def _status(self, actor: Actor) -> e.Status:
        ranks = tuple(
            e.RankState(
                rank, actor.generation, rank not in actor.exits, actor.exits.get(rank), "", actor.step, actor.stepped
            )
            for rank in actor.ranks
        )
        shards = tuple(Shard(r, v, own, f"{r}-{v.step}") for (r, own, _), v in actor.shards.items())
        heard = {n: self.now - at for n, at in actor.heard.items()}
        return e.Status(
            fenced=actor.fenced, ranks=ranks, shards=shards, heard_s=heard, flushed_serial=actor.flushed,
            store_port=4000 + actor.store if actor.store else 0, store_generation=actor.store,
            failure=actor.failure,
        )  # fmt: skip

    def _order(self, actor: Actor) -> None:
        if not (actor.agent and actor.answers) or actor.left:
            return
        order = order_for(self.core.ledger, "g", actor.node)
        if order.duty == pb.DUTY_EXIT:
            actor.left, actor.ranks = True, []
        elif order.duty == pb.DUTY_FENCE:
            actor.fenced, actor.ranks = max(actor.fenced, order.generation), []
            actor.store = order.generation + 1 if order.store_node == actor.node else 0
        elif order.duty == pb.DUTY_RUN and order.generation not in (actor.generation, 0):
            self._run(actor, order)
        if order.HasField("flush"):
            actor.flushed = order.flush.serial
        self._later(HOP_S, lambda: self._report(actor))

    def _run(self, actor: Actor, order: pb.Order) -> None:
        actor.generation = order.generation
        actor.ranks = [p.rank for p in order.places if p.node == actor.node]
        actor.exits, actor.stepped, actor.step = {}, False, order.restore.version.step
        self._later(START_S, lambda: self._step(actor, order.generation))

    def _moves(self) -> bool:
        """Synchronous training: a step ends when every rank of the generation takes part."""
        carriers = [self.actors[seat.node] for seat in self.gang.seats]
        return all(a.answers and a.agent and a.ranks and a.generation == self.gang.generation for a in carriers)

    def _step(self, actor: Actor, generation: int) -> None:
        if actor.generation != generation or not actor.ranks or actor.exits or not (actor.agent and actor.answers):
            return
        if self._moves():
            actor.step, actor.stepped = actor.step + 1, True
            self._snapshot(actor)
            self._report(actor)
        self._later(STEP_S, lambda: self._step(actor, generation))

    def _snapshot(self, actor: Actor) -> None:
        version = Version(actor.generation, actor.step)
        buddy = next(seat.buddy for seat in self.gang.seats if seat.node == actor.node)
        for rank in actor.ranks:
            actor.shards[(rank, True, actor.step % 2)] = version
            if buddy:
                self.actors[buddy].shards[(rank, False, actor.step % 2)] = version

    # -- probes --

    def _silence(self, actor: Actor) -> Silence | None:
        if not actor.kernel:
            return Silence.NO_ANSWER
        if actor.frozen:
            return Silence.KERNEL_ONLY
        return None if actor.agent else Silence.CLOSED

    def _ask(self, ask: Ask) -> None:
        actor = self.actors[ask.node]
        for witness in ask.witnesses:
            silence = self._silence(actor)
            if witness == MUSTERD and actor.answers:
                silence = None
            delay = HOP_S if silence in (None, Silence.CLOSED) else ask.deadline_s
            event = e.Probed("g", ask.probe, witness, ask.node, silence, 0)
            if witness not in self.actors or self.actors[witness].answers:
                self._later(delay, lambda ev=event: self.post(ev))  # type: ignore[misc]

    # -- faults --

    def crash(self, node: str) -> None:
        """The node dies and its kernel closes every connection on the way."""
        actor = self.actors[node]
        actor.kernel = False
        for other in self.actors.values():
            other.heard[node] = self.now
        self.post(e.AgentGone("g", node, f"a{actor.incarnation}"))
        self.post(e.NodeGone(node, "d1"))
        for witness in self._watchers(node):
            self.post(e.NeighbourAccused("g", witness, node, Silence.CLOSED))

    def power_off(self, node: str) -> None:
        """The node dies without a word."""
        self.actors[node].kernel = False
        self._fall_silent(node, Silence.NO_ANSWER)

    def pause(self, node: str) -> None:
        """Its kernel answers, its processes don't."""
        self.actors[node].frozen = True
        self._fall_silent(node, Silence.KERNEL_ONLY)

    def _fall_silent(self, node: str, silence: Silence) -> None:
        for other in self.actors.values():
            other.heard[node] = self.now
        self._later(ACCUSE_S, lambda: self._accuse(node, silence))

    def _accuse(self, node: str, silence: Silence) -> None:
        """Whoever watches the node by now accuses it; again and again while it is silent and part of the gang."""
        if self.actors[node].answers or self.gang.final or (node in self.gang.members and self.gang.members[node].out):
            return
        for witness in self._watchers(node):
            self.post(e.NeighbourAccused("g", witness, node, silence))
        self._later(ACCUSE_S, lambda: self._accuse(node, silence))

    def _watchers(self, node: str) -> list[str]:
        seats = [*self.gang.seats, *self.gang.spares]
        return [s.node for s in seats if node in s.neighbours and self.actors[s.node].answers]

    def kill_rank(self, node: str, exit_code: int = 1) -> None:
        """One rank exits by itself."""
        actor = self.actors[node]
        actor.exits = dict.fromkeys(actor.ranks, exit_code)
        self._report(actor)

    def kill_agent(self, node: str) -> None:
        """The agent's process ends, and its ranks with it."""
        actor = self.actors[node]
        actor.agent, actor.ranks = False, []
        self.post(e.AgentGone("g", node, f"a{actor.incarnation}"))

    def signal(self, node: str, judgement: str = "unfit", reason: str = "Xid 79") -> None:
        """The node's daemon sees a hardware signal."""
        self.post(e.NodeSignalled(node, judgement, reason, reason))

    def finish(self) -> None:
        """Every rank exits with 0."""
        for seat in self.gang.seats:
            self.kill_rank(seat.node, 0)
