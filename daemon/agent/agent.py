"""muster-agent on one node: takes the coordinator's orders, makes them so, says how things stand.

Level-triggered: every order, and every change on the node, ends in `_converge`, which asks `converge.decide` for the
next steps until there are none.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from muster.daemon.agent import memory_handover
from muster.daemon.agent.coordinator_stream import AgentStream, StreamHandlers
from muster.daemon.agent.failure_detector.peer_monitor import MonitorCallbacks, PeerMonitor
from muster.daemon.agent.failure_detector.peers import (
    AgentIdentity,
    PeerChannels,
    PeerService,
    ProbeService,
    ShardService,
)
from muster.daemon.agent.memory_handover import MemoryHandover
from muster.daemon.agent.pool_jobs import PoolRequests
from muster.daemon.agent.ranks import reconcile
from muster.daemon.agent.ranks.rank_supervisor import NodeJob, RankSupervisor
from muster.daemon.agent.ranks.stack_dumps import StackDumps
from muster.daemon.transport.channel import bind, make_server
from muster.daemon.transport.identity import Credentials, IdentityUnavailable
from muster.daemon.transport.reachability import Reachability, probe
from muster.v1 import common_pb2_grpc, peer_pb2_grpc
from muster.v1.agent_pb2 import (
    AgentHello,
    AgentMessage,
    AgentStatus,
    Duty,
    FlushOrder,
    Order,
    ProbeOrder,
    ProbeResult,
    RankPhase,
    RankStatus,
    ShardStatus,
    Silence,
)
from muster.v1.common_pb2 import JobSpec, Version

log = logging.getLogger(__name__)

# Ranks that an agent without orders has asked to stop get this long.
_STOP_GRACE_S = 12.0
_LOOK_AGAIN_S = 0.05
_AT_LEISURE_S = 0.25
_TIDY_S = 1.0
_HAND_OVER_S = 3.0
_EXIT_TERM = 128 + signal.SIGTERM
_NOTICE = "Slurm has sent SIGTERM: the job's time limit, a preemption, a requeue or scancel"
_SILENCES = {
    None: Silence.SILENCE_UNSPECIFIED,
    Reachability.ACCEPTED: Silence.SILENCE_KERNEL_ONLY,
    Reachability.REFUSED: Silence.SILENCE_CLOSED,
    Reachability.NO_ANSWER: Silence.SILENCE_NO_ANSWER,
}


class Keeper(ShardService, memory_handover.Keeper, Protocol):
    """The memory store of this node (muster.checkpoint.store.checkpoint_service.Keeper)."""

    def rank_socket(self, rank: int, generation: int) -> socket.socket: ...
    def apply_order(self, order: Order) -> None: ...
    def fence(self, generation: int) -> None: ...
    def shards(self) -> list[ShardStatus]: ...
    def committed(self) -> Version | None: ...
    def progress(self) -> dict[int, int]: ...
    def phases(self) -> dict[int, str]: ...
    def is_digesting(self, rank: int, generation: int) -> bool: ...
    async def flush(self, order: FlushOrder, durable_dir: str) -> None: ...
    def stop_ranks(self, reason: str) -> None: ...
    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """All that an agent is started with. `listen`: "host:port"; `host`: the address that others reach it at;
    `notice_s`: how long it waits for the coordinator's word after SIGTERM."""

    identity: AgentIdentity
    job: NodeJob
    spec: JobSpec
    coordinator: str
    credentials: Credentials
    listen: str
    host: str
    notice_s: float
    slurm_job_id: int = 0
    slurm_restart_count: int = 0
    batch_host: bool = False
    pool_serial: int = 0
    """The request for a node of the shared pool that this agent comes of; 0: it is of the gang's own job."""
    memory_socket: str = ""
    """Where musterd keeps memory until the job's next run; empty: nowhere."""
    failure: str = ""
    """Why the job can't run on this node, for the user; empty: it can."""


MakeKeeper = Callable[[PeerChannels, Callable[[], None]], Keeper]
MakePool = Callable[[Callable[[], None]], PoolRequests]


class Agent:
    """One agent, from `run` to its exit code."""

    def __init__(self, setting: AgentSettings, make_keeper: MakeKeeper, make_pool: MakePool) -> None:
        self._setting = setting
        self._attachment: AgentStream | None = None
        self._channels = PeerChannels(setting.credentials)
        self._keeper = make_keeper(self._channels, self._kept)
        own = setting.identity
        self._newest = 0
        self._handover = MemoryHandover(own.gang, own.node, setting.slurm_job_id, setting.memory_socket)
        self._hands_over = self._stopped = False
        self._moving: frozenset[int] = frozenset()
        self._withheld = False
        self._pool = make_pool(self._changed)
        self._stacks = StackDumps(setting.job.run_dir, setting.job.gang)
        self._crew = RankSupervisor(setting.job, self._keeper.rank_socket, self._progressed)
        self._order: Order | None = None
        self._fenced = 0
        self._killed = 0
        self._flushed = (0, "")
        self._flushing = 0
        self._failure = setting.failure
        self._notice = ""
        self._told_to_stop = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._converging = False
        self._done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._service = PeerService(setting.identity, self._keeper, lambda: self._order)
        self._neighbours = PeerMonitor(
            setting.identity,
            self._channels.open_link,
            MonitorCallbacks(self._coordinator_contact, self._worried, self._accuse, self._end_ranks),
        )

    async def run(self) -> int:
        """Serve until the coordinator says EXIT (or dismisses us, or SIGTERM ends us); returns the exit code."""
        self._crew.start_zygotes()
        server = make_server(self._setting.credentials)
        peer_pb2_grpc.add_PeerServiceServicer_to_server(self._service, server)
        common_pb2_grpc.add_ProbeServiceServicer_to_server(ProbeService(self._setting.identity), server)
        port = bind(server, self._setting.listen)
        await server.start()
        # Before the first status: what it says is what the gang's next generation starts from.
        self._newest = await self._handover.reclaim(self._keeper)
        self._attachment = self._attach(port)
        self._start(self._attachment.run())
        self._start(self._neighbours.run())
        try:
            return await self._done
        finally:
            # gRPC logs an error for every stream that a stop cuts.
            logging.getLogger("grpc").setLevel(logging.CRITICAL)
            for task in list(self._tasks):
                task.cancel()
            self._neighbours.stop()
            self._stacks.close()
            await self._crew.stop()
            last = self._leave_memory() if self._hands_over else self._handover.withdraw()
            with suppress(TimeoutError):
                async with asyncio.timeout(_HAND_OVER_S):
                    await last
            # The end of the process does the same: none of it may hold that up.
            for tidy in (self._keeper.close(), self._channels.close(), server.stop(grace=None)):
                with suppress(TimeoutError):
                    async with asyncio.timeout(_TIDY_S):
                        await tidy

    def terminate(self) -> None:
        """SIGTERM has come: say so, and do as the coordinator orders; without its word wind down."""
        if not self._notice and not self._done.done():
            self._notice = _NOTICE
            log.warning(self._notice)
            self._changed()
            self._start(self._wind_down_unless_told())

    # --- orders ------------------------------------------------------------------------------------------------------

    def _take_order(self, order: Order) -> None:
        known = self._order
        if known is None or order.SerializeToString() != known.SerializeToString():
            log.info("order %d: %s", order.serial, _words(order))
        self._order = order
        self._handover.confirm()
        self._newest = max(self._newest, order.generation)
        self._neighbours.apply_order(order)
        self._keeper.apply_order(order)
        if order.HasField("flush") and order.flush.serial > max(self._flushing, self._flushed[0]):
            self._flushing = order.flush.serial
            self._flush(order.flush)
        for request in self._pool.new_requests(order.pool):
            self._start(self._pool.submit(request), vital=False)
        self._converge()
        if order.keep_stacks and self._stacks.claim(order.generation):
            self._start(self._keep_stacks(order.generation), vital=False)
        if order.stop:
            self._ask_to_stop(order.stop)
        if reconcile.is_carried_out(self._local(), order):
            self._changed()  # nothing under way will say that the order is carried out

    def _converge(self) -> None:
        """Take steps until none is left. Steps call back here: the outermost call does the work."""
        if self._converging or self._order is None or self._done.done():
            return
        self._converging = True
        try:
            while steps := reconcile.next_steps(self._local(), self._order):
                for step in steps:
                    self._take(step, self._order)
                if any(isinstance(step, reconcile.ExitAgent) for step in steps):
                    return
        finally:
            self._converging = False

    def _take(self, step: reconcile.Step, order: Order) -> None:
        log.debug("step: %s", step)
        match step:
            case reconcile.KillRanks(generation):
                self._killed = generation
                self._crew.kill_ranks(generation)
            case reconcile.ReportFenced(generation):
                self._keeper.fence(generation)
                self._fenced = generation
                self._changed()
            case reconcile.OpenStore(generation):
                self._crew.open_store(generation)
            case reconcile.CloseStore():
                self._crew.close_store()
            case reconcile.StartRanks():
                self._crew.start_ranks(step, order)
            case reconcile.ExitAgent(exit_code, reason):
                self._hands_over = order.requeued
                self._leave(exit_code, reason or "the coordinator says so")

    def _local(self) -> reconcile.LocalState:
        return reconcile.LocalState(
            node=self._setting.identity.node,
            fenced_generation=self._fenced,
            killed_generation=self._killed,
            ranks=self._crew.ranks(),
            store_generation=self._crew.store_generation(),
        )

    def _flush(self, order: FlushOrder) -> None:
        def over(task: asyncio.Task[Any]) -> None:
            if order.serial < self._flushing:
                return  # a newer order has ended this flush, and that one's end is what counts
            error = None if task.cancelled() else task.exception()
            self._flushed = (order.serial, str(error) if error is not None else "")
            self._changed()

        # Whatever goes wrong with it is the coordinator's to judge; training goes on.
        self._start(self._keeper.flush(order, self._setting.spec.durable_dir), vital=False).add_done_callback(over)

    async def _keep_stacks(self, generation: int) -> None:
        await self._stacks.write(generation, self._crew.pids(generation))
        self._changed()

    def _leave(self, code: int, reason: str) -> None:
        if not self._done.done():
            log.info("leaving with exit code %d: %s", code, reason)
            self._done.set_result(code)

    # --- saying how things stand -------------------------------------------------------------------------------------

    def _progressed(self) -> None:
        self._converge()
        self._changed()
        if self._told_to_stop.is_set() and not self._stopped and not self._any_alive():
            self._stopped = True
            # What follows may take longer than Slurm lets us live: its SIGKILL finds the memory with musterd.
            self._start(self._leave_memory(), vital=False)

    async def _leave_memory(self) -> None:
        await self._handover.deposit(self._keeper, self._newest)

    def _kept(self) -> None:
        """Shards, commits and steps: news at every step, so told at leisure, but for a generation's first and last."""
        moving = frozenset(self._keeper.progress())
        if moving != self._moving or self._withheld:
            self._moving = moving
            self._changed()
        elif self._attachment is not None:
            self._attachment.schedule_status(within=_AT_LEISURE_S)

    def _changed(self) -> None:
        if self._attachment is not None:
            self._attachment.schedule_status()

    def _status(self) -> AgentStatus:
        store = self._crew.store
        listening = store if store is not None and store.port else None
        order = self._order
        done = order is not None and reconcile.is_carried_out(self._local(), order)
        return AgentStatus(
            fenced_generation=self._fenced,
            ranks=self._ranks(),
            shards=self._keeper.shards(),
            committed=self._keeper.committed(),
            store_port=listening.port if listening is not None else 0,
            store_generation=listening.generation if listening is not None else 0,
            warm=self._crew.ready_zygotes(),
            heard_ms=self._neighbours.heard_ms(),
            answered_ms=self._service.answered_ms(),
            flushed_serial=self._flushed[0],
            flush_error=self._flushed[1],
            order_serial=order.serial if order is not None and done else 0,
            failure=self._failure or self._crew.failure,
            notice=self._notice,
            pool=self._pool.answers(),
            store_reserved=listening is not None and not listening.hosted,
            stacks_generation=self._stacks.generation,
        )

    def _ranks(self) -> list[RankStatus]:
        """The ranks' statuses. An end in good order is told no sooner than what was kept before it: where it is the
        gang's, the last checkpoint is chosen among what is known then. Ends that this agent brings about are told once
        all ranks have ended, with the fence: the first of them is no crash. A fault never waits."""
        ended = [rank for rank in self._crew.statuses({}) if _in_order(rank)]
        behind = {(r.rank, r.generation) for r in ended if self._keeper.is_digesting(r.rank, r.generation)}
        self._withheld = bool(behind)
        ranks, phases = list(self._crew.statuses(self._keeper.progress())), self._keeper.phases()
        for rank in ranks:
            rank.declared_phase = phases.get(rank.rank, "")
            if (rank.rank, rank.generation) in behind or self._fenced < rank.generation <= self._killed:
                rank.phase = RankPhase.RANK_PHASE_RUNNING
        return ranks

    def _attach(self, port: int) -> AgentStream:
        setting = self._setting
        hello = AgentHello(
            gang_id=setting.identity.gang,
            slurm_job_id=setting.slurm_job_id,
            slurm_restart_count=setting.slurm_restart_count,
            node=setting.identity.node,
            incarnation=setting.identity.incarnation,
            peer_address=f"{setting.host}:{port}",
            spec=setting.spec,
            batch_host=setting.batch_host,
            pool_serial=setting.pool_serial,
        )
        again = self._neighbours.repeat_accusations
        ears = StreamHandlers(hello, self._status, again, self._take_order, self._take_probe, self._dismissed)
        return AgentStream(setting.coordinator, setting.credentials, ears)

    # --- silence -----------------------------------------------------------------------------------------------------

    def _coordinator_contact(self) -> float:
        return self._attachment.last_contact if self._attachment is not None else float("-inf")

    def _worried(self, worried: bool) -> None:
        if self._attachment is not None:
            self._attachment.set_suspicion(worried)

    def _accuse(self, accusation: Any) -> None:
        self._say(AgentMessage(accusation=accusation))

    def _end_ranks(self, why: str) -> None:
        """Fence ourselves: no order is waited for."""
        alive = [rank.generation for rank in self._crew.ranks() if rank.alive]
        if alive and max(alive) > self._killed:
            log.error("ending all ranks: %s", why)
            self._killed = max(alive)
            self._crew.kill_ranks(self._killed)
            self._progressed()

    def _take_probe(self, order: ProbeOrder) -> None:
        self._start(self._probe(order), vital=False)

    async def _probe(self, order: ProbeOrder) -> None:
        try:
            met = await probe(order.peer_address, order.node, self._setting.credentials, order.deadline_ms / 1000)
        except IdentityUnavailable as error:
            log.error("can't probe %s: %s", order.node, error)
            return
        if met is Reachability.NO_ANSWER and self._neighbours.closed_by_peer(order.node):
            met = Reachability.REFUSED  # its kernel told us before it, too, went
        result = ProbeResult(
            probe_id=order.probe_id,
            node=order.node,
            answered=met is None,
            silence=_SILENCES[met],
            step=max(self._keeper.progress().values(), default=0),
        )
        self._say(AgentMessage(probe_result=result))

    def _say(self, message: AgentMessage) -> None:
        if self._attachment is not None:
            self._attachment.send(message)

    # --- leaving -----------------------------------------------------------------------------------------------------

    def _dismissed(self, reason: str) -> None:
        self._leave(0, f"dismissed by the coordinator: {reason}")

    def _ask_to_stop(self, reason: str) -> None:
        """Ask the ranks, once, to finish their step and leave."""
        if self._told_to_stop.is_set():
            return
        self._told_to_stop.set()
        self._keeper.stop_ranks(reason)
        if self._setting.spec.stop_signal:
            self._crew.signal_ranks(self._setting.spec.stop_signal)

    async def _wind_down_unless_told(self) -> None:
        try:
            async with asyncio.timeout(self._setting.notice_s):
                await self._told_to_stop.wait()
        except TimeoutError:
            await self._wind_down()

    async def _wind_down(self) -> None:
        self._failure = self._notice
        self._changed()
        self._ask_to_stop(self._failure)
        spec = self._setting.spec
        if spec.stop_signal or spec.memory_checkpoint:
            await self._ranks_end(_STOP_GRACE_S)
        self._end_ranks(self._failure)
        await self._ranks_end(_STOP_GRACE_S)
        self._hands_over = True  # nobody has had it written, or has said that the job doesn't come back
        self._leave(_EXIT_TERM, self._failure)

    def _any_alive(self) -> bool:
        return any(rank.alive for rank in self._crew.ranks())

    async def _ranks_end(self, timeout: float) -> None:
        deadline = asyncio.get_running_loop().time() + timeout
        while asyncio.get_running_loop().time() < deadline:
            if not self._any_alive():
                return
            await asyncio.sleep(_LOOK_AGAIN_S)

    def _start(self, work: Coroutine[Any, Any, Any], *, vital: bool = True) -> asyncio.Task[Any]:
        """Begin some work. A vital one that fails is a bug that ends the agent loudly, ranks and all."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, vital))
        return task

    def _ended(self, vital: bool, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not vital:
            log.error("%s", error, exc_info=error)
        elif not self._done.done():
            self._done.set_exception(error)


def _in_order(rank: RankStatus) -> bool:
    return rank.phase == RankPhase.RANK_PHASE_EXITED and rank.exit_code == 0


def _words(order: Order) -> str:
    duty = Duty.Name(order.duty).removeprefix("DUTY_")
    return f"{duty} {order.generation}" + (f", {order.reason}" if order.reason else "")
