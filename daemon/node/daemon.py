"""The whole node daemon: sensors, the stream to the coordinator, and answers to probes."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc.aio
from prometheus_client import CollectorRegistry

from muster import __version__, compatibility
from muster.daemon.host import clock
from muster.daemon.host.addresses import own_addresses
from muster.daemon.host.clock_steps import ClockSteps
from muster.daemon.host.name_resolution import NameResolver
from muster.daemon.metrics import textfile
from muster.daemon.metrics.metrics_access import MetricsAccess
from muster.daemon.metrics.metrics_server import MetricsServer
from muster.daemon.node import nvhcd_service
from muster.daemon.node.clock_offset import ClockOffset
from muster.daemon.node.coordinator_stream import NodeStream
from muster.daemon.node.hardware_inventory import HardwareInventory
from muster.daemon.node.kept_memory.kept_memory_store import KeptMemoryStore
from muster.daemon.node.kept_memory.memory_service import NO_METRICS, MemoryService
from muster.daemon.node.kept_memory.systemd_fd_store import FdStore
from muster.daemon.node.node_metrics import NodeMetrics, NodeValues
from muster.daemon.node.own_verdict import OwnVerdict
from muster.daemon.node.port_reservation import ALL_ADDRESSES, STORED_PREFIX, PortReservation
from muster.daemon.node.requested_check import RequestedCheck
from muster.daemon.node.sensors import SENSORS
from muster.daemon.node.sensors.kmsg import KernelLogSensor
from muster.daemon.node.sensors.nvml import NvmlSensor
from muster.daemon.node.sensors.sensor import Observation, SensorPaths, run_sensor
from muster.daemon.node.signal_windows import SignalRule, SignalWindows
from muster.daemon.node.watchdog import report_alive
from muster.daemon.transport import call_binding, job_limits
from muster.daemon.transport.authorization import Rights
from muster.daemon.transport.channel import ListenError, bind, make_server
from muster.daemon.transport.identity import Credentials
from muster.daemon.transport.reachability import ProbeService
from muster.daemon.transport.server_limits import NODE_DAEMON, ServerLimits
from muster.daemon.transport.site_config import split_address, split_addresses
from muster.daemon.transport.tls import ServerKey, Trust
from muster.v1 import common_pb2_grpc, node_pb2
from muster.v1.memory_pb2 import ReportRanks

# Seconds for probes that are in progress when the daemon stops.
PROBE_GRACE_S = 0.2
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Systemd:
    """What systemd gave this process: the notification socket, the stored descriptors by name, and the seconds of its
    watchdog (0: none)."""

    notify: str = ""
    stored: Mapping[str, int] = field(default_factory=dict)
    watchdog_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What a node daemon is started with.

    coordinator: "host:port", or several with commas.
    listen: "host:port"; port 0: any free port.
    memory: the socket for memory that is kept over a requeue; None: keep none.
    nvhcd: the socket on which NVRx asks for the verdict on this node; None: none.
    check_python: the interpreter of the checks that the coordinator asks for; empty: make none.
    metrics: where metrics are served, and to whom; None: nowhere.
    metrics_textfile: the folder of node_exporter's text files, for metrics; None: no file is written.
    trust: whom to take for a coordinator; None: all connections are plain text.
    """

    node: str
    coordinator: str
    listen: str
    credentials: Credentials
    heartbeat_s: float = 5.0
    roots: SensorPaths = field(default_factory=SensorPaths)
    memory: Path | None = None
    nvhcd: Path | None = None
    check_python: str = ""
    systemd: Systemd = field(default_factory=Systemd)
    trust: Trust | None = None
    metrics: MetricsAccess | None = None
    metrics_textfile: Path | None = None


class NodeDaemon:
    """One node daemon: await `run` until it is cancelled."""

    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings
        self._names = NameResolver()
        self._incarnation = secrets.token_hex(8)
        self._port = 0
        store, stored = FdStore(settings.systemd.notify), settings.systemd.stored
        self._kept_memory = KeptMemoryStore(store)
        self._reservation = PortReservation(settings.listen, stored, store)
        self._key = ServerKey(call_binding.name_of_node_daemon(settings.node)) if settings.trust else None
        self._sensors = [make(settings.roots) for make in SENSORS]
        self._nvml = next(sensor for sensor in self._sensors if isinstance(sensor, NvmlSensor))
        self._kernel_log = next(sensor for sensor in self._sensors if isinstance(sensor, KernelLogSensor))
        self._hardware = HardwareInventory(settings.roots.host_root, self._nvml.gpus.current, self._hardware_changed)
        self._own_verdict = OwnVerdict()
        self._clock_offset = ClockOffset()
        self._requested_check = RequestedCheck(settings.check_python)
        self._stream = NodeStream(
            settings.coordinator,
            settings.credentials,
            self._hello,
            settings.heartbeat_s,
            self._kept_memory,
            trust=settings.trust,
            key=self._key,
            on_rules=self._use_rules,
            own_verdict=self._own_verdict,
            clock_offset=self._clock_offset,
            requested_check=self._requested_check,
            hardware=lambda: self._hardware.current,
            driver_lines=self._driver_lines,
        )
        self._registry = CollectorRegistry()
        self._metrics = NodeMetrics(self._registry, self._values)
        self._windows = SignalWindows(self._report)

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            muster.daemon.transport.channel.ListenError: the address is taken.
        """
        # First: release old memory, so that nothing is kept too long however this daemon ends.
        memory = self._make_memory_service()
        with closing(self._reservation):
            await asyncio.to_thread(self._reservation.take)
            await self._serve(memory)

    async def _serve(self, memory: MemoryService | None) -> None:
        server = make_probe_server(
            self._settings.credentials,
            self._settings.node,
            self._incarnation,
            share_port=self._reservation.is_wanted,
        )
        self._port = bind(server, self._settings.listen, self._key.certificates() if self._key else None)
        await server.start()
        metrics = self._metrics_server()
        _log.info("node %s, answers probes on port %d", self._settings.node, self._port)
        try:
            async with asyncio.TaskGroup() as tasks:
                for sensor in self._sensors:
                    tasks.create_task(run_sensor(sensor, self._windows.report))
                tasks.create_task(self._hardware.run())
                tasks.create_task(self._stream.run())
                tasks.create_task(self._requested_check.run())
                tasks.create_task(self._reservation.run())
                tasks.create_task(ClockSteps().run())
                tasks.create_task(self._clock_offset.run(self._windows.report))
                if self._settings.metrics_textfile is not None:
                    path = self._settings.metrics_textfile / "musterd.prom"
                    tasks.create_task(textfile.keep_written(path, self._registry))
                if memory is not None:
                    tasks.create_task(memory.run())
                if self._settings.nvhcd is not None:
                    tasks.create_task(nvhcd_service.serve(self._settings.nvhcd, self._own_verdict.current))
                tasks.create_task(report_alive(self._settings.systemd.notify, self._settings.systemd.watchdog_s))
        finally:
            if metrics is not None:
                await asyncio.to_thread(metrics.stop)
            await server.stop(PROBE_GRACE_S)

    def _metrics_server(self) -> MetricsServer | None:
        """Serve metrics, if they are wanted. A process of a user may have taken their port while this daemon was
        restarted, and the health of the node matters more."""
        if self._settings.metrics is None:
            return None
        try:
            server = MetricsServer(self._settings.metrics, self._registry)
        except ListenError as error:
            _log.error("%s: this daemon goes on without them until its next start", error)
            return None
        server.start()
        return server

    def _make_memory_service(self) -> MemoryService | None:
        """Recover what an earlier daemon has kept. If no memory is to be kept, release all of it."""
        path, given = self._settings.memory, self._settings.systemd.stored
        stored = {name: fd for name, fd in given.items() if not name.startswith(STORED_PREFIX)}
        service = None
        if path:
            service = MemoryService(
                path,
                self._kept_memory,
                verdict=lambda: self._own_verdict.current().message(),
                counters=lambda: self._nvml.counters.message(clock.monotonic()),
                hardware=lambda: self._hardware.current,
                gpu_use=self._nvml.counters.use,
                report_ranks=self._take_ranks,
            )
        self._kept_memory.recover(stored, service.prolog_job() if service else None)
        self._kept_memory.release_expired(clock.monotonic())
        return service

    def _hardware_changed(self) -> None:
        self._stream.hardware_changed()

    def _take_ranks(self, uid: int, report: ReportRanks) -> str:
        shown = self._settings.metrics is not None or self._settings.metrics_textfile is not None
        return self._metrics.ranks.take(uid, report) if shown else NO_METRICS

    def _report(self, observation: Observation) -> None:
        self._metrics.note(observation, self._gpus())
        self._stream.report(observation)

    def _gpus(self) -> dict[str, int]:
        return {gpu.device: gpu.index for gpu in self._nvml.gpus.current()}

    def _driver_lines(self) -> node_pb2.DriverLines:
        count, newest = sum(self._kernel_log.driver_lines.values()), self._kernel_log.newest_driver_line
        return node_pb2.DriverLines(count=count, newest=newest[: job_limits.MAX_DRIVER_LINE_CHARS])

    def _values(self) -> NodeValues:
        return NodeValues(
            answered_at=self._stream.answered_at,
            waiting=self._stream.waiting,
            kept_bytes=self._kept_memory.kept_bytes(),
            lines_not_understood=self._kernel_log.not_understood,
            driver_lines=self._kernel_log.driver_lines,
            gpus=self._gpus(),
            lasting=self._windows.lasting,
        )

    def _use_rules(self, messages: Iterable[node_pb2.SignalRule]) -> None:
        self._windows.use(map(SignalRule.from_message, messages))

    async def _hello(self) -> node_pb2.NodeHello:
        """Raises OSError: the coordinator's address can't be resolved or routed to."""
        listen, _ = split_address(self._settings.listen)
        host = (
            listen
            if listen not in ALL_ADDRESSES
            else await own_address(split_addresses(self._settings.coordinator)[0], self._names)
        )
        return node_pb2.NodeHello(
            node=self._settings.node,
            boot_id=self._settings.roots.boot_id.read_text().strip(),
            probe_address=f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}",
            version=__version__,
            incarnation=self._incarnation,
            addresses=own_addresses(),
            public_key=self._key.public_key if self._key else b"",
            certified_by=self._key.certified_by if self._key else b"",
            hardware=self._hardware.current,
            release=compatibility.to_wire(compatibility.own_side(f"musterd on {self._settings.node}")),
        )


async def own_address(peer: str, names: NameResolver) -> str:
    """This host's IP address on the route to `peer` ("host:port"), without DNS: other processes reach this host there.

    Raises:
        OSError: `peer` has no address, or there is no route to it.
    """
    host, port = split_address(peer)
    await names.ask(host)  # before a look-up that could hold a thread for half a minute
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # a datagram socket: nothing is sent
        return str(probe.getsockname()[0])


def make_probe_server(
    credentials: Credentials,
    node: str,
    incarnation: str,
    *,
    share_port: bool = False,
    limits: ServerLimits = NODE_DAEMON,
) -> grpc.aio.Server:
    """The server of a node daemon, which answers probes. It listens nowhere yet. `share_port`: beside a reservation of
    its port."""
    refuse = partial(Rights(frozenset()).refusal, names_job=False)
    names = frozenset({call_binding.name_of_node_daemon(node)})
    server = make_server(credentials, limits, server_names=lambda: names, refuse=refuse, share_port=share_port)
    common_pb2_grpc.add_ProbeServiceServicer_to_server(ProbeService(node, "musterd", incarnation), server)
    return server
