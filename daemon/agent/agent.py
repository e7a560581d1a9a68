"""muster-agent on one node: receives the coordinator's orders, carries them out, reports the node's status.

Every order and every change on the node ends in `_converge`. It asks `reconcile.next_steps` for steps and carries them
out until no step is left.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

from muster.checkpoint.format.errors import FlushError
from muster.checkpoint.store.checkpoint_service import CheckpointService
from muster.daemon.agent import listening
from muster.daemon.agent.agent_settings import AgentSettings
from muster.daemon.agent.coordinator_stream import CoordinatorStream, StreamHandlers
from muster.daemon.agent.failure_detector.peer_monitor import MonitorCallbacks, PeerMonitor
from muster.daemon.agent.failure_detector.peers import (
    PeerChannels,
    PeerService,
    make_agent_server,
)
from muster.daemon.agent.failure_detector.version_check import VersionCheck
from muster.daemon.agent.link_meter import LinkMeter
from muster.daemon.agent.memory_handover import MemoryHandover
from muster.daemon.agent.own_hardware import OwnHardware
from muster.daemon.agent.own_node_check import OwnNodeCheck
from muster.daemon.agent.pool_jobs import PoolRequests
from muster.daemon.agent.rank_statuses import RankStatuses
from muster.daemon.agent.ranks import reconcile
from muster.daemon.agent.ranks.rank_idleness import RankIdleness
from muster.daemon.agent.ranks.rank_places import RankPlaces
from muster.daemon.agent.ranks.rank_supervisor import RankSupervisor
from muster.daemon.agent.ranks.stack_dumps import StackDumps
from muster.daemon.host.name_resolution import NameResolver, NameUnresolved
from muster.daemon.transport import call_binding
from muster.daemon.transport.identity import IdentityUnavailable
from muster.daemon.transport.reachability import Probed, Reachability, probe
from muster.daemon.transport.server_limits import agent_limits
from muster.daemon.transport.site_config import split_address
from muster.daemon.transport.tls import ServerKey
from muster.v1.agent_pb2 import (
    AgentHello,
    AgentMessage,
    AgentStatus,
    Certificate,
    Duty,
    FlushOrder,
    MeasureOrder,
    Order,
    ProbeOrder,
    ProbeResult,
    Silence,
)
from muster.v1.common_pb2 import JobSpec, Version

log = logging.getLogger(__name__)

# Seconds for which an agent without orders waits for its ranks to stop.
_RANK_EXIT_TIMEOUT_S = 12.0
_POLL_S = 0.05
_STEP_STATUS_DELAY_S = 0.25
_CLOSE_TIMEOUT_S = 1.0
_HANDOVER_TIMEOUT_S = 3.0
_EXIT_SIGTERM = 128 + signal.SIGTERM
_SIGTERM_NOTICE = "Slurm has sent SIGTERM: the job's time limit, a preemption, a requeue or scancel"
_SILENCE_BY_REACHABILITY = {
    None: Silence.SILENCE_UNSPECIFIED,
    Reachability.ACCEPTED: Silence.SILENCE_KERNEL_ONLY,
    Reachability.REFUSED: Silence.SILENCE_CLOSED,
    Reachability.NO_ANSWER: Silence.SILENCE_NO_ANSWER,
}


MakeCheckpointService = Callable[[PeerChannels, Callable[[], None]], CheckpointService]
MakePool = Callable[[Callable[[], None]], PoolRequests]


class Agent:
    """One agent, from `run` to its exit code."""

    def __init__(
        self, settings: AgentSettings, make_checkpoint_service: MakeCheckpointService, make_pool: MakePool
    ) -> None:
        self._settings = settings
        self._stream: CoordinatorStream | None = None
        name = call_binding.name_of_agent(settings.identity.gang, settings.identity.node)
        self._key = ServerKey(name) if settings.trust else None
        self._names = NameResolver()
        self._channels = PeerChannels(settings.credentials, settings.identity.gang, plain_text=settings.trust is None)
        self._checkpoints = make_checkpoint_service(self._channels, self._store_changed)
        identity = settings.identity
        self._newest_generation = self._swapped_generation = 0
        self._handover = MemoryHandover(identity.gang, identity.node, settings.slurm_job_id, settings.memory_socket)
        self._keep_memory = self._stop_completed = False
        self._ranks_with_steps: frozenset[int] = frozenset()
        self._pool = make_pool(self._status_changed)
        self._stacks = StackDumps(settings.job.run_dir, settings.job.gang)
        self._hardware = OwnHardware(settings.hardware_socket, settings.environ)
        self._supervisor = RankSupervisor(
            settings.job,
            self._checkpoints.rank_socket,
            self._ranks_changed,
            lambda: self._node_check.pids,
            places=RankPlaces(identity.node, settings.spec, settings.environ, lambda: self._hardware.current),
        )
        # A node that lacks something for the job is said to lack that, and not to have failed a check.
        job, preflight = settings.job.zygote_spec, settings.spec.preflight and not settings.failure
        self._node_check = OwnNodeCheck(preflight, job, self._status_changed, self._supervisor.broken_import)
        self._idleness = RankIdleness(
            settings.spec.hang_after_idle_s, self._supervisor.running_pids, self._status_changed
        )
        self._rank_statuses = RankStatuses(
            self._supervisor,
            self._checkpoints,
            self._idleness,
            self._stacks,
            # Smaller groups have collectives of their own. Pipelines also send from rank to rank, and the recorder may
            # count that with the collectives.
            ordered_collectives=_is_pure_data_parallel(settings.spec),
        )
        self._order: Order | None = None
        self._fenced_generation = 0
        self._killed_generation = 0
        self._last_flush = (0, "")
        self._flush_serial = 0
        self._flush_task: asyncio.Task[Any] | None = None
        self._flushed_version: Version | None = None
        self._failure, self._misfit = settings.failure, ""
        self._sigterm_notice = ""
        self._stop_requested = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._converging = False
        self._done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._versions = VersionCheck(identity.node, self._on_misfit)
        listen_host = split_address(settings.listen)[0]
        self._link_meter = LinkMeter(identity.gang, identity.node, listen_host, settings.ports)
        self._service = PeerService(
            settings.identity, self._checkpoints, lambda: self._order, self._link_meter.open_sink, self._versions
        )
        self._peer_monitor = PeerMonitor(
            settings.identity,
            self._channels.open_link,
            MonitorCallbacks(
                self._coordinator_contact, self._suspicion_changed, self._accuse, self._self_fence, self._versions
            ),
        )

    async def run(self) -> int:
        """Serve until an EXIT order, a dismissal or SIGTERM ends the agent; return the exit code.

        Raises:
            muster.daemon.transport.channel.ListenError: no port is free for the agent.
        """
        self._supervisor.start_zygotes()
        spec, identity = self._settings.spec, self._settings.identity
        limits = agent_limits(spec.nodes + spec.spares + spec.pool_nodes)
        key, listen = self._key, self._settings.listen
        server = make_agent_server(self._settings.credentials, limits, identity, self._service)
        port = listening.listen(server, listen, self._settings.ports, key.certificates if key else None)
        await server.start()
        # Reclaim before the first status: the gang's next generation starts from the shards in that status.
        self._newest_generation = await self._handover.reclaim(self._checkpoints)
        await self._hardware.refresh()
        self._stream = self._attach(port)
        self._spawn(self._stream.run())
        self._spawn(self._peer_monitor.run())
        self._spawn(self._node_check.run(), vital=False)
        self._spawn(self._idleness.run(), vital=False)
        try:
            return await self._done
        finally:
            # gRPC logs an error for each stream that a stop cuts.
            logging.getLogger("grpc").setLevel(logging.CRITICAL)
            for task in list(self._tasks):
                task.cancel()
            self._peer_monitor.stop()
            self._stacks.close()
            await self._supervisor.stop()
            last = self._deposit_memory() if self._keep_memory else self._handover.withdraw()
            with suppress(TimeoutError):
                async with asyncio.timeout(_HANDOVER_TIMEOUT_S):
                    await last
            # The end of the process closes these as well, so none of them may delay the exit.
            for closing in (self._checkpoints.close(), self._channels.close(), server.stop(grace=None)):
                with suppress(TimeoutError):
                    async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                        await closing

    def terminate(self) -> None:
        """SIGTERM has come: report it and follow the coordinator's orders. Without an order, wind down."""
        if not self._sigterm_notice and not self._done.done():
            self._sigterm_notice = _SIGTERM_NOTICE
            log.warning(self._sigterm_notice)
            self._status_changed()
            self._spawn(self._wind_down_without_order())

    # --- orders ------------------------------------------------------------------------------------------------------

    def _handle_order(self, order: Order) -> None:
        previous = self._order
        if previous is None or order.SerializeToString() != previous.SerializeToString():
            log.info("order %d: %s", order.serial, _describe(order))
        self._order = order
        self._handover.confirm()
        self._newest_generation = max(self._newest_generation, order.generation)
        if order.duty == Duty.DUTY_FENCE and (previous is None or previous.duty != order.duty):
            self._spawn(self._hardware.refresh(), vital=False)
        self._peer_monitor.apply_order(order)
        self._checkpoints.apply_order(order)
        if order.HasField("flush") and order.flush.serial > max(self._flush_serial, self._last_flush[0]):
            self._flush_serial = order.flush.serial
            self._flush(order.flush)
        elif not order.HasField("flush") and self._flush_task is not None:
            self._flush_task.cancel()  # the coordinator has given it up: the file system may hang
        for request in self._pool.new_requests(order.pool):
            self._spawn(self._pool.submit(request), vital=False)
        self._converge()
        if order.keep_stacks and self._stacks.claim(order.generation):
            self._spawn(self._keep_stacks(order.generation), vital=False)
        if order.stop:
            self._request_stop(order.stop)
        elif order.planned_swap and order.generation > self._swapped_generation:
            self._swapped_generation = order.generation
            self._checkpoints.stop_ranks(order.planned_swap, order.generation)
        if reconcile.is_carried_out(self._local_state(), order):
            self._status_changed()  # no later change reports that the order is carried out

    def _converge(self) -> None:
        """Carry out steps until none is left. A step may call this function again; only the outermost call works."""
        if self._converging or self._order is None or self._done.done():
            return
        self._converging = True
        try:
            while steps := self._next_steps(self._order):
                for step in steps:
                    self._carry_out(step, self._order)
                if any(isinstance(step, reconcile.ExitAgent) for step in steps):
                    return
        finally:
            self._converging = False

    def _next_steps(self, order: Order) -> list[reconcile.Step]:
        steps = reconcile.next_steps(self._local_state(), order)
        return [step for step in steps if not (self._misfit and isinstance(step, reconcile.StartRanks))]

    def _carry_out(self, step: reconcile.Step, order: Order) -> None:
        log.debug("step: %s", step)
        match step:
            case reconcile.KillRanks(generation):
                self._killed_generation = generation
                self._supervisor.kill_ranks(generation)
            case reconcile.ReportFenced(generation):
                self._checkpoints.fence(generation)
                self._fenced_generation = generation
                self._status_changed()
            case reconcile.OpenStore(generation):
                self._supervisor.open_store(generation)
            case reconcile.CloseStore():
                self._supervisor.close_store()
            case reconcile.StartRanks():
                self._supervisor.start_ranks(step, order)
            case reconcile.ExitAgent(exit_code, reason):
                self._keep_memory = order.requeued
                self._exit(exit_code, reason or "the coordinator ordered it")

    def _local_state(self) -> reconcile.LocalState:
        return reconcile.LocalState(
            node=self._settings.identity.node,
            fenced_generation=self._fenced_generation,
            killed_generation=self._killed_generation,
            ranks=self._supervisor.ranks(),
            store_generation=self._supervisor.store_generation(),
        )

    def _flush(self, order: FlushOrder) -> None:
        def finished(task: asyncio.Task[Any]) -> None:
            if order.serial < self._flush_serial:
                return  # a newer order has cancelled this flush; only the newer flush is reported
            error = FlushError("given up by the coordinator") if task.cancelled() else task.exception()
            self._last_flush = (order.serial, str(error) if error is not None else "")
            self._flushed_version = task.result() if error is None else None
            self._status_changed()

        # The coordinator decides about a failed flush; training goes on.
        spec = self._settings.spec
        work = self._checkpoints.flush(order, spec.durable_dir, spec.durable_keep, spec.durable_keep_s)
        self._flush_task = self._spawn(work, vital=False)
        self._flush_task.add_done_callback(finished)

    async def _keep_stacks(self, generation: int) -> None:
        await self._stacks.write(generation, self._supervisor.pids(generation))
        self._status_changed()

    def _exit(self, code: int, reason: str) -> None:
        if not self._done.done():
            log.info("leaving with exit code %d: %s", code, reason)
            self._done.set_result(code)

    # --- the status --------------------------------------------------------------------------------------------------

    def _ranks_changed(self) -> None:
        self._converge()
        self._status_changed()
        if self._stop_requested.is_set() and not self._stop_completed and not self._any_alive():
            self._stop_completed = True
            # Deposit now: what follows may last longer than Slurm allows, and SIGKILL must not lose the memory.
            self._spawn(self._deposit_memory(), vital=False)

    async def _deposit_memory(self) -> None:
        await self._handover.deposit(self._checkpoints, self._newest_generation)

    def _store_changed(self) -> None:
        """Shards, commits or steps have changed, which happens at every step. Report it after a delay, except the first
        step of a generation, and what follows the last one: the gang waits for these."""
        ranks_with_steps = frozenset(self._checkpoints.progress())
        first_step = ranks_with_steps != self._ranks_with_steps
        if first_step or self._rank_statuses.exit_withheld or self._checkpoints.rank_reports.any_stopped():
            self._ranks_with_steps = ranks_with_steps
            self._status_changed()
        elif self._stream is not None:
            self._stream.schedule_status(within=_STEP_STATUS_DELAY_S)

    def _status_changed(self) -> None:
        if self._stream is not None:
            self._stream.schedule_status()

    def _status(self) -> AgentStatus:
        store = self._supervisor.store
        listening = store if store is not None and store.port else None
        order = self._order
        done = order is not None and reconcile.is_carried_out(self._local_state(), order)
        return AgentStatus(
            fenced_generation=self._fenced_generation,
            ranks=self._rank_statuses.read(self._fenced_generation, self._killed_generation),
            shards=self._checkpoints.shards(),
            parities=self._checkpoints.parities(),
            committed=self._checkpoints.committed(),
            store_port=listening.port if listening is not None else 0,
            store_generation=listening.generation if listening is not None else 0,
            warm=self._supervisor.ready_zygotes(),
            heard_ms=self._peer_monitor.heard_ms(),
            answered_ms=self._service.answered_ms(),
            flushed_serial=self._last_flush[0],
            flush_error=self._last_flush[1],
            order_serial=order.serial if order is not None and done else 0,
            failure=self._failure or self._supervisor.failure,
            notice=self._sigterm_notice,
            pool=self._pool.answers(),
            store_reserved=listening is not None and not listening.hosted,
            stacks_generation=self._stacks.generation,
            disagreement=self._checkpoints.disagreement(),
            node_check=self._node_check.status,
            transfers=self._checkpoints.transfers(),
            snapshot_cost=self._checkpoints.snapshot_cost(),
            no_slots=self._checkpoints.no_slots,
            flushed_version=self._flushed_version,
            corrupt_copies=self._checkpoints.corrupt_copies(),
            restore=self._checkpoints.restore_progress(),
            flush_progress=self._checkpoints.flush_progress(),
        )

    def _attach(self, port: int) -> CoordinatorStream:
        settings = self._settings
        handlers = StreamHandlers(
            hello=partial(self._hello, port),
            status=self._status,
            met=self._versions.meet_coordinator,
            attached=self._peer_monitor.repeat_accusations,
            certificate_due=lambda: self._key is not None and self._key.renewal_due,
            certificate=self._use_certificate,
            order=self._handle_order,
            probe=self._handle_probe,
            measure=self._handle_measure,
            dismissed=self._dismissed,
        )
        return CoordinatorStream(settings.coordinator, settings.credentials, handlers, settings.trust)

    def _hello(self, port: int) -> AgentHello:
        settings = self._settings
        return AgentHello(
            gang_id=settings.identity.gang,
            slurm_job_id=settings.slurm_job_id,
            slurm_restart_count=settings.slurm_restart_count,
            node=settings.identity.node,
            incarnation=settings.identity.incarnation,
            peer_address=f"{settings.host}:{port}",
            spec=settings.spec,
            batch_host=settings.batch_host,
            pool_serial=settings.pool_serial,
            public_key=self._key.public_key if self._key else b"",
            certified_by=self._key.certified_by if self._key else b"",
            nvlink_domain=self._hardware.nvlink_domain,
            release=self._versions.release,
        )

    def _use_certificate(self, message: Certificate) -> None:
        """From now on, prove this agent's name to others, and ask them for theirs."""
        if self._key is not None:
            self._key.use(message.certificate)
            self._channels.use_authorities(message.authorities)

    # --- silence of others -------------------------------------------------------------------------------------------

    def _coordinator_contact(self) -> float:
        return self._stream.last_contact if self._stream is not None else float("-inf")

    def _suspicion_changed(self, suspicion: bool) -> None:
        if self._stream is not None:
            self._stream.set_suspicion(suspicion)

    def _accuse(self, accusation: Any) -> None:
        self._send(AgentMessage(accusation=accusation))

    def _self_fence(self, why: str) -> None:
        """Kill this node's ranks without waiting for an order."""
        alive = [rank.generation for rank in self._supervisor.ranks() if rank.alive]
        if alive and max(alive) > self._killed_generation:
            log.error("killing all ranks: %s", why)
            self._killed_generation = max(alive)
            self._supervisor.kill_ranks(self._killed_generation)
            self._ranks_changed()

    def _handle_probe(self, order: ProbeOrder) -> None:
        self._spawn(self._probe(order), vital=False)

    async def _probe(self, order: ProbeOrder) -> None:
        try:
            server = call_binding.name_of_agent(self._settings.identity.gang, order.node)
            probed = Probed(order.peer_address, order.node, server)
            reachability = await probe(
                probed, self._settings.credentials, order.deadline_ms / 1000, self._channels.trust, self._names
            )
        except (IdentityUnavailable, NameUnresolved) as error:
            log.error("can't probe %s: %s", order.node, error)
            return
        if reachability is Reachability.NO_ANSWER and self._peer_monitor.closed_by_peer(order.node):
            reachability = Reachability.REFUSED  # the peer's kernel closed our connection before it stopped answering
        result = ProbeResult(
            probe_id=order.probe_id,
            node=order.node,
            answered=reachability is None,
            silence=_SILENCE_BY_REACHABILITY[reachability],
            step=max(self._checkpoints.progress().values(), default=0),
        )
        self._send(AgentMessage(probe_result=result))

    def _handle_measure(self, order: MeasureOrder) -> None:
        self._spawn(self._measure(order), vital=False)

    async def _measure(self, order: MeasureOrder) -> None:
        measured = await self._link_meter.measure(order, self._channels.stub_for)
        self._send(AgentMessage(link_measurement=measured))

    def _send(self, message: AgentMessage) -> None:
        if self._stream is not None:
            self._stream.send(message)

    def _on_misfit(self, why: str) -> None:
        """Another process does not fit this one: run no ranks from now on. The coordinator decides what becomes of the
        gang."""
        if not self._misfit:
            self._misfit = why
            self._failure = self._failure or why
            log.error("%s", why)
            self._self_fence(why)
            self._status_changed()

    # --- leaving -----------------------------------------------------------------------------------------------------

    def _dismissed(self, reason: str) -> None:
        self._exit(0, f"dismissed by the coordinator: {reason}")

    def _request_stop(self, reason: str) -> None:
        """Ask the ranks, once, to finish their step and exit."""
        if self._stop_requested.is_set():
            return
        self._stop_requested.set()
        self._checkpoints.stop_ranks(reason)
        if self._settings.spec.stop_signal:
            self._supervisor.signal_ranks(self._settings.spec.stop_signal)

    async def _wind_down_without_order(self) -> None:
        try:
            async with asyncio.timeout(self._settings.notice_s):
                await self._stop_requested.wait()
        except TimeoutError:
            await self._wind_down()

    async def _wind_down(self) -> None:
        self._failure = self._sigterm_notice
        self._status_changed()
        self._request_stop(self._failure)
        spec = self._settings.spec
        if spec.stop_signal or spec.memory_checkpoint:
            await self._wait_for_ranks(_RANK_EXIT_TIMEOUT_S)
        self._self_fence(self._failure)
        await self._wait_for_ranks(_RANK_EXIT_TIMEOUT_S)
        self._keep_memory = True  # no order has written the memory or ended the job
        self._exit(_EXIT_SIGTERM, self._failure)

    def _any_alive(self) -> bool:
        return any(rank.alive for rank in self._supervisor.ranks())

    async def _wait_for_ranks(self, timeout: float) -> None:
        deadline = asyncio.get_running_loop().time() + timeout
        while asyncio.get_running_loop().time() < deadline:
            if not self._any_alive():
                return
            await asyncio.sleep(_POLL_S)

    def _spawn(self, work: Coroutine[Any, Any, Any], *, vital: bool = True) -> asyncio.Task[Any]:
        """Start a task. If a `vital` task fails, that is a bug: it ends the agent and its ranks."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._task_ended, vital))
        return task

    def _task_ended(self, vital: bool, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not vital:
            log.error("%s", error, exc_info=error)
        elif not self._done.done():
            self._done.set_exception(error)


def _is_pure_data_parallel(spec: JobSpec) -> bool:
    degrees = (spec.tensor_parallel, spec.context_parallel, spec.expert_parallel, spec.pipeline_parallel)
    return max(degrees) <= 1


def _describe(order: Order) -> str:
    duty = Duty.Name(order.duty).removeprefix("DUTY_")
    return f"{duty} {order.generation}" + (f", {order.reason}" if order.reason else "")
