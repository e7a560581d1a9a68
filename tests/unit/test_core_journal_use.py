"""What a job and its owner may add to the journal: a bad day costs an honest job nothing, and nobody fills the disk."""

from __future__ import annotations

import pytest

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.detection import circuit_breaker
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.account import FADES_S, JournalUse, counted_bytes
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.events import GangSpec, Shard, Version
from muster.daemon.coordinator.core.state.limits import Limits
from muster.daemon.coordinator.core.state.roster import Member
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.turn.state_updates import apply
from muster.simulator.scenario import Scenario

KIB, MIB = 1024, 1024 * 1024
RECOVERY_KIB = 60
"""KiB that a recovery counts at most, whatever the gang's size."""


def _training(limits: Limits, **spec: object) -> Scenario:
    world = Scenario(2, 0, limits=limits, durable_dir="/durable", **spec)  # type: ignore[arg-type]
    _steps(world, 1)
    return world


def _steps(world: Scenario, generation: int) -> None:
    """Run until that generation has made some steps."""
    world.run_until(lambda: world.is_running(generation) and world.gang.newest.stepped_generation == generation)
    step = world.core.observed.gang("g").step_number
    world.run_until(lambda: world.core.observed.gang("g").step_number > step + 2)


def _ordered(world: Scenario) -> int:
    return len(world.facts(facts.FlushOrdered))


# -- requests --


def _request_often(world: Scenario, count: int) -> None:
    for _ in range(count):
        world.post_event(events.FlushRequested("g", "alice"))
        world.run_for(0.5)


def test_flush_after_flush_adds_a_bounded_number_of_records() -> None:
    """The attack: the owner asks for a checkpoint again as soon as the last one is written."""
    world = _training(Limits(journal_mib_per_job=1))
    _request_often(world, 150)
    assert 40 < _ordered(world) < 60  # half a MiB, and two records of 5 KiB each
    assert world.gang.phase is Phase.RUNNING
    assert world.replayed_state() == world.core.state


def test_requests_are_possible_again_with_time_and_end_no_job() -> None:
    world = _training(Limits(journal_mib_per_job=1), step_s=5.0)
    _request_often(world, 100)
    before = _ordered(world)
    world.run_for(3600.0)
    _request_often(world, 20)
    assert before < _ordered(world) < before + 10  # 1 / 24 of the half MiB that counted
    world.kill_rank("n1")
    world.run_until(lambda: world.gang.newest.generation == 2 and world.gang.phase is Phase.RUNNING)


def test_agents_that_report_newer_versions_for_ever_do_not_hold_up_the_end() -> None:
    """The attack: in the last flush the agents report a newer version each time the one before is written."""
    world = _training(Limits(journal_mib_per_job=1))
    world.finish()
    world.run_until(lambda: world.gang.phase is Phase.DRAINING)
    core = Core(world.replayed_state(), world.now, Limits(journal_mib_per_job=1))  # without the simulator's own agents
    gang = core.state.gangs["g"]
    for rank, member in enumerate(gang.roster.present()):
        core.decide(_attached(member, _claim(rank, 1000, 0)), world.now)
    reports = 0
    while not gang.final and reports < 1000:
        assert gang.checkpoint.flush
        serial, reports = gang.checkpoint.flush.serial, reports + 1
        for rank, member in enumerate(gang.roster.present()):
            status = _claim(rank, 1000 + reports, serial)
            core.decide(events.AgentReported("g", member.node, member.incarnation, status), world.now)
    assert gang.phase is Phase.DONE
    assert reports < 120


def _claim(rank: int, step: int, flushed_serial: int) -> events.AgentStatus:
    """The agent says that it has written that flush, and holds the state after `step`."""
    return events.AgentStatus(shards=(Shard(rank, Version(1, step), True, "digest"),), flushed_serial=flushed_serial)


def _attached(member: Member, status: events.AgentStatus) -> events.AgentAttached:
    return events.AgentAttached(
        "g", member.node, member.job, 0, member.incarnation, member.peer_address, member.batch_host, "", status
    )


# -- recoveries --


def test_a_job_that_crashes_without_end_and_claims_progress_is_saved_and_stopped() -> None:
    """The attack: each generation reports some steps, which resets the count of failures, and crashes."""
    world = _training(Limits(journal_mib_per_job=1))
    for generation in range(2, 60):
        world.kill_rank("n1")
        world.run_until(lambda generation=generation: world.gang.newest.generation == generation or world.gang.final)  # type: ignore[misc]
        if world.gang.final:
            break
        _steps(world, generation)
    assert (world.gang.phase, world.gang.exit_code) == (Phase.FAILED, 98)
    assert world.gang.reason.startswith("the job was recovered too often: the records of this job count 1.0")
    assert world.gang.reason.endswith(" MiB in the journal, and 1 MiB are allowed (journal_mib_per_job)")
    assert world.gang.newest.generation > 15
    assert world.gang.checkpoint.durable_version is not None
    assert world.replayed_state() == world.core.state


@pytest.mark.parametrize("phase", [Phase.GATHERING, Phase.PREFLIGHT])
def test_a_job_that_has_used_up_its_part_does_not_start_again(phase: Phase) -> None:
    world = _training(Limits(journal_mib_per_job=1))
    world.requeue()
    world.run_until(lambda: world.gang.phase is phase, 900)
    world.gang.account.journal_use.add(2 * MIB, world.now)
    world.run_until(lambda: world.gang.final)
    assert world.gang.exit_code == 98
    assert "journal_mib_per_job" in world.gang.reason


def test_a_day_with_hundreds_of_recoveries_stops_no_job() -> None:
    """All of them within minutes, which is worse than any day."""
    world = _training(Limits(), step_s=0.1)
    for generation in range(2, 202):
        world.kill_rank("n1")
        world.run_until(lambda generation=generation: world.gang.newest.stepped_generation == generation)  # type: ignore[misc]
    assert world.gang.account.journal_use.counted_at(world.now) < 200 * RECOVERY_KIB * KIB
    _request_often(world, 1)
    assert _ordered(world) == 1


def _swap(nodes: int, ranks_per_node: int) -> list[facts.Fact]:
    """The facts of a recovery from the loss of a node."""
    names = [f"node{number:05}" for number in range(nodes)]
    seats = tuple(facts.Seat(name, at, names[at - 1], (names[at - 1], names[at - 2])) for at, name in enumerate(names))
    sources = tuple(
        facts.ShardSource(rank, names[rank // ranks_per_node], True, "0123456789abcdef" * 2)
        for rank in range(nodes * ranks_per_node)
    )
    lost = "node00001 is lost: agent and daemon silent to the coordinator and to other nodes"
    return [
        facts.SlurmCallOwed("g", 7, "down", 1, names[1], f"muster: [node] {lost}"),
        facts.GenerationFenced("g", 5, lost, True, names[0], 1000, 1e9),
        facts.MemberRemoved("g", names[1], lost, False),
        facts.GenerationStarted("g", 6, seats, (), names[0], 1, Version(5, 1000), sources, "", 1e9, "swap"),
        facts.PhaseChanged("g", Phase.RUNNING, ""),
        facts.FirstStep("g", 6, 1001),
        facts.SlurmCallSettled("g", 7, ""),
        facts.SlurmCallOwed("g", 8, "let_go", 1, names[1], f"muster: {lost}"),
        facts.SlurmCallSettled("g", 8, ""),
    ]


@pytest.mark.parametrize("nodes", [2, 64, 1000])
def test_a_thousand_recoveries_fit_into_the_part_of_a_job_of_any_size(nodes: int) -> None:
    size = sum(counted_bytes(fact, nodes) for fact in _swap(nodes, 8))
    assert 1000 * size < Limits().journal_mib_per_job * MIB
    assert size < RECOVERY_KIB * KIB


# -- users --


def _of_gangs(owners: dict[str, int]) -> DurableState:
    state = DurableState()
    for number, (gang, uid) in enumerate(owners.items(), 1):
        apply(state, facts.GangRegistered(gang, number, uid, gang, GangSpec(1, 0), "{}"), 0.0)
    return state


def _add_records(state: DurableState, gang: str, size: float, at: float) -> None:
    """Add records of the gang that count so many bytes, at least."""
    before = state.gangs[gang].account.journal_use.counted_at(at)
    while state.gangs[gang].account.journal_use.counted_at(at) - before < size:
        apply(state, facts.JobChanged(gang, ("n1",)), at)


def test_what_one_user_adds_stops_no_job_of_another_user() -> None:
    state = _of_gangs({"a": 1000, "b": 1000, "c": 1000, "d": 2000})
    limits = Limits(journal_mib_per_job=8, journal_mib_per_user=10)
    _add_records(state, "a", 6 * MIB, 100.0)
    _add_records(state, "b", 5 * MIB, 100.0)

    def stopped(gang: str, now: float) -> str:
        return circuit_breaker.too_many_records(state, state.gangs[gang].account, limits, now)

    def refused(gang: str, now: float) -> str:
        return circuit_breaker.why_no_request(state, state.gangs[gang].account, limits, now)

    words = "the records of all jobs of uid 1000 count 11.00 MiB in the journal, and 10 MiB are allowed"
    assert stopped("a", 100.0) == f"{words} (journal_mib_per_user), and 6.00 MiB of them are of this job"
    assert stopped("b", 100.0).startswith(words)
    assert stopped("c", 100.0) == ""  # it has caused none of them
    assert stopped("d", 100.0) == refused("d", 100.0) == ""
    assert refused("c", 100.0).startswith(
        f"{words} (journal_mib_per_user). Requests may use half of that: try again in"
    )
    assert stopped("a", 100.0 + 0.1 * FADES_S) == ""


def test_records_of_a_gang_count_for_its_user_when_the_gang_is_forgotten() -> None:
    state = _of_gangs({"a": 1000})
    _add_records(state, "a", MIB, 100.0)
    apply(state, facts.GangForgotten("a"), 200.0)
    assert state.journal_use[1000].counted_at(200.0) > 0.9 * MIB
    apply(state, facts.GangRegistered("b", 2, 2000, "b", GangSpec(1, 0), "{}"), 300.0)
    assert state.journal_use.keys() == {1000}
    apply(state, facts.GangRegistered("c", 3, 2000, "c", GangSpec(1, 0), "{}"), 300.0 + 20 * FADES_S)
    assert state.journal_use == {}


def test_the_wait_is_until_enough_has_faded() -> None:
    use = JournalUse()
    use.add(3 * MIB, 1000.0)
    wait_s = use.wait_s(MIB, 1000.0)
    assert use.counted_at(1000.0 + wait_s) == pytest.approx(MIB)
    assert use.wait_s(4 * MIB, 1000.0) == 0.0
