"""The InfiniBand sensor: a folder in the place of the kernel's, and the shipped policy."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path

import pytest

from muster.daemon.coordinator.policy.policy import Policy
from muster.daemon.node.sensors.infiniband import ABSENT_S, HANG, PERIOD_S, InfinibandSensor
from muster.daemon.node.sensors.infiniband_conditions import PORT
from muster.daemon.node.sensors.sensor import Observation, Sample, SensorPaths
from muster.daemon.node.signal_windows import SignalRule
from muster.daemon.node.sysfs.infiniband_ports import COUNTERS, FOLDER
from muster.daemon.testing.watched_sensor import WatchedSensor, watching

RULES = [SignalRule(**asdict(rule)) for rule in Policy.load().rules()]


class Host:
    """The files of a host's adapters."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(self, device: str, port: int = 1, state: str = "4: ACTIVE") -> Path:
        folder = self.root / FOLDER / device / "ports" / str(port)
        for name in ("counters", "hw_counters"):
            (folder / name).mkdir(parents=True)
        for counter in COUNTERS:
            (folder / counter).write_text("0\n")
        texts = {"state": state, "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}
        for name, text in texts.items():
            (folder / name).write_text(f"{text}\n")
        (folder.parents[1] / "board_id").write_text("MT_0000000838\n")
        return folder


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.fixture
async def watched(host: Host) -> AsyncIterator[WatchedSensor]:
    paths = SensorPaths(host_root=host.root)
    async with watching(
        RULES, lambda watched: InfinibandSensor(paths, watched.now, watched.pause, deadline_s=60)
    ) as watched:
        yield watched


def _actions(signals: list[str]) -> list[str]:
    return [Policy.load().decide(kind, int(code)).action for kind, code, _ in map(str.split, signals)]


async def test_a_node_without_adapters_is_healthy(watched: WatchedSensor) -> None:
    assert await watched.seconds(5) == []
    assert watched.samples == []
    assert set(watched.pauses) == {ABSENT_S}


async def test_healthy_ports_have_samples_of_which_none_holds(host: Host, watched: WatchedSensor) -> None:
    for index in range(8):
        host.add(f"mlx5_{index}")
    assert await watched.seconds(5) == []
    assert {sample.device for sample in watched.samples} == {"", *(f"mlx5_{index}/1" for index in range(8))}
    assert not any(sample.held for sample in watched.samples)
    assert watched.pauses[-1] == PERIOD_S


async def test_a_link_that_stays_down_makes_the_node_unfit_and_a_healthy_link_does_not(
    host: Host, watched: WatchedSensor
) -> None:
    port = host.add("mlx5_0")
    host.add("mlx5_1")
    await watched.seconds(5)
    (port / "state").write_text("1: DOWN\n")
    (port / "phys_state").write_text("2: Polling\n")
    (port / "counters/link_downed").write_text("1\n")
    assert await watched.seconds(26) == []
    signals = await watched.seconds(4)
    assert signals == ["rdma-port 1 mlx5_0/1"]
    assert _actions(signals) == ["unfit"]
    assert watched.signals[0].text == (
        "port mlx5_0/1 (InfiniBand): 1: DOWN, physical 2: Polling; for 27 s of the last 30 s"
    )


async def test_a_link_that_comes_back_is_counted_and_the_third_time_the_node_is_degraded(
    host: Host, watched: WatchedSensor
) -> None:
    port = host.add("mlx5_0")
    await watched.seconds(5)
    raised = []
    for downed in range(1, 4):
        (port / "state").write_text("1: DOWN\n")
        (port / "counters/link_downed").write_text(f"{downed}\n")
        raised.append(await watched.seconds(20))
        (port / "state").write_text("4: ACTIVE\n")
        raised.append(await watched.seconds(300))
    assert raised == [[], [], [], [], ["rdma-port 4 mlx5_0/1"], []]
    assert _actions(raised[4]) == ["degraded"]


async def test_a_link_without_the_counter_is_counted_by_its_state(host: Host, watched: WatchedSensor) -> None:
    port = host.add("mlx5_0")
    (port / "counters/link_downed").unlink()
    await watched.seconds(5)
    raised = []
    for _ in range(3):
        (port / "state").write_text("1: DOWN\n")
        raised += await watched.seconds(3)
        (port / "state").write_text("4: ACTIVE\n")
        raised += await watched.seconds(3)
    assert raised == ["rdma-port 4 mlx5_0/1"]


@pytest.mark.parametrize("state", ["1: DOWN", "2: INIT"])
async def test_a_port_that_was_never_active_is_no_fault(host: Host, watched: WatchedSensor, state: str) -> None:
    port = host.add("mlx5_0", state=state)
    assert await watched.seconds(200) == []
    shutil.rmtree(port.parents[1])
    assert await watched.seconds(60) == []
    assert not any(sample.held for sample in watched.samples)


async def test_a_port_that_waits_for_the_subnet_manager_is_degraded_after_two_minutes(
    host: Host, watched: WatchedSensor
) -> None:
    port = host.add("mlx5_0")
    await watched.seconds(5)
    (port / "state").write_text("2: INIT\n")
    assert await watched.seconds(100) == []
    assert await watched.seconds(20) == ["rdma-port 2 mlx5_0/1"]


async def test_a_port_that_the_kernel_loses_makes_the_node_unfit(host: Host, watched: WatchedSensor) -> None:
    port = host.add("mlx5_0")
    host.add("mlx5_1")
    await watched.seconds(5)
    shutil.rmtree(port.parents[1])
    assert await watched.seconds(20) == []
    signals = await watched.seconds(10)
    assert signals == ["rdma-port 3 mlx5_0/1"]
    assert _actions(signals) == ["unfit"]
    shutil.rmtree(host.root / "sys")
    assert await watched.seconds(30) == ["rdma-port 3 mlx5_1/1"]


async def test_a_rate_below_what_it_was_makes_the_node_degraded(host: Host, watched: WatchedSensor) -> None:
    port = host.add("mlx5_0")
    await watched.seconds(5)
    (port / "rate").write_text("200 Gb/sec (4X HDR)\n")
    signals = await watched.seconds(60)
    assert signals == ["rdma-port 5 mlx5_0/1"]
    assert _actions(signals) == ["degraded"]
    assert "200 Gb/s, it had 400 Gb/s" in watched.signals[0].text


async def test_one_port_slower_than_its_siblings_is_recorded_and_two_are_a_design(
    host: Host, watched: WatchedSensor
) -> None:
    for index in range(4):
        host.add(f"mlx5_{index}")
    (host.root / FOLDER / "mlx5_2/ports/1/rate").write_text("200 Gb/sec (4X HDR)\n")
    signals = await watched.seconds(65)
    assert signals == ["rdma-port 6 mlx5_2/1"]
    assert _actions(signals) == ["ignore"]
    (host.root / FOLDER / "mlx5_3/ports/1/rate").write_text("200 Gb/sec (4X HDR)\n")
    before = len(watched.samples)
    await watched.seconds(5)
    assert not any(sample.held for sample in watched.samples[before:] if sample.code == 6)


@pytest.mark.parametrize(
    ("counter", "per_s", "action"),
    [
        ("counters/symbol_error", 11, "degraded"),
        ("counters/link_error_recovery", 1, "degraded"),
        ("counters/port_rcv_errors", 11, "degraded"),
        ("counters/local_link_integrity_errors", 1, "degraded"),
        ("counters/excessive_buffer_overrun_errors", 1, "degraded"),
        ("counters/port_xmit_discards", 101, "ignore"),
        ("hw_counters/local_ack_timeout_err", 2, "ignore"),
        ("hw_counters/roce_slow_restart", 11, "ignore"),
    ],
)
async def test_errors_of_a_link_count_by_their_rate(
    host: Host, watched: WatchedSensor, counter: str, per_s: int, action: str
) -> None:
    port = host.add("mlx5_0")
    await watched.seconds(5)
    signals: list[str] = []
    for second in range(1, 62):
        (port / counter).write_text(f"{per_s * second}\n")
        signals += await watched.seconds(1)
    assert len(signals) == 1
    assert _actions(signals) == [action]


async def test_errors_below_the_rate_are_no_signal_and_120_seconds_with_symbol_errors_are(
    host: Host, watched: WatchedSensor
) -> None:
    port = host.add("mlx5_0")
    await watched.seconds(5)
    signals: list[str] = []
    for step in range(1, 121):
        (port / "counters/symbol_error").write_text(f"{step * 9}\n")
        (port / "counters/port_rcv_errors").write_text(f"{step * 9}\n")
        signals += await watched.seconds(2)
    assert signals == ["rdma-port 12 mlx5_0/1"]


async def test_counters_that_wrap_jump_or_are_reset_and_values_half_written_are_no_fault(
    host: Host, watched: WatchedSensor, caplog: pytest.LogCaptureFixture
) -> None:
    port = host.add("mlx5_0")
    await watched.seconds(5)
    for value in ("4294967290", "3", "4294967295", "0", "1000000", "12", "x\n", "", "18446744073709551615", "7", "5"):
        for counter in COUNTERS:
            (port / counter).write_text(value if value.endswith("\n") else f"{value}\n")
        assert await watched.seconds(1) == []
        for name in ("state", "rate", "phys_state", "link_layer"):
            whole = (port / name).read_text()
            for broken in (whole[:1], "", "7: \x00\n", "9" * 5000, "99999999999 Gb/sec\n", "0: NOP\n"):
                (port / name).write_text(broken)
                assert await watched.seconds(1) == []
            (port / name).write_text(whole)
    assert "port mlx5_0/1 can't be read: " in caplog.text
    assert "not a count: 'x'" in caplog.text


async def test_an_adapter_of_another_kind_is_read_as_any_other(
    host: Host, watched: WatchedSensor, caplog: pytest.LogCaptureFixture
) -> None:
    port = host.add("efa_0")
    (port / "link_layer").write_text("Unspecified\n")
    (port.parents[1] / "board_id").write_text("\n")
    (port / "counters/symbol_error").write_text("N/A (no PMA)\n")
    assert await watched.seconds(5) == []
    assert "can't be read" not in caplog.text
    (port / "state").write_text("1: DOWN\n")
    assert await watched.seconds(30) == ["rdma-port 1 efa_0/1"]


async def test_files_that_a_port_lacks_are_named_once_and_give_no_sample(
    host: Host, watched: WatchedSensor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    port = host.add("mlx5_0")
    shutil.rmtree(port / "hw_counters")
    shutil.rmtree(port / "counters")
    assert await watched.seconds(100) == []
    assert caplog.text.count("this host does not report") == 1
    assert {sample.code for sample in watched.samples if sample.kind == PORT} == {1, 2, 3, 4, 5, 6}


async def test_an_adapter_whose_ports_cannot_be_listed_is_named_and_not_missing(
    host: Host, watched: WatchedSensor, caplog: pytest.LogCaptureFixture
) -> None:
    port = host.add("mlx5_0")
    await watched.seconds(5)
    shutil.rmtree(port.parent)
    port.parent.touch()
    assert await watched.seconds(60) == []
    assert "adapter mlx5_0 can't be read" in caplog.text


async def test_a_read_that_hangs_is_a_sample_and_the_next_one_waits_for_it(host: Host) -> None:
    reported: list[Observation | Sample] = []
    hang, done = asyncio.Event(), asyncio.Event()
    host.add("mlx5_0")

    async def pause(_: float) -> None:
        await asyncio.sleep(0)

    def report(sample: Observation | Sample) -> None:
        reported.append(sample)
        if isinstance(sample, Sample) and sample.kind == PORT:
            done.set()
        elif isinstance(sample, Sample) and sample.held:
            hang.set()

    sensor = InfinibandSensor(SensorPaths(host_root=host.root), pause=pause, deadline_s=0.0)
    watching = asyncio.create_task(sensor.watch(report))
    await hang.wait()  # no read ends within 0 s
    await done.wait()  # what the thread has read is heard once it ends
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
    hangs = [sample for sample in reported if isinstance(sample, Sample) and sample.kind == HANG and sample.held]
    assert hangs[0].text == "/sys/class/infiniband: no answer for 0 s"
