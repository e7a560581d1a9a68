"""The circuit breaker, observe mode, and the attribution of crashes, in simulated worlds."""

import pytest
from tests.unit.training_worlds import health, verbs

from muster.daemon.coordinator.core.detection import circuit_breaker
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.limits import Limits
from muster.daemon.coordinator.core.state.observed_state import ObservedState
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.turn.state_index import StateIndex
from muster.daemon.coordinator.core.turn.state_updates import apply
from muster.daemon.coordinator.core.turn.turn import Turn
from muster.node_health import NodeHealth
from muster.simulator.scenario import Scenario


def training(spares: int = 2, limits: Limits | None = None, **spec: object) -> Scenario:
    more = {} if limits is None else {"limits": limits}
    world = Scenario(4, spares, **more, **{"durable_dir": "/durable", **spec})  # type: ignore[arg-type]
    runs(world, 1)
    return world


def runs(world: Scenario, generation: int) -> None:
    """Run until that generation has made a few steps."""
    world.run_until(lambda: world.is_running(generation) and world.gang.newest.stepped_generation == generation)
    step = world.core.observed.gang("g").step_number
    world.run_until(lambda: world.core.observed.gang("g").step_number > step + 3)


# -- limits --


def test_at_the_limit_a_live_node_stays_in_service_whatever_its_hardware_reports() -> None:
    world = training(limits=Limits(nodes_per_hour=1))
    world.signal("n1")
    runs(world, 2)
    world.signal("n2")
    world.run_for(5)
    assert world.gang.newest.generation == 2
    assert health(world, "n2") is NodeHealth.DEGRADED
    assert "Xid 79; the node stays in service: 1 node was taken" in world.core.state.node("n2").reason
    assert ("drain", "n1") in verbs(world)
    assert ("drain", "n2") not in verbs(world)


def test_at_the_limit_a_gang_goes_on_without_a_dead_node_and_slurm_is_not_told() -> None:
    world = training(limits=Limits(nodes_per_hour=1))
    world.signal("n1")
    runs(world, 2)
    world.power_off("n2")
    runs(world, 3)
    assert health(world, "n2") is NodeHealth.LOST
    assert [fact.node for fact in world.facts(facts.ActionWithheld)] == ["n2"]
    assert ("down", "n2") not in verbs(world)


def test_an_hour_later_nodes_may_be_taken_out_again() -> None:
    state, limits = DurableState(), Limits(nodes_per_hour=2)
    for node, at in (("n1", 100.0), ("n2", 200.0)):
        apply(state, facts.SlurmCallOwed("", 1, "drain", 0, node, ""), at)

    def held(now: float) -> str:
        observed = ObservedState(observing_since=0.0)
        return circuit_breaker.reason_to_withhold(
            Turn(state, observed, StateIndex(state, observed), now, limits=limits)
        )

    assert held(3699.0) == "2 nodes were taken out of service within the hour, and no more may be"
    assert held(3701.0) == ""
    apply(state, facts.SlurmCallOwed("", 2, "down", 0, "n3", ""), 3750.0)
    assert state.taken_out_at == {"n2": 200.0, "n3": 3750.0}


def test_only_a_fraction_of_the_nodes_may_be_out_of_service_at_once() -> None:
    world = training(limits=Limits(fraction=0.2, nodes_at_least=0))
    world.signal("n1")
    runs(world, 2)
    world.signal("n2")
    world.run_for(5)
    assert health(world, "n2") is NodeHealth.DEGRADED
    assert "1 of 6 nodes are out of service" in world.core.state.node("n2").reason


def test_a_node_whose_health_gets_worse_counts_once() -> None:
    world = training()
    world.signal("n1")
    runs(world, 2)
    assert len(world.core.state.taken_out_at) == 1
    world.power_off("n1")
    world.power_off("n2")
    runs(world, 3)
    assert len(world.core.state.taken_out_at) == 2


def test_a_gang_that_loses_node_after_node_is_saved_and_stopped() -> None:
    world = training(limits=Limits(swaps_per_hour=1))
    world.crash("n1")
    runs(world, 2)
    world.crash("n2")
    world.run_until(lambda: world.gang.final)
    assert (world.gang.phase, world.gang.exit_code) == (Phase.FAILED, 98)
    assert "lost 2 nodes within the hour, and 1 may be replaced" in world.gang.reason
    assert world.gang.checkpoint.durable_version is not None
    assert world.gang.checkpoint.durable_version.step > 3


def _with_rank(world: Scenario) -> str:
    """A node that carries ranks, and is not the batch host."""
    return next(seat.node for seat in world.gang.roster.seats if seat.node != "n0")


PAGE_FAULT = "Xid 31: GPU memory page fault"


def test_a_script_that_breaks_a_second_node_in_the_same_way_is_named_and_gets_no_third() -> None:
    """Xid 31, then the driver asks for a boot of the node. The node that takes its place meets the same."""
    world = training(spares=3)
    first = _with_rank(world)
    world.signal(first, error=PAGE_FAULT)
    runs(world, 2)
    second = _with_rank(world)
    world.signal(second, error=PAGE_FAULT)
    world.run_until(lambda: world.gang.final)
    assert (world.gang.phase, world.gang.exit_code) == (Phase.FAILED, 98)
    both = ", ".join(sorted([first, second]))
    assert f"{both} each had to be taken out of service after {PAGE_FAULT}" in world.gang.reason
    assert "the script is the likely cause, and gets no further node" in world.gang.reason
    unfit = {node for node in world.core.state.nodes if health(world, node) is NodeHealth.UNFIT}
    assert unfit == {first, second}
    assert world.gang.newest.generation == 2


@pytest.mark.parametrize("second", ["", "Xid 13: graphics engine exception"])
def test_two_nodes_that_break_in_ways_of_their_own_are_replaced(second: str) -> None:
    world = training(spares=3)
    world.signal(_with_rank(world), error=PAGE_FAULT)
    runs(world, 2)
    world.signal(_with_rank(world), error=second)
    runs(world, 3)


def test_two_nodes_that_break_hours_apart_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuit_breaker, "LIMIT_WINDOW_S", 60.0)
    world = training(spares=3)
    world.signal(_with_rank(world), error=PAGE_FAULT)
    runs(world, 2)
    world.run_for(60)
    world.signal(_with_rank(world), error=PAGE_FAULT)
    runs(world, 3)


def test_nodes_that_a_program_broke_before_their_repair_may_leave_for_other_reasons() -> None:
    world = training(spares=3)
    nodes = [seat.node for seat in world.gang.roster.seats if seat.node != "n0"][:2]
    for node in nodes:
        broken = facts.NodeJudged(node, NodeHealth.UNFIT, "GPU recovery action 2", program_error=PAGE_FAULT)
        apply(world.core.state, broken, world.now)
        apply(world.core.state, facts.NodeJudged(node, NodeHealth.FIT, "repaired"), world.now)
    for generation, node in enumerate(nodes, 2):
        world.drain(node, "maintenance")
        runs(world, generation)
    assert {node: world.gang.roster.members[node].removed for node in nodes} == dict.fromkeys(nodes, True)
    world.kill_rank("n0")  # the limits are looked at in every recovery
    runs(world, 4)


def test_the_error_of_a_program_counts_for_a_node_that_is_in_service_again() -> None:
    world = training(spares=3)
    first = _with_rank(world)
    world.signal(first, error=PAGE_FAULT)
    runs(world, 2)
    world.repair(first)
    world.run_until(lambda: health(world, first) is NodeHealth.FIT)
    world.signal(_with_rank(world), error=PAGE_FAULT)
    world.run_until(lambda: world.gang.final)
    assert f"after {PAGE_FAULT}" in world.gang.reason


def test_a_gang_that_loses_many_nodes_is_stopped_without_a_durable_folder_too() -> None:
    world = training(limits=Limits(swaps_per_hour=0), durable_dir="")
    world.crash("n1")
    world.run_until(lambda: world.gang.final)
    assert (world.gang.phase, world.gang.exit_code) == (Phase.FAILED, 98)


@pytest.mark.parametrize("durable_dir", ["", "/durable"])
def test_a_job_that_was_requeued_starts_whatever_its_last_run_has_lost(durable_dir: str) -> None:
    world = training(limits=Limits(swaps_per_hour=0), durable_dir=durable_dir)
    world.cut(("n3", "coordinator"), ("coordinator", "n3"))  # its fence is still awaited when the job is requeued
    world.signal("n1")
    world.run_until(lambda: world.gang.phase is Phase.RECOVERING)
    world.requeue()
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED)
    world.heal(("n3", "coordinator"), ("coordinator", "n3"))
    world.run_until(lambda: world.is_running(2) and world.gang.newest.stepped_generation == 2, 900)
    assert "n1" in world.gang.recovery.recoveries[-1].nodes_out
    world.kill_rank("n0")  # a restart in place loses no further node
    runs(world, 3)
    assert not world.gang.final


def test_restarts_in_place_do_not_count_as_swaps() -> None:
    world = training(limits=Limits(swaps_per_hour=0))
    world.kill_rank("n1")
    runs(world, 2)
    assert not world.gang.final


# -- observe mode --


def test_observe_mode_names_the_swap_it_would_make_and_ends_the_job() -> None:
    world = training(limits=Limits(observe=True))
    world.power_off("n2")
    world.run_until(lambda: world.gang.final)
    assert (world.gang.phase, world.gang.exit_code) == (Phase.FAILED, 99)
    assert "observe mode: n3 would take the place of n2; n2 is lost" in world.gang.reason
    assert "observe mode" in world.facts(facts.ActionWithheld)[0].reason
    assert not {"drain", "down", "requeue", "let_go"} & {verb for verb, _ in verbs(world)}


def test_observe_mode_names_the_restart_or_the_requeue_it_would_make() -> None:
    world = training(limits=Limits(observe=True))
    world.kill_rank("n2")
    world.run_until(lambda: world.gang.final)
    assert "the ranks would be restarted in place; rank 1 on n2 exited with 1" in world.gang.reason
    world = training(spares=0, limits=Limits(observe=True))
    world.crash("n2")
    world.run_until(lambda: world.gang.final)
    assert "the job would be requeued" in world.gang.reason
    assert verbs(world) == []


def test_observe_mode_leaves_the_requeue_flag_where_one_failure_is_enough() -> None:
    world = training(limits=Limits(observe=True), max_failures=1)
    world.kill_rank("n2")
    world.run_until(lambda: world.gang.final)
    assert (world.gang.phase, world.gang.exit_code) == (Phase.FAILED, 99)
    assert "observe mode: the job would fail with exit code 93: 1 generation ended" in world.gang.reason
    assert verbs(world) == []


def test_observe_mode_leaves_a_live_node_its_ranks_whatever_its_hardware_reports() -> None:
    world = training(limits=Limits(observe=True))
    world.signal("n2")
    world.run_for(5)
    assert world.gang.phase is Phase.RUNNING
    assert health(world, "n2") is NodeHealth.DEGRADED
    assert verbs(world) == []


# -- the same node twice --


def crash_at_once(world: Scenario, generation: int, position: int) -> None:
    """Have a rank of the node in that seat exit before its first step."""
    world.run_until(lambda: world.is_running(generation))
    world.kill_rank(world.gang.roster.seats[position].node)


def doubted(world: Scenario) -> list[str]:
    return [fact.node for fact in world.facts(facts.MemberRemoved) if not fact.attributed]


def test_a_node_on_which_ranks_crash_twice_is_replaced_and_blamed_once_the_ranks_progress_elsewhere() -> None:
    world = training()
    world.kill_rank("n2")
    crash_at_once(world, 2, 1)
    runs(world, 3)
    assert "n2" not in {seat.node for seat in world.gang.roster.seats}
    assert health(world, "n2") is NodeHealth.UNFIT
    assert (
        world.core.state.node("n2").reason
        == "ranks failed on n2 in two consecutive generations, and the gang trains on without this node"
    )
    assert ("drain", "n2") in verbs(world)
    assert world.gang.recovery.unattributed_node == ""


def dies_of_reset(world: Scenario, generation: int, node: str, culprit: str, exit_code: int) -> None:
    """A rank of `culprit` dies. The rank on `node` dies of the reset, and the coordinator hears of that first."""
    world.run_until(lambda: world.is_running(generation))
    world.kill_rank(culprit, exit_code, delay_s=0.02)
    world.kill_rank(node, 1)
    world.run_until(lambda: world.gang.newest.generation > generation)


def test_a_node_whose_rank_dies_of_a_peers_reset_is_not_blamed_even_if_reported_first() -> None:
    world = training()
    for generation in (1, 2):
        dies_of_reset(world, generation, "n0", "n2", -11)
    runs(world, 3)
    assert [recovery.crashed_on for recovery in world.gang.recovery.recoveries] == ["n2", "n2"]
    assert health(world, "n0") is NodeHealth.FIT
    assert health(world, "n2") is NodeHealth.UNFIT
    assert world.replayed_state() == world.core.state


@pytest.mark.parametrize("exit_code", [1, -6, -15])
def test_no_node_is_swapped_where_the_first_crash_is_unknown(exit_code: int) -> None:
    world = training()
    for generation in (1, 2):
        dies_of_reset(world, generation, "n0", "n2", exit_code)
    runs(world, 3)
    assert doubted(world) == []
    assert [recovery.crashed_on for recovery in world.gang.recovery.recoveries] == ["", ""]


def test_a_late_report_of_the_earlier_generation_blames_no_node() -> None:
    world = training()
    world.kill_rank("n2")
    crash_at_once(world, 2, 1)
    world.run_until(lambda: world.gang.newest.generation == 3)
    reached = world.gang.recovery.furthest_step
    world.core.observed.gang("g").last_step = (2, reached + 5)
    world.run_until(lambda: world.gang.phase is Phase.RUNNING)
    assert health(world, "n2") is NodeHealth.FIT


def test_a_node_whose_ranks_progressed_between_the_crashes_is_not_swapped() -> None:
    world = training()
    for generation in (1, 2):
        runs(world, generation)
        world.kill_rank("n2")
    runs(world, 3)
    assert doubted(world) == []
    assert all(node.health is NodeHealth.FIT for node in world.core.state.nodes.values())


def test_ranks_that_crash_on_another_node_too_blame_the_software_and_no_node() -> None:
    world = training()
    for generation in (1, 2, 3):
        crash_at_once(world, generation, 1)
    world.run_until(lambda: world.gang.final)
    assert (world.gang.phase, world.gang.exit_code) == (Phase.FAILED, 93)
    assert doubted(world) == ["n2"]
    assert all(node.health is NodeHealth.FIT for node in world.core.state.nodes.values())


def test_further_crashes_in_the_same_place_swap_no_second_node() -> None:
    world = training(spares=3, max_failures=9)
    for generation in range(1, 6):
        crash_at_once(world, generation, 1)
    runs(world, 6)
    assert doubted(world) == ["n2"]


def test_without_a_spare_crashing_ranks_are_restarted_in_place() -> None:
    world = training(spares=0)
    world.kill_rank("n2")
    crash_at_once(world, 2, 1)
    runs(world, 3)
    assert "n2" in {seat.node for seat in world.gang.roster.seats}
    assert not world.facts(facts.MemberRemoved)


def test_crashes_in_two_places_swap_no_node() -> None:
    world = training()
    world.kill_rank("n0")
    crash_at_once(world, 2, 1)
    runs(world, 3)
    assert doubted(world) == []


@pytest.mark.parametrize("generation", [2, 3])
def test_a_crash_that_the_loss_of_another_node_explains_is_none_of_two_in_a_row(generation: int) -> None:
    world = training(spares=3, max_failures=9)
    world.kill_rank("n0")
    crash_at_once(world, 2, 1)
    if generation == 2:
        world.crash("n1")
    crash_at_once(world, 3, 1)
    if generation == 3:
        world.crash("n1")
    runs(world, 4)
    assert [recovery.crashed_on for recovery in world.gang.recovery.recoveries] == ["n0", "n2", "n2"]
    assert doubted(world) == []


@pytest.mark.parametrize("stays", [True, False])
def test_crashes_of_the_run_before_swap_no_node(stays: bool) -> None:
    world = training(spares=0, idle_nodes=1)
    world.kill_rank("n2")
    crash_at_once(world, 2, 1)
    world.run_until(lambda: world.is_running(3))
    world.requeue()
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED)
    if not stays:
        world.power_off("n2")
    world.run_until(lambda: world.gang.newest.stepped_generation == 4, 900)
    assert len(world.gang.recovery.recoveries) == 2
    assert ("n2" in world.gang.roster.members) == stays
    assert doubted(world) == []


def test_a_former_spare_is_blamed_like_any_other_node() -> None:
    world = training()
    world.crash("n1")
    runs(world, 2)
    spare = world.gang.roster.seats[3].node
    world.kill_rank(spare)
    crash_at_once(world, 3, 3)
    runs(world, 4)
    assert health(world, spare) is NodeHealth.UNFIT


def test_an_unattributed_node_that_takes_its_seat_again_at_once_is_not_blamed() -> None:
    world = training()
    world.kill_rank("n2")
    crash_at_once(world, 2, 1)
    world.run_until(lambda: world.gang.recovery.unattributed_node == "n2" and world.gang.newest.generation == 3)
    seated = world.gang.roster.seats[0].node
    world.gang.recovery.unattributed_node = seated  # as a node of the shared pool, within the recovery that removed it
    world.gang.recovery.recoveries[-1].nodes_out.append(seated)
    runs(world, 3)
    world.run_for(2.0)
    assert health(world, seated) is NodeHealth.FIT


def test_an_unattributed_node_that_carries_ranks_again_is_not_blamed() -> None:
    world = training()
    world.kill_rank("n2")
    crash_at_once(world, 2, 1)
    world.run_until(lambda: world.gang.recovery.unattributed_node == "n2" and world.gang.newest.generation == 3)
    world.gang.recovery.recoveries[-1].nodes_in.append("n2")  # as a node of the shared pool
    runs(world, 3)
    world.run_for(2.0)
    assert health(world, "n2") is NodeHealth.FIT


def test_an_unattributed_node_is_blamed_after_a_restart_of_the_coordinator_too() -> None:
    world = training()
    world.kill_rank("n2")
    crash_at_once(world, 2, 1)
    world.run_until(lambda: world.gang.recovery.unattributed_node == "n2")
    world.restart_coordinator()
    runs(world, 3)
    assert health(world, "n2") is NodeHealth.UNFIT


def test_losses_count_for_an_hour() -> None:
    world = training()
    world.power_off("n1")
    world.run_until(lambda: world.gang.phase is Phase.RECOVERING)
    none = Limits(swaps_per_hour=0)
    assert "has lost 1 node" in circuit_breaker.too_many_swaps(world.gang.recovery, none, world.now)
    assert circuit_breaker.too_many_swaps(world.gang.recovery, none, world.now + 3600.0) == ""


def test_observe_mode_lets_no_node_go() -> None:
    world = training(limits=Limits(observe=True))
    spare = world.gang.roster.spares[0].node
    world.agent(spare).failure = "no space left on /shared"
    world.agent(spare).status_changed(0.0)
    world.run_until(lambda: world.gang.roster.members[spare].removed)
    world.run_for(5)
    assert world.gang.newest.generation == 1
    assert verbs(world) == []
