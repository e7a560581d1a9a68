"""The lease: never two who may act, whoever stands still when; and somebody soon."""

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

from muster.daemon.coordinator.leadership.leader import Keeping
from muster.daemon.coordinator.leadership.lease import Lease, LeaseError, LeaseLost, Patience
from muster.daemon.coordinator.leadership.lease_holder import Incumbent
from muster.slurm.client.permit import OVERTIME_S

PATIENCE = Patience()
ME = Incumbent.of_this_process()


class Killed(Exception):
    """By the timer of its kernel."""


class World:
    """One time; each machine's clock shows it in its own way."""

    def __init__(self, folder: Path, patience: Patience = PATIENCE) -> None:
        self.folder, self.patience, self.now = folder, patience, 1000.0
        self.machines: list[Machine] = []
        self.written: list[bytes] = []
        """What the lease's file said, oldest first."""

    def remember(self) -> None:
        if (file := self.folder / "lease").exists() and self.written[-1:] != [found := file.read_bytes()]:
            self.written.append(found)

    def write_late(self, back: int) -> None:
        """What a machine wrote a while ago reaches the folder only now."""
        if len(self.written) > back:
            (self.folder / "lease").write_bytes(self.written[-1 - back])

    def hang(self, whom: Machine, seconds: float) -> None:
        """The folder keeps one machine waiting; the others go on meanwhile."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(self.now + self.patience.renew_s, until)
            for machine in self.machines:
                if machine is not whom:
                    machine.step("go on")

    def holders(self) -> list[Machine]:
        return [machine for machine in self.machines if machine.may_act()]


class Machine:
    """A coordinator of which only the lease is real. `rate`: seconds of its clock in one of the world's."""

    def __init__(self, world: World, name: str, rate: float) -> None:
        self.world, self.rate, self.boots = world, rate, 0
        self.name = name
        self.frozen = False
        self.hangs: list[float] = []
        """Seconds for which what follows each of the next looks at the clock waits for the folder."""
        self.start()
        world.machines.append(self)

    def clock(self) -> float:
        return self.world.now * self.rate

    def look(self) -> float:
        """The clock as the lease sees it: what it does next may take its time."""
        now = self.clock()
        if self.hangs and (seconds := self.hangs.pop(0)):
            self.world.hang(self, seconds)
            if self.clock() >= self.killed_at:
                raise Killed
        return now

    def start(self) -> None:
        self.boots += 1
        self.killed_at = float("inf")
        me = Incumbent(self.name, f"boot-{self.boots}", 1, 1)
        self.lease = Lease(self.world.folder, me, self._arm, self.world.patience, self.look)

    def _arm(self, seconds: float) -> None:
        self.killed_at = self.clock() + seconds if seconds else float("inf")

    def may_act(self) -> bool:
        """By time alone: what `check` reads besides is a second net."""
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
            self.lease.try_take()
        elif what == "leave":
            self.lease.release()
            self.start()
        else:
            try:
                self.lease.renew()
            except LeaseLost:
                self.start()


class Step(NamedTuple):
    """After so many seconds this machine does that. `hangs`: see Machine."""

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
WORLDS = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def play(folder: Path, steps: Sequence[Step], rates: Sequence[float], patience: Patience) -> None:
    world = World(folder, patience)
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
    # Whatever happened: somebody holds it soon, once processes run.
    for machine in machines:
        machine.frozen = False
    for _ in range(int((patience.lapse_s + patience.takeover_s + 3) / patience.look_s)):
        world.now += patience.look_s
        for machine in machines:
            machine.step("go on")
    assert len(world.holders()) == 1


RATES = st.tuples(*[st.floats(0.95, 1.05)] * 3)


@WORLDS
@given(steps=st.lists(STEP, max_size=60), rates=RATES)
def test_never_two_who_may_act_and_soon_one(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Step], rates: tuple[float, ...]
) -> None:
    play(tmp_path_factory.mktemp("state"), steps, rates, PATIENCE)


@pytest.mark.parametrize(
    "patience",
    [Patience(takeover_s=3.0), Patience(lapse_s=60.0)],
    ids=["taken before it has lapsed", "not let go in time"],
)
def test_the_property_finds_wrong_times(tmp_path: Path, patience: Patience) -> None:
    """ctl0 stands still for less than its lapse, while ctl1 looks on."""
    looks = [Step(0.25, 1, "go on")] * 40
    with pytest.raises(AssertionError, match=r"ctl0.*ctl1"):
        play(tmp_path, [Step(0.0, 0, "go on"), *looks], (1.0, 1.0, 1.0), patience)


def test_a_look_that_hangs_takes_nothing_from_who_goes_on(tmp_path: Path) -> None:
    begin = [Step(0.0, 0, "go on"), Step(0.5, 1, "go on")]
    looks = [Step(0.01, 1, "go on")] * 5
    for hang in (7.5, 8.0, 9.0, 20.0):
        folder = tmp_path / str(hang)
        folder.mkdir()
        play(folder, [*begin, Step(0.25, 1, "go on", (hang,)), *looks], (1.0, 1.0, 1.0), PATIENCE)


def test_a_step_that_outlives_the_lease_is_over_before_another_begins() -> None:
    assert PATIENCE.lapse_s + 2 * OVERTIME_S < PATIENCE.takeover_s


def lease(folder: Path, me: Incumbent = ME) -> Lease:
    return Lease(folder, me, lambda _: None)


def elsewhere(folder: Path) -> Lease:
    return lease(folder, Incumbent("ctl2", "another-boot", 1, 1))


def test_the_first_takes_it_at_once_and_the_second_looks_on(tmp_path: Path) -> None:
    first, second = lease(tmp_path), elsewhere(tmp_path)
    assert first.try_take()
    assert not second.try_take()
    assert (first.term, second.term) == (1, 0)
    assert second.holder() == f"{ME.host} (term 1)"


def test_one_that_was_given_back_is_taken_at_once(tmp_path: Path) -> None:
    first, second = lease(tmp_path), elsewhere(tmp_path)
    assert first.try_take()
    first.release()
    assert second.try_take()
    assert second.term == 2


def test_one_whose_process_has_ended_on_this_machine_is_taken_at_once(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    before = lease(tmp_path, Incumbent(ME.host, ME.kernel, ended.pid, 1))
    assert before.try_take()
    assert lease(tmp_path).try_take()


def test_of_a_process_on_another_machine_nothing_is_known(tmp_path: Path) -> None:
    assert elsewhere(tmp_path).try_take()
    assert not lease(tmp_path).try_take()


def test_a_file_of_a_term_that_another_made_decides(tmp_path: Path) -> None:
    first, second = lease(tmp_path), elsewhere(tmp_path)
    (tmp_path / "term-1").touch()
    assert not first.try_take()
    assert not second.try_take()


def test_who_was_replaced_is_told_so(tmp_path: Path) -> None:
    first, second = lease(tmp_path), elsewhere(tmp_path)
    first.try_take()
    (tmp_path / "lease").unlink()
    assert not second.try_take()  # the term's file is there: somebody is on the way
    (tmp_path / "term-1").unlink()
    assert second.try_take()
    with pytest.raises(LeaseLost, match="has passed on"):
        first.renew()


class Elsewhere:
    """A lease of another machine, on a clock that is set; `meanwhile` happens once, when it looks at its clock for the
    `at`-th time from now."""

    def __init__(self, folder: Path, host: str = "ctl2") -> None:
        self.now = 0.0
        self.meanwhile: tuple[int, Callable[[], None]] | None = None
        self.lease = Lease(folder, Incumbent(host, f"boot of {host}", 1, 1), lambda _: None, now=self._look)

    def _look(self) -> float:
        if self.meanwhile:
            at, what = self.meanwhile
            self.meanwhile = (at - 1, what) if at > 1 else None
            if at == 1:
                what()
        return self.now


def test_a_late_write_under_an_older_term_ends_nobody(tmp_path: Path) -> None:
    first, second = elsewhere(tmp_path), lease(tmp_path)
    first.try_take()
    late = (tmp_path / "lease").read_bytes()
    first.release()
    second.try_take()
    for left_behind in (late, b"", b"\0" * 512):
        (tmp_path / "lease").write_bytes(left_behind)
        second.check()
        second.renew()
        assert (tmp_path / "lease").read_text().split()[0] == "2"
    (tmp_path / "lease").write_bytes(late)
    (tmp_path / "term-3").touch()
    with pytest.raises(LeaseLost, match="has passed on with term 3"):
        second.check()


def test_what_a_claim_saw_of_the_folder_may_have_been_old(tmp_path: Path) -> None:
    """When it makes a term's file that term is over, and its file away; the entry is an older one's late write."""
    first, returning = lease(tmp_path), Elsewhere(tmp_path)
    first.try_take()
    first.release()
    late = (tmp_path / "lease").read_bytes()
    others = [lease(tmp_path), lease(tmp_path)]

    def two_terms_pass() -> None:
        assert others[0].try_take()
        others[0].release()
        assert others[1].try_take()
        (tmp_path / "lease").write_bytes(late)

    returning.meanwhile = 3, two_terms_pass  # a look begins, it is dated, a claim begins
    assert not returning.lease.try_take()
    assert others[1].term == 3
    others[1].renew()
    assert [path.name for path in tmp_path.glob("term-*")] == ["term-3"]


def test_a_claim_that_is_given_up_keeps_nobody_waiting(tmp_path: Path) -> None:
    first, other = lease(tmp_path), Elsewhere(tmp_path)
    assert first.try_take()
    assert not other.lease.try_take()
    other.now += PATIENCE.takeover_s
    other.meanwhile = 2, first.renew  # a look begins, a claim begins
    assert not other.lease.try_take()
    first.release()
    assert other.lease.try_take()


@pytest.mark.parametrize("left", [b"", b"\0" * 512])
def test_a_file_that_was_never_written_is_waited_for_and_no_longer(tmp_path: Path, left: bytes) -> None:
    (tmp_path / "lease").write_bytes(left)
    (tmp_path / "term-1").touch()
    other = Elsewhere(tmp_path)
    assert not other.lease.try_take()
    other.now += PATIENCE.takeover_s
    assert other.lease.try_take()
    assert other.lease.term == 2


def test_terms_go_on_above_those_of_the_journals(tmp_path: Path) -> None:
    (tmp_path / "journal-00000007.db").touch()
    first = lease(tmp_path)
    assert first.try_take()
    assert first.term == 8


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "lease").write_text("rubbish")
    with pytest.raises(LeaseError, match="lease is damaged"):
        lease(tmp_path).try_take()


def test_an_identity_survives_the_file(tmp_path: Path) -> None:
    assert Incumbent.parse(str(ME)) == ME
    assert Incumbent.parse("ctl1") is None
    assert not ME.has_ended(ME)


async def test_the_loop_counts_as_moving_from_when_the_lease_was_taken(tmp_path: Path) -> None:
    """A standby is made long before."""
    loop, renewed, lost, moment = asyncio.get_running_loop(), asyncio.Event(), list[str](), [0.0]
    held = Lease(tmp_path, ME, lambda _: loop.call_soon_threadsafe(renewed.set) and None, Patience(renew_s=0.001))
    keeping = Keeping(held, lost.append, now=lambda: moment[0])
    moment[0] += 100 * PATIENCE.stuck_s
    assert held.try_take()
    await asyncio.sleep(0)
    renewed.clear()
    keeping.start()
    async with asyncio.timeout(10):
        await renewed.wait()
    keeping.stop()
    assert lost == []


def test_who_is_hidden_has_not_ended(tmp_path: Path) -> None:
    """As where /proc shows a user's own processes alone."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    for pid, has_ended in ((1, False), (ended.pid, True)):
        assert Incumbent(ME.host, ME.kernel, pid, 1).has_ended(ME, proc=tmp_path) is has_ended


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
        done = subprocess.run([sys.executable, "-c", started, program], timeout=30, check=False)
        assert done.returncode == status
