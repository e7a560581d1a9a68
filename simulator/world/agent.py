"""One agent: attaches, obeys (by the real `converge.decide`), reports, pings, ends its ranks when it must.

Its ranks are processes of their own: they die with it, and run on while it is stopped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from muster.daemon.agent.ranks import reconcile
from muster.daemon.coordinator.core.state import events
from muster.daemon.coordinator.core.state.events import Silence
from muster.daemon.coordinator.core.state.turn import ProbeRequest
from muster.simulator.world.agent_memory import Memory
from muster.simulator.world.machine import Backoff, Machine, Process
from muster.simulator.world.network import COORDINATOR, END, Stream
from muster.simulator.world.peer_monitor import Uneasy
from muster.v1 import agent_pb2 as pb

if TYPE_CHECKING:
    from muster.simulator.world.world import World

CALM_PING_S, WORRIED_PING_S = 5.0, 0.25
DEAF_S = 16.0
LEISURE_S = 0.25
_NOTICE_S = 8.0
_BORN_S = 0.05
"""How long a rank outlives its agent at most."""


@dataclass(slots=True, eq=False)
class Rank:
    """One rank's process. `doomed`: SIGKILL is on its way, it runs no more code; `alive`: it is still there; `hung`: it
    goes on no more; `declared`: the phase that it says to be in."""

    agent: Agent
    rank: int
    generation: int
    alive: bool = True
    doomed: bool = False
    exit_code: int | None = None
    stderr: str = ""
    running: bool = False
    step: int = 0
    progressed: bool = False
    hung: bool = False
    fate: int | None = None
    """It is dying, of itself, with this exit code; a SIGKILL that comes now changes nothing of that."""
    reset: bool = False
    declared: str = ""

    @property
    def able(self) -> bool:
        """It can write, join and publish at this moment."""
        machine = self.agent.machine
        dying = self.doomed or self.fate is not None
        return self.alive and not dying and machine.kernel and not machine.frozen


@dataclass(frozen=True, slots=True)
class Post:
    """Where an agent belongs, and in which run of which job."""

    gang: str
    job: int
    restarts: int
    batch_host: bool
    incarnation: str
    pool: int = 0


class Agent(Process):
    """The agent of a gang on a node, from its start by srun to its end."""

    machine: Machine

    def __init__(self, world: World, machine: Machine, post: Post) -> None:
        super().__init__(world.schedule, machine)
        self.machine = machine
        self.world = world
        self.post = post
        self.node = machine.name
        self.order: pb.Order | None = None
        self.newest = 0
        self.fenced = self.killed = 0
        self.store = self.store_port = 0
        self.flushed = 0
        self.flush_error = ""
        self.flushing = 0
        self.stacks = self.stacks_begun = 0
        self.failure = ""
        self.notice = ""
        self.pool: dict[int, events.PoolAnswer | None] = {}
        self.asked_to_stop = self.deaf_ranks = False
        self.ranks: dict[int, Rank] = {}
        self.memory = Memory(self)
        self.uneasy = Uneasy(self)
        self.contact = float("-inf")
        self.stream: Stream | None = None
        self._term = 0
        self._backoff = Backoff(0.05, 1.0)
        self._due = float("inf")
        self._pinging = 0
        self._heard_at = 0.0
        self._stores = 0
        self._carried_out = 0

    # -- the stream --

    def attach(self) -> None:
        """Open a stream, again and again until there is one."""
        if self.stream is not None:
            return
        coordinator = self.world.coordinator
        if not coordinator.listens() or not self.world.network.both(self.node, COORDINATOR):
            self.later(self._backoff.pause() * (0.5 + self.world.chance.random()), self.attach)
            return
        self.stream = stream = Stream(
            self.world.network, self.node, (self.post.gang, self.node, self.post.incarnation),
            (self.awake, self._hear), (coordinator.awake, coordinator.hear_agent),
        )  # fmt: skip
        self._heard_at = self.schedule.now
        stream.up.put(("hello", self, self.status()))
        self.uneasy.accuse_again()
        self._pinging += 1
        self._ping(self._pinging)

    def _lose_stream(self) -> None:
        if self.stream is not None:
            self.stream.down.closed = True
            self.stream = None
            self.later(self._backoff.pause() * (0.5 + self.world.chance.random()), self.attach)

    def _hear(self, stream: Stream, message: Any) -> None:
        if stream is not self.stream:
            return
        if message is END:
            self._lose_stream()
            return
        term, kind, body = message
        if term < self._term:
            return
        self._term = term
        self._heard_at = self.schedule.now
        self._backoff.reset()
        match kind:
            case "order":
                self._obey(body)
            case "probe":
                self._probe(body)
            case "pong":
                self.contact = max(self.contact, body)
            case "dismissed":
                self.leave()

    def say(self, kind: str, body: object) -> None:
        """Send something that no status holds; lost where no stream is open."""
        if self.stream is not None:
            self.stream.up.put((kind, body))

    def changed(self, within: float = 0.0) -> None:
        """The status has changed: send it, once for all changes within so many seconds."""
        due = self.schedule.now + within
        if due < self._due:
            self._due = due
            self.later(within, self._report, due)

    def _report(self, due: float) -> None:
        if due != self._due:
            return
        self._due = float("inf")
        if self.stream is not None:
            self.stream.up.put(("status", self.status()))

    def _ping(self, number: int) -> None:
        if number != self._pinging or self.stream is None:
            return
        now = self.schedule.now
        if now - max(self._heard_at, self.contact) > DEAF_S:
            self.stream.close_near()
            self._lose_stream()
            return
        self.stream.up.put(("ping", now))
        self.later(WORRIED_PING_S if self.uneasy.spell is not None else CALM_PING_S, self._ping, number)

    def hurry(self) -> None:
        """Ping at once, and often from now on."""
        if self.stream is not None:
            self._pinging += 1
            self._ping(self._pinging)

    def status(self) -> events.Status:
        """The whole status, as convert.status makes it of the wire's."""
        ranks = []
        for r in self.ranks.values():
            gone = not r.alive and not self.fenced < r.generation <= self.killed
            ranks.append(
                events.RankState(
                    r.rank, r.generation, r.running and not gone, r.exit_code if gone else None, r.stderr,
                    r.step, r.progressed, r.declared,
                )
            )  # fmt: skip
        return events.Status(
            fenced=self.fenced,
            ranks=tuple(ranks),
            shards=self.memory.shards(),
            committed=self.memory.committed,
            store_port=self.store_port,
            store_generation=self.store if self.store_port else 0,
            store_reserved=bool(self.store_port) and self.world.reserves,
            heard_s=self.uneasy.heard_s(),
            flushed_serial=self.flushed,
            flush_error=self.flush_error,
            failure=self.failure,
            notice=self.notice,
            answered_s=self.uneasy.answered_s(),
            order_serial=self._carried_out,
            stacks=self.stacks,
            pool=tuple(answer for answer in self.pool.values() if answer),
        )

    # -- orders --

    def _obey(self, order: pb.Order) -> None:
        self.order, self.newest = order, max(self.newest, order.generation)
        self.uneasy.enlist(order)
        self.memory.enlist(order)
        self.world.cast_out(self)
        if order.HasField("flush") and order.flush.serial > max(self.flushing, self.flushed):
            self.flushing = order.flush.serial
            self.memory.flush(order.flush)
        for request in order.pool:
            if request.serial not in self.pool:
                self.pool[request.serial] = None
                self.later(self.world.timing.launch(), self._ask_pool, request)
        self.carry_out()
        if order.keep_stacks and order.generation > self.stacks_begun:
            self.stacks_begun = order.generation
            self.later(self.world.timing.copy(), self._keep_stacks, order.generation)
        self.asked_to_stop = self.asked_to_stop or bool(order.stop)
        if self._carried_out:
            self.changed()

    def carry_out(self) -> None:
        """Take steps until none is left."""
        while self.order is not None and self.alive:
            steps = reconcile.next_steps(self._local(), self.order)
            if not steps:
                done = reconcile.is_carried_out(self._local(), self.order)
                self._carried_out = self.order.serial if done else 0
                return
            for step in steps:
                self._take(step, self.order)

    def _local(self) -> reconcile.LocalState:
        ranks = tuple(reconcile.LocalRank(r.rank, r.generation, r.alive) for r in self.ranks.values())
        return reconcile.LocalState(self.node, self.fenced, self.killed, ranks, self.store)

    def _take(self, step: reconcile.Step, order: pb.Order) -> None:
        match step:
            case reconcile.KillRanks(generation):
                self._kill(generation)
            case reconcile.ReportFenced(generation):
                self.fenced = generation
                self.changed()
            case reconcile.OpenStore(generation):
                self.store, self.store_port = generation, 0
                self.later(self.world.timing.store(), self._store_listens, generation)
            case reconcile.CloseStore():
                self.store = self.store_port = 0
            case reconcile.StartRanks():
                self._start(step, order)
            case reconcile.ExitAgent():
                if order.requeued:
                    self.world.depots.leave(self)
                self.leave()

    def _store_listens(self, generation: int) -> None:
        if self.store == generation and not self.store_port:
            self._stores += 1
            self.store_port = 4000 + 100 * generation + self._stores
            self.changed()

    def _start(self, step: reconcile.StartRanks, order: pb.Order) -> None:
        training = self.world.training(self.post.gang, order)
        for rank, _ in step.places:
            self.ranks[rank] = started = Rank(self, rank, step.generation)
            training.enter(started)
        self.changed()

    def _keep_stacks(self, generation: int) -> None:
        self.stacks = generation
        self.changed()

    def _ask_pool(self, request: pb.PoolRequest) -> None:
        """Call sbatch."""
        self.pool[request.serial] = self.world.jobs.submit_pool(self.post, request.serial, request.options)
        self.changed()

    # -- ranks --

    def end_ranks(self, why: str) -> None:
        """Fence ourselves: no order is waited for."""
        alive = [r.generation for r in self.ranks.values() if r.alive]
        if alive and max(alive) > self.killed:
            self.world.note(f"{self.node} ends its ranks: {why}")
            self._kill(max(alive))
            self.carry_out()

    def _kill(self, generation: int) -> None:
        self.killed = max(self.killed, generation)
        held = max(0.0, self.machine.stuck_until - self.schedule.now)
        for rank in self.ranks.values():
            if rank.alive and rank.generation <= generation:
                rank.doomed = True
                self.schedule.later(held + self.world.timing.kill(), self.rank_ends, rank, -9, "")

    def rank_dies(self, rank: Rank, exit_code: int, stderr: str, told_s: float) -> None:
        """A rank's process dies; its agent hears of that so much later."""
        rank.fate = exit_code
        self.schedule.later(told_s, self.rank_ends, rank, exit_code, stderr)

    def rank_ends(self, rank: Rank, exit_code: int, stderr: str) -> None:
        """A rank's process is gone, by whatever cause."""
        if not rank.alive or not self.machine.kernel:
            return
        if self.machine.frozen:  # it goes once its node goes on
            self.schedule.later(0.5, self.rank_ends, rank, exit_code, stderr)
            return
        exit_code = exit_code if rank.fate is None else rank.fate
        rank.alive, rank.running, rank.exit_code, rank.stderr = False, False, exit_code, stderr
        if exit_code and (rank.fate is not None or not rank.doomed):
            self.world.laws.crashed_by_itself(self.post.gang, rank.generation, self.node, of_reset=rank.reset)
        self.later(0.0, self._rank_ended)

    def _rank_ended(self) -> None:
        self.carry_out()
        self.changed()

    # -- ends --

    def terminate(self, words: str) -> None:
        """SIGTERM has come: it says so; without the coordinator's word it winds down by itself."""
        if not self.notice:
            self.notice = words
            self.changed()
            self.later(_NOTICE_S, self._wind_down)

    def _wind_down(self) -> None:
        if not self.asked_to_stop:
            self.failure = self.notice
            self.changed()
            self.end_ranks(self.notice)
            self.later(self.world.timing.kill() + 0.3, self._leave_alone)

    def _leave_alone(self) -> None:
        """Nobody has said what follows."""
        self.world.depots.leave(self)
        self.leave()

    def leave(self) -> None:
        """End by itself, once its ranks have."""
        self.world.end_agent(self)

    def end(self, closes: bool) -> None:
        """The process is gone, its ranks with it. `closes`: its kernel lives and closes its connections."""
        self.alive = False
        for rank in self.ranks.values():
            rank.doomed = True
            if rank.alive:
                self.schedule.later(_BORN_S, self._orphan_dies, rank)
        if self.stream is not None:
            self.stream.down.closed = True
            if closes:
                self.stream.close_near()
            self.stream = None

    def _orphan_dies(self, rank: Rank) -> None:
        rank.alive = rank.running = False

    # -- probes --

    def _probe(self, ask: ProbeRequest) -> None:
        """Probe for the coordinator, as probe.probe does: one connection, one ping."""
        found = self.world.door(self.node, ask.node, self.post.gang)
        if found is None or found is Silence.CLOSED:
            self.later(0.003, self._answer, ask, found)
        else:
            self.later(ask.deadline_s, self._answer, ask, found)

    def _answer(self, ask: ProbeRequest, found: Silence | None) -> None:
        if found is Silence.NO_ANSWER and self.uneasy.closed(ask.node):
            found = Silence.CLOSED
        step = max((r.step for r in self.ranks.values()), default=0)
        self.say("probed", events.Probed(self.post.gang, ask.probe, self.node, ask.node, found, step))
