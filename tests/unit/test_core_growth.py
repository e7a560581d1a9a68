"""Growth: a gang that goes on with fewer ranks, or on a node of the shared pool, gets its own nodes back."""

from dataclasses import replace
from itertools import pairwise

import pytest

from muster.daemon.coordinator.core.recovery.growth import undone_growth
from muster.daemon.coordinator.core.recovery.growth.surplus_nodes import KEPT_S
from muster.daemon.coordinator.core.recovery.growth.undone_growth import PAUSE_S, PROVEN_S
from muster.daemon.coordinator.core.recovery.planned_growth import REQUESTED_S, WARM_UP_S
from muster.daemon.coordinator.core.recovery.wanted_nodes import RETRY_S
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.events import AgentStatus
from muster.daemon.coordinator.core.state.fact_text import describe
from muster.daemon.coordinator.core.state.limits import Pool
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.services.views import gang_view
from muster.node_health import NodeHealth
from muster.simulator.scenario import Scenario
from muster.simulator.world.world import NO_LIMITS

NO_POOL = replace(NO_LIMITS, pool=Pool())
SOON_S = 10.0
"""Seconds within which a repaired node carries ranks again."""


def training(nodes: int = 4, spares: int = 0, *, min_nodes: int = 2, **more: object) -> Scenario:
    world = Scenario(nodes, spares, min_nodes=min_nodes, **{"limits": NO_POOL, **more})  # type: ignore[arg-type]
    trains(world, 1)
    return world


def trains(world: Scenario, generation: int, limit_s: float = 60.0) -> None:
    """Run until that generation has finished a step."""
    world.run_until(lambda: world.gang.newest.stepped_generation == generation, limit_s)


def shrunk(node: str = "n2", **more: object) -> Scenario:
    """A gang of four nodes that has lost one of them, and trains on three."""
    world = training(**more)
    world.crash(node)
    trains(world, 2, 120.0)
    assert len(world.gang.roster.seats) == 3
    return world


def repaired(world: Scenario, node: str) -> None:
    """An operator repairs the node once Slurm has drained it, and resumes it."""
    world.run_until(lambda: world.world.cluster.nodes()[node].drained)
    world.repair(node)


def carriers(world: Scenario) -> list[str]:
    return [seat.node for seat in world.gang.roster.seats]


def requests(world: Scenario) -> list[tuple[str, ...]]:
    return [fact.options for fact in world.facts(facts.PoolNodeRequested)]


def grown(world: Scenario) -> list[int]:
    """To how many nodes each planned growth went."""
    return [fact.nodes for fact in world.facts(facts.GrowthPlanned)]


# -- growing --


def test_a_gang_grows_back_when_its_node_is_repaired_and_repeats_no_step() -> None:
    world = shrunk()
    repaired(world, "n2")
    trains(world, 3, SOON_S)
    recovery = world.gang.recovery.recoveries[-1]
    assert (recovery.action, recovery.nodes_in, recovery.nodes_out) == ("more replicas", ["n2"], [])
    assert recovery.step_restored == recovery.step_before
    assert recovery.cause == f"the gang grows from 3 to 4 ranks with n2, after step {recovery.step_before}"
    assert (requests(world), grown(world), world.gang.slurm.restart_count) == ([("--nodelist=n2",)], [4], 0)
    assert world.gang.recovery.failures_in_a_row == 0
    assert world.replayed_state() == world.core.state


def test_all_other_ranks_keep_their_node_and_load_their_own_memory() -> None:
    world = shrunk()
    before = carriers(world)
    repaired(world, "n2")
    trains(world, 3)
    assert carriers(world) == [*before, "n2"]
    started = world.facts(facts.GenerationStarted)[-1]
    assert [(source.rank, source.node) for source in started.sources] == [*enumerate(before)]
    assert world.gang.ranks_of(started.version) == 3 if started.version else False


def test_a_generation_that_grew_and_commits_nothing_is_started_again_from_the_smaller_version() -> None:
    world = shrunk()
    repaired(world, "n2")
    world.run_until(lambda: world.gang.newest.generation == 3 and world.gang.phase is Phase.RUNNING)
    world.kill_rank("n0")
    trains(world, 4)
    recovery = world.gang.recovery.recoveries[-1]
    assert (len(carriers(world)), recovery.action) == (4, "restart in place")
    assert recovery.step_restored == world.gang.recovery.recoveries[-2].step_restored


def test_a_job_with_several_ranks_on_a_node_grows_by_a_node() -> None:
    world = training(3, ranks_per_node=2)
    world.crash("n1")
    trains(world, 2)
    repaired(world, "n1")
    trains(world, 3)
    assert world.gang.recovery.recoveries[-1].cause.startswith("the gang grows from 4 to 6 ranks with n1")
    assert len(world.agent("n1").ranks) == 2


def test_two_nodes_that_come_back_together_are_one_growth() -> None:
    world = training()
    world.crash("n2")
    trains(world, 2)
    world.crash("n3")
    trains(world, 3)
    for node in ("n2", "n3"):
        world.run_until(lambda node=node: world.world.cluster.nodes()[node].drained)  # type: ignore[misc]
    world.repair("n2")
    world.repair("n3")
    trains(world, 4)
    assert (grown(world), sorted(carriers(world))) == ([4], ["n0", "n1", "n2", "n3"])


def test_an_agent_that_attaches_late_is_grown_onto_without_a_request() -> None:
    """The gang has started without it, because `gather_timeout` had passed."""
    world = Scenario(3, 0, absent=["n2"], min_nodes=2, gather_timeout_s=5.0, limits=NO_POOL)
    trains(world, 1)
    assert len(world.gang.roster.seats) == 2
    world.world.jobs.unstartable_nodes.clear()
    status = AgentStatus(fenced_generation=world.gang.recovery.fenced_generation, warm=1)
    world.post_event(events.AgentAttached("g", "n2", 1, 0, "n2-late", "n2:9", False, "", status))
    world.run_until(lambda: grown(world) == [3], 2.0)
    assert requests(world) == []


def test_the_ranks_do_not_stop_before_the_new_node_is_ready_to_start_its_own() -> None:
    world = shrunk()
    world.machines["n2"].has_imported = False
    repaired(world, "n2")
    world.run_until(lambda: len(world.gang.roster.present()) == 4)
    world.run_for(WARM_UP_S / 2)
    assert grown(world) == []
    world.machines["n2"].has_imported = True
    world.agent("n2").status_changed()
    world.run_until(lambda: grown(world) == [4], 2.0)


def test_a_job_whose_ranks_are_no_python_grows_too() -> None:
    world = shrunk()
    world.machines["n2"].has_imported = False
    repaired(world, "n2")
    trains(world, 3, WARM_UP_S + SOON_S)
    assert grown(world) == [4]


def test_a_second_growth_waits() -> None:
    world = shrunk()
    repaired(world, "n2")
    trains(world, 3)
    world.crash("n3")
    trains(world, 4)
    repaired(world, "n3")
    world.run_for(PAUSE_S / 2)
    assert grown(world) == [4]
    trains(world, 5, PAUSE_S)
    assert grown(world) == [4, 4]


def test_a_restarted_coordinator_completes_the_growth() -> None:
    world = shrunk()
    repaired(world, "n2")
    world.run_until(lambda: world.gang.plans.swap is not None)
    world.restart_coordinator()
    trains(world, 3)
    assert len(carriers(world)) == 4
    assert world.replayed_state() == world.core.state


def test_a_fault_while_the_ranks_stop_is_a_recovery_as_any_other_and_the_gang_grows_later() -> None:
    world = shrunk(step_s=1.0)
    repaired(world, "n2")
    world.run_until(lambda: world.gang.plans.swap is not None)
    world.crash("n1")
    trains(world, 3)
    assert (sorted(carriers(world)), world.gang.recovery.recoveries[-1].action) == (["n0", "n2", "n3"], "swap")


def test_a_node_that_is_lost_while_the_ranks_stop_changes_nothing_for_the_others() -> None:
    world = shrunk(step_s=1.0)
    repaired(world, "n2")
    world.run_until(lambda: world.gang.plans.swap is not None)
    world.signal("n2")
    trains(world, 3)
    recovery = world.gang.recovery.recoveries[-1]
    assert (recovery.action, recovery.step_restored) == ("restart in place", recovery.step_before)
    assert recovery.cause.endswith("but no spare is left for that")


def test_a_growth_that_came_to_nothing_is_not_tried_again_at_once() -> None:
    world = shrunk(step_s=1.0)
    repaired(world, "n2")
    world.run_until(lambda: world.gang.plans.swap is not None)
    world.signal("n2")
    trains(world, 3)
    repaired(world, "n2")
    world.run_for(PAUSE_S / 2)
    assert (grown(world), world.gang.newest.generation) == ([4], 3)
    trains(world, 4, PAUSE_S)
    assert (grown(world), len(carriers(world))) == ([4, 4], 4)


# -- when it does not grow --


def test_a_gang_does_not_grow_onto_a_node_that_is_not_repaired() -> None:
    world = shrunk()
    world.world.boot("n2")
    world.run_for(30)
    assert (requests(world), grown(world)) == ([], [])
    assert world.core.state.node("n2").health is NodeHealth.RETURNING


def test_a_node_that_was_left_because_a_user_wanted_it_does_not_come_back() -> None:
    world = training(4, spares=1)
    world.run_for(2)
    world.swap("n1")
    trains(world, 2)
    world.crash("n2")
    trains(world, 3)
    world.run_for(30)
    assert (len(carriers(world)), requests(world)) == (3, [])


def test_a_drained_node_comes_back_when_an_operator_resumes_it() -> None:
    world = training(4, spares=1)
    world.drain("n1", "its fan is loud")
    trains(world, 2)
    world.crash("n2")
    trains(world, 3)
    world.run_until(lambda: world.core.observed.node("n1").drain is not None)
    world.world.cluster.resume("n1")
    trains(world, 4)
    assert (requests(world), len(carriers(world))) == ([("--nodelist=n1",)], 4)


def test_a_spare_with_a_precursor_is_not_grown_onto() -> None:
    world = shrunk(launch_s=3.0)
    repaired(world, "n2")
    world.run_until(lambda: bool(world.gang.growth.pool))
    world.precursor("n2", "record")
    world.run_for(30)
    assert (len(world.gang.roster.present()), grown(world)) == (4, [])
    world.precursor_over("n2")
    trains(world, 3)
    assert grown(world) == [4]


def test_a_lemon_does_not_come_back() -> None:
    world = shrunk(limits=replace(NO_POOL, lemon_after=1))
    repaired(world, "n2")
    world.run_for(30)
    assert requests(world) == []
    view = gang_view(world.core.state, world.core.observed, world.gang, world.now, replace(NO_POOL, lemon_after=1))
    [node] = [node for node in view.nodes if node.node == "n2"]
    assert (node.verdict, node.role, node.lemon, node.failures) == ("FIT", "out", True, 1)
    left, back = node.reason.split("; ")
    assert (left, back.startswith("in service again: ")) == (world.gang.roster.members["n2"].removal_reason, True)


def test_observe_mode_asks_for_nothing() -> None:
    world = Scenario(3, 0, absent=["n2"], min_nodes=2, gather_timeout_s=5.0, limits=replace(NO_LIMITS, observe=True))
    world.run_for(60)
    assert (requests(world), grown(world)) == ([], [])


def test_a_gang_whose_time_limit_is_near_does_not_grow() -> None:
    world = shrunk(time_limit_s=100)
    repaired(world, "n2")
    world.run_for(60)
    assert (requests(world), grown(world)) == ([], [])


def test_a_crash_while_the_ranks_stop_does_not_grow() -> None:
    world = shrunk(step_s=1.0)
    repaired(world, "n2")
    world.run_until(lambda: world.gang.plans.swap is not None)
    world.kill_rank("n0")
    trains(world, 3)
    assert (len(carriers(world)), world.gang.recovery.recoveries[-1].action) == (3, "restart in place")
    assert (grown(world), world.gang.recovery.recoveries[-1].hardware) == ([4], False)
    trains(world, 4, PAUSE_S + SOON_S)
    assert len(carriers(world)) == 4


# -- spares --


def test_a_node_that_is_repaired_comes_back_as_a_spare_and_no_rank_stops() -> None:
    world = training(3, spares=1, min_nodes=0)
    world.crash("n1")
    trains(world, 2)
    repaired(world, "n1")
    world.run_until(lambda: "n1" in {member.node for member in world.gang.roster.present()}, SOON_S)
    world.run_for(60)
    assert (requests(world), grown(world), world.gang.newest.generation) == ([("--nodelist=n1",)], [], 2)
    world.crash("n2")
    trains(world, 3)
    assert (world.gang.recovery.recoveries[-1].action, world.gang.recovery.recoveries[-1].nodes_in) == ("swap", ["n1"])
    assert world.replayed_state() == world.core.state


def test_a_spare_that_was_lost_comes_back() -> None:
    world = training(2, spares=2, min_nodes=0)
    world.run_for(20)
    spare = world.gang.roster.spares[0].node
    world.crash(spare)
    world.run_until(lambda: world.gang.roster.members[spare].removed, 120.0)
    world.run_for(10)
    assert world.core.state.node(spare).health is NodeHealth.FIT  # Slurm alone has it DOWN
    assert requests(world) == []
    world.repair(spare)
    world.run_until(lambda: len(world.gang.roster.present()) == 4, SOON_S)
    world.run_for(30)
    assert (world.gang.newest.generation, requests(world)) == (1, [(f"--nodelist={spare}",)])


def test_a_gang_that_has_all_its_spares_asks_for_none() -> None:
    world = training(3, spares=1, min_nodes=0, idle_nodes=1, step_s=2.0, limits=NO_LIMITS, pool_nodes=1)
    world.crash("n1")
    trains(world, 2)
    world.crash("n2")
    trains(world, 3)  # on n4 of the pool
    repaired(world, "n1")
    trains(world, 4)  # n4 has given way
    repaired(world, "n2")
    world.run_until(lambda: len(world.gang.own_members()) == 4, RETRY_S)
    asked = len(requests(world))
    world.run_for(RETRY_S + 10)
    assert (len(requests(world)), len(world.gang.roster.present())) == (asked, 4)


# -- a growth that is undone --


def grown_onto_a_broken_node(steps: int = 0, **more: object) -> Scenario:
    """A gang of four nodes has grown back onto n2, whose ranks crash after so many steps."""
    world = shrunk(**more)
    world.machines["n2"].crashes_ranks_after = steps
    repaired(world, "n2")
    world.run_until(lambda: world.gang.newest.generation == 3)
    return world


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("max_failures", [1, 2, 3])
def test_a_gang_goes_back_to_the_nodes_before_a_growth_after_which_ranks_crash(steps: int, max_failures: int) -> None:
    world = grown_onto_a_broken_node(steps, max_failures=max_failures)
    last = 4 if max_failures == 1 else 5
    trains(world, last)
    recovery = world.gang.recovery.recoveries[-1]
    assert (sorted(carriers(world)), recovery.action, recovery.nodes_out) == (
        ["n0", "n1", "n3"],
        "fewer replicas",
        ["n2"],
    )
    assert (recovery.hardware, recovery.nodes_undone, recovery.crashed_on) == (False, ["n2"], "n2")
    removed = world.facts(facts.MemberRemoved)[-1]
    assert removed.reason == "ranks have failed since n2 came, and the gang trained well before"
    world.run_for(5)
    assert world.replayed_state() == world.core.state


def test_the_node_that_came_is_free_and_in_service_again() -> None:
    world = grown_onto_a_broken_node()
    job = next(request.job for request in world.gang.growth.pool.values())
    trains(world, 5)
    world.run_for(30)
    assert world.core.state.node("n2").health is NodeHealth.FIT
    assert [call.verb for call in world.slurm if call.node == "n2"] == ["down"]  # when it was lost
    assert not world.world.cluster.jobs()[job].running


def test_the_gang_does_not_grow_with_that_node_again_until_it_is_repaired_once_more() -> None:
    world = grown_onto_a_broken_node(step_s=2.0)
    trains(world, 5)
    world.run_for(2 * PAUSE_S + RETRY_S)
    assert (len(requests(world)), grown(world)) == (1, [4])
    world.machines["n2"].crashes_ranks_after = None
    world.drain("n2", "its memory is to be changed")
    world.run_until(lambda: world.core.observed.node("n2").drain is not None)
    world.world.cluster.resume("n2")
    trains(world, 6, 60.0)
    assert (len(requests(world)), grown(world), len(carriers(world))) == (2, [4, 4], 4)


def test_after_a_growth_that_was_undone_the_next_one_waits_twice_as_long_with_any_node() -> None:
    world = training(5, min_nodes=2, step_s=2.0)
    world.crash("n4")
    trains(world, 2, 120.0)
    world.crash("n2")
    trains(world, 3, 120.0)
    world.machines["n2"].crashes_ranks_after = 0
    repaired(world, "n2")
    world.run_until(lambda: world.gang.growth.last_growth_at > 0)
    trains(world, 6)
    planned = world.gang.growth.last_growth_at
    repaired(world, "n4")
    world.run_until(lambda: len(grown(world)) == 2, 3 * PAUSE_S)
    assert world.now - planned >= 2 * PAUSE_S
    assert len(world.gang.roster.present()) == 4


def test_crashes_on_the_former_nodes_as_well_end_the_job() -> None:
    world = grown_onto_a_broken_node()
    world.machines["n0"].crashes_ranks_after = 0
    world.run_until(lambda: world.gang.final, 120.0)
    assert (world.gang.phase, world.gang.exit_code, world.gang.recovery.failures_in_a_row) == (Phase.FAILED, 93, 3)
    assert world.gang.newest.generation == 5  # three nodes have had one try


def test_a_spare_of_the_gang_stays_a_spare_when_the_growth_is_undone() -> None:
    world = grown_onto_a_broken_node()
    status = AgentStatus(fenced_generation=world.gang.recovery.fenced_generation, warm=1)
    world.post_event(events.AgentAttached("g", "n9", 1, 0, "n9-late", "n9:9", False, "", status))
    trains(world, 5)
    assert sorted(carriers(world)) == ["n0", "n1", "n3"]


def test_a_growth_after_which_the_gang_has_trained_for_long_stays() -> None:
    world = shrunk(step_s=2.0)
    repaired(world, "n2")
    trains(world, 3)
    world.run_for(PROVEN_S + 1)
    for generation in (4, 5):
        world.kill_rank("n2")
        trains(world, generation)
    assert len(carriers(world)) == 4


def test_a_hang_after_a_growth_counts_as_a_crash() -> None:
    world = shrunk(hang_after_s=5.0)
    repaired(world, "n2")
    trains(world, 3)
    for generation in (4, 5):
        world.hang_rank("n2")
        trains(world, generation, 300.0)
    assert sorted(carriers(world)) == ["n0", "n1", "n3"]


def test_a_growth_of_an_earlier_run_concerns_no_later_one() -> None:
    world = grown_onto_a_broken_node()
    world.run_until(lambda: world.gang.recovery.failures_in_a_row == 2)
    recovery = world.gang.recovery
    known = [replace(one, nodes_undone=[]) for one in recovery.recoveries]
    gang = replace(world.gang, recovery=replace(recovery, recoveries=known))
    assert undone_growth.suspected(gang) is not None
    assert undone_growth.suspected(replace(gang, phase=Phase.PREFLIGHT)) is None
    trains(world, 5)
    assert undone_growth._times_undone(world.gang.recovery) == 1
    assert not undone_growth.is_undone(world.gang)
    assert world.gang.seats_to_fill() == carriers(world)


def test_a_node_of_the_pool_is_not_kept_idle_until_a_growth_that_is_far_away() -> None:
    world = training(4, limits=NO_LIMITS, pool_nodes=1, idle_nodes=1, step_s=2.0)
    world.drain_by_hand("n4", "elsewhere")
    world.crash("n2")
    trains(world, 2, 120.0)
    world.machines["n2"].crashes_ranks_after = 0
    repaired(world, "n2")
    trains(world, 5, 120.0)
    world.world.cluster.resume("n4")
    world.run_for(2 * PAUSE_S - 60)
    assert sorted(member.node for member in world.gang.roster.present()) == ["n0", "n1", "n3"]
    trains(world, 6, 2 * RETRY_S)
    assert (sorted(carriers(world)), grown(world)) == (["n0", "n1", "n3", "n4"], [4, 4])


def test_a_restarted_coordinator_still_goes_back() -> None:
    world = grown_onto_a_broken_node()
    world.run_until(lambda: bool(world.gang.recovery.recoveries[-1].nodes_undone))
    world.restart_coordinator()
    trains(world, 5)
    assert len(carriers(world)) == 3


# -- asking again --


def test_a_repaired_node_that_another_job_has_taken_is_asked_for_again_later() -> None:
    world = shrunk(step_s=2.0)
    world.run_until(lambda: world.world.cluster.nodes()["n2"].drained)
    world.world.jobs.sbatch_failure_rate = 1.0
    world.repair("n2")
    world.run_for(60)
    assert (len(requests(world)), world.gang.growth.requests_in_vain) == (1, 1)
    world.world.jobs.sbatch_failure_rate = 0.0
    world.run_for(RETRY_S)
    assert (len(requests(world)), grown(world)) == (1, [])
    trains(world, 3, 2 * RETRY_S)
    assert (len(requests(world)), grown(world), world.gang.growth.requests_in_vain) == (2, [4], 0)


def test_a_node_of_the_pool_that_is_free_later_is_grown_onto() -> None:
    world = training(4, idle_nodes=1, limits=NO_LIMITS, pool_nodes=1, step_s=2.0)
    world.drain_by_hand("n4", "elsewhere")
    world.crash("n2")
    trains(world, 2, 120.0)
    assert (world.gang.recovery.recoveries[-1].action, len(requests(world))) == ("fewer replicas", 1)
    world.run_for(RETRY_S + 60)
    assert [fact.reason for fact in world.facts(facts.PoolRequestClosed)] == ["no node has come within 12 s"] * 2
    world.world.cluster.resume("n4")
    trains(world, 3, 2 * RETRY_S)
    assert (len(requests(world)), world.gang.recovery.recoveries[-1].nodes_in) == (3, ["n4"])


def test_no_request_of_a_gang_that_trains_is_in_the_queue_for_long() -> None:
    """Another gang may need the node to go on at all."""
    world = training(4, limits=NO_LIMITS, pool_nodes=1, step_s=20.0)
    world.crash("n2")
    trains(world, 2, 120.0)
    world.run_for(5400)
    asked = [at for at, fact in world.journal if isinstance(fact, facts.PoolNodeRequested)][1:]
    over = [at for at, fact in world.journal if isinstance(fact, facts.PoolRequestClosed)][1:]
    assert all(end - begin < 14 for begin, end in zip(asked, over, strict=True))
    pauses = [round((later - earlier) / RETRY_S) for earlier, later in pairwise(asked)]
    assert pauses[:3] == [2, 4, 8]
    assert [call.job for call in world.slurm if call.verb == "cancel"] == [*range(2, 3 + len(over))]


# -- a node of the pool gives way --


def on_the_pool(**more: object) -> Scenario:
    """A gang of three nodes that has lost n1, and trains on n3 of the pool instead."""
    world = training(3, idle_nodes=1, pool_nodes=1, min_nodes=0, limits=NO_LIMITS, **more)
    world.crash("n1")
    trains(world, 2)
    assert "n3" in carriers(world)
    return world


def test_a_node_of_the_pool_gives_way_to_a_repaired_one_and_is_free_again() -> None:
    world = on_the_pool()
    pool_job = next(request.job for request in world.gang.growth.pool.values())
    repaired(world, "n1")
    trains(world, 3, SOON_S)
    recovery = world.gang.recovery.recoveries[-1]
    assert (recovery.action, recovery.nodes_out, recovery.nodes_in) == ("pool node gives way", ["n3"], ["n1"])
    assert recovery.step_restored == recovery.step_before
    assert recovery.cause == "n3 of the shared pool gives way to n1, which is back"
    world.run_for(3)
    assert pool_job in [call.job for call in world.slurm if call.verb == "cancel"]
    assert world.core.state.node("n3").health is NodeHealth.FIT
    assert not world.world.cluster.jobs()[pool_job].running
    assert world.replayed_state() == world.core.state


def test_a_node_of_the_pool_stays_if_the_repaired_one_is_gone_when_the_ranks_have_stopped() -> None:
    world = on_the_pool(step_s=1.0)
    repaired(world, "n1")
    world.run_until(lambda: world.gang.plans.swap is not None)
    world.signal("n1")
    trains(world, 3)
    assert ("n3" in carriers(world), world.gang.recovery.recoveries[-1].action) == (True, "restart in place")


def test_the_limit_of_the_pool_does_not_count_nodes_that_came_back() -> None:
    world = on_the_pool()
    repaired(world, "n1")
    trains(world, 3)
    world.run_for(3)
    world.crash("n2")
    trains(world, 4)
    assert world.gang.recovery.recoveries[-1].nodes_in == ["n3"]


def test_a_node_of_the_pool_is_fetched_again_if_ranks_crash_on_the_one_to_which_it_gave_way() -> None:
    world = on_the_pool(step_s=2.0)
    world.machines["n1"].crashes_ranks_after = 0
    repaired(world, "n1")
    trains(world, 5)
    assert sorted(carriers(world)) == ["n0", "n2", "n3"]
    assert world.core.state.node("n1").health is NodeHealth.FIT
    world.run_for(2 * RETRY_S)
    assert world.gang.newest.generation == 5
    assert world.replayed_state() == world.core.state


def left_over(**more: object) -> Scenario:
    """A gang of four nodes that has grown back from three. Its own node and one of the pool have come together."""
    world = training(4, idle_nodes=1, limits=NO_LIMITS, pool_nodes=1, launch_s=3.0, step_s=2.0, **more)
    world.drain_by_hand("n4", "elsewhere")
    world.crash("n2")
    trains(world, 2, 120.0)
    world.world.cluster.resume("n4")
    world.machines["n4"].has_imported = False
    world.run_until(lambda: any(one.job for one in world.gang.growth.pool.values()), 3 * RETRY_S)
    repaired(world, "n2")
    trains(world, 3, 2 * WARM_UP_S)
    assert (sorted(carriers(world)), len(world.gang.roster.present())) == (["n0", "n1", "n2", "n3"], 5)
    return world


def test_a_node_of_the_pool_that_carries_no_rank_is_given_back() -> None:
    world = left_over()
    world.run_for(KEPT_S - 30)
    assert len(world.gang.roster.present()) == 5
    world.run_for(60)
    assert [member.node for member in world.gang.roster.members.values() if member.removed] == ["n4"]
    assert [call.verb for call in world.slurm][-1] == "cancel"
    assert {job.id for job in world.world.cluster.jobs().values() if job.running} == {
        1,
        world.gang.roster.members["n2"].job,
    }
    assert (world.gang.newest.generation, world.core.state.node("n4").health) == (3, NodeHealth.FIT)
    assert world.replayed_state() == world.core.state
    world.crash("n3")
    trains(world, 4)
    assert world.gang.recovery.recoveries[-1].nodes_in == ["n4"]  # nothing is held against it


def test_a_node_of_the_pool_stays_as_the_spare_that_the_job_has_asked_for() -> None:
    world = training(4, spares=1, idle_nodes=1, limits=NO_LIMITS, pool_nodes=1, launch_s=3.0, step_s=2.0)
    world.drain_by_hand("n5", "elsewhere")
    world.crash("n1")
    trains(world, 2)
    world.crash("n2")
    trains(world, 3, 120.0)
    world.world.cluster.resume("n5")
    world.run_until(lambda: any(one.job for one in world.gang.growth.pool.values()), 3 * RETRY_S)
    repaired(world, "n2")
    trains(world, 4)
    world.run_for(2 * KEPT_S)
    assert sorted(member.node for member in world.gang.roster.present()) == ["n0", "n2", "n3", "n4", "n5"]


def test_growth_does_not_wait_for_long_for_nodes_that_were_requested() -> None:
    limits = replace(NO_LIMITS, pool=replace(NO_LIMITS.pool, wait_s=3600.0))
    world = training(5, min_nodes=2, pool_nodes=2, limits=limits, step_s=2.0)
    world.crash("n2")
    world.run_until(lambda: world.gang.phase is Phase.RECOVERING)
    trains(world, 2, 4000.0)
    world.crash("n3")
    trains(world, 3, 4000.0)
    repaired(world, "n2")
    world.run_until(lambda: len(world.gang.roster.present()) == 4, 2 * RETRY_S)
    joined = world.now
    assert any(not one.node for one in world.gang.growth.pool.values())
    world.run_until(lambda: grown(world) == [4], REQUESTED_S + SOON_S)
    assert world.now - joined >= REQUESTED_S - 1


@pytest.mark.parametrize(
    ("fact", "words"),
    [
        (
            facts.GrowthPlanned("g", 2, 4, "grows from 3 to 4 ranks with n2"),
            "the gang grows from 3 to 4 ranks with n2; the ranks finish a step and exit, then ranks run on 4 nodes",
        ),
        (
            facts.PoolNodeRequested("g", 1, "n0", ("--nodelist=n2",), "n2", 9.0),
            "request 1: the agent on n0 submits a job for n2, which is repaired (--nodelist=n2)",
        ),
    ],
)
def test_events_say_it_in_words(fact: facts.Fact, words: str) -> None:
    assert describe(fact) == words


def test_a_repaired_node_may_join_while_nobody_knows_yet_that_its_job_was_requeued() -> None:
    world = training(3)
    lost = world.gang.roster.seats[1].node
    world.signal(lost)
    world.run_until(lambda: world.world.cluster.nodes()[lost].drained)
    world.repair(lost)
    world.run_until(lambda: world.facts(facts.PoolJobQueued) != [])
    world.requeue()
    world.run_until(lambda: not world.gang.roster.members[lost].removed)
    assert world.gang.slurm.restart_count == 0
    world.run_until(lambda: world.gang.slurm.restart_count == 1)
