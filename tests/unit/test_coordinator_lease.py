"""The lease: two coordinators never act at the same time, whichever process is suspended; and one of them acts soon."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muster.daemon.coordinator.leadership.leader import LeaseKeeper
from muster.daemon.coordinator.leadership.lease import Lease, LeaseError, LeaseLost, LeaseTimeouts
from muster.daemon.coordinator.leadership.lease_holder import LeaseHolder
from muster.slurm.client.deadline import BACKSTOP_DELAY_S

TIMEOUTS = LeaseTimeouts()
THIS_PROCESS = LeaseHolder.of_this_process()


class Killed(Exception):
    """The kernel timer has ended the process."""


class World:
    """Simulated time and the machines that share the folder; each machine's clock runs at its own rate."""

    def __init__(self, folder: Path, timeouts: LeaseTimeouts = TIMEOUTS) -> None:
        self.folder, self.timeouts, self.now = folder, timeouts, 1000.0
        self.machines: list[Machine] = []
        self.written: list[bytes] = []
        """Contents of the lease file, oldest first."""

    def remember(self) -> None:
        if (file := self.folder / "lease").exists() and self.written[-1:] != [found := file.read_bytes()]:
            self.written.append(found)

    def write_late(self, back: int) -> None:
        """An old write of a machine reaches the folder only now."""
        if len(self.written) > back:
            (self.folder / "lease").write_bytes(self.written[-1 - back])

    def hang(self, whom: Machine, seconds: float) -> None:
        """The shared folder blocks one machine; the other machines go on meanwhile."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(self.now + self.timeouts.renew_interval_s, until)
            for machine in self.machines:
                if machine is not whom:
                    machine.step("go on")

    def holders(self) -> list[Machine]:
        return [machine for machine in self.machines if machine.may_act()]


class Machine:
    """A coordinator that consists of its lease alone. `rate`: seconds of its clock per second of world time."""

    def __init__(self, world: World, name: str, rate: float) -> None:
        self.world, self.rate, self.boots = world, rate, 0
        self.name = name
        self.frozen = False
        self.hangs: list[float] = []
        """Seconds for which the folder blocks after each of the next readings of the clock."""
        self.start()
        world.machines.append(self)

    def clock(self) -> float:
        return self.world.now * self.rate

    def look(self) -> float:
        """The clock as the lease reads it: the next file operation may block."""
        now = self.clock()
        if self.hangs and (seconds := self.hangs.pop(0)):
            self.world.hang(self, seconds)
            if self.clock() >= self.killed_at:
                raise Killed
        return now

    def start(self) -> None:
        self.boots += 1
        self.killed_at = float("inf")
        me = LeaseHolder(self.name, f"boot-{self.boots}", 1, 1)
        self.lease = Lease(self.world.folder, me, self._arm, self.world.timeouts, self.look)

    def _arm(self, seconds: float) -> None:
        self.killed_at = self.clock() + seconds if seconds else float("inf")

    def may_act(self) -> bool:
        """Judged by time alone: that `check` reads the file as well is a second safeguard."""
        return self.lease.term > 0 and self.clock() < self.killed_at

    def step(self, what: str) -> None:
        try:
            self._step(what)
        except Killed:
            self.start()
        self.hangs.clear()

    def _step(self, what: str) -> None:
        if what in ("freeze", "thaw"):
            self.frozen = what == "freeze"
        elif self.frozen:
            return
        elif self.clock() >= self.killed_at or what == "crash":
            self.start()
        elif not self.lease.term:
            self.lease.try_acquire()
        elif what == "leave":
            self.lease.release()
            self.start()
        else:
            try:
                self.lease.renew()
            except LeaseLost:
                self.start()


class Step(NamedTuple):
    """After `passes` seconds machine `which` does `what`. `hangs`: see Machine."""

    passes: float
    which: int
    what: str
    hangs: tuple[float, ...] = ()


HANGS = st.lists(st.sampled_from([0.0, 0.0, 2.0, 6.0, 8.0, 9.0, 14.0]), max_size=3).map(tuple)
STEP = st.builds(
    Step,
    st.floats(0.0, 4.0),
    st.integers(0, 2),
    st.sampled_from(["go on"] * 6 + ["freeze", "thaw", "thaw", "crash", "leave", "late"]),
    st.just(()) | HANGS,
)
WORLDS = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def play(folder: Path, steps: Sequence[Step], rates: Sequence[float], timeouts: LeaseTimeouts) -> None:
    world = World(folder, timeouts)
    machines = [Machine(world, f"ctl{n}", rate) for n, rate in enumerate(rates)]
    terms: list[int] = []
    for step in steps:
        world.now += step.passes
        if step.what == "late":
            world.write_late(1 + 2 * step.which)
            continue
        machines[step.which].hangs = [*step.hangs]
        machines[step.which].step(step.what)
        world.remember()
        holders = world.holders()
        assert len(holders) <= 1, [(m.name, m.lease.term) for m in holders]
        terms += [m.lease.term for m in holders]
        assert terms == sorted(terms)
    # Whatever happened before: once the processes run, one of them soon holds the lease.
    for machine in machines:
        machine.frozen = False
    for _ in range(int((timeouts.expiry_s + timeouts.takeover_s + 3) / timeouts.poll_interval_s)):
        world.now += timeouts.poll_interval_s
        for machine in machines:
            machine.step("go on")
    assert len(world.holders()) == 1


RATES = st.tuples(*[st.floats(0.95, 1.05)] * 3)


@WORLDS
@given(steps=st.lists(STEP, max_size=60), rates=RATES)
def test_two_never_hold_the_lease_and_one_soon_does(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Step], rates: tuple[float, ...]
) -> None:
    play(tmp_path_factory.mktemp("state"), steps, rates, TIMEOUTS)


@pytest.mark.parametrize(
    "timeouts",
    [LeaseTimeouts(takeover_s=3.0), LeaseTimeouts(expiry_s=60.0)],
    ids=["acquired before it has expired", "not given up in time"],
)
def test_the_property_fails_with_wrong_timeouts(tmp_path: Path, timeouts: LeaseTimeouts) -> None:
    """ctl0 does not run for less than its expiry time, while ctl1 polls."""
    looks = [Step(0.25, 1, "go on")] * 40
    with pytest.raises(AssertionError, match=r"ctl0.*ctl1"):
        play(tmp_path, [Step(0.0, 0, "go on"), *looks], (1.0, 1.0, 1.0), timeouts)


def test_a_poll_that_hangs_does_not_take_the_lease_from_a_running_holder(tmp_path: Path) -> None:
    begin = [Step(0.0, 0, "go on"), Step(0.5, 1, "go on")]
    looks = [Step(0.01, 1, "go on")] * 5
    for hang in (7.5, 8.0, 9.0, 20.0):
        folder = tmp_path / str(hang)
        folder.mkdir()
        play(folder, [*begin, Step(0.25, 1, "go on", (hang,)), *looks], (1.0, 1.0, 1.0), TIMEOUTS)


def test_a_slurm_step_that_outlives_the_lease_ends_before_a_takeover() -> None:
    assert TIMEOUTS.expiry_s + 2 * BACKSTOP_DELAY_S < TIMEOUTS.takeover_s


def lease(folder: Path, me: LeaseHolder = THIS_PROCESS) -> Lease:
    return Lease(folder, me, lambda _: None)


def elsewhere(folder: Path) -> Lease:
    return lease(folder, LeaseHolder("ctl2", "another-boot", 1, 1))


def test_the_first_acquires_the_lease_at_once_and_the_second_polls(tmp_path: Path) -> None:
    first, second = lease(tmp_path), elsewhere(tmp_path)
    assert first.try_acquire()
    assert not second.try_acquire()
    assert (first.term, second.term) == (1, 0)
    assert second.describe_holder() == f"{THIS_PROCESS.host} (term 1)"


def test_a_released_lease_is_acquired_at_once(tmp_path: Path) -> None:
    first, second = lease(tmp_path), elsewhere(tmp_path)
    assert first.try_acquire()
    first.release()
    assert second.try_acquire()
    assert second.term == 2


def test_the_lease_of_an_ended_process_of_this_machine_is_acquired_at_once(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    before = lease(tmp_path, LeaseHolder(THIS_PROCESS.host, THIS_PROCESS.kernel_id, ended.pid, 1))
    assert before.try_acquire()
    assert lease(tmp_path).try_acquire()


def test_a_process_of_another_machine_counts_as_alive(tmp_path: Path) -> None:
    assert elsewhere(tmp_path).try_acquire()
    assert not lease(tmp_path).try_acquire()


def test_an_existing_term_file_blocks_a_claim(tmp_path: Path) -> None:
    first, second = lease(tmp_path), elsewhere(tmp_path)
    (tmp_path / "term-1").touch()
    assert not first.try_acquire()
    assert not second.try_acquire()


def test_a_replaced_holder_loses_the_lease_at_its_next_renewal(tmp_path: Path) -> None:
    first, second = lease(tmp_path), elsewhere(tmp_path)
    first.try_acquire()
    (tmp_path / "lease").unlink()
    assert not second.try_acquire()  # the term file exists: another coordinator may be claiming the term
    (tmp_path / "term-1").unlink()
    assert second.try_acquire()
    with pytest.raises(LeaseLost, match="another coordinator has the lease"):
        first.renew()


class Elsewhere:
    """A lease of another machine, on a clock that the test sets. `meanwhile` is (n, action): the action runs once, when
    the lease reads its clock for the n-th time from now."""

    def __init__(self, folder: Path, host: str = "ctl2") -> None:
        self.now = 0.0
        self.meanwhile: tuple[int, Callable[[], None]] | None = None
        self.lease = Lease(folder, LeaseHolder(host, f"boot of {host}", 1, 1), lambda _: None, now=self._look)

    def _look(self) -> float:
        if self.meanwhile:
            at, what = self.meanwhile
            self.meanwhile = (at - 1, what) if at > 1 else None
            if at == 1:
                what()
        return self.now


def test_a_late_write_under_an_older_term_does_not_end_the_holder(tmp_path: Path) -> None:
    first, second = elsewhere(tmp_path), lease(tmp_path)
    first.try_acquire()
    late = (tmp_path / "lease").read_bytes()
    first.release()
    second.try_acquire()
    for left_behind in (late, b"", b"\0" * 512):
        (tmp_path / "lease").write_bytes(left_behind)
        second.check()
        second.renew()
        assert (tmp_path / "lease").read_text().split()[0] == "2"
    (tmp_path / "lease").write_bytes(late)
    (tmp_path / "term-3").touch()
    with pytest.raises(LeaseLost, match="another coordinator has the lease under term 3"):
        second.check()


def test_a_claim_on_a_stale_listing_fails(tmp_path: Path) -> None:
    """The claimed term is over and its file removed; the lease file holds an older holder's late write."""
    first, returning = lease(tmp_path), Elsewhere(tmp_path)
    first.try_acquire()
    first.release()
    late = (tmp_path / "lease").read_bytes()
    others = [lease(tmp_path), lease(tmp_path)]

    def two_terms_pass() -> None:
        assert others[0].try_acquire()
        others[0].release()
        assert others[1].try_acquire()
        (tmp_path / "lease").write_bytes(late)

    returning.meanwhile = 3, two_terms_pass  # the poll begins, the change is dated, the claim begins
    assert not returning.lease.try_acquire()
    assert others[1].term == 3
    others[1].renew()
    assert [path.name for path in tmp_path.glob("term-*")] == ["term-3"]


def test_a_failed_claim_leaves_no_term_file(tmp_path: Path) -> None:
    first, other = lease(tmp_path), Elsewhere(tmp_path)
    assert first.try_acquire()
    assert not other.lease.try_acquire()
    other.now += TIMEOUTS.takeover_s
    other.meanwhile = 2, first.renew  # the poll begins, the claim begins
    assert not other.lease.try_acquire()
    first.release()
    assert other.lease.try_acquire()


@pytest.mark.parametrize("left", [b"", b"\0" * 512])
def test_a_lease_file_that_was_never_written_is_acquired_after_the_takeover_time(tmp_path: Path, left: bytes) -> None:
    (tmp_path / "lease").write_bytes(left)
    (tmp_path / "term-1").touch()
    other = Elsewhere(tmp_path)
    assert not other.lease.try_acquire()
    other.now += TIMEOUTS.takeover_s
    assert other.lease.try_acquire()
    assert other.lease.term == 2


def test_a_new_term_is_above_the_terms_of_the_journals(tmp_path: Path) -> None:
    (tmp_path / "journal-00000007.db").touch()
    first = lease(tmp_path)
    assert first.try_acquire()
    assert first.term == 8


def test_the_error_names_a_damaged_lease_file(tmp_path: Path) -> None:
    (tmp_path / "lease").write_text("rubbish")
    with pytest.raises(LeaseError, match="lease is damaged"):
        lease(tmp_path).try_acquire()


def test_a_holder_is_parsed_from_its_text(tmp_path: Path) -> None:
    assert LeaseHolder.parse(str(THIS_PROCESS)) == THIS_PROCESS
    assert LeaseHolder.parse("ctl1") is None
    assert not THIS_PROCESS.has_ended(THIS_PROCESS)


async def test_the_stall_of_the_loop_is_measured_from_the_acquisition(tmp_path: Path) -> None:
    """A standby is created long before it acquires the lease."""
    loop, renewed, lost, moment = asyncio.get_running_loop(), asyncio.Event(), list[str](), [0.0]
    held = Lease(
        tmp_path,
        THIS_PROCESS,
        lambda _: loop.call_soon_threadsafe(renewed.set) and None,
        LeaseTimeouts(renew_interval_s=0.001),
    )
    keeper = LeaseKeeper(held, lost.append, now=lambda: moment[0])
    moment[0] += 100 * TIMEOUTS.loop_stalled_s
    assert held.try_acquire()
    await asyncio.sleep(0)
    renewed.clear()
    keeper.start()
    async with asyncio.timeout(120):
        await renewed.wait()
    keeper.stop()
    assert lost == []


def test_a_process_that_proc_hides_has_not_ended(tmp_path: Path) -> None:
    """/proc may show a user's own processes alone (hidepid)."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    for pid, has_ended in ((1, False), (ended.pid, True)):
        assert (
            LeaseHolder(THIS_PROCESS.host, THIS_PROCESS.kernel_id, pid, 1).has_ended(THIS_PROCESS, proc=tmp_path)
            is has_ended
        )


ARMED = (
    "import time; from muster.daemon.coordinator.leadership.leader import Watchdog; "
    "dog = Watchdog(); {}; time.sleep({})"
)


@pytest.mark.parametrize("parent", ["", "SIG_BLOCK", "SIG_IGN"])
def test_the_kernel_ends_a_process_that_does_not_renew_whatever_it_inherits(parent: str) -> None:
    inherit = {
        "": "pass",
        "SIG_BLOCK": "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])",
        "SIG_IGN": "signal.signal(signal.SIGALRM, signal.SIG_IGN)",
    }
    started = (
        f"import os, signal, sys; {inherit[parent]}; os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])"
    )
    for code, status in (("dog.arm(0.05)", -signal.SIGALRM), ("dog.arm(60); dog.arm(0)", 0)):
        program = ARMED.format(code, 60 if status else 0)
        done = subprocess.run([sys.executable, "-c", started, program], timeout=60, check=False)
        assert done.returncode == status
