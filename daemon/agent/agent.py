"""muster-agent on one node: puts its parts together, and hands the coordinator's orders to those whom they concern."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

import grpc.aio

from muster.checkpoint.durable.locations import is_url
from muster.checkpoint.store.checkpoint_service import CheckpointService
from muster.checkpoint.store.streams.socket_transport import SocketTransport
from muster.checkpoint.store.streams.stream_sockets import STREAM_BACKLOG, StreamSecurity
from muster.daemon.agent import listening, rank_metrics
from muster.daemon.agent.agent_settings import AgentSettings
from muster.daemon.agent.coordinator_stream import CoordinatorStream, StreamHandlers
from muster.daemon.agent.ending import Ending, Lifetime, WindDown
from muster.daemon.agent.failure_detector.peer_monitor import MonitorCallbacks, PeerMonitor
from muster.daemon.agent.failure_detector.peer_prober import PeerProber
from muster.daemon.agent.failure_detector.peers import PeerChannels, PeerService, make_agent_server
from muster.daemon.agent.failure_detector.version_check import VersionCheck
from muster.daemon.agent.launch.output_target import OutputTarget
from muster.daemon.agent.launch.rank_output import RankOutput
from muster.daemon.agent.link_meter import LinkMeter
from muster.daemon.agent.memory_handover import MemoryHandover
from muster.daemon.agent.ordered_flush import OrderedFlush
from muster.daemon.agent.ordered_ranks import OrderedRanks
from muster.daemon.agent.own_hardware import OwnHardware
from muster.daemon.agent.own_node_check import OwnNodeCheck
from muster.daemon.agent.own_status import OwnStatus, RankStatuses
from muster.daemon.agent.pool_jobs import PoolRequests
from muster.daemon.agent.ranks.imports.job_imports import KeptImports
from muster.daemon.agent.ranks.rank_idleness import RankIdleness
from muster.daemon.agent.ranks.rank_places import RankPlaces
from muster.daemon.agent.ranks.rank_supervisor import RankSupervisor
from muster.daemon.agent.ranks.stack_dumps import StackDumps
from muster.daemon.agent.ranks.zygote_handle import CannotStart, interpreter_of
from muster.daemon.agent.training import hardware_file
from muster.daemon.agent.training.live_numbers import LiveNumbers, LiveRun, live_run
from muster.daemon.agent.training.log_limit import LogLimit
from muster.daemon.agent.training.node_use import NodeUseRecord
from muster.daemon.agent.training.training_record import TrainingRecord
from muster.daemon.host.worker_threads import run_in_own_thread
from muster.daemon.preflight import inventory
from muster.daemon.transport import call_binding
from muster.daemon.transport.server_limits import agent_limits
from muster.daemon.transport.site_config import split_address
from muster.daemon.transport.tls import ServerKey, pinned_context
from muster.slurm.client.backends.commands import CliSlurm
from muster.v1.agent_pb2 import (
    AgentHello,
    AgentMessage,
    Certificate,
    Duty,
    MeasureOrder,
    Order,
    ProbeOrder,
)
from muster.v1.common_pb2 import JobSpec
from muster.v1.memory_pb2 import ReportRanks

log = logging.getLogger(__name__)

_STEP_STATUS_DELAY_S = 0.25
_CLOSE_TIMEOUT_S = 1.0
_HANDOVER_TIMEOUT_S = 3.0


class Agent:
    """One agent, from `run` to its exit code.

    wind_down: takes the signal SIGTERM.
    """

    def __init__(self, settings: AgentSettings) -> None:
        identity, spec, job = settings.identity, settings.spec, settings.job
        self._settings = settings
        self._swapped_generation = 0
        # Where srun would start the ranks, the script's spares are known. Their imports wait until ranks start: the
        # nodes of these may read from the same file system.
        is_spare = spec.ranks_of_srun and bool(spec.own_nodes) and identity.node not in spec.own_nodes
        self._imports_later = is_spare and not spec.preflight and not settings.pool_serial
        self._lifetime = lifetime = Lifetime()
        self._stream = stream = CoordinatorStream(settings.coordinator, settings.credentials, settings.trust)
        self._key = ServerKey(call_binding.name_of_agent(identity.gang, identity.node)) if settings.trust else None
        self._channels = PeerChannels(settings.credentials, identity.gang, plain_text=settings.trust is None)
        self._checkpoints = _checkpoint_service(settings, self._channels, self._on_store_changed)
        self._handover = MemoryHandover(
            identity.gang, identity.node, settings.slurm_job_id, settings.memory_socket, self._checkpoints
        )
        self._pool = PoolRequests(settings.pool, CliSlurm(), stream.schedule_status)
        self._hardware = OwnHardware(settings.hardware_socket, settings.environ)
        # The ranks.
        places = RankPlaces(identity.node, spec, settings.environ, lambda: self._hardware.current)
        self._supervisor = RankSupervisor(
            job,
            self._checkpoints.rank_socket,
            self._on_ranks_changed,
            lambda: self._node_check.pids | settings.other_children,
            places=places,
        )
        self._output = (
            RankOutput(job.run_dir, job.gang, job.node, OutputTarget(spec, job.node, settings.shown))
            if settings.shown is not None
            else None
        )
        self._ranks = OrderedRanks(
            identity.node, self._supervisor, self._checkpoints.fence, lifetime, stream.schedule_status
        )
        self._flush = OrderedFlush(spec, self._checkpoints, lifetime, stream.schedule_status)
        self.wind_down = WindDown(
            spec,
            settings.notice_s,
            self._ranks.self_fence,
            self._supervisor,
            self._checkpoints.stop_ranks,
            self._handover.deposit,
            lifetime,
            stream.schedule_status,
        )
        # A node that lacks something for the job is said to lack that, and not to have failed a check.
        preflight = spec.preflight and not settings.failure
        self._node_check = OwnNodeCheck(
            preflight, job.zygote_spec, stream.schedule_status, self._supervisor.broken_import
        )
        self._stacks = StackDumps(job.run_dir, job.gang)
        self._idleness = RankIdleness(spec.hang_after_idle_s, self._supervisor.running_pids, stream.schedule_status)
        self._rank_statuses = RankStatuses(
            self._supervisor,
            self._checkpoints,
            self._idleness,
            self._stacks,
            # Smaller groups have collectives of their own. Pipelines also send from rank to rank, and the recorder may
            # count that with the collectives.
            ordered_collectives=_is_pure_data_parallel(spec),
        )
        self._log_limit = LogLimit(spec.run_dir, identity.gang, spec.log_limit_bytes, self._generation_of_rank_0)
        self._imports = KeptImports(
            job.run_dir,
            job.gang,
            self._supervisor.imports,
            has_rank_0=lambda: self._generation_of_rank_0() > 0,
            has_ranks=self._supervisor.any_alive,
        )
        self._training = TrainingRecord(
            job.run_dir,
            job.gang,
            identity.node,
            spec.nodes * spec.ranks_per_node,
            self._checkpoints.rank_samples,
            lambda: self._checkpoints.generation,
            stream.schedule_status,
        )
        self._live = LiveNumbers(
            _live_run(settings), lambda: self._training.status, lambda: self._generation_of_rank_0() > 0
        )
        self._use = NodeUseRecord(settings.hardware_socket, places.used_gpus, stream.schedule_status)
        # The other agents.
        self._versions = VersionCheck(identity.node, self._ranks.run_none)
        self._link_meter = LinkMeter(identity.gang, identity.node, split_address(settings.listen)[0], settings.ports)
        self._peer_service = PeerService(
            identity, self._checkpoints, lambda: self._ranks.order, self._link_meter.open_sink, self._versions
        )
        callbacks = MonitorCallbacks(
            lambda: stream.last_contact,
            stream.set_suspicion,
            lambda accusation: stream.send(AgentMessage(accusation=accusation)),
            self._ranks.self_fence,
            self._versions,
        )
        self._peer_monitor = PeerMonitor(identity, self._channels.open_link, callbacks)
        self._prober = PeerProber(
            identity.gang,
            settings.credentials,
            self._channels,
            self._peer_monitor.closed_by_peer,
            self._checkpoints.progress,
        )

    async def run(self) -> int:
        """Serve until an EXIT order, a dismissal or SIGTERM ends the agent; return the exit code.

        Raises:
            muster.daemon.transport.channel.ListenError: no port is free for the agent.
        """
        if not self._imports_later:
            self._supervisor.start_zygotes()
        if self._output is not None:
            self._output.start()
        settings, spec, key = self._settings, self._settings.spec, self._key
        limits = agent_limits(spec.nodes + spec.spares + spec.pool_nodes)
        server = make_agent_server(settings.credentials, limits, settings.identity, self._peer_service)
        port = listening.listen(server, settings.listen, settings.ports, key.certificates if key else None)
        await server.start()
        # Reclaim before the first status: the gang's next generation starts from the shards in that status.
        await self._handover.reclaim()
        await self._hardware.refresh()
        self._lifetime.start(self._stream.run(self._stream_handlers(port)), vital=True)
        self._lifetime.start(self._peer_monitor.run(), vital=True)
        self._lifetime.start(self._node_check.run())
        self._lifetime.start(self._idleness.run())
        if settings.hardware_socket:
            self._lifetime.start(rank_metrics.keep_reporting(settings.hardware_socket, self._rank_report))
        self._lifetime.start(self._training.run())
        self._lifetime.start(self._use.run())
        self._lifetime.start(self._live.run())
        self._lifetime.start(self._keep_hardware())
        self._lifetime.start(self._log_limit.run())
        if settings.job.zygote_spec.learns:
            self._lifetime.start(self._imports.run())
        ending = Ending(exit_code=1)
        try:
            ending = await self._lifetime.ended
            return ending.exit_code
        finally:
            await self._close(server, ending)

    async def _keep_hardware(self) -> None:
        """Leave beside the logs what this node has, for the record of the run."""
        identity, run_dir = self._settings.identity, self._settings.spec.run_dir
        try:
            await run_in_own_thread(
                lambda: hardware_file.write(run_dir, identity.gang, identity.node, inventory.describe_node()),
                "muster-hardware",
            )
        except OSError as error:
            log.info("the record of this run lacks the hardware of this node: %s", error)

    @property
    def job_is_over(self) -> bool:
        """Whether the newest order says that the job is over for all nodes."""
        return self._ranks.order is not None and self._ranks.order.job_over

    def _rank_report(self) -> ReportRanks:
        ranks = list(self._supervisor.statuses(self._checkpoints.progress()))
        for rank in ranks:
            self._checkpoints.rank_reports.add_to(rank)
        logged = self._training.status.step if self._training.status is not None else 0
        return rank_metrics.report_of(self._settings.slurm_job_id, ranks, list(self._checkpoints.shards()), logged)

    async def _close(self, server: grpc.aio.Server, ending: Ending) -> None:
        # gRPC logs an error for each stream that a stop cuts.
        logging.getLogger("grpc").setLevel(logging.CRITICAL)
        self._lifetime.cancel_tasks()
        self._peer_monitor.stop()
        self._stacks.close()
        await self._supervisor.stop()
        if self._output is not None:
            self._output.note(self._supervisor.outcomes())
        last = self._handover.deposit() if ending.keep_memory else self._handover.withdraw()
        await _within(_HANDOVER_TIMEOUT_S, last)
        await _within(_CLOSE_TIMEOUT_S, self._training.close())
        # Behind what SIGKILL must not lose: this lasts for as long as somebody reads.
        if self._output is not None:
            await asyncio.to_thread(self._output.close)
        status = "FAILED" if ending.exit_code else "FINISHED"
        await self._live.close(status if ending.job_over else "")
        # The end of the process closes these as well, so none of them may delay the exit.
        for closing in (self._checkpoints.close(), self._channels.close(), server.stop(grace=None)):
            await _within(_CLOSE_TIMEOUT_S, closing)

    # --- the coordinator's stream ------------------------------------------------------------------------------------

    def _stream_handlers(self, port: int) -> StreamHandlers:
        status = OwnStatus(
            lacks=self._settings.failure,
            ranks=self._ranks,
            supervisor=self._supervisor,
            rank_statuses=self._rank_statuses,
            stacks=self._stacks,
            checkpoints=self._checkpoints,
            flush=self._flush,
            wind_down=self.wind_down,
            peer_monitor=self._peer_monitor,
            peer_service=self._peer_service,
            pool=self._pool,
            node_check=self._node_check,
            training=self._training,
            use=self._use,
        )
        return StreamHandlers(
            hello=partial(self._hello, port),
            status=status.read,
            met=self._versions.meet_coordinator,
            attached=self._peer_monitor.repeat_accusations,
            certificate_due=lambda: self._key is not None and self._key.renewal_due,
            certificate=self._use_certificate,
            order=self._handle_order,
            probe=lambda order: self._lifetime.start(self._probe(order)),
            measure=lambda order: self._lifetime.start(self._measure(order)),
            dismissed=lambda reason: self._lifetime.end(0, f"dismissed by the coordinator: {reason}"),
        )

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

    async def _probe(self, order: ProbeOrder) -> None:
        if result := await self._prober.probe(order):
            self._stream.send(AgentMessage(probe_result=result))

    async def _measure(self, order: MeasureOrder) -> None:
        measured = await self._link_meter.measure(order, self._channels.stub_for)
        self._stream.send(AgentMessage(link_measurement=measured))

    # --- orders and changes ------------------------------------------------------------------------------------------

    def _handle_order(self, order: Order) -> None:
        previous = self._ranks.order
        if previous is None or order.SerializeToString() != previous.SerializeToString():
            log.info("order %d: %s", order.serial, _describe(order))
        self._handover.meet_order(order.generation)
        if self._imports_later and order.generation:
            self._imports_later = False
            self._supervisor.start_zygotes()
        if order.duty == Duty.DUTY_FENCE and (previous is None or previous.duty != order.duty):
            self._lifetime.start(self._hardware.refresh())
        self._peer_monitor.apply_order(order)
        self._checkpoints.apply_order(order)
        self._flush.apply_order(order)
        for request in self._pool.new_requests(order.pool):
            self._lifetime.start(self._pool.submit(request))
        if self._output is not None:
            self._output.carried_by(order.output_node)
        self._ranks.follow(order)
        if order.keep_stacks and self._stacks.claim(order.generation):
            self._lifetime.start(self._write_stacks(order.generation))
        self._stop_ranks(order)
        if self._ranks.is_carried_out():
            self._stream.schedule_status()  # no later change reports that the order is carried out

    def _stop_ranks(self, order: Order) -> None:
        """Ask the ranks to finish their step, keep their state and exit, if the order wants that."""
        if order.stop:
            self.wind_down.request_stop(order.stop)
        elif order.planned_swap and order.generation > self._swapped_generation:
            self._swapped_generation = order.generation
            self._checkpoints.stop_ranks(order.planned_swap, order.generation)

    async def _write_stacks(self, generation: int) -> None:
        await self._stacks.write(generation, self._supervisor.pids(generation))
        self._stream.schedule_status()

    def _generation_of_rank_0(self) -> int:
        """The generation of which rank 0 runs here; 0: of none."""
        ranks = self._supervisor.ranks()
        return max((rank.generation for rank in ranks if rank.rank == 0 and rank.alive), default=0)

    def _on_ranks_changed(self) -> None:
        if self._output is not None:
            self._output.note(self._supervisor.outcomes())
        self._ranks.converge()
        self._stream.schedule_status()
        self.wind_down.on_ranks_changed()

    def _on_store_changed(self) -> None:
        """Shards, commits or steps have changed, which happens at every step. Report it after a delay, unless the gang
        waits for it."""
        self._stream.schedule_status(within=0.0 if self._rank_statuses.is_awaited() else _STEP_STATUS_DELAY_S)


def _checkpoint_service(
    settings: AgentSettings, channels: PeerChannels, changed: Callable[[], None]
) -> CheckpointService:
    """Listens for the streams of pieces, too. Raises ListenError: no port is free."""
    host, spec = split_address(settings.listen)[0], settings.spec
    security = StreamSecurity(*pinned_context()) if settings.trust and settings.encrypt_checkpoints else None
    return CheckpointService(
        settings.identity.gang,
        settings.identity.node,
        channels.stub_for,
        SocketTransport(listening.listen_for_streams(host, settings.ports, STREAM_BACKLOG), security),
        changed,
        "" if spec.memory_checkpoint else "job.toml says checkpoint.memory = false",
        uploads=is_url(spec.durable_dir),
    )


def _live_run(settings: AgentSettings) -> LiveRun | None:
    """What is logged while the job trains; None: nothing, or its ranks can't start either, which is said elsewhere."""
    spec, zygote = settings.spec, settings.job.zygote_spec
    try:
        interpreter = interpreter_of(zygote) if spec.live.tool else []
    except CannotStart:
        interpreter = []
    gang, job = settings.identity.gang, settings.slurm_job_id
    return live_run(spec, gang, job, interpreter, zygote.environment) if interpreter else None


async def _within(seconds: float, work: Awaitable[object]) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await work


def _is_pure_data_parallel(spec: JobSpec) -> bool:
    degrees = (spec.tensor_parallel, spec.context_parallel, spec.expert_parallel, spec.pipeline_parallel)
    return max(degrees) <= 1


def _describe(order: Order) -> str:
    duty = Duty.Name(order.duty).removeprefix("DUTY_")
    return f"{duty} {order.generation}" + (f", {order.reason}" if order.reason else "")
