"""The ledger of a gang: to what each second of its nodes went."""

from collections.abc import Iterable

import pytest

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.events import GangSpec, Version
from muster.daemon.coordinator.core.state.facts import Progress, Seat
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.turn.state_updates import apply
from muster.daemon.coordinator.goodput.intervals import Category, FaultKind, Interval, Measured, sums
from muster.daemon.coordinator.goodput.ledger import Ledger
from muster.simulator.scenario import Scenario


class Job:
    """A gang on two nodes and a spare, which waits 100 s in the queue and 10 s for its agents. Its facts are short."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.noted: list[tuple[float, facts.Fact]] = []
        self._note(0, facts.GangRegistered("g", 1, 1000, "train", GangSpec(2, 1), "{}"))
        self._note(100, facts.JobChanged("g", ("a", "b", "c")))
        self._note(100, facts.PhaseChanged("g", Phase.GATHERING, ""))
        for node in ("a", "b", "c"):
            self._note(105, facts.MemberJoined("g", node, 1, "i", "", node == "a", "s0"))
        self._note(108, facts.GenerationFenced("g", 0, facts.PREFLIGHT_CAUSE, True, "a", 0, 108))

    def _note(self, at: float, fact: facts.Fact) -> None:
        self.noted.append((at, fact))
        self.ledger.note(fact, at)

    def start(self, at: float, generation: int, seats: str, version: int | None = None, fenced_at: float = 0) -> None:
        """A generation starts, with the state of a step."""
        restored = Version(generation - 1, version) if version is not None else None
        places = tuple(Seat(node, number, "", ()) for number, node in enumerate(seats))
        self._note(
            at,
            facts.GenerationStarted(
                "g", generation, places, (), "a", 1, restored, (), "", fenced_at=fenced_at or at, action=""
            ),
        )

    def run(self, at: float, generation: int, step: int) -> None:
        """Its ranks run 3 s after its start, have their state after 2 s more, and their first step another second
        later: at `at`."""
        self._note(at - 3, facts.PhaseChanged("g", Phase.RUNNING, ""))
        if generation > 1:
            self._note(at - 1, facts.StateRestored("g", generation, Version(1, step - 1), 0, 0, 0, (), 1.0))
        self._note(at, facts.FirstStep("g", generation, step))

    def crash(self, at: float, generation: int, step: int, suspected_at: float, node: str = "") -> None:
        """A rank ends by itself; or a node is lost, if it is named."""
        progress = Progress(Version(generation, step))
        crashed_on = "" if node else "b"
        self._note(
            at,
            facts.GenerationFenced(
                "g", generation, "it failed", bool(node), "a", step, suspected_at, crashed_on, progress
            ),
        )
        if node:
            self._note(at, facts.MemberRemoved("g", node, f"{node} is silent", alive=False))

    def end(self, at: float, step: int) -> None:
        """Every rank is done, and Slurm has the nodes back 4 s later."""
        done = Progress(Version(1, step))
        self._note(at, facts.GangEnded("g", Phase.DONE, 0, "", done))
        self._note(at + 4, facts.JobEnded("g", "COMPLETED"))


def by_category(intervals: Iterable[Interval]) -> dict[str, float]:
    return {str(category): pytest.approx(node_s) for category, node_s in sums(intervals).items()}


def test_a_run_without_faults() -> None:
    job = Job()
    job.start(110, 1, "ab")
    job.run(114, 1, step=1)
    job.end(1014, step=901)
    assert by_category(job.ledger.take()) == {
        "queue": 300, "start": 30 + 12, "rendezvous": 2, "first_step": 6, "useful": 1800, "spare": 904
    }  # fmt: skip


def test_each_part_of_a_recovery_is_charged_with_the_node_that_was_lost() -> None:
    job = Job()
    job.start(110, 1, "ab")
    job.run(114, 1, step=1)
    job.ledger.take()
    job.crash(1019, 1, step=901, suspected_at=1014, node="b")
    job.start(1032, 2, "ac", version=880, fenced_at=1025)
    job.run(1039, 2, step=881)
    state = DurableState()
    for at, fact in job.noted:
        apply(state, fact, at)
    recovery = state.gangs["g"].recovery.last
    assert recovery is not None
    job.crash(2039, 2, step=1881, suspected_at=2039)
    settled = job.ledger.take()
    lost = [one for one in settled if one.fault is not None and one.category is not Category.SPARE]
    assert [(str(one.category), one.since, one.until) for one in lost] == [
        ("detect", 1014, 1019),
        ("fence", 1019, 1025),
        ("place", 1025, 1032),
        ("rendezvous", 1032, 1036),
        ("load", 1036, 1038),
        ("first_step", 1038, 1039),
        ("steps_again", 1039, 1059),
    ]
    assert list(recovery.phase_seconds()) == [(str(one.category), one.until - one.since) for one in lost[:-1]]
    assert {(one.fault.kind, one.fault.node, one.fault.at) for one in lost if one.fault} == {
        (FaultKind.NODE, "b", 1019)
    }
    held = [one for one in settled if one.category is Category.SPARE and "b" in one.nodes]
    assert {(one.fault and one.fault.kind) for one in held} == {FaultKind.NODE}


def test_steps_that_two_faults_undo_are_charged_with_each_of_them() -> None:
    job = Job()
    job.start(110, 1, "ab")
    job.run(120, 1, step=1)
    job.crash(1120, 1, step=1001, suspected_at=1120, node="b")
    job.start(1130, 2, "ac", version=801)
    job.run(1140, 2, step=802)
    job.crash(1240, 2, step=902, suspected_at=1240)  # a rank crashes halfway
    job.start(1250, 3, "ac", version=851)
    job.run(1260, 3, step=852)
    job.end(1560, step=1152)
    again = [one for one in job.ledger.take() if one.category is Category.STEPS_AGAIN]
    charged = [(one.generation, one.fault and one.fault.kind, one.node_s) for one in again]
    assert charged == [
        (2, FaultKind.NODE, pytest.approx(2 * 100)),
        (3, FaultKind.CRASH, pytest.approx(2 * 50)),
        (3, FaultKind.NODE, pytest.approx(2 * 99)),
    ]


def test_what_was_measured_of_a_generation_is_no_useful_time() -> None:
    job = Job()
    job.start(110, 1, "ab")
    job.run(120, 1, step=1)
    job.ledger.measure(Measured(checkpoint=0.02, straggler=0.1, data=0.05))
    job.end(1120, step=1001)
    parts = sums(job.ledger.take())
    assert (parts[Category.CHECKPOINT], parts[Category.STRAGGLER], parts[Category.DATA]) == (40, 200, 100)
    assert parts[Category.USEFUL] == pytest.approx(2000 - 340)


def test_parts_never_take_more_than_the_whole() -> None:
    assert sum(share for _, share in Measured(0.7, 0.7, 0.7).shares()) == 1.0
    assert Measured(-0.1, 0.0, 0.2).shares() == [(Category.DATA, 0.2)]


def test_of_a_script_that_says_no_step_the_time_in_which_all_ranks_ran_is_told_apart() -> None:
    """While it runs, and after a fault: only what the fault took is lost."""
    job = Job()
    job.start(110, 1, "ab")
    job.ledger.note(facts.PhaseChanged("g", Phase.RUNNING, ""), 112)
    assert sums(job.ledger.unsettled(212))[Category.STEPS_UNKNOWN] == 200
    job.crash(4014, 1, step=0, suspected_at=4012)
    job.start(4020, 2, "ab", fenced_at=4015)
    job.ledger.note(facts.PhaseChanged("g", Phase.RUNNING, ""), 4023)
    job.end(4823, step=0)
    parts = by_category(one for one in job.ledger.take() if one.since >= 110)
    assert parts == {
        "rendezvous": 4 + 6, "steps_unknown": 7800 + 1600, "detect": 4, "fence": 2, "place": 10, "spare": 4713,
        "start": 12,
    }  # fmt: skip


def test_a_rank_that_fails_soon_and_before_any_step_has_not_trained() -> None:
    """It may be the library's, and compile. A lost node says nothing of the script."""
    job = Job()
    for generation, since, node in ((1, 110, ""), (2, 920, ""), (3, 1820, "b")):
        job.start(since, generation, "ab", fenced_at=since)
        job.ledger.note(facts.PhaseChanged("g", Phase.RUNNING, ""), since + 2)
        job.crash(since + 802, generation, step=0, suspected_at=since + 802, node=node)
    job.end(2622, step=0)
    parts = sums(job.ledger.take())
    assert (parts[Category.FIRST_STEP], parts[Category.STEPS_UNKNOWN]) == (3200, 1600)


def test_time_before_the_first_step_is_lost_once_a_step_is_known() -> None:
    """So it is where ranks were given a state to load: their script has the library."""
    job = Job()
    job.start(110, 1, "ab")
    job.ledger.note(facts.PhaseChanged("g", Phase.RUNNING, ""), 112)
    job.ledger.note(facts.FirstStep("g", 1, 1), 212)
    job.crash(312, 1, step=11, suspected_at=312)
    parts = sums(job.ledger.take())
    assert (parts[Category.FIRST_STEP], parts[Category.USEFUL]) == (200, 200)
    resumed = Job()
    resumed.start(110, 1, "ab", version=7)
    resumed.ledger.note(facts.PhaseChanged("g", Phase.RUNNING, ""), 112)
    resumed.ledger.note(facts.StateRestored("g", 1, Version(0, 7), 0, 0, 0, (), 1.0), 122)
    resumed.crash(222, 1, step=7, suspected_at=222)
    assert sums(resumed.ledger.take()).keys() & {Category.FIRST_STEP, Category.STEPS_UNKNOWN} == {Category.FIRST_STEP}


def only_logs(job: Job, at: float, generation: int) -> None:
    """Ranks of a script that reports no finished steps run at `at`."""
    job.ledger.note(facts.PhaseChanged("g", Phase.RUNNING, ""), at)
    job.ledger.measure(Measured(first_at=at + 10, first_step=1, step=501))


def test_a_script_that_only_logs_trains_from_its_first_number_on() -> None:
    job = Job()
    job.start(110, 1, "ab")
    only_logs(job, 112, 1)
    assert by_category(job.ledger.unsettled(222)) == {
        "rendezvous": 4, "first_step": 20, "useful": 200, "spare": 112
    }  # fmt: skip
    job.end(8000, step=0)
    parts = sums(job.ledger.take())
    assert (parts[Category.FIRST_STEP], parts[Category.USEFUL], job.ledger.logged_step) == (20, 2 * (8000 - 122), 501)


def test_steps_that_are_logged_again_are_done_again() -> None:
    job = Job()
    job.start(110, 1, "ab")
    only_logs(job, 112, 1)
    job.crash(622, 1, step=0, suspected_at=622)  # a second a step
    job.start(630, 2, "ab")
    job.ledger.note(facts.PhaseChanged("g", Phase.RUNNING, ""), 632)
    assert job.ledger.logged_step == 501  # nothing is said of this generation so far
    job.ledger.measure(Measured(first_at=642, first_step=401, step=901))
    job.end(1142, step=0)
    (again,) = (one for one in job.ledger.take() if one.category is Category.STEPS_AGAIN)
    assert (again.since, again.until, again.fault and again.fault.kind) == (642, 742, FaultKind.CRASH)


def test_numbers_that_name_no_step_are_useful_and_are_never_done_again() -> None:
    job = Job()
    job.start(110, 1, "ab")
    job.ledger.note(facts.PhaseChanged("g", Phase.RUNNING, ""), 112)
    job.ledger.measure(Measured(first_at=50))  # a clock that is late
    job.end(212, step=0)
    parts = sums(job.ledger.take())
    assert (parts[Category.USEFUL], parts.keys() & {Category.FIRST_STEP, Category.STEPS_AGAIN}) == (200, set())


def test_numbers_count_for_nothing_where_ranks_report_their_steps() -> None:
    job = Job()
    job.start(110, 1, "ab")
    job.run(114, 1, step=1)
    job.crash(214, 1, step=101, suspected_at=214)
    job.ledger.take()
    job.start(220, 2, "ab")
    only_logs(job, 222, 2)
    job.crash(300, 2, step=0, suspected_at=300)
    parts = sums(job.ledger.take())
    assert (parts.get(Category.USEFUL, 0), job.ledger.logged_step) == (0, 0)


def test_the_account_of_a_running_job_ends_now_and_changes_nothing() -> None:
    job = Job()
    job.start(110, 1, "ab")
    job.run(114, 1, step=1)
    first = by_category(job.ledger.unsettled(214, step=101))
    assert first["useful"] == 200
    assert by_category(job.ledger.unsettled(214, step=101)) == first
    job.end(314, step=201)
    assert sums(job.ledger.take())[Category.USEFUL] == 400


def test_a_job_in_the_queue_holds_nothing() -> None:
    world = Scenario(nodes=2, spares=0)
    ledger = Ledger()
    for at, fact in world.journal:
        ledger.note(fact, at)
    assert set(sums(ledger.unsettled(world.now + 50.0))) <= {Category.QUEUE}


def test_a_requeue_that_is_settled_late_takes_no_node_of_the_next_run() -> None:
    job = Job()
    for at, fact in (
        (120, facts.SlurmCallOwed("g", 7, "requeue", 1, "", "muster: why")),
        (120, facts.PhaseChanged("g", Phase.REQUEUED, "why")),
        (150, facts.JobRestarted("g", 1, 1)),
        (150, facts.JobChanged("g", ("a", "b", "c"))),
        (150, facts.PhaseChanged("g", Phase.GATHERING, "")),
        (160, facts.SlurmCallSettled("g", 7, "")),
    ):
        job.ledger.note(fact, at)
    assert sums([*job.ledger.take(), *job.ledger.unsettled(170)])[Category.START] == 3 * (150 - 100) + 3 * 20


def test_a_requeued_job_waits_without_nodes_and_its_start_is_charged_with_the_fault() -> None:
    world = Scenario(nodes=2, spares=0, idle_nodes=1)
    world.run_until(lambda: world.core.observed.gang("g").step_number >= 3)
    world.crash("n1")
    world.run_until(lambda: world.gang.newest.stepped_generation == 2, 600.0)
    ledger = Ledger()
    for at, fact in world.journal:
        if getattr(fact, "gang", "") == "g":
            ledger.note(fact, at)
    intervals = [*ledger.take(), *ledger.unsettled(world.now)]
    began = next(at for at, fact in world.journal if isinstance(fact, facts.GenerationFenced) and fact.generation)
    later = [one for one in intervals if one.since >= began and one.category is not Category.USEFUL]
    assert {"queue", "start", "rendezvous", "first_step"} <= {str(one.category) for one in later}
    assert {(one.fault.kind, one.fault.node) if one.fault else None for one in later} == {(FaultKind.NODE, "n1")}
