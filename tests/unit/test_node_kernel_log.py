"""The kernel log: lines that stood there, lines that come, and what the sensor makes of them."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from muster.daemon.node.kernel.kernel_errors import MAX_RECENT, KernelErrors, RecentErrors
from muster.daemon.node.kernel.kernel_log import Device, KernelLog, open_kernel_log, reason_for_distrust
from muster.daemon.node.kernel.kernel_record import KernelError, KernelRecord
from muster.daemon.node.sensors.kmsg import KernelLogSensor
from muster.daemon.node.sensors.sensor import Observation, SensorPaths, run_sensor

LOST = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "kmsg").touch(mode=0o600)
    return tmp_path / "kmsg"


def _append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def _open(path: Path) -> KernelLog:
    log = open_kernel_log(path)
    assert log is not None
    return log


async def _next(records: AsyncIterator[KernelRecord]) -> str:
    async with asyncio.timeout(120):
        return (await anext(records)).message


async def test_a_line_comes_at_once_and_older_ones_stand_before(path: Path) -> None:
    _append(path, "old one\n3,1,2,-;old two\n")
    with _open(path) as log:
        assert [record.message for record in log.existing_records()] == ["old one", "old two"]
        records = log.follow()
        waiting = asyncio.ensure_future(_next(records))
        await asyncio.sleep(0)
        assert not waiting.done()
        _append(path, "3,2,3,-;new\n")
        assert await waiting == "new"


async def test_a_line_that_came_before_following_is_not_missed(path: Path) -> None:
    with _open(path) as log:
        _append(path, "one\ntwo\n")
        records = log.follow()
        assert [await _next(records), await _next(records)] == ["one", "two"]


async def test_a_line_written_in_two_parts_is_one(path: Path) -> None:
    with _open(path) as log:
        records = log.follow()
        _append(path, "first\nsec")
        assert await _next(records) == "first"
        _append(path, "ond\n")
        assert await _next(records) == "second"


async def test_a_file_that_shrinks_is_read_from_its_start(path: Path) -> None:
    _append(path, "a long line that goes away\n")
    with _open(path) as log:
        records = log.follow()
        path.write_text("anew\n")
        assert await _next(records) == "anew"


async def test_closing_gives_every_descriptor_back(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with _open(path) as log:
        records = log.follow()
        _append(path, "x\n")
        await _next(records)
        await records.aclose()  # type: ignore[attr-defined]
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_log_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert open_kernel_log(tmp_path / "absent") is None
    assert "can't be read (No such file or directory); GPU errors go unseen" in caplog.text


async def test_a_line_has_the_prefix_of_the_device_or_none(path: Path) -> None:
    with _open(path) as log:
        _append(path, "12,7,2,c;from a program\\x0a\nfrom the kernel\\x0a\n")
        records = log.follow()
        async with asyncio.timeout(120):
            assert await anext(records) == KernelRecord(1, 4, 7, True, "from a program")
            assert await anext(records) == KernelRecord(0, 6, None, False, "from the kernel\\x0a")


async def test_only_a_line_break_ends_a_line(path: Path) -> None:
    """Python has more characters that end a line: a user's text may hold them."""
    _append(path, f"quoted \v{LOST}\nquoted \x85{LOST}\nquoted \u2028{LOST}\n")
    with _open(path) as log:
        assert len(log.existing_records()) == 3


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666, 0o664])
def test_a_file_that_others_can_write_is_not_read(path: Path, mode: int, caplog: pytest.LogCaptureFixture) -> None:
    path.chmod(mode)
    assert open_kernel_log(path) is None
    assert f"others can write to it (mode 0{mode:o}): chmod go-w; GPU errors go unseen" in caplog.text


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o440])
def test_a_file_that_others_can_read_is_read(path: Path, mode: int) -> None:
    path.chmod(mode)
    with _open(path) as log:
        assert log.existing_records() == []


@pytest.mark.parametrize(
    ("owner", "user", "reason"),
    [
        (0, 0, ""),
        (0, 1000, ""),
        (1000, 1000, ""),
        (1000, 0, "it belongs to uid 1000; it must belong to root or to uid 0"),
        (1001, 1000, "it belongs to uid 1001; it must belong to root or to uid 1000"),
    ],
)
def test_a_file_of_another_user_is_not_believed(owner: int, user: int, reason: str) -> None:
    status = os.stat_result((0o100600, 1, 1, 1, owner, owner, 0, 0, 0, 0))
    assert reason_for_distrust(status, user) == reason


def test_a_pipe_is_no_log_and_nobody_waits_for_its_writer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(tmp_path / "kmsg", 0o600)
    assert open_kernel_log(tmp_path / "kmsg") is None
    assert "is not read: it is neither /dev/kmsg nor a regular file" in caplog.text


def test_another_device_is_no_log(caplog: pytest.LogCaptureFixture) -> None:
    """Some containers have a terminal in place of /dev/kmsg."""
    assert open_kernel_log(Path("/dev/null")) is None
    assert "is not read: this device is not the kernel's log (1:11)" in caplog.text


@pytest.mark.parametrize(
    "line",
    [
        "Nov 21 08:00:00 n17 kernel: usb 1-1: new device",
        "2026-11-21T08:00:00.123456+00:00 n17 kernel: usb 1-1: new device",
        "[ 1234.567890] usb 1-1: new device",
        "[12345.567890] usb 1-1: new device",
        "<6>[ 1234.567890] usb 1-1: new device",
    ],
)
def test_a_file_of_syslog_is_no_substitute(path: Path, line: str, caplog: pytest.LogCaptureFixture) -> None:
    _append(path, f"{line}\n")
    with _open(path):
        assert "looks like a file of syslog or dmesg: GPU errors in such lines go unseen" in caplog.text


def test_a_file_of_records_does_not_look_like_syslog(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _append(path, f"6,1,2,-;usb 1-1: new device\n SUBSYSTEM=usb\n{LOST}\n")
    with _open(path):
        assert caplog.text == ""


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK), reason="reading /dev/kmsg takes CAP_SYSLOG")
def test_the_kernels_own_log_is_a_device() -> None:
    log = open_kernel_log(Path("/dev/kmsg"))
    assert isinstance(log, Device)
    with log:
        assert all(record.sequence is not None for record in log.existing_records())


class Seen:
    """Collects observations."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Observation] = asyncio.Queue()

    def __call__(self, observation: Observation) -> None:
        self.queue.put_nowait(observation)

    async def next(self) -> Observation:
        async with asyncio.timeout(120):
            return await self.queue.get()


class Watched:
    """The sensor, watching a file in a task of its own."""

    def __init__(self, path: Path) -> None:
        self.seen = Seen()
        self._task = asyncio.ensure_future(KernelLogSensor(SensorPaths(kmsg=path)).watch(self.seen))

    async def __aenter__(self) -> Seen:
        await asyncio.sleep(0)  # runs up to its first wait
        return self.seen

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def test_the_sensor_reports_new_lines_only(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _append(path, f"{LOST}\n")
    async with Watched(path) as seen:
        _append(path, "3,1,2,-;NVRM: Xid (PCI:0000:86:00): 48, DBE\n")
        observation = await seen.next()
    assert (observation.kind, observation.code, observation.device) == ("xid", 48, "0000:86:00")
    assert observation.text == "NVRM: Xid (PCI:0000:86:00): 48, DBE"
    assert f"the kernel log holds 1 GPU errors from before the start; the newest: {LOST}" in caplog.text


async def test_one_fault_printed_twice_is_one_observation(path: Path) -> None:
    async with Watched(path) as seen:
        _append(path, f"{LOST}\n{LOST}\nNVRM: Xid (PCI:0000:86:00): 79, x\n")
        assert [(await seen.next()).device, (await seen.next()).device] == ["0000:3b:00", "0000:86:00"]


def test_after_a_second_the_same_is_new() -> None:
    recent, sighting = RecentErrors(), KernelError("xid", 79, "0000:3b:00", LOST)
    assert recent.is_new(sighting, 10.0)
    assert not recent.is_new(sighting, 10.9)
    assert recent.is_new(sighting, 11.0)


async def test_what_a_user_can_have_written_is_not_reported(path: Path) -> None:
    async with Watched(path) as seen:
        _append(path, f"3,1,2,-;tmpfs: Unknown parameter '{LOST}'\n")  # a mount in a user namespace
        _append(path, f"12,2,3,-;{LOST}\n")  # a program that writes to /dev/kmsg
        _append(path, "6,2,3,-;oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=\n")
        _append(path, f"6,3,4,c;{LOST}\n")  # a fragment: the name of a cgroup
        _append(path, f"3,4,5,-;a\\x0a{LOST}\n")  # a line break in the name of a process
        _append(path, "3,5,6,-;NVRM: Xid (PCI:0000:86:00): 48, DBE\n")
        assert (await seen.next()).device == "0000:86:00"


class Broken:
    """A sensor that fails twice, then finds that there is nothing to watch."""

    name = "broken"

    def __init__(self) -> None:
        self.tries = 0

    async def watch(self, report: object) -> None:
        self.tries += 1
        if self.tries < 3:
            raise OSError("sensor trouble")


async def test_a_sensor_that_fails_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    waits: list[float] = []

    async def pause(seconds: float) -> None:
        waits.append(seconds)

    sensor = Broken()
    await run_sensor(sensor, Seen(), pause)
    assert (sensor.tries, waits) == (3, [5.0, 5.0])
    assert "sensor broken failed" in caplog.text


def test_no_name_of_a_control_group_is_counted_as_the_trouble_of_a_driver() -> None:
    errors, words = KernelErrors(), "mlx5_core 0000:3b:00.0: a new fatal error"
    errors.read(KernelRecord(0, 6, 1, False, "oom-kill:constraint=CONSTRAINT_NONE,cpuset=", 100.0), 1.0)
    assert errors.read(KernelRecord(0, 6, 2, True, words, 100.0), 1.0) == (None, "")
    assert errors.read(KernelRecord(0, 3, 3, False, words, 101.0), 2.0) == (None, words)
    assert dict(errors.lines.counts) == {"mlx5_core": 1}


def test_a_storm_of_different_errors_takes_no_more_memory() -> None:
    recent = RecentErrors()
    for number in range(3 * MAX_RECENT):
        assert recent.is_new(KernelError("xid", 79, str(number), ""), 1.0)
    assert recent.is_new(KernelError("xid", 79, "0", ""), 1.0)
    assert not recent.is_new(KernelError("xid", 79, str(3 * MAX_RECENT - 1), ""), 1.0)
