"""Recoveries of the real core in virtual time: each fault, and what must and must not follow from it."""

from collections.abc import Callable

import pytest

from muster.daemon.coordinator.core import events as e
from muster.daemon.coordinator.core import facts as f
from muster.daemon.coordinator.core.core import KEPT, KEPT_S, Core
from muster.daemon.coordinator.core.events import Silence
from muster.daemon.coordinator.core.states import Phase, Verdict
from muster.daemon.coordinator.rehearsal import Rehearsal


def training(nodes: int = 4, spares: int = 2, **spec: object) -> Rehearsal:
    world = Rehearsal(nodes, spares, **spec)
    world.run_until(lambda: world.gang.phase is Phase.RUNNING and world.core.sight.gang("g").step >= 3)
    return world


def recovered(world: Rehearsal, generation: int = 2) -> Callable[[], bool]:
    return lambda: world.gang.stepped == generation


def carriers(world: Rehearsal) -> list[str]:
    return [seat.node for seat in world.gang.seats]


def verbs(world: Rehearsal) -> list[tuple[str, str]]:
    return [(call.verb, call.node) for call in world.slurm]


def test_all_start_and_spares_stand_by() -> None:
    world = training()
    assert carriers(world) == ["n0", "n2", "n4", "n1"]  # leaf s0 holds n0, n2, n4, leaf s1 the rest
    assert {s.node for s in world.gang.spares} == {"n3", "n5"}
    assert world.slurm == []


def test_buddies_and_neighbours_sit_in_other_leaves() -> None:
    world = training(nodes=6, spares=2)
    leaf = {a.node: a.leaf for a in world.actors.values()}
    for seat in world.gang.seats:
        assert seat.buddy != seat.node
        others = [n for n in carriers(world) if leaf[n] != leaf[seat.node]]
        assert not others or leaf[seat.buddy] != leaf[seat.node]
        assert len(set(seat.neighbours)) == 4


@pytest.mark.parametrize("node", ["n0", "n1"])
@pytest.mark.parametrize(
    ("fault", "verdict"), [("crash", Verdict.LOST), ("power_off", Verdict.LOST), ("pause", Verdict.HUNG)]
)
def test_a_dead_node_is_replaced(fault: str, verdict: Verdict, node: str) -> None:
    world = training()
    before, step = world.now, world.core.sight.gang("g").step
    getattr(world, fault)(node)
    world.run_until(recovered(world))
    assert node not in carriers(world)
    assert world.core.ledger.node(node).verdict is verdict
    assert verbs(world) == [("down", node)]
    assert world.gang.version is not None
    assert world.gang.version.step >= step - 1
    assert world.now - before < (1.5 if fault == "crash" else 4.5)


def test_silence_is_waited_out_before_the_next_generation() -> None:
    world = training()
    before = world.now
    world.power_off("n1")
    world.run_until(lambda: world.gang.phase is Phase.STARTING)
    assert world.now - before >= 2.0


def test_a_crash_proven_by_resets_waits_for_no_silence() -> None:
    world = training()
    before = world.now
    world.crash("n1")
    world.run_until(lambda: world.gang.phase is Phase.STARTING)
    assert world.now - before < 1.0


def test_a_fatal_signal_swaps_drains_and_lets_go() -> None:
    world = training()
    world.signal("n1", reason="Xid 79: GPU has fallen off the bus")
    world.run_until(lambda: ("let_go", "n1") in verbs(world))
    assert verbs(world) == [("drain", "n1"), ("let_go", "n1")]
    assert "Xid 79" in world.slurm[0].text
    assert world.gang.recoveries[-1].action == "swap"
    assert world.core.ledger.node("n1").verdict is Verdict.UNFIT


def test_an_unfit_batch_host_is_drained_and_kept() -> None:
    world = training()
    world.signal("n0")
    world.run_until(recovered(world))
    world.run_until(lambda: world.core.sight.gang("g").step > 20)
    assert verbs(world) == [("drain", "n0")]
    assert "n0" not in carriers(world)


def test_once_the_batch_host_is_dead_nobody_is_let_go() -> None:
    world = training()
    world.power_off("n0")
    world.run_until(recovered(world))
    world.signal("n1")
    world.run_until(recovered(world, 3))
    world.run_until(lambda: world.core.sight.gang("g").step > 30)
    assert verbs(world) == [("down", "n0"), ("drain", "n1")]


def test_a_job_whose_batch_host_died_is_completed_with_its_code() -> None:
    world = training()
    world.power_off("n0")
    world.run_until(recovered(world))
    world.finish()
    world.run_until(lambda: world.gang.phase is Phase.DONE)
    assert [(c.verb, c.exit_code) for c in world.slurm] == [("down", 0), ("complete", 0)]


def test_a_batch_host_that_dies_unseen_does_not_keep_its_job_for_ever() -> None:
    world = training()
    world.signal("n0")
    world.run_until(recovered(world))
    world.finish()
    world.run_until(lambda: ("complete", "") in verbs(world), 30)


def test_a_job_that_ends_by_itself_needs_no_completing() -> None:
    world = training()
    world.finish()
    world.run_until(lambda: world.gang.phase is Phase.DONE)
    world.post(e.JobSeen("g", 1, ("n0",), 0, "COMPLETED"))
    assert world.gang.job_over
    later = world.now + 40
    world.run_until(lambda: world.now >= later - 1 or not world.slurm, 41)
    assert world.slurm == []


def test_a_lost_nodes_silence_is_waited_out_once() -> None:
    world = training()
    world.power_off("n1")
    world.run_until(recovered(world))
    world.restart_coordinator()
    world.run_until(lambda: all(world.core.sight.gang("g").attached(n) for n in carriers(world)))
    before = world.now
    world.kill_rank("n2", 1)
    world.run_until(recovered(world, 3))
    assert world.now - before < 1.0


def test_a_rank_that_dies_is_restarted_in_place_and_blames_nobody() -> None:
    world = training()
    before = carriers(world)
    world.kill_rank("n1", -9)
    world.run_until(recovered(world))
    assert carriers(world) == before
    assert world.slurm == []
    assert world.gang.recoveries[-1].action == "restart in place"
    assert "signal 9" in world.gang.recoveries[-1].cause


def test_ranks_that_die_of_a_peers_reset_don_t_hide_the_dead_node() -> None:
    world = training()
    world.kill_rank("n2", 1)
    world.crash("n1")
    world.run_until(recovered(world))
    assert "n1" not in carriers(world)
    assert "n2" in carriers(world)
    assert "n1 is lost" in world.gang.recoveries[-1].cause
    assert world.gang.failures == 0


def test_a_script_that_always_dies_fails_without_blaming_a_node() -> None:
    world = Rehearsal(2, 1, max_failures=3)
    for generation in (1, 2, 3):
        world.run_until(
            lambda g=generation: (
                world.gang.generation == g and all(a.ranks for a in world.actors.values() if a.node in carriers(world))
            )
        )  # type: ignore[misc]
        world.kill_rank(carriers(world)[0], 1)
    world.run_until(lambda: world.gang.final)
    assert (world.gang.phase, world.gang.exit_code) == (Phase.FAILED, 93)
    assert verbs(world) == [("requeue_off", "")]


def test_an_agent_that_ends_alone_costs_its_node_nothing_in_slurm() -> None:
    world = training()
    world.kill_agent("n1")
    world.run_until(recovered(world))
    assert "n1" not in carriers(world)
    assert world.core.ledger.node("n1").verdict is Verdict.FIT
    assert world.slurm == []


def test_one_accuser_takes_nobody() -> None:
    world = training()
    world.post(e.NeighbourAccused("g", "n2", "n1", Silence.NO_ANSWER))
    world.run_until(lambda: world.core.sight.gang("g").step > 20)
    assert world.gang.generation == 1
    assert "n1" not in world.core.sight.gang("g").suspected


def test_no_spare_left_flushes_and_requeues_without_the_bad_nodes() -> None:
    world = training(nodes=3, spares=0, durable_dir="/d")
    world.power_off("n1")
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED)
    requeue = next(call for call in world.slurm if call.verb == "requeue")
    assert requeue.exclude == ("n1",)
    assert world.gang.durable_path.startswith("/d/step_")


def test_no_spare_left_and_no_requeue_fails() -> None:
    world = training(nodes=3, spares=0, requeue=False)
    world.power_off("n1")
    world.run_until(lambda: world.gang.final)
    assert (world.gang.phase, world.gang.exit_code) == (Phase.FAILED, 94)


def test_a_node_that_never_attaches_ends_the_gang_by_name() -> None:
    world = Rehearsal(3, 0, gather_timeout_s=20.0)
    world.actors["n1"].agent = False
    world.post(e.JobSeen("g", 1, ("n0", "n1", "n2"), 0, None))
    world.run_until(lambda: world.gang.final)
    assert world.gang.exit_code == 95
    assert "missing: n1" in world.gang.reason


def test_a_missing_spare_delays_the_start_but_does_not_prevent_it() -> None:
    world = Rehearsal(3, 1)
    world.actors["n3"].agent = False
    world.run_until(lambda: world.gang.phase is Phase.RUNNING, 120)
    assert len(carriers(world)) == 3


def test_cancel_ends_the_gang_and_its_job() -> None:
    world = training()
    world.post(e.CancelAsked("g", "uid 1000"))
    assert world.gang.phase is Phase.CANCELLED
    assert verbs(world) == [("cancel", "")]
    world.run_until(lambda: all(a.left for a in world.actors.values()), 1)


def test_an_agents_error_ends_the_gang_with_its_words() -> None:
    world = training()
    world.actors["n1"].failure = "no space left on /shared"
    world.kill_rank("n1", 1)
    world.run_until(lambda: world.gang.final)
    assert (world.gang.phase, world.gang.exit_code) == (Phase.FAILED, 96)
    assert "n1: no space left" in world.gang.reason
    assert world.gang.generation == 1


def test_scancel_shows_as_cancelled_though_its_signal_comes_first() -> None:
    world = training()
    world.actors["n1"].failure = "ended by SIGTERM"
    world.kill_rank("n1", -15)
    world.kill_agent("n1")
    later = world.now + 3
    world.run_until(lambda: world.now > later)
    world.post(e.JobSeen("g", 1, (), 0, "CANCELLED"))
    assert world.gang.phase is Phase.CANCELLED
    assert world.slurm == []


def test_a_second_fault_during_recovery() -> None:
    world = training()
    world.power_off("n1")
    world.run_until(lambda: world.gang.phase is Phase.RECOVERING)
    world.crash("n2")
    world.run_until(lambda: world.gang.stepped == world.gang.generation > 1)
    assert not {"n1", "n2"} & set(carriers(world))


def test_an_nvlink_echo_blames_the_dead_peer_only() -> None:
    world = training()
    world.power_off("n1")
    world.signal("n2", "echo", "Xid 74")
    world.run_until(recovered(world))
    world.run_until(lambda: world.core.sight.gang("g").step > 40)
    assert world.core.ledger.node("n2").verdict is Verdict.FIT


def test_an_nvlink_error_of_its_own_is_fatal() -> None:
    world = training()
    world.signal("n2", "echo", "Xid 74")
    world.run_until(recovered(world))
    assert world.core.ledger.node("n2").verdict is Verdict.UNFIT


@pytest.mark.parametrize("fault", ["crash", "power_off", "signal", "kill_rank", "kill_agent"])
def test_a_coordinator_restarted_after_any_fact_completes_the_recovery(fault: str) -> None:
    whole = training()
    getattr(whole, fault)("n1")
    whole.run_until(recovered(whole))
    first = next(i for i, (_, fact) in enumerate(whole.journal) if isinstance(fact, f.FirstStep))
    for position in range(first + 1, len(whole.journal)):
        world = training()
        getattr(world, fault)("n1")
        world.run_until(lambda w=world, p=position: len(w.journal) > p)  # type: ignore[misc]
        world.restart_coordinator()
        world.run_until(lambda w=world: w.gang.stepped == w.gang.generation >= 2, 120)  # type: ignore[misc]
        assert world.folded() == world.core.ledger
        if fault in ("crash", "power_off", "signal"):
            assert "n1" not in carriers(world)


def test_the_journal_folds_to_the_ledger_and_survives_its_codec() -> None:
    world = training()
    world.crash("n1")
    world.run_until(recovered(world))
    assert world.folded() == world.core.ledger
    assert type(world.core.ledger).load(world.core.ledger.dump()) == world.core.ledger
    assert [f.decode(*f.encode(fact)) for _, fact in world.journal] == [fact for _, fact in world.journal]


def test_who_does_not_come_back_after_a_restart_is_missed_though_nothing_else_happens() -> None:
    world = training()
    world.crash("n1")
    for actor in world.actors.values():
        actor.agent = False
    world.core = Core(world.folded(), world.now)
    world.post(e.Tick())
    world.run_until(lambda: bool(world.core.sight.gang("g").suspected), 10)


def test_a_restart_gives_those_who_gather_time_to_attach_anew() -> None:
    world = Rehearsal(3, 1, gather_timeout_s=20.0)
    world.actors["n2"].agent = False
    world._later(15.0, lambda: None)
    world.run_until(lambda: world.now >= 1015, 30)
    world.now += 10  # the coordinator is down meanwhile
    world.restart_coordinator()
    world.actors["n2"].agent = True
    world._later(5.0, lambda: world._attach(world.actors["n2"]))
    world.run_until(lambda: world.gang.phase is Phase.RUNNING, 30)


def _over(world: Rehearsal, gang: str, job: int) -> None:
    """Another gang, registered and over at once."""
    world.post(e.GangSubmitted(gang, job, 1000, "job", world.spec, "{}"))
    world.post(e.JobSeen(gang, job, (), 0, "CANCELLED"))
    assert world.core.ledger.gangs[gang].job_over


def test_gangs_that_are_over_leave_the_ledger_after_a_week() -> None:
    world = training()
    _over(world, "old", 2)
    world.now += KEPT_S - 10
    _over(world, "young", 3)
    assert set(world.core.ledger.gangs) == {"g", "old", "young"}
    world.now += 20
    _over(world, "new", 4)
    assert set(world.core.ledger.gangs) == {"g", "young", "new"}
    assert set(world.core.sight.gangs) == {"g", "young", "new"}
    assert world.folded() == world.core.ledger


def test_no_more_than_so_many_gangs_that_are_over_are_kept() -> None:
    world = training()
    for number in range(KEPT + 3):
        world.now += 1
        _over(world, f"over{number}", 10 + number)
    kept = set(world.core.ledger.gangs) - {"g"}
    assert kept == {f"over{number}" for number in range(2, KEPT + 3)}
    assert world.folded() == world.core.ledger


def test_a_gang_that_owes_or_whose_job_runs_is_not_forgotten() -> None:
    world = training()
    world.post(e.CancelAsked("g", "alice"))
    assert world.gang.final
    world.now += 2 * KEPT_S
    _over(world, "new", 2)
    assert "g" in world.core.ledger.gangs  # its job still runs
    world.post(e.JobSeen("g", 1, (), 0, "CANCELLED"))
    _over(world, "newer", 3)
    assert "g" in world.core.ledger.gangs  # its cancel is owed
    world.post(e.SlurmAnswered("g", 1, None))
    _over(world, "newest", 4)
    assert "g" not in world.core.ledger.gangs
