"""A gang that is over leaves the durable state once no call is owed for it and its job has ended; no sooner."""

from __future__ import annotations

from dataclasses import dataclass, field

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.limits import GANG_KEPT_S, GANGS_KEPT
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.turn.state_updates import RECOVERIES_KEPT, apply

SPEC = events.GangSpec(1, 0)


@dataclass
class Desk:
    """A core, its journal, and a clock."""

    now: float = 1000.0
    core: Core = field(default_factory=lambda: Core(DurableState(), 1000.0))
    journal: list[tuple[float, facts.Fact]] = field(default_factory=list)

    def post(self, *events: events.Event) -> None:
        """Send the core these events now."""
        for event in events:
            self.journal += [(self.now, fact) for fact in self.core.decide(event, self.now).facts]

    def over(self, gang: str, job: int) -> None:
        """Register a gang that is over at once."""
        self.post(
            events.GangSubmitted(gang, job, 1000, "job", SPEC, "{}"),
            events.SlurmJobChanged(gang, job, (), 0, "CANCELLED"),
        )
        assert self.core.state.gangs[gang].slurm.job_over

    def gangs(self) -> set[str]:
        """Gangs of the durable state; a replay of the journal gives the same, and no other gang is observed."""
        state = DurableState()
        for at, fact in self.journal:
            apply(state, fact, at)
        assert state == self.core.state
        assert self.core.observed.gangs.keys() <= state.gangs.keys()
        return set(state.gangs)


def test_a_week_after_its_end_a_gang_leaves_the_durable_state() -> None:
    desk = Desk()
    desk.post(events.GangSubmitted("g", 1, 1000, "job", SPEC, "{}"))
    desk.over("old", 2)
    desk.now += GANG_KEPT_S - 10
    desk.over("young", 3)
    assert desk.gangs() == {"g", "old", "young"}
    desk.now += 20
    desk.over("new", 4)
    assert desk.gangs() == {"g", "young", "new"}


def test_only_the_newest_gangs_that_are_over_are_kept() -> None:
    desk = Desk()
    for number in range(GANGS_KEPT + 3):
        desk.now += 1
        desk.over(f"over{number}", 10 + number)
    assert desk.gangs() == {f"over{number}" for number in range(2, GANGS_KEPT + 3)}


def test_a_gang_with_an_owed_call_or_a_running_job_is_not_forgotten() -> None:
    desk = Desk()
    desk.post(events.GangSubmitted("g", 1, 1000, "job", SPEC, "{}"), events.CancelRequested("g", "alice"))
    assert desk.core.state.gangs["g"].final
    desk.now += 2 * GANG_KEPT_S
    desk.over("new", 2)
    assert "g" in desk.gangs()  # its job still runs
    desk.post(events.SlurmJobChanged("g", 1, (), 0, "CANCELLED"))
    desk.over("newer", 3)
    assert "g" in desk.gangs()  # its cancel is owed
    desk.post(events.SlurmAnswered("g", 1, None))
    desk.over("newest", 4)
    assert "g" not in desk.gangs()


def test_only_the_newest_recoveries_of_a_gang_are_kept() -> None:
    state = DurableState()
    apply(state, facts.GangRegistered("g", 1, 1000, "job", SPEC, "{}"), 0.0)
    gang = state.gangs["g"]
    gang.phase, gang.newest.generation = Phase.RUNNING, 1
    for generation in range(1, RECOVERIES_KEPT + 101):
        apply(state, facts.GenerationFenced("g", generation, "rank 0 exited with 1", False, "n0", 0, 0.0), 1.0)
        apply(state, facts.GenerationStarted("g", generation + 1, (), (), "n0", 1, None, (), "", 0.0, "swap"), 2.0)
    assert len(gang.recovery.recoveries) == RECOVERIES_KEPT
    assert (gang.recovery.recoveries[-1].generation, gang.recovery.recoveries[-1].action) == (
        RECOVERIES_KEPT + 101,
        "swap",
    )
    assert gang.recovery.recoveries[0].generation == 102
