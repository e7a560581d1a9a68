"""The NVML sensor: a scripted reader for its decisions, and the real reader process over the stand-in library."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from muster.daemon.host import process_tree
from muster.daemon.node.nvml.nvml_process import GpuReading, GpuReadings, NvmlProcess, ReaderEnded, ReaderHung
from muster.daemon.node.nvml.nvml_readings import SLOW_EVERY
from muster.daemon.node.sensors.gpu_conditions import HANG, MISSING, GpuConditions
from muster.daemon.node.sensors.nvml import ABSENT_S, EMPTY_S, FIRST_RETRY_S, PERIOD_S, NvmlSensor
from muster.daemon.node.sensors.sensor import Observation, Sample, SensorPaths
from muster.slurm.image import nvml_stand_in
from muster.slurm.image.nvml_stand_in import CONTROL_SUFFIX, ControlFile

DEADLINE_S = 60.0
"""Seconds that end a wait which would never end."""
NOT_REPORTED_BY_AN_H100 = {"retirement_pending": 3}
"""It remaps rows instead."""
DEVICES = ["0000:1b:00", "0000:2b:00", "0000:3b:00"]
ALL_WELL = GpuReadings(3, [GpuReading(index, device, reasons=0) for index, device in enumerate(DEVICES)])


class ScriptEnded(Exception):
    """The test has seen enough."""


@dataclass
class ScriptedReader:
    """Gives the answers of a script, and notes what it was asked."""

    script: list[GpuReadings | Exception]
    asked: list[set[str]] = field(default_factory=list)
    closed: int = 0

    async def read(self, leave_out: Collection[str]) -> GpuReadings:
        self.asked.append(set(leave_out))
        if not self.script:
            raise ScriptEnded
        answer = self.script.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self) -> None:
        self.closed += 1


class Watched:
    """A sensor on a clock that passes only while the sensor pauses."""

    def __init__(self, folder: Path, *script: GpuReadings | Exception) -> None:
        self.driver = folder / "version"
        self.driver.write_text("NVRM version: 580.95.05")
        self.reader = ScriptedReader(list(script))
        self.reported: list[Observation | Sample] = []
        self.pauses: list[float] = []
        self.at = 1000.0
        self.sensor = NvmlSensor(SensorPaths(nvidia_driver=self.driver), self.reader, lambda: self.at, self._pause)

    async def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.at += seconds

    async def watch(self) -> None:
        with pytest.raises(ScriptEnded):
            await self.sensor.watch(self.reported.append)

    def hangs(self) -> list[tuple[str, float]]:
        """(device, held) of each sample of a hang that says something new."""
        found = [(each.device, each.held) for each in self.reported if isinstance(each, Sample) and each.kind == HANG]
        return [each for each in found if each[1]]


async def test_the_gpus_are_read_once_a_second(tmp_path: Path) -> None:
    watched = Watched(tmp_path, ALL_WELL, ALL_WELL, ALL_WELL)
    await watched.watch()
    assert watched.pauses == [PERIOD_S] * 3
    throttle = [each for each in watched.reported if isinstance(each, Sample) and each.kind == "gpu-throttle"]
    assert len(throttle) == 3 * 3 * 4
    assert watched.reader.closed == 1


async def test_a_node_without_the_driver_starts_no_reader(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.driver.unlink()

    async def load_the_driver_at_the_third_look(seconds: float) -> None:
        watched.pauses.append(seconds)
        if len(watched.pauses) == 3:
            assert watched.reader.asked == []
            watched.driver.write_text("loaded")

    sensor = NvmlSensor(
        SensorPaths(nvidia_driver=watched.driver), watched.reader, lambda: watched.at, load_the_driver_at_the_third_look
    )
    with pytest.raises(ScriptEnded):
        await sensor.watch(watched.reported.append)
    assert watched.pauses == [ABSENT_S] * 3
    assert watched.reported == []


async def test_a_driver_without_gpus_keeps_no_reader(tmp_path: Path) -> None:
    watched = Watched(tmp_path, GpuReadings(0, []))
    await watched.watch()
    assert watched.pauses == [EMPTY_S]
    assert watched.reader.closed == 2


async def test_a_gpu_that_hangs_is_left_out_for_longer_each_time(tmp_path: Path) -> None:
    hung = ReaderHung(DEVICES[1], "no answer for 10 s")
    others = GpuReadings(3, [ALL_WELL.gpus[0], ALL_WELL.gpus[2]])
    script = [ALL_WELL, hung, *[others] * 9, hung, *[others] * 19, ALL_WELL, hung]
    watched = Watched(tmp_path, *script)
    await watched.watch()
    left_out = [asked == {DEVICES[1]} for asked in watched.reader.asked]
    assert left_out == [False, False, *[True] * 9, False, *[True] * 19, False, False, True]
    assert watched.hangs() == [(DEVICES[1], 1.0)] * 3
    assert set(watched.pauses) == {PERIOD_S}


async def test_a_driver_that_hangs_is_asked_again_with_longer_waits(tmp_path: Path) -> None:
    hung = ReaderHung("", "no answer for 60 s")
    watched = Watched(tmp_path, hung, hung, hung, ALL_WELL, hung)
    await watched.watch()
    assert watched.pauses == [FIRST_RETRY_S, 2 * FIRST_RETRY_S, 4 * FIRST_RETRY_S, PERIOD_S, FIRST_RETRY_S]
    assert watched.hangs() == [("", 1.0)] * 4


async def test_a_reader_that_ends_is_no_sign_of_a_fault(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    watched = Watched(tmp_path, ReaderEnded("Driver Not Loaded"), ReaderEnded("Driver Not Loaded"), ALL_WELL)
    await watched.watch()
    assert watched.pauses == [FIRST_RETRY_S, 2 * FIRST_RETRY_S, PERIOD_S]
    assert watched.hangs() == []
    assert "no GPU can be read: Driver Not Loaded" in caplog.text
    assert "GPUs are read, after 30 s" in caplog.text


async def test_the_log_says_what_can_not_be_read_and_when_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    partly = GpuReading(2, DEVICES[2], reasons=0, failed={"temperature_c": 999, "ecc_uncorrected": 3})
    watched = Watched(tmp_path, *[GpuReadings(1, [partly])] * 30, ALL_WELL)
    await watched.watch()
    lines = [record.message for record in caplog.records]
    assert lines == [
        "GPU 2 can't be read: temperature_c (NVML error 999)",
        "GPU 2 does not report ecc_uncorrected",
        "GPU 2 is read again, after 30 s",
    ]


async def test_a_slow_reading_that_fails_does_not_come_and_go_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    slow = GpuReading(2, DEVICES[2], reasons=0, failed={"links": 999})
    fast = GpuReading(2, DEVICES[2], reasons=0, whole=False)
    watched = Watched(tmp_path, *[GpuReadings(1, [each]) for each in (slow, fast, fast) * 10], ALL_WELL)
    await watched.watch()
    assert [record.message for record in caplog.records] == [
        "GPU 2 can't be read: links (NVML error 999)",
        "GPU 2 is read again, after 30 s",
    ]


async def test_a_node_with_fewer_gpus_than_slurm_expects_lacks_one(tmp_path: Path) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text("NodeName=n[1-4] Gres=gpu:h100:4\n")
    watched = Watched(tmp_path, ALL_WELL)
    paths = SensorPaths(nvidia_driver=watched.driver, node="n3", slurm_conf=(tmp_path / "absent", conf))
    watched.sensor = NvmlSensor(paths, watched.reader, lambda: watched.at, watched._pause)
    await watched.watch()
    missing = [each for each in watched.reported if isinstance(each, Sample) and each.kind == MISSING]
    assert [(each.code, each.held) for each in missing] == [(0, 0.0), (1, 1.0)]
    assert missing[1].text == "3 GPUs, Slurm's GRES says 4"


async def test_the_log_names_each_gpu_s_fabric_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    before = GpuReading(0, DEVICES[0], "GPU-4a1c", fabric=(3, 0, "4a1c", 7, 0))
    after = GpuReading(0, DEVICES[0], "GPU-4a1c", fabric=(3, 0, "4a1c", 8, 0))
    watched = Watched(tmp_path, *[GpuReadings(1, [each]) for each in (before, before, after)])
    await watched.watch()
    assert [record.message for record in caplog.records] == [
        "GPU 0 (GPU-4a1c): NVLink fabric 4a1c, clique 7",
        "GPU 0 (GPU-4a1c): NVLink fabric 4a1c, clique 8",
    ]


# -- the reader process ----------------------------------------------------------------------------------------------


@dataclass
class Node:
    """The stand-in library in a folder of its own, and a reader over it."""

    library: Path
    process: NvmlProcess

    def has(self, file: ControlFile) -> None:
        file.write(Path(f"{self.library}{CONTROL_SUFFIX}"))

    async def read(self, leave_out: Collection[str] = (), timeout_s: float = DEADLINE_S) -> GpuReadings:
        return await self.process.read(leave_out, timeout_s)


@pytest.fixture
async def node(tmp_path: Path, nvml_library: Path) -> AsyncIterator[Node]:
    library = Path(shutil.copy(nvml_library, tmp_path))
    made = Node(library, NvmlProcess(str(library), DEADLINE_S))
    made.has(ControlFile.of_healthy_gpus(8))
    yield made
    await made.process.close()


async def test_all_gpus_are_read_with_their_addresses_as_the_kernel_log_has_them(node: Node) -> None:
    readings = await node.read()
    assert readings.count == 8
    assert [gpu.device for gpu in readings.gpus][:3] == DEVICES
    assert readings.gpus[2] == GpuReading(
        *(2, DEVICES[2], "GPU-00000000-0000-0000-0000-000000000002", "NVIDIA H100 80GB HBM3"),
        reasons=0,
        thermal_violation_ns=0,
        board_limit_ns=0,
        reliability_ns=0,
        power_brake_ns=0,
        temperature_c=45,
        margin_c=42,
        slowdown_margin_c=-2,
        power_mw=110_000,
        ecc_uncorrected=0,
        ecc_dram=0,
        ecc_sram=0,
        recovery_action=0,
        slowdown_c=90,
        remapped=(0, 0, 0, 0),
        sram_over_threshold=False,
        mig=0,
        pcie=(5, 5, 16, 16),
        pcie_replays=0,
        links=((1, 0, 0, 0, 0),) * nvml_stand_in.LINKS,
        fabric=(3, 0, nvml_stand_in.FABRIC_CLUSTER, 7, 0),
        memory=(60_000_000_000, 80_000_000_000),
        busy_percent=97,
        failed=NOT_REPORTED_BY_AN_H100,
    )


async def test_slow_readings_are_taken_of_each_gpu_in_turn(node: Node) -> None:
    whole = [[gpu.whole for gpu in (await node.read()).gpus] for _ in range(1 + SLOW_EVERY)]
    assert whole[0] == [True] * 8
    assert [sum(each) for each in whole[1:]] == [2, 3, 3]
    assert all(sum(of_gpu) == 1 for of_gpu in zip(*whole[1:], strict=True))


async def test_a_link_and_a_fabric_are_read_with_their_counters(node: Node) -> None:
    file = ControlFile.of_healthy_gpus(1)
    file.gpus[0] |= {"link 17": "0 1 2 3 4", "fabric": "2 9 00ff 3 0x11", "field 194": "-3", "margin": "-5"}
    node.has(file)
    (gpu,) = (await node.read()).gpus
    assert gpu.links
    assert gpu.links[16:] == ((1, 0, 0, 0, 0), (0, 1, 2, 3, 4))
    assert gpu.fabric == (2, 9, "00ff" + "00" * 14, 3, 0x11)
    assert (gpu.margin_c, gpu.slowdown_margin_c) == (-5, -3)


async def test_what_a_gpu_does_not_support_is_left_out(node: Node) -> None:
    kept = {"uuid", "pci", "name", "reasons", "temperature", "threshold 1", "power", "pcie", "max-pcie"}
    file = ControlFile.of_healthy_gpus(2)
    file.gpus[0] = {key: value for key, value in file.gpus[0].items() if key in kept}
    node.has(file)
    old, new = (await node.read()).gpus
    assert set(old.failed.values()) == {3}
    assert (old.links, old.fabric, old.margin_c, old.recovery_action) == (None, None, None, None)
    assert (old.slowdown_c, old.pcie) == (90, (5, 5, 16, 16))
    samples = list(GpuConditions().samples(GpuReadings(1, [old]), 0.0, in_gres=1))
    assert samples
    assert not any(sample.held for sample in samples)
    assert new.failed == NOT_REPORTED_BY_AN_H100


async def test_what_changes_is_seen_by_the_same_reader(node: Node) -> None:
    await node.read()
    file = ControlFile.of_healthy_gpus(8)
    file.gpus[5] |= {"reasons": "0x48", "violation 1": "77"}
    node.has(file)
    gpu = (await node.read()).gpus[5]
    assert (gpu.reasons, gpu.thermal_violation_ns) == (0x48, 77)
    node.has(ControlFile.of_healthy_gpus(7))
    assert [len((await node.read()).gpus), (await node.read()).count] == [7, 7]


async def test_errors_of_one_gpu_do_not_hide_the_others(node: Node) -> None:
    file = ControlFile.of_healthy_gpus(8)
    file.gpus[3]["error *"] = "15"
    file.gpus[4]["error nvmlDeviceGetTemperature"] = "999"
    del file.gpus[5]["remapped"]
    node.has(file)
    gpus = (await node.read()).gpus
    assert [gpu.failed for gpu in gpus[3:6]] == [
        {"handle": 15},
        NOT_REPORTED_BY_AN_H100 | {"temperature_c": 999},
        NOT_REPORTED_BY_AN_H100 | {"remapped": 3},
    ]
    assert [gpu.reasons for gpu in gpus] == [0, 0, 0, None, 0, 0, 0, 0]


async def test_a_gpu_that_hangs_is_named_and_a_new_reader_reads_the_others(node: Node) -> None:
    await node.read()
    file = ControlFile.of_healthy_gpus(8)
    file.gpus[2]["hang nvmlDeviceGetPowerUsage"] = ""
    node.has(file)
    with pytest.raises(ReaderHung, match="no answer for 3 s") as hung:
        await node.read(timeout_s=3.0)
    assert hung.value.device == DEVICES[2]
    readings = await node.read(leave_out=[DEVICES[2]])
    assert [gpu.index for gpu in readings.gpus] == [0, 1, 3, 4, 5, 6, 7]
    assert readings.count == 8


async def test_a_process_that_did_not_run_does_not_take_its_reader_for_hung(node: Node) -> None:
    jumps = iter(range(0, 10**9, 1000))
    frozen = NvmlProcess(str(node.library), 0.01, now=lambda: next(jumps))
    assert (await frozen.read([], 0.01)).count == 8
    await frozen.close()


def _reader_pid() -> int:
    (reader,) = [pid for pid in process_tree.child_pids() if Path(f"/proc/{pid}/comm").read_text() == "muster-nvml\n"]
    return reader


async def test_the_reader_stays_small(node: Node) -> None:
    """It loads NVIDIA's library, and nothing of gRPC, protobuf or pydantic."""
    await node.read()
    loaded = Path(f"/proc/{_reader_pid()}/maps").read_text()
    assert str(node.library) in loaded
    assert not [word for word in ("grpc", "google", "pydantic", "torch") if word in loaded]


async def test_the_reader_ends_with_its_sensor(node: Node) -> None:
    await node.read()
    reader = _reader_pid()
    await node.process.close()
    assert not Path(f"/proc/{reader}").exists()


async def test_a_reader_that_was_killed_is_replaced(node: Node) -> None:
    await node.read()
    process_tree.kill(_reader_pid(), group=False)
    with pytest.raises(ReaderEnded, match="has ended"):
        await node.read()
    assert (await node.read()).count == 8


async def test_without_a_library_or_a_driver_the_reader_says_so(node: Node, tmp_path: Path) -> None:
    Path(f"{node.library}{CONTROL_SUFFIX}").unlink()
    with pytest.raises(ReaderEnded, match="Driver Not Loaded"):
        await node.read()
    with pytest.raises(ReaderEnded, match=r"absent\.so: cannot open shared object file"):
        await NvmlProcess(str(tmp_path / "absent.so"), DEADLINE_S).read([])


async def test_a_sensor_over_a_node_with_a_hot_gpu_samples_it(node: Node, tmp_path: Path) -> None:
    file = ControlFile.of_healthy_gpus(8)
    file.gpus[1]["reasons"] = "0x40"
    node.has(file)
    paths = SensorPaths(nvidia_driver=Path(f"{node.library}{CONTROL_SUFFIX}"), nvml=str(node.library))
    held: asyncio.Queue[Sample] = asyncio.Queue()

    def report(reported: Observation | Sample) -> None:
        if isinstance(reported, Sample) and reported.held:
            held.put_nowait(reported)

    watching = asyncio.create_task(NvmlSensor(paths).watch(report))
    async with asyncio.timeout(DEADLINE_S):
        sample = await held.get()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert (sample.kind, sample.code, sample.device) == ("gpu-throttle", 64, DEVICES[1])
