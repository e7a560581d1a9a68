"""After a restart of the daemon no error of the kernel log is missed, and none is judged twice."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from muster.daemon.host import clock
from muster.daemon.node.kernel.log_position import LogPosition
from muster.daemon.node.outbox import Outbox
from muster.daemon.node.sensors.kmsg import MAX_AGE_S, KernelLogSensor
from muster.daemon.node.sensors.sensor import Observation, Sample, SensorPaths
from muster.daemon.node.signal_windows import MAX_WAITING, SignalRule, SignalWindows


@pytest.fixture
def boot_id(tmp_path: Path) -> Path:
    file = SensorPaths(host_root=tmp_path).boot_id
    file.parent.mkdir(parents=True)
    file.write_text("boot-1\n")
    return file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "kmsg-position"


def test_the_position_is_before_the_oldest_error_that_is_not_handled(file: Path, boot_id: Path) -> None:
    position = LogPosition(file, boot_id)
    assert position.load() is None
    position.start_after(10)
    ends = [position.begin(sequence) for sequence in (12, 15, 19)]
    assert LogPosition(file, boot_id).load() == 10
    ends[1]()
    assert LogPosition(file, boot_id).load() == 11
    ends[0]()
    assert LogPosition(file, boot_id).load() == 18
    ends[2]()
    ends[2]()
    assert LogPosition(file, boot_id).load() == 19
    assert file.read_text() == "boot-1 19\n"
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_position_of_another_boot_counts_for_nothing(file: Path, boot_id: Path) -> None:
    LogPosition(file, boot_id).start_after(10)
    boot_id.write_text("boot-2\n")
    assert LogPosition(file, boot_id).load() is None


@pytest.mark.parametrize(
    "text", [b"", b"boot-1", b"boot-1 x", b"boot-1 -3", b"\xff\xfe", b"boot-1 " + b"9" * 5000, b"\0"]
)
def test_a_damaged_file_is_the_start_of_a_boot(file: Path, boot_id: Path, text: bytes) -> None:
    file.write_bytes(text)
    position = LogPosition(file, boot_id).load()
    assert position is None or position < 10**200


def test_where_the_position_can_not_be_kept_the_log_says_so_once(
    tmp_path: Path, boot_id: Path, caplog: pytest.LogCaptureFixture
) -> None:
    position = LogPosition(tmp_path / "absent" / "position", boot_id)
    for sequence in range(5):
        position.begin(sequence)()
    assert caplog.text.count("can't be kept") == 1


class Node:
    """A node whose kernel log is a file. `run` starts the sensor, and returns what it reports of the log so far."""

    def __init__(self, folder: Path, position: Path) -> None:
        self.log = folder / "kmsg"
        self.log.touch(mode=0o600)
        self._paths = SensorPaths(kmsg=self.log, kmsg_position=position, host_root=folder)
        self._sequence = 100

    def write(self, *codes: int, age_s: float = 0.0, device: str = "0000:3b:00") -> None:
        for code in codes:
            self._sequence += 1
            at = int((_since_boot() - age_s) * 1e6)
            with self.log.open("a") as log:
                log.write(f"3,{self._sequence},{at},-;NVRM: Xid (PCI:{device}): {code}, x\n")

    async def run(self, *new: int) -> list[Observation]:
        """Start the sensor, write these codes while it runs, and end it. An error of another device tells the end."""
        seen: asyncio.Queue[Observation | Sample] = asyncio.Queue()
        task = asyncio.ensure_future(KernelLogSensor(self._paths, _since_boot).watch(seen.put_nowait))
        await asyncio.sleep(0)  # runs up to its first wait
        last = f"0001:{self._sequence % 256:02x}:00"
        self.write(*new)
        self.write(1, device=last)
        reported: list[Observation] = []
        async with asyncio.timeout(120):
            while not reported or reported[-1].device != last:
                observation = await seen.get()
                assert isinstance(observation, Observation)
                reported.append(observation)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        reported.pop().handled()
        return reported


@pytest.fixture
def node(tmp_path: Path, file: Path, boot_id: Path) -> Node:
    assert SensorPaths(host_root=tmp_path).boot_id == boot_id
    return Node(tmp_path, file)


def _since_boot() -> float:
    """Seconds since a boot that is long ago, whenever this machine was started."""
    return clock.monotonic() + 100 * MAX_AGE_S


def _codes(observations: list[Observation]) -> list[int]:
    return [observation.code for observation in observations]


def _handle(observations: list[Observation]) -> None:
    for observation in observations:
        observation.handled()


async def test_what_came_while_no_daemon_ran_is_reported_once(node: Node) -> None:
    node.write(79)  # before the first start of this boot: somebody may have mended it
    assert await node.run() == []
    node.write(48, 62)
    missed = await node.run()
    assert _codes(missed) == [48, 62]
    assert abs(missed[0].observed_s - clock.wall()) < 60
    _handle(missed)
    assert await node.run() == []


async def test_what_the_coordinator_has_not_confirmed_is_reported_again(node: Node) -> None:
    await node.run()
    first = await node.run(48)
    assert _codes(first) == [48]
    assert _codes(await node.run())[:1] == [48]


async def test_what_was_confirmed_is_not_reported_again(node: Node) -> None:
    await node.run()
    _handle(await node.run(48))
    assert await node.run() == []


async def test_a_repetition_of_a_handled_error_is_none_after_a_restart(node: Node) -> None:
    await node.run()
    _handle(await node.run(48, 48))
    assert await node.run() == []


async def test_after_a_reboot_no_old_line_is_judged(node: Node, boot_id: Path) -> None:
    await node.run()
    node.write(79)
    boot_id.write_text("boot-2\n")
    assert await node.run() == []


async def test_an_error_that_nobody_saw_for_long_is_not_judged(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    await node.run()
    node.write(79, age_s=MAX_AGE_S + 10)
    node.write(48, age_s=MAX_AGE_S - 60)
    assert _codes(await node.run())[:1] == [48]
    assert "too old to be judged now: NVRM: Xid (PCI:0000:3b:00): 79" in caplog.text


class Ends:
    """Observations, and which of them were handled."""

    def __init__(self) -> None:
        self.handled: list[int] = []

    def observation(self, number: int, code: int = 79, kind: str = "xid") -> Observation:
        return Observation(kind, code, "a", "text", float(number), lambda: self.handled.append(number))


def test_an_observation_is_handled_when_it_is_confirmed_or_leaves_the_outbox() -> None:
    ends, box = Ends(), Outbox(limit=2)
    box.put(ends.observation(1))
    box.put(ends.observation(2))  # the first one waits
    assert ends.handled == [2]
    sent = box.next_unsent()
    assert sent is not None
    box.put(ends.observation(3))  # replaces what was sent and not confirmed
    box.confirm(sent)
    assert ends.handled == [2, 1]
    for number in (4, 5):
        box.put(ends.observation(number, code=number))
    assert ends.handled == [2, 1, 3]  # there was no room
    while observation := box.next_unsent():
        box.confirm(observation)
    assert ends.handled == [2, 1, 3, 4, 5]


def test_an_observation_that_only_counts_is_handled() -> None:
    ends = Ends()
    reported: list[Observation] = []
    windows = SignalWindows(reported.append)
    windows.use([SignalRule("nic", 1, 0, 60, 0, 60, count=2)])
    windows.report(ends.observation(1, 1, "nic"))
    windows.report(ends.observation(2, 1, "nic"))
    assert ends.handled == [1]
    reported[0].handled()
    assert ends.handled == [1, 2]


def test_observations_that_wait_for_rules_are_not_handled_yet() -> None:
    ends = Ends()
    windows = SignalWindows(lambda _: None)
    for number in range(MAX_WAITING + 2):
        windows.report(ends.observation(number))
    assert ends.handled == [0, 1]
