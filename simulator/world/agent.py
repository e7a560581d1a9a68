"""One agent: attaches, obeys orders with the real `reconcile.next_steps`, reports its status, pings, and fences itself.

An agent's ranks are processes of their own. They end with the agent, and they run on while the agent is stopped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from muster.checkpoint.store.block_times import StepBlocks
from muster.checkpoint.store.rank_silences import COUNT_INTERVAL_S, RankSilences
from muster.daemon.agent.ranks import reconcile
from muster.daemon.coordinator.core.state import events
from muster.daemon.coordinator.core.state.events import Silence, Version
from muster.daemon.coordinator.core.turn.turn import ProbeRequest
from muster.simulator.environment.machine import Backoff, Machine, Process
from muster.simulator.environment.network import COORDINATOR, STREAM_END, Stream
from muster.simulator.world import step_times
from muster.simulator.world.agent_memory import ShardMemory
from muster.simulator.world.peer_monitor import PeerMonitor
from muster.v1 import agent_pb2 as pb

if TYPE_CHECKING:
    from muster.simulator.world.world import World

IDLE_PING_INTERVAL_S, SILENCE_PING_INTERVAL_S = 5.0, 0.25
"""Seconds between two pings to the coordinator: usually, and while the agent hears too few peers."""
STREAM_TIMEOUT_S = 16.0
"""Seconds without a message from the coordinator after which the agent opens a new stream."""
_SIGTERM_TIMEOUT_S = 8.0
"""Seconds after SIGTERM for which an agent waits for the coordinator before it shuts down by itself."""
CHECK_DEADLINE_S = 60.0
"""Seconds after which an agent gives up the check of its node."""
_ZYGOTES = 16
"""Zygotes that are ready on a node: as many as any node has ranks, or more."""
_ORPHAN_LIFETIME_S = 0.05
"""Seconds. A rank outlives its agent by this time at most."""


@dataclass(slots=True, eq=False)
class Rank:
    """One rank's process.

    `alive`: the process exists. `kill_sent`: SIGKILL is on its way, and the process executes no more code. `hung`: the
    process makes no more steps. `silent`: no Python thread of it runs, since `silent_since`. `declared_phase`: the
    phase that the script has declared. `stopped_step`: the last step, if the rank was asked to stop. `flip`: the number
    of the bit flip that its state carries; 0: none.
    """

    agent: Agent
    rank: int
    generation: int
    alive: bool = True
    kill_sent: bool = False
    exit_code: int | None = None
    stderr: str = ""
    running: bool = False
    step: int = 0
    progressed: bool = False
    hung: bool = False
    silent: bool = False
    silent_since: float = 0.0
    pending_exit_code: int | None = None
    """The rank is exiting by itself with this code. A SIGKILL that comes now does not change the code."""
    died_of_reset: bool = False
    ended_at: float = 0.0
    declared_phase: str = ""
    stopped_step: int = 0
    flip: int = 0
    idle_quarters: int | None = None
    """As its agent has measured it."""
    hang_place: events.HangPlace | None = None
    """Where its stacks show it, once they are written."""
    entered_collectives: int | None = None
    """Reported once the stacks are written."""
    step_blocks: StepBlocks = field(default_factory=StepBlocks)

    @property
    def is_active(self) -> bool:
        """The rank can write, join the rendezvous and publish at this moment."""
        machine = self.agent.machine
        dying = self.kill_sent or self.pending_exit_code is not None
        return self.alive and not dying and machine.powered and not machine.frozen


@dataclass(frozen=True, slots=True)
class AgentIdentity:
    """The gang, job and run that an agent belongs to. `pool_request`: see JobSubmission. `own_nodes`: see GangSpec."""

    gang: str
    job: int
    restarts: int
    on_batch_host: bool
    incarnation: str
    pool_request: int = 0
    own_nodes: tuple[str, ...] = ()


class Agent(Process):
    """The agent of a gang on a node, from its start by srun to its end."""

    machine: Machine

    def __init__(self, world: World, machine: Machine, identity: AgentIdentity) -> None:
        super().__init__(world.schedule, machine)
        self.machine = machine
        self.world = world
        self.identity = identity
        self.node = machine.name
        self.order: pb.Order | None = None
        self.newest_generation = 0
        self.fenced_generation = self.killed_generation = 0
        self.store_generation = self.store_port = 0
        self.flushed_serial = 0
        self.flush_error = ""
        self.flushed_version: Version | None = None
        self.flushing_serial = 0
        self.stacks_generation = self.stacks_requested = 0
        self.failure = ""
        self.node_check: events.NodeCheck | None = None
        self.is_rogue = False
        """The job's owner runs this process out of Slurm's reach: it acknowledges no fence, and outlives the job."""
        self.sigterm_notice = ""
        self.pool_answers: dict[int, events.PoolAnswer | None] = {}
        self.stop_requested = self.ranks_ignore_stop = False
        self.swapped_generation = 0
        """The generation whose ranks were asked to stop for a planned swap."""
        self.ranks: dict[int, Rank] = {}
        self.silences = RankSilences(self.status_changed)
        self._counts_silences = False
        self.measures_idleness = True
        self.training: events.NodeTraining | None = None
        self.memory = ShardMemory(self)
        self.peer_monitor = PeerMonitor(self)
        self.coordinator_contact = float("-inf")
        self.stream: Stream | None = None
        self._term = 0
        self._backoff = Backoff(0.05, 1.0)
        self._report_due = float("inf")
        self._ping_series = 0
        self._last_message_at = 0.0
        self._store_count = 0
        self._carried_out_serial = 0

    # -- the stream --

    def attach(self) -> None:
        """Open a stream. Retry until it is open."""
        if self.stream is not None:
            return
        coordinator = self.world.coordinator
        if not coordinator.listens() or not self.world.network.connected(self.node, COORDINATOR):
            self.call_later(self._backoff.next_delay_s() * (0.5 + self.world.rng.random()), self.attach)
            return
        self.stream = stream = Stream(
            self.world.network, self.node, (self.identity.gang, self.node, self.identity.incarnation),
            (self.is_running, self._receive), (coordinator.is_running, coordinator.receive_from_agent),
        )  # fmt: skip
        self._last_message_at = self.schedule.now
        stream.up.send(("hello", self, self.status()))
        self.peer_monitor.accuse_again()
        self._ping_series += 1
        self._ping(self._ping_series)

    def _disconnect(self) -> None:
        if self.stream is not None:
            self.stream.down.closed = True
            self.stream = None
            self.call_later(self._backoff.next_delay_s() * (0.5 + self.world.rng.random()), self.attach)

    def _receive(self, stream: Stream, message: Any) -> None:
        if stream is not self.stream:
            return
        if message is STREAM_END:
            self._disconnect()
            return
        term, kind, body = message
        if term < self._term:
            return
        self._term = term
        self._last_message_at = self.schedule.now
        self._backoff.reset()
        match kind:
            case "order":
                self._accept_order(body)
            case "probe":
                self._probe(body)
            case "pong":
                self.coordinator_contact = max(self.coordinator_contact, body)
            case "dismissed":
                self.exit()

    def send(self, kind: str, body: object) -> None:
        """Send a message that is not part of the status. The message is lost if no stream is open."""
        if self.stream is not None:
            self.stream.up.send((kind, body))

    def status_changed(self, within_s: float = 0.0) -> None:
        """The status has changed. Send it within this time, in seconds, once for all changes until then."""
        due = self.schedule.now + within_s
        if due < self._report_due:
            self._report_due = due
            self.call_later(within_s, self._send_status, due)

    def _send_status(self, due: float) -> None:
        if due != self._report_due:
            return
        self._report_due = float("inf")
        if self.stream is not None:
            self.stream.up.send(("status", self.status()))

    def _ping(self, number: int) -> None:
        if number != self._ping_series or self.stream is None:
            return
        now = self.schedule.now
        if now - max(self._last_message_at, self.coordinator_contact) > STREAM_TIMEOUT_S:
            self.stream.close_node_side()
            self._disconnect()
            return
        self.stream.up.send(("ping", now))
        self.call_later(
            SILENCE_PING_INTERVAL_S if self.peer_monitor.suspicion_since is not None else IDLE_PING_INTERVAL_S,
            self._ping,
            number,
        )

    def ping_now(self) -> None:
        """Ping the coordinator at once, and often from now on."""
        if self.stream is not None:
            self._ping_series += 1
            self._ping(self._ping_series)

    def status(self) -> events.AgentStatus:
        """The whole status, as `convert.status` reads it from the wire."""
        ranks, silences = [], self.silences.reported()
        for r in self.ranks.values():
            has_exited = not r.alive and not self.fenced_generation < r.generation <= self.killed_generation
            ranks.append(
                events.RankState(
                    r.rank, r.generation, r.running and not has_exited, r.exit_code if has_exited else None, r.stderr,
                    r.step, r.progressed, r.declared_phase, r.stopped_step, silent_s=silences.get(r.rank),
                    idle_quarters=r.idle_quarters,
                    hang_place=r.hang_place if self.stacks_generation == r.generation else None,
                    entered_collectives=r.entered_collectives if self.stacks_generation == r.generation else None,
                    block_times=step_times.reported(r.step_blocks),
                    ended_s_ago=self.schedule.now - r.ended_at if has_exited else None,
                )
            )  # fmt: skip
        return events.AgentStatus(
            fenced_generation=0 if self.is_rogue else self.fenced_generation,
            ranks=tuple(ranks),
            shards=self.memory.shards(),
            combined=self.memory.combined(),
            committed=self.memory.committed,
            store_port=self.store_port,
            store_generation=self.store_generation if self.store_port else 0,
            store_reserved=bool(self.store_port) and self.world.rank_opens_store,
            heard_s=self.peer_monitor.heard_s(),
            flushed_serial=self.flushed_serial,
            flush_error=self.flush_error,
            flushed_version=self.flushed_version,
            failure=self.failure,
            sigterm_notice=self.sigterm_notice,
            answered_s=self.peer_monitor.answered_s(),
            order_serial=self._carried_out_serial,
            stacks_generation=self.stacks_generation,
            node_check=self.node_check,
            warm=_ZYGOTES if self.machine.has_imported else 0,
            pool=tuple(answer for answer in self.pool_answers.values() if answer),
            disagreement=self.memory.disagreement,
            training=self.training,
        )

    def start_node_check(self) -> None:
        """Check the node, as jobs with a preflight want it."""
        self.node_check = events.NodeCheck(events.CheckOutcome.RUNNING)
        outcome = events.CheckOutcome(self.machine.check_outcome)
        silent = outcome is events.CheckOutcome.SILENT
        self.call_later(CHECK_DEADLINE_S if silent else self.world.durations.check_s(), self._node_checked, outcome)

    def _node_checked(self, outcome: events.CheckOutcome) -> None:
        self.node_check = events.NodeCheck(outcome, hardware="1 processor")
        self.status_changed()

    # -- orders --

    def _accept_order(self, order: pb.Order) -> None:
        self.order, self.newest_generation = order, max(self.newest_generation, order.generation)
        self.peer_monitor.apply_order(order)
        self.memory.apply_order(order)
        self.world.notify_removed_nodes(self)
        if order.HasField("flush") and order.flush.serial > max(self.flushing_serial, self.flushed_serial):
            self.flushing_serial = order.flush.serial
            self.memory.start_flush(order.flush)
        for request in order.pool:
            if request.serial not in self.pool_answers:
                self.pool_answers[request.serial] = None
                self.call_later(self.world.durations.launch_s(), self._request_pool_node, request)
        self.reconcile_order()
        if order.keep_stacks and order.generation > self.stacks_requested:
            self.stacks_requested = order.generation
            self.call_later(self.world.durations.copy_s(), self._stacks_written, order.generation)
        self.stop_requested = self.stop_requested or bool(order.stop)
        self.swapped_generation = order.generation if order.planned_swap else self.swapped_generation
        if self._carried_out_serial:
            self.status_changed()

    def reconcile_order(self) -> None:
        """Execute steps until none is left."""
        while self.order is not None and self.alive:
            steps = reconcile.next_steps(self._local_state(), self.order)
            if not steps:
                done = reconcile.is_carried_out(self._local_state(), self.order)
                self._carried_out_serial = self.order.serial if done else 0
                return
            for step in steps:
                self._execute(step, self.order)

    def _local_state(self) -> reconcile.LocalState:
        ranks = tuple(reconcile.LocalRank(r.rank, r.generation, r.alive) for r in self.ranks.values())
        return reconcile.LocalState(
            self.node, self.fenced_generation, self.killed_generation, ranks, self.store_generation
        )

    def _execute(self, step: reconcile.Step, order: pb.Order) -> None:
        match step:
            case reconcile.KillRanks(generation):
                self._kill_ranks(generation)
            case reconcile.ReportFenced(generation):
                self.fenced_generation = generation
                self.status_changed()
            case reconcile.OpenStore(generation):
                self.store_generation, self.store_port = generation, 0
                self.call_later(self.world.durations.store_s(), self._store_opened, generation)
            case reconcile.CloseStore():
                self.store_generation = self.store_port = 0
            case reconcile.StartRanks():
                self._start_ranks(step, order)
            case reconcile.ExitAgent():
                if order.requeued:
                    self.world.kept_memory.keep(self)
                self.exit()

    def _store_opened(self, generation: int) -> None:
        if self.store_generation == generation and not self.store_port:
            self._store_count += 1
            self.store_port = 4000 + 100 * generation + self._store_count
            self.status_changed()

    def _start_ranks(self, step: reconcile.StartRanks, order: pb.Order) -> None:
        training = self.world.training_for(self.identity.gang, order)
        self.silences = RankSilences(self.status_changed)
        for rank, _ in step.places:
            self.ranks[rank] = started = Rank(self, rank, step.generation)
            training.add_rank(started)
        self.status_changed()

    def _stacks_written(self, generation: int) -> None:
        self.stacks_generation = generation
        self.status_changed()

    def _request_pool_node(self, request: pb.PoolRequest) -> None:
        """Call sbatch."""
        self.pool_answers[request.serial] = self.world.jobs.submit_pool_job(
            self.identity, request.serial, request.options
        )
        self.status_changed()

    # -- ranks --

    def silence_rank(self, rank: Rank) -> None:
        """From now on no Python thread of the rank runs."""
        if not rank.silent:
            rank.silent, rank.silent_since = True, self.schedule.now
        if not self._counts_silences:
            self._counts_silences = True
            self.call_later(COUNT_INTERVAL_S, self._count_silences)

    def _count_silences(self) -> None:
        """Each second while a rank is silent. All others send signs of life."""
        for rank in self.ranks.values():
            if not rank.silent:
                self.silences.note_message(rank.rank)
        self._counts_silences = any(rank.silent and rank.alive for rank in self.ranks.values())
        if self._counts_silences:
            self.silences.count_second([rank.rank for rank in self.ranks.values() if rank.declared_phase])
            self.call_later(COUNT_INTERVAL_S, self._count_silences)

    def measure_idleness(self, interval_s: float) -> None:
        """Count, from now on, the intervals in which each rank was idle. A rank in which no Python runs computes."""
        self.call_later(interval_s, self.measure_idleness, interval_s)
        training = self.world.newest_training(self.identity.gang)
        if training is None or not self.measures_idleness:
            return
        was_idle = training.idle_since <= self.schedule.now - interval_s
        for rank in self.ranks.values():
            idle = was_idle and rank.generation == training.generation and not rank.silent
            before, rank.idle_quarters = rank.idle_quarters, (rank.idle_quarters or 0) + 1 if idle else 0
            if rank.idle_quarters != before:
                self.status_changed()

    def self_fence(self, reason: str) -> None:
        """Kill the agent's own ranks without an order."""
        alive = [r.generation for r in self.ranks.values() if r.alive]
        if alive and max(alive) > self.killed_generation:
            self.world.note(f"{self.node} fences itself: {reason}")
            self._kill_ranks(max(alive))
            self.reconcile_order()

    def _kill_ranks(self, generation: int) -> None:
        self.killed_generation = max(self.killed_generation, generation)
        unkillable_s = max(0.0, self.machine.ranks_unkillable_until - self.schedule.now)
        for rank in self.ranks.values():
            if rank.alive and rank.generation <= generation:
                rank.kill_sent = True
                self.schedule.call_later(unkillable_s + self.world.durations.kill_s(), self.rank_exited, rank, -9, "")

    def crash_rank(self, rank: Rank, exit_code: int, stderr: str, delay_s: float) -> None:
        """A rank crashes. Its agent learns of it this many seconds later."""
        rank.pending_exit_code = exit_code
        self.schedule.call_later(delay_s, self.rank_exited, rank, exit_code, stderr)

    def rank_exited(self, rank: Rank, exit_code: int, stderr: str) -> None:
        """A rank's process has ended, for any reason."""
        if not rank.alive or not self.machine.powered:
            return
        if self.machine.frozen:  # it exits once its node resumes
            self.schedule.call_later(0.5, self.rank_exited, rank, exit_code, stderr)
            return
        exit_code = exit_code if rank.pending_exit_code is None else rank.pending_exit_code
        rank.alive, rank.running, rank.exit_code, rank.stderr = False, False, exit_code, stderr
        rank.ended_at = self.schedule.now
        if exit_code and (rank.pending_exit_code is not None or not rank.kill_sent):
            self.world.observer.rank_crashed(
                self.identity.gang, rank.generation, self.node, exit_code, of_reset=rank.died_of_reset
            )
        self.call_later(0.0, self._after_rank_exit)

    def _after_rank_exit(self) -> None:
        self.reconcile_order()
        self.status_changed()

    # -- ends --

    def receive_sigterm(self, words: str) -> None:
        """SIGTERM has come.

        The agent reports it. Without an answer from the coordinator the agent shuts down by itself.
        """
        if not self.sigterm_notice:
            self.sigterm_notice = words
            self.status_changed()
            self.call_later(_SIGTERM_TIMEOUT_S, self._shut_down_alone)

    def _shut_down_alone(self) -> None:
        if not self.stop_requested:
            self.failure = self.sigterm_notice
            self.status_changed()
            self.self_fence(self.sigterm_notice)
            self.call_later(self.world.durations.kill_s() + 0.3, self._exit_alone)

    def _exit_alone(self) -> None:
        """The coordinator has not said what follows: keep the memory."""
        self.world.kept_memory.keep(self)
        self.exit()

    def exit(self) -> None:
        """End the process, because its ranks have ended."""
        self.world.end_agent(self)

    def end(self, closes: bool) -> None:
        """The process has ended, and its ranks with it. `closes`: its kernel runs and closes its connections."""
        self.alive = False
        for rank in self.ranks.values():
            rank.kill_sent = True
            if rank.alive:
                self.schedule.call_later(_ORPHAN_LIFETIME_S, self._end_orphan, rank)
        if self.stream is not None:
            self.stream.down.closed = True
            if closes:
                self.stream.close_node_side()
            self.stream = None

    def _end_orphan(self, rank: Rank) -> None:
        rank.alive = rank.running = False

    # -- probes --

    def _probe(self, probe_request: ProbeRequest) -> None:
        """Probe for the coordinator, as the real agent does: one connection and one ping."""
        silence = self.world.reachability(self.node, probe_request.node, self.identity.gang)
        if silence is None or silence is Silence.CLOSED:
            self.call_later(0.003, self._answer_probe, probe_request, silence)
        else:
            self.call_later(probe_request.deadline_s, self._answer_probe, probe_request, silence)

    def _answer_probe(self, probe_request: ProbeRequest, silence: Silence | None) -> None:
        if silence is Silence.NO_ANSWER and self.peer_monitor.was_closed(probe_request.node):
            silence = Silence.CLOSED
        step = max((r.step for r in self.ranks.values()), default=0)
        self.send(
            "probed",
            events.ProbeAnswered(self.identity.gang, probe_request.probe, self.node, probe_request.node, silence, step),
        )
