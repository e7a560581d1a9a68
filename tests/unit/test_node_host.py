"""The host sensor: a folder in the place of the kernel's, and the shipped policy."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.daemon.coordinator.core.state.state_tables import Response
from muster.daemon.coordinator.policy.policy import Policy
from muster.daemon.node.sensors.host import HANG, PERIOD_S, HostSensor
from muster.daemon.node.sensors.sensor import Observation, Sample, SensorPaths
from muster.daemon.node.signal_windows import SignalRule
from muster.daemon.node.sysfs.host_files import CPUS, MEMORY_CONTROLLERS, FileSystem, HostFiles, parse_file_systems
from muster.daemon.testing import watched_sensor
from muster.daemon.testing.watched_sensor import WatchedSensor

RULES = [SignalRule(**asdict(rule)) for rule in Policy.load().rules()]
ROOT_DISK = "25 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw,errors=remount-ro\n"
SCRATCH = "40 25 259:5 / /scratch rw,noatime - xfs /dev/nvme1n1p1 rw,attr2\n"


class Host:
    """The files of a host with one memory controller and two CPU packages."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.used = 0.5
        for path, text in {
            f"{MEMORY_CONTROLLERS}/mc0/ue_count": "0",
            f"{MEMORY_CONTROLLERS}/mc0/ce_count": "3",
            "proc/meminfo": "MemTotal:       1000000 kB\nMemFree:  1 kB\nMemAvailable:    500000 kB",
            "proc/loadavg": "0.50 0.40 0.30 1/345 6789",
            "proc/self/mountinfo": (ROOT_DISK + SCRATCH).rstrip("\n"),
        }.items():
            self.put(path, text)
        for cpu in range(4):
            self.put(f"{CPUS}/cpu{cpu}/topology/physical_package_id", str(cpu // 2))
            self.put(f"{CPUS}/cpu{cpu}/thermal_throttle/package_throttle_count", "7")
            self.put(f"{CPUS}/cpu{cpu}/thermal_throttle/package_throttle_total_time_ms", "70")

    def put(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(f"{text}\n")

    def files(self) -> HostFiles:
        return HostFiles(self.root, lambda folder: self.used)


def watching(host: Host) -> AbstractAsyncContextManager[WatchedSensor]:
    paths = SensorPaths(host_root=host.root)
    return watched_sensor.watching(
        RULES, lambda watched: HostSensor(paths, host.files(), watched.now, watched.pause, deadline_s=60)
    )


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.fixture
async def watched(host: Host) -> AsyncIterator[WatchedSensor]:
    async with watching(host) as watched:
        yield watched


def _decision(signal: str) -> tuple[str, Response]:
    kind, code = signal.split()[:2]
    decision = Policy.load().decide(kind, int(code))
    return decision.action, decision.response


async def test_a_healthy_host_has_samples_of_which_none_holds(watched: WatchedSensor) -> None:
    assert await watched.seconds(5) == []
    assert not any(sample.held for sample in watched.samples)
    assert {(sample.kind, sample.code, sample.device) for sample in watched.samples} == {
        ("sysfs-hang", 2, ""),
        ("host-memory", 1, "mc0"),
        ("host-memory", 2, "mc0"),
        ("cpu-throttle", 1, "package0"),
        ("cpu-throttle", 1, "package1"),
        ("mount", 1, "/"),
        ("mount", 1, "/scratch"),
        ("host-use", 1, ""),
        *(("host-use", 2, folder) for folder in ("/", "/tmp", "/var", "/dev/shm")),
        ("host-use", 3, ""),
    }
    assert watched.pauses[-1] == PERIOD_S


async def test_a_new_uncorrectable_error_makes_the_node_degraded_and_ends_in_a_planned_swap(
    host: Host, watched: WatchedSensor
) -> None:
    await watched.seconds(3)
    host.put(f"{MEMORY_CONTROLLERS}/mc0/ue_count", "1")
    assert await watched.seconds(2) == ["host-memory 1 mc0"]
    assert _decision("host-memory 1") == ("degraded", Response.SWAP)
    assert watched.signals[0].text == "memory controller mc0: 1 new uncorrectable error, 1 since boot"
    assert await watched.seconds(50) == []


async def test_errors_from_before_the_start_are_of_the_past(host: Host) -> None:
    host.put(f"{MEMORY_CONTROLLERS}/mc0/ue_count", "5")
    async with watching(host) as watched:
        assert await watched.seconds(30) == []


async def test_corrected_errors_count_when_ten_seconds_of_an_hour_have_one(host: Host, watched: WatchedSensor) -> None:
    await watched.seconds(3)
    signals = []
    for count in range(1, 11):
        host.put(f"{MEMORY_CONTROLLERS}/mc0/ce_count", str(3 + count))
        signals.append(await watched.seconds(60))
    assert signals == [*([[]] * 9), ["host-memory 2 mc0"]]
    assert _decision("host-memory 2") == ("degraded", Response.RECORD)


@pytest.mark.parametrize("file", ["package_throttle_count", "package_throttle_total_time_ms"])
async def test_a_package_that_throttles_for_a_fifth_of_two_minutes_is_degraded(
    host: Host, watched: WatchedSensor, file: str
) -> None:
    await watched.seconds(3)
    signals = []
    for second in range(1, 30):
        host.put(f"{CPUS}/cpu2/thermal_throttle/{file}", str(70 + second * 1000))
        signals += await watched.seconds(1)
    assert signals == ["cpu-throttle 1 package1"]
    assert _decision("cpu-throttle 1") == ("degraded", Response.RECORD)


async def test_a_file_system_that_becomes_read_only_makes_the_node_degraded(host: Host, watched: WatchedSensor) -> None:
    await watched.seconds(3)
    host.put("proc/self/mountinfo", ROOT_DISK + SCRATCH.replace("rw,attr2", "ro,attr2").rstrip("\n"))
    assert await watched.seconds(10) == ["mount 1 /scratch"]
    assert _decision("mount 1") == ("degraded", Response.SWAP)
    assert watched.signals[0].text == "the file system at /scratch (259:5) is read-only; for 9 s of the last 10 s"


@pytest.mark.parametrize(
    "line",
    [
        "40 25 259:5 / /scratch ro,noatime - xfs /dev/nvme1n1p1 rw,attr2",  # ProtectSystem: this mount alone
        "40 25 259:5 / /boot rw - ext4 /dev/nvme1n1p1 ro",  # what administrators do
        "40 25 0:50 / /scratch rw - fuse.sshfs /dev/fake ro",  # a user's own
        "41 25 7:3 / /var/lib/images/tree rw - ext3 /dev/loop3 ro",  # a user's image, which is full of errors
        "40 25 0:50 / /scratch rw - nfs4 server:/scratch ro",
        "40 25 0:50 / /scratch",
    ],
)
async def test_a_file_system_that_the_node_did_not_lose_is_no_fault(
    host: Host, watched: WatchedSensor, line: str
) -> None:
    host.put("proc/self/mountinfo", ROOT_DISK + line.replace("ro", "rw"))
    await watched.seconds(3)
    host.put("proc/self/mountinfo", ROOT_DISK + line)
    assert await watched.seconds(20) == []


async def test_a_file_system_that_is_read_only_from_the_start_is_meant_to_be_so(host: Host) -> None:
    host.put("proc/self/mountinfo", "25 1 259:2 / / ro - ext4 /dev/nvme0n1p2 ro")
    async with watching(host) as watched:
        assert await watched.seconds(30) == []


async def test_what_a_job_can_cause_is_recorded_only(host: Host, watched: WatchedSensor) -> None:
    host.used = 0.99
    host.put("proc/meminfo", "MemTotal:       1000000 kB\nMemAvailable:    5000 kB")
    host.put("proc/loadavg", "90000.00 0.40 0.30 1/345 6789")
    signals = await watched.seconds(310)
    assert sorted(signals) == [
        "host-use 1",
        *(f"host-use 2 {folder}" for folder in ("/", "/dev/shm", "/tmp", "/var")),
        "host-use 3",
    ]
    assert {_decision(signal)[0] for signal in signals} == {"ignore"}


async def test_a_host_without_any_of_it_is_healthy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    paths = SensorPaths(host_root=tmp_path / "empty")
    async with watched_sensor.watching(
        RULES, lambda watched: HostSensor(paths, None, watched.now, watched.pause, deadline_s=60)
    ) as watched:
        assert await watched.seconds(10) == []
    assert {sample.kind for sample in watched.samples} == {HANG}
    assert caplog.text.count("this host does not report") == 1


async def test_garbage_in_every_file_is_named_and_no_fault(
    host: Host, watched: WatchedSensor, caplog: pytest.LogCaptureFixture
) -> None:
    await watched.seconds(3)
    paths = [path for path in host.root.rglob("*") if path.is_file()]
    for garbage in (b"", b"1", b"\xff\n", b"-1\n", b"x" * 2**17 + b"\n", b"99999999999999999999\n", b"0\n", b"\0\n"):
        for path in paths:
            path.write_bytes(garbage)
        assert await watched.seconds(12) == []
    assert "the host can't be read: " in caplog.text
    assert "mc0/ue_count (half written)" in caplog.text


async def test_a_disk_that_does_not_answer_holds_only_this_sensor(host: Host) -> None:
    release, reported = threading.Event(), asyncio.Queue[Sample]()

    def usage(_: Path) -> float:
        release.wait()
        return 0.5

    def report(sample: Observation | Sample) -> None:
        assert isinstance(sample, Sample)
        reported.put_nowait(sample)

    async def pause(_: float) -> None:
        await asyncio.sleep(0)

    files = HostFiles(host.root, usage)
    sensor = HostSensor(SensorPaths(host_root=host.root), files, pause=pause, deadline_s=0.01)
    watching = asyncio.create_task(sensor.watch(report))
    hang = await reported.get()
    assert (hang.kind, hang.held, hang.text) == (HANG, 1.0, "the host's files: no answer for 0.01 s")
    release.set()
    while (await reported.get()).kind == HANG:
        pass
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching


def test_a_file_system_counts_once_at_its_shortest_mount_point() -> None:
    lines = [
        "1 0 8:1 /etc/hosts /etc/hosts rw - ext4 /dev/sda1 rw",
        "2 0 8:1 / / rw - ext4 /dev/sda1 rw,emergency_ro",
        "3 0 8:2 / /data\\040set rw - ext4 /dev/sda2 rw",
    ]
    assert parse_file_systems(lines) == [
        FileSystem("8:1", "/", "/", True),
        FileSystem("8:2", "8:2", "/data\\040set", False),
    ]


@given(st.lists(st.text(), max_size=5))
def test_any_table_of_mounts_is_read(lines: list[str]) -> None:
    parse_file_systems(lines)
