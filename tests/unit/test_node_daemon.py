"""The node daemon against a real gRPC server on loopback."""

import asyncio
import io
import shutil
import signal
import socket
import sys
import tarfile
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from muster.daemon.agent import own_hardware
from muster.daemon.host import clock
from muster.daemon.host.name_resolution import NameResolver
from muster.daemon.metrics.metrics_access import MetricsAccess, MetricsToken
from muster.daemon.node.coordinator_stream import KeptGangs, NodeStream
from muster.daemon.node.daemon import NodeDaemon, NodeSettings, own_address
from muster.daemon.node.kept_memory.kept_memory_store import KeptMemoryStore
from muster.daemon.node.kept_memory.systemd_fd_store import FdStore
from muster.daemon.node.own_verdict import OwnVerdict, Verdict
from muster.daemon.node.requested_check import RequestedCheck
from muster.daemon.node.sensors.sensor import Observation, SensorPaths
from muster.daemon.node.stream_pauses import StreamTimeouts
from muster.daemon.preflight.check_result import Outcome
from muster.daemon.transport.channel import ListenError, bind, make_server, open_channel
from muster.daemon.transport.identity import Caller, SecretCredentials, current_caller
from muster.daemon.transport.node_hardware import nvlink_domain_of
from muster.daemon.transport.server_limits import COORDINATOR
from muster.slurm.hooks import healthcheck
from muster.slurm.hooks.node_verdict import Hook
from muster.slurm.image.nvml_stand_in import CONTROL_SUFFIX, ControlFile
from muster.slurm.testcluster.hardware.pretended_host import EIGHT_GPUS, tar_of
from muster.v1 import common_pb2_grpc, node_pb2_grpc
from muster.v1 import node_pb2 as pb
from muster.v1.common_pb2 import CheckOutcome, Hardware, PingRequest

FAST = StreamTimeouts(hello_timeout_s=20.0, answer_timeout_s=20.0, first_backoff_s=0.01, max_backoff_s=0.05)
IMPATIENT = StreamTimeouts(hello_timeout_s=0.5, answer_timeout_s=0.2, first_backoff_s=0.01, max_backoff_s=0.05)
LOST = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."


class Coordinator(node_pb2_grpc.NodeServiceServicer):
    """The coordinator's side, as the test wants it: what arrives is queued, what is answered can be chosen."""

    def __init__(self, credentials: SecretCredentials) -> None:
        self._credentials = credentials
        self._server: grpc.aio.Server | None = None
        self.port = 0
        self.heard: asyncio.Queue[pb.NodeMessage] = asyncio.Queue()
        self.ended: asyncio.Queue[str] = asyncio.Queue()
        self.callers: asyncio.Queue[Caller] = asyncio.Queue()
        self.term = 1
        self.heartbeat_s = self.return_within_s = 0.0
        self.over: list[pb.KeptGang] = []
        self.rules: list[pb.SignalRule] = []
        self.unfit: list[pb.UnfitSignals] = []
        self.verdict = self.check = ""
        self.mute = False
        self.refuse = ""

    async def Attach(
        self, request_iterator: AsyncIterator[pb.NodeMessage], context: Any
    ) -> AsyncIterator[pb.NodeOrder]:
        self.callers.put_nowait(current_caller())
        if self.refuse:
            await anext(request_iterator)  # as the coordinator does: a caller that still writes hears no reason
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, self.refuse)
        try:
            async for message in request_iterator:
                self.heard.put_nowait(message)
                if not self.mute:
                    seq = message.heartbeat.seq
                    yield pb.NodeOrder(
                        term=self.term, seq=seq, heartbeat_s=self.heartbeat_s, over=self.over,
                        return_within_s=self.return_within_s, rules=self.rules if message.HasField("hello") else (),
                        unfit=self.unfit if message.HasField("hello") else (),
                        verdict=self.verdict, verdict_reason="why", check=self.check,
                    )  # fmt: skip
        finally:
            self.ended.put_nowait("ended")

    async def start(self) -> None:
        self._server = make_server(self._credentials, COORDINATOR)
        node_pb2_grpc.add_NodeServiceServicer_to_server(self, self._server)
        self.port = bind(self._server, f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        if self._server:
            await self._server.stop(None)

    def forget(self) -> None:
        """Drop what was heard."""
        self.heard = asyncio.Queue()

    async def next(self, kind: str) -> pb.NodeMessage:
        """The next message of that kind; others are passed over."""
        async with asyncio.timeout(120):
            while (message := await self.heard.get()).WhichOneof("body") != kind:
                pass
        return message


@pytest.fixture
def credentials(tmp_path: Path) -> SecretCredentials:
    return SecretCredentials.create(tmp_path / "secret")


@pytest.fixture
async def coordinator(credentials: SecretCredentials) -> AsyncIterator[Coordinator]:
    coordinator = Coordinator(credentials)
    await coordinator.start()
    yield coordinator
    await coordinator.stop()


class Running:
    """Something with `run()`, running."""

    def __init__(self, what: NodeStream | NodeDaemon | RequestedCheck) -> None:
        self.task = asyncio.ensure_future(what.run())

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        ended = await asyncio.gather(self.task, return_exceptions=True)
        assert isinstance(ended[0], asyncio.CancelledError), ended


async def _hello() -> pb.NodeHello:
    return pb.NodeHello(node="n1")


def _attachment(
    coordinator: Coordinator,
    credentials: SecretCredentials,
    heartbeat_s: float = 60.0,
    patience: StreamTimeouts = FAST,
    memory: KeptGangs | None = None,
    addresses: Callable[[], tuple[str, ...]] | None = None,
    on_rules: Callable[[Iterable[pb.SignalRule]], None] = lambda _: None,
    own_verdict: OwnVerdict | None = None,
    requested_check: RequestedCheck | None = None,
    hardware: Callable[[], Hardware] = Hardware,
) -> NodeStream:
    return NodeStream(
        f"127.0.0.1:{coordinator.port}",
        credentials,
        _hello,
        heartbeat_s,
        memory or KeptMemoryStore(FdStore("")),
        patience,
        addresses or _no_address,
        on_rules=on_rules,
        own_verdict=own_verdict,
        requested_check=requested_check,
        hardware=hardware,
    )


def _no_address() -> tuple[str, ...]:
    """As `_hello` says."""
    return ()


def _seen(code: int) -> Observation:
    return Observation("xid", code, "0000:3b:00", f"Xid {code}", 1.5)


async def test_hello_first_then_heartbeats(coordinator: Coordinator, credentials: SecretCredentials) -> None:
    async with Running(_attachment(coordinator, credentials, 0.02)):
        assert (await coordinator.heard.get()).hello.node == "n1"
        assert [(await coordinator.next("heartbeat")).heartbeat.seq for _ in range(3)] == [1, 2, 3]
    async with asyncio.timeout(120):
        assert await coordinator.ended.get()


async def test_what_the_node_has_is_sent_again_when_it_changes(
    coordinator: Coordinator, credentials: SecretCredentials
) -> None:
    now = [Hardware(), Hardware(numa_nodes=[0]), Hardware(numa_nodes=[0, 1])]
    stream = _attachment(coordinator, credentials, hardware=lambda: now[0])
    async with Running(stream):
        assert not (await coordinator.next("hello")).hello.HasField("hardware")
        await coordinator.next("heartbeat")
        for _ in range(2):
            now.pop(0)
            stream.hardware_changed()
            assert (await coordinator.next("hardware")).hardware == now[0]
        stream.hardware_changed()  # without a change
        stream.report(_seen(1))
        assert (await coordinator.heard.get()).WhichOneof("body") == "signal"


async def test_a_node_whose_addresses_change_attaches_again(
    coordinator: Coordinator, credentials: SecretCredentials
) -> None:
    now: list[tuple[str, ...]] = [()]
    async with Running(_attachment(coordinator, credentials, 0.02, addresses=lambda: now[0])):
        await coordinator.next("hello")
        await coordinator.next("heartbeat")
        now[0] = ("192.0.2.7",)
        await coordinator.next("hello")
        now[0] = ()
        await coordinator.next("heartbeat")


class Shelf:
    """Memory of two gangs that is kept on a node."""

    def __init__(self) -> None:
        self.gangs = [("g", 3), ("h", 1)]

    def kept(self) -> list[tuple[str, int]]:
        return self.gangs

    def mark_obsolete(self, gang: str, generation: int) -> None:
        self.gangs = [one for one in self.gangs if one != (gang, generation)]


async def test_memory_that_is_kept_is_told_of_until_it_is_wanted_no_more(
    coordinator: Coordinator, credentials: SecretCredentials
) -> None:
    coordinator.over = [pb.KeptGang(gang_id="g", generation=3)]
    async with Running(_attachment(coordinator, credentials, 0.02, memory=Shelf())):
        first = (await coordinator.next("heartbeat")).heartbeat
        for _ in range(2):
            last = (await coordinator.next("heartbeat")).heartbeat
    assert "h" in [one.gang_id for one in first.kept]
    assert [(one.gang_id, one.generation) for one in last.kept] == [("h", 1)]


async def test_a_check_that_the_coordinator_asks_for_is_made_once_and_told_until_it_asks_no_more(
    coordinator: Coordinator, credentials: SecretCredentials
) -> None:
    check = RequestedCheck(sys.executable, driver_gpus=0)
    async with Running(_attachment(coordinator, credentials, 0.02, requested_check=check)), Running(check):
        assert not (await coordinator.next("heartbeat")).heartbeat.HasField("checked")
        coordinator.check = "verdict 1"
        told = [await _checked(coordinator, "verdict 1") for _ in range(2)]
        assert told[0] == told[1]
        assert told[0].check.outcome == CheckOutcome.CHECK_OUTCOME_PASSED
        coordinator.check = "verdict 2"
        again = await _checked(coordinator, "verdict 2")
        assert again.check.outcome == CheckOutcome.CHECK_OUTCOME_PASSED
        coordinator.check = ""
        async with asyncio.timeout(120):
            while (await coordinator.next("heartbeat")).heartbeat.HasField("checked"):
                pass


async def _checked(coordinator: Coordinator, request: str) -> pb.RequestedCheck:
    """The next report of this check."""
    async with asyncio.timeout(120):
        while (checked := (await coordinator.next("heartbeat")).heartbeat.checked).request != request:
            pass
    return checked


@pytest.mark.parametrize(
    ("interpreter", "driver_gpus", "reason"),
    [
        (sys.executable, 8, "the GPUs were not checked: the interpreter has no PyTorch with CUDA"),
        ("/no/python3 -s", 0, "the node check can't be started: No such file or directory"),
    ],
)
async def test_a_check_that_misses_the_hardware_has_failed(interpreter: str, driver_gpus: int, reason: str) -> None:
    check = RequestedCheck(interpreter, driver_gpus)
    result = await check.make()
    assert (result.outcome, result.reason) == (Outcome.FAILED, reason)


async def test_the_coordinators_rules_arrive_with_its_first_answer(
    coordinator: Coordinator, credentials: SecretCredentials
) -> None:
    coordinator.rules = [pb.SignalRule(kind="gpu-throttle", code=64, share=0.2, window_s=120, clear_s=600)]
    told: list[list[pb.SignalRule]] = []
    stream = _attachment(coordinator, credentials, 0.02, on_rules=lambda rules: told.append(list(rules)))
    async with Running(stream):
        for _ in range(3):
            await coordinator.next("heartbeat")
    assert told == [coordinator.rules]


async def test_slurms_hooks_hear_of_a_fatal_signal_before_the_coordinator_has_judged_it(
    coordinator: Coordinator, credentials: SecretCredentials
) -> None:
    own = OwnVerdict()
    coordinator.unfit = [pb.UnfitSignals(kind="xid", codes=[79])]
    stream = _attachment(coordinator, credentials, 0.02, own_verdict=own)
    async with Running(stream):
        for _ in range(2):
            await coordinator.next("heartbeat")
        coordinator.mute = True
        stream.report(_seen(79))
        assert own.current().name == "UNFIT"


async def test_slurms_hooks_hear_the_coordinators_verdict(
    coordinator: Coordinator, credentials: SecretCredentials
) -> None:
    own = OwnVerdict()
    coordinator.verdict = "RETURNING"
    async with Running(_attachment(coordinator, credentials, 0.02, own_verdict=own)):
        for _ in range(2):
            await coordinator.next("heartbeat")
        assert own.current() == Verdict("RETURNING", "why")


async def test_the_coordinator_sets_the_pace(coordinator: Coordinator, credentials: SecretCredentials) -> None:
    coordinator.heartbeat_s = 0.02
    async with Running(_attachment(coordinator, credentials, 3600.0)):
        assert [(await coordinator.next("heartbeat")).heartbeat.seq for _ in range(3)] == [1, 2, 3]


async def test_a_signal_goes_between_heartbeats(coordinator: Coordinator, credentials: SecretCredentials) -> None:
    attachment = _attachment(coordinator, credentials)
    async with Running(attachment):
        await coordinator.next("heartbeat")
        attachment.report(_seen(79))
        sent = (await coordinator.next("signal")).signal
    assert sent == pb.Signal(kind="xid", code=79, device="0000:3b:00", text="Xid 79", observed_s=1.5)


async def test_no_heartbeat_is_sent_before_the_last_one_is_answered(
    coordinator: Coordinator, credentials: SecretCredentials
) -> None:
    """A coordinator with too much to do would else read a signal after all the heartbeats that were sent before it."""
    attachment = _attachment(coordinator, credentials, 0.0001)
    async with Running(attachment):
        await coordinator.next("heartbeat")
        coordinator.mute = True
        attachment.report(_seen(0))
        await coordinator.next("signal")
        coordinator.forget()
        seen = []
        for code in range(1, 20):
            attachment.report(_seen(code))
            async with asyncio.timeout(120):
                seen.append((await coordinator.heard.get()).WhichOneof("body"))
    assert seen.count("heartbeat") <= 1


async def test_what_was_not_answered_is_sent_again_and_nothing_else(
    coordinator: Coordinator, credentials: SecretCredentials
) -> None:
    attachment = _attachment(coordinator, credentials, 0.02)
    async with Running(attachment):
        attachment.report(_seen(48))
        await coordinator.next("signal")
        await coordinator.next("heartbeat")
        await coordinator.next("heartbeat")  # the answers before it have arrived, or it would not be sent
        coordinator.mute = True
        attachment.report(_seen(79))
        await coordinator.next("signal")
        await coordinator.stop()
        coordinator.mute = False
        coordinator.forget()
        await coordinator.start()
        async with asyncio.timeout(120):
            again = [await coordinator.heard.get() for _ in range(4)]
    assert [message.WhichOneof("body") for message in again] == ["hello", "signal", "heartbeat", "heartbeat"]
    assert again[1].signal.code == 79


async def test_signals_wait_for_a_coordinator_that_is_away(credentials: SecretCredentials) -> None:
    coordinator = Coordinator(credentials)
    await coordinator.start()
    await coordinator.stop()
    attachment = _attachment(coordinator, credentials)
    async with Running(attachment):
        attachment.report(_seen(79))
        attachment.report(_seen(48))
        await coordinator.start()
        assert [(await coordinator.next("signal")).signal.code for _ in range(2)] == [79, 48]
    await coordinator.stop()


async def test_a_silent_coordinator_is_left_and_found_again(
    coordinator: Coordinator, credentials: SecretCredentials, caplog: pytest.LogCaptureFixture
) -> None:
    async with Running(_attachment(coordinator, credentials, 0.02, IMPATIENT)):
        await coordinator.next("heartbeat")
        coordinator.mute = True
        await coordinator.next("hello")  # the second one
        coordinator.mute = False
        await coordinator.next("heartbeat")
    assert "no answer for 0.22 s" in caplog.text


async def test_an_older_coordinator_is_not_believed(
    coordinator: Coordinator, credentials: SecretCredentials, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator.term = 5
    async with Running(_attachment(coordinator, credentials, 0.02)):
        await coordinator.next("heartbeat")
        await coordinator.next("heartbeat")
        coordinator.term = 4
        await coordinator.next("hello")
        await coordinator.next("hello")
        coordinator.term = 6
        await coordinator.next("hello")
        await coordinator.next("heartbeat")
    assert "answers with term 4, but term 5 was seen" in caplog.text


async def test_a_refusal_is_told_once_and_tried_again(
    coordinator: Coordinator, credentials: SecretCredentials, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator.refuse = "n1 has 10.0.0.1 in Slurm, this call comes from 127.0.0.1"
    async with Running(_attachment(coordinator, credentials)):
        for _ in range(4):
            async with asyncio.timeout(120):
                await coordinator.callers.get()
        coordinator.refuse = ""
        await coordinator.next("heartbeat")
    assert caplog.text.count("PERMISSION_DENIED: n1 has 10.0.0.1 in Slurm") == 1


async def test_a_node_of_a_large_site_returns_when_it_was_asked_to_and_at_once_with_a_signal(
    coordinator: Coordinator, credentials: SecretCredentials
) -> None:
    chosen, asked = [], asyncio.Event()

    def latest(_: float, high: float) -> float:
        if high > FAST.max_backoff_s:
            chosen.append(high)
            asked.set()
        return high

    coordinator.return_within_s = 7200.0
    attachment = _attachment(coordinator, credentials, 0.02, replace(FAST, uniform=latest, max_return_s=3600.0))
    async with Running(attachment):
        await coordinator.next("heartbeat")
        await coordinator.next("heartbeat")
        await coordinator.stop()
        coordinator.forget()
        await coordinator.start()
        async with asyncio.timeout(120):
            await asked.wait()
        assert coordinator.heard.empty()
        attachment.report(_seen(79))
        assert (await coordinator.next("signal")).signal.code == 79
    assert chosen == [3600.0]


async def test_nodes_take_more_time_to_return_while_a_coordinator_has_too_many_of_them(
    coordinator: Coordinator, credentials: SecretCredentials
) -> None:
    """If they came again at the same rate, a coordinator that is too slow for it would never have them all."""
    chosen, asked_four_times = [], asyncio.Event()

    def at_once(low: float, high: float) -> float:
        if high > IMPATIENT.max_backoff_s:
            chosen.append((low, high))
        if len(chosen) == 4:
            asked_four_times.set()
        return 0.0

    coordinator.return_within_s = 50.0
    patience = replace(IMPATIENT, uniform=at_once, crowded_s=0.1)
    async with Running(_attachment(coordinator, credentials, 0.02, patience)):
        await coordinator.next("heartbeat")
        coordinator.mute = True
        async with asyncio.timeout(120):
            await asked_four_times.wait()
    assert chosen == [(0.0, 50.0), (100.0, 100.0), (200.0, 200.0), (200.0, 200.0)]


def test_pauses_double_up_to_their_longest_with_jitter() -> None:
    pauses = StreamTimeouts().backoffs()
    for whole in (0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0):
        assert whole / 2 <= next(pauses) <= whole


# --- the whole daemon ------------------------------------------------------------------------------------------------


def _settings(coordinator: Coordinator, credentials: SecretCredentials, tmp_path: Path, listen: str) -> NodeSettings:
    (tmp_path / "kmsg").touch(mode=0o600)
    paths = SensorPaths(kmsg=tmp_path / "kmsg", host_root=tmp_path)
    paths.boot_id.parent.mkdir(parents=True, exist_ok=True)
    paths.boot_id.write_text("boot-1\n")
    return NodeSettings(
        node="n1",
        coordinator=f"127.0.0.1:{coordinator.port}",
        listen=listen,
        credentials=credentials,
        roots=paths,
    )


async def test_the_daemon_attaches_answers_probes_and_reports(
    coordinator: Coordinator, credentials: SecretCredentials, tmp_path: Path
) -> None:
    settings = _settings(coordinator, credentials, tmp_path, ":0")
    async with Running(NodeDaemon(settings)):
        hello = (await coordinator.next("hello")).hello
        assert (hello.node, hello.boot_id) == ("n1", "boot-1")
        assert hello.probe_address.startswith("127.0.0.1:")
        async with open_channel(hello.probe_address, credentials, server="musterd/n1") as channel:
            reply = await common_pb2_grpc.ProbeServiceStub(channel).Ping(PingRequest(nonce="42"))
        assert (reply.nonce, reply.node, reply.role, reply.incarnation) == ("42", "n1", "musterd", hello.incarnation)
        with (tmp_path / "kmsg").open("a") as file:
            file.write(f"3,1,2,-;{LOST}\n")
        sent = (await coordinator.next("signal")).signal
    assert (sent.kind, sent.code, sent.device, sent.text) == ("xid", 79, "0000:3b:00", LOST)


async def test_a_daemon_whose_port_of_metrics_is_taken_watches_its_node(
    coordinator: Coordinator, credentials: SecretCredentials, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A user may have taken it while the daemon was restarted."""
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("t" * 32)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        access = MetricsAccess("127.0.0.1", taken.getsockname()[1], MetricsToken(token))
        settings = replace(_settings(coordinator, credentials, tmp_path, ":0"), metrics=access)
        async with Running(NodeDaemon(settings)):
            assert (await coordinator.next("hello")).hello.node == "n1"
    assert "goes on without them" in caplog.text


async def test_the_daemon_tells_slurms_hooks_what_it_knows(
    coordinator: Coordinator, credentials: SecretCredentials, tmp_path: Path
) -> None:
    settings = replace(_settings(coordinator, credentials, tmp_path, ":0"), memory=tmp_path / "memory.sock")
    coordinator.unfit = [pb.UnfitSignals(kind="xid", codes=[79])]
    hook = Hook(str(settings.memory))
    async with Running(NodeDaemon(settings)):
        await coordinator.next("heartbeat")
        assert await asyncio.to_thread(healthcheck.check, hook) == 0
        coordinator.mute = True
        with (tmp_path / "kmsg").open("a") as file:
            file.write(f"3,1,2,-;{LOST}\n")
        await coordinator.next("signal")
        assert await asyncio.to_thread(healthcheck.check, hook) == 1


async def test_a_gpu_that_throttles_is_reported_by_the_coordinators_rule(
    coordinator: Coordinator, credentials: SecretCredentials, tmp_path: Path, nvml_library: Path
) -> None:
    library = Path(shutil.copy(nvml_library, tmp_path))
    driver = Path(f"{library}{CONTROL_SUFFIX}")
    gpus = ControlFile.of_healthy_gpus(8)
    gpus.gpus[2]["reasons"] = "0x48"
    gpus.write(driver)
    settings = _settings(coordinator, credentials, tmp_path, ":0")
    settings = replace(settings, roots=replace(settings.roots, nvidia_driver=driver, nvml=str(library)))
    coordinator.rules = [pb.SignalRule(kind="gpu-throttle", code=64, share=0.5, window_s=2, clear_s=1)]
    async with Running(NodeDaemon(settings)):
        raised = (await coordinator.next("signal")).signal
        gpus.gpus[2]["reasons"] = "0x0"
        gpus.write(driver)
        over = (await coordinator.next("signal")).signal
    assert (raised.kind, raised.code, raised.device) == ("gpu-throttle", 64, "0000:3b:00")
    assert "GPU 2 (NVIDIA H100 80GB HBM3" in raised.text
    assert "hardware thermal slowdown; for " in raised.text
    assert (over.kind, over.code, over.device) == ("gpu-throttle-over", 64, "0000:3b:00")


async def test_the_daemon_tells_its_hardware_to_the_coordinator_and_to_agents(
    coordinator: Coordinator, credentials: SecretCredentials, tmp_path: Path, nvml_library: Path
) -> None:
    library = Path(shutil.copy(nvml_library, tmp_path))
    driver = Path(f"{library}{CONTROL_SUFFIX}")
    host = replace(EIGHT_GPUS, cluster="4a1c000000000000000000000000000f", clique=3)
    with tarfile.open(fileobj=io.BytesIO(tar_of(host.files()))) as archive:
        archive.extractall(tmp_path, filter="tar")
    host.control_file().write(driver)
    settings = replace(_settings(coordinator, credentials, tmp_path, ":0"), memory=tmp_path / "memory.sock")
    settings = replace(settings, roots=replace(settings.roots, nvidia_driver=driver, nvml=str(library)))
    async with Running(NodeDaemon(settings)):
        while len((told := (await coordinator.next("hardware")).hardware).gpus) < 8:
            pass
        answer = await asyncio.to_thread(own_hardware.ask, str(settings.memory))
    assert answer == told
    assert [list(gpu.nearest_adapters) for gpu in told.gpus] == [[f"mlx5_{index // 2}"] for index in range(8)]
    assert nvlink_domain_of(told) == f"{host.cluster}.3"
    with pytest.raises(own_hardware.HardwareUnknown, match="absent"):
        own_hardware.ask(str(tmp_path / "absent.sock"))


async def test_a_driver_that_hangs_holds_up_neither_heartbeats_nor_the_kernel_log(
    coordinator: Coordinator, credentials: SecretCredentials, tmp_path: Path, nvml_library: Path
) -> None:
    library = Path(shutil.copy(nvml_library, tmp_path))
    driver = Path(f"{library}{CONTROL_SUFFIX}")
    hanging = ControlFile.of_healthy_gpus(8)
    hanging.library["hang nvmlInitWithFlags"] = ""
    hanging.write(driver)
    settings = _settings(coordinator, credentials, tmp_path, ":0")
    roots = replace(settings.roots, nvidia_driver=driver, nvml=str(library))
    async with Running(NodeDaemon(replace(settings, roots=roots, heartbeat_s=0.02))):
        for _ in range(5):
            await coordinator.next("heartbeat")
        with (tmp_path / "kmsg").open("a") as file:
            file.write(f"3,1,2,-;{LOST}\n")
        assert (await coordinator.next("signal")).signal.code == 79
        assert (await coordinator.next("heartbeat")).heartbeat.seq > 5


async def test_lines_of_drivers_that_were_not_understood_are_told_once_for_each_change(
    coordinator: Coordinator, credentials: SecretCredentials, tmp_path: Path
) -> None:
    settings = replace(_settings(coordinator, credentials, tmp_path, ":0"), heartbeat_s=0.02)
    async with Running(NodeDaemon(settings)):
        await coordinator.next("heartbeat")
        for count, line in enumerate(("nvme nvme0: a new fault", "mlx5_core 0000:c1:00.0: a new error"), 1):
            with (tmp_path / "kmsg").open("a") as file:
                file.write(f"4,{count},3,-;{line}\n")
            while not (heard := (await coordinator.next("heartbeat")).heartbeat).HasField("driver_lines"):
                pass
            assert heard.driver_lines == pb.DriverLines(count=count, newest=line)
            assert not (await coordinator.next("heartbeat")).heartbeat.HasField("driver_lines")


async def test_a_restarted_daemon_misses_no_error_and_sends_none_twice(
    coordinator: Coordinator, credentials: SecretCredentials, tmp_path: Path
) -> None:
    settings = _settings(coordinator, credentials, tmp_path, ":0")
    settings = replace(settings, roots=replace(settings.roots, kmsg_position=tmp_path / "position"), heartbeat_s=0.02)

    def write(sequence: int, code: int) -> None:
        with (tmp_path / "kmsg").open("a") as file:
            at = int(clock.monotonic() * 1e6)
            file.write(f"3,{sequence},{at},-;NVRM: Xid (PCI:0000:3b:00): {code}, x\n")

    async with Running(NodeDaemon(settings)):
        await coordinator.next("heartbeat")
        write(7, 79)
        assert (await coordinator.next("signal")).signal.code == 79
        for _ in range(3):  # a heartbeat waits until what was sent before it is confirmed
            await coordinator.next("heartbeat")
    write(8, 48)
    async with Running(NodeDaemon(settings)):
        assert (await coordinator.next("signal")).signal.code == 48
        write(9, 62)
        assert (await coordinator.next("signal")).signal.code == 62


async def test_two_daemons_on_one_port_are_a_mistake(
    coordinator: Coordinator, credentials: SecretCredentials, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ListenError):
            await NodeDaemon(_settings(coordinator, credentials, tmp_path, listen)).run()


async def test_the_own_address_is_the_one_towards_the_peer() -> None:
    assert await own_address("127.0.0.1:7070", NameResolver()) == "127.0.0.1"


# --- the command -----------------------------------------------------------------------------------------------------


async def _musterd(*flags: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-Im", "muster.daemon.node", *flags, stderr=asyncio.subprocess.PIPE
    )


async def test_the_command_ends_with_0_after_sigterm(coordinator: Coordinator, tmp_path: Path) -> None:
    (tmp_path / "kmsg").touch(mode=0o600)
    process = await _musterd(
        f"--coordinator=127.0.0.1:{coordinator.port}",
        f"--auth=secret:{tmp_path / 'secret'}",
        "--listen=127.0.0.1:0",
        "--node=n1",
        f"--kmsg={tmp_path / 'kmsg'}",
        f"--memory={tmp_path / 'memory.sock'}",
    )
    async with asyncio.timeout(120):
        await coordinator.next("heartbeat")
        process.send_signal(signal.SIGTERM)
        _, said = await process.communicate()
        await coordinator.ended.get()
    assert process.returncode == 0, said.decode()
    assert b"stopping: got a signal" in said


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (["--auth=none"], 78, '--auth: auth = \'none\': must be "munge" or "secret:/absolute/path"'),
        (["--auth=secret:/no/such/file", "--coordinator=127.0.0.1:1"], 78, "the secret file can't be read"),
        (["--listen=here"], 78, "--listen: 'here' must be HOST:PORT"),
        (["--heartbeat=0"], 78, "must be 0.05 to 3600"),
    ],
)
async def test_the_command_says_what_is_wrong(flags: list[str], status: int, words: str) -> None:
    process = await _musterd(*flags)
    async with asyncio.timeout(120):
        _, said = await process.communicate()
    assert process.returncode == status
    assert words in said.decode()
    assert "Traceback" not in said.decode()


async def test_who_is_told_to_end_ends_though_an_error_comes_instead(credentials: SecretCredentials) -> None:
    """As gRPC has it where a call fails while its reader is being cancelled."""
    asked = asyncio.Event()

    async def hello() -> pb.NodeHello:
        asked.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            raise OSError("the call has failed") from None
        raise AssertionError("nobody else ends it")

    running = asyncio.create_task(
        NodeStream("127.0.0.1:1", credentials, hello, 5.0, KeptMemoryStore(FdStore(""))).run()
    )
    await asked.wait()
    running.cancel()
    async with asyncio.timeout(120):
        with pytest.raises(asyncio.CancelledError):
            await running
