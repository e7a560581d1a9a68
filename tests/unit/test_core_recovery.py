"""Recoveries of the real core in virtual time: for each fault, what must follow and what must not."""

from collections.abc import Callable

import pytest
from tests.unit.training_worlds import training, verbs

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.events import Silence
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.turn.state_updates import apply
from muster.daemon.coordinator.core.turn.turn import ProbeRequest
from muster.node_health import NodeHealth
from muster.simulator.scenario import Scenario
from muster.slurm.client.states import JobState


def recovered(world: Scenario, generation: int = 2) -> Callable[[], bool]:
    return lambda: world.gang.newest.stepped_generation == generation


def carriers(world: Scenario) -> list[str]:
    return [seat.node for seat in world.gang.roster.seats]


def test_all_ranks_start_and_spares_stand_by() -> None:
    world = training()
    assert carriers(world) == ["n0", "n2", "n4", "n1"]  # leaf s0 holds n0, n2, n4, leaf s1 the rest
    assert {s.node for s in world.gang.roster.spares} == {"n3", "n5"}
    assert world.slurm == []


def test_buddies_and_watched_peers_sit_in_other_leaves() -> None:
    world = training(nodes=6, spares=2)
    leaf = {machine.name: machine.leaf for machine in world.machines.values()}
    for seat in world.gang.roster.seats:
        assert seat.holder != seat.node
        others = [n for n in carriers(world) if leaf[n] != leaf[seat.node]]
        assert not others or leaf[seat.holder] != leaf[seat.node]
        assert len(set(seat.watched_peers)) == 4


@pytest.mark.parametrize("node", ["n0", "n1"])
@pytest.mark.parametrize(
    ("fault", "verdict"), [("crash", NodeHealth.LOST), ("power_off", NodeHealth.LOST), ("pause", NodeHealth.HUNG)]
)
def test_a_dead_node_is_replaced(fault: str, verdict: NodeHealth, node: str) -> None:
    world = training()
    before, step = world.now, world.core.observed.gang("g").step_number
    getattr(world, fault)(node)
    world.run_until(recovered(world))
    assert node not in carriers(world)
    assert world.core.state.node(node).health is verdict
    assert verbs(world) == [("down", node)]
    assert world.gang.restore.restored_version is not None
    assert world.gang.restore.restored_version.step >= step - 1
    assert world.now - before < {"crash": 1.5, "power_off": 4.5, "pause": 8.0}[fault]


def test_a_node_whose_processes_stand_still_for_seconds_stays() -> None:
    world = training()
    world.pause("n1")
    world.run_until(lambda: "n1" in world.core.observed.gang("g").suspected_since)
    world.run_for(4.0)
    world.resume("n1")
    world.run_until(recovered(world))
    assert "n1" in carriers(world)
    assert world.core.state.node("n1").health is NodeHealth.FIT
    assert verbs(world) == []


def test_fencing_by_time_precedes_the_next_generation() -> None:
    world = training()
    before = world.now
    world.power_off("n1")
    world.run_until(lambda: world.gang.phase is Phase.STARTING)
    assert world.now - before >= 2.0


def test_a_crash_proven_by_closed_connections_needs_no_fencing_by_time() -> None:
    world = training()
    before = world.now
    world.crash("n1")
    world.run_until(lambda: world.gang.phase is Phase.STARTING)
    assert world.now - before < 1.0


def test_a_fatal_signal_swaps_drains_and_releases_the_node() -> None:
    world = training()
    world.signal("n1", reason="Xid 79: GPU has fallen off the bus")
    world.run_until(lambda: ("let_go", "n1") in verbs(world))
    assert verbs(world) == [("drain", "n1"), ("let_go", "n1")]
    assert "Xid 79" in world.slurm[0].text
    assert world.gang.recovery.recoveries[-1].action == "swap"
    assert world.core.state.node("n1").health is NodeHealth.UNFIT


def test_an_unfit_batch_host_is_drained_and_kept() -> None:
    world = training()
    world.signal("n0")
    world.run_until(recovered(world))
    world.run_until(lambda: world.core.observed.gang("g").step_number > 20)
    assert verbs(world) == [("drain", "n0")]
    assert "n0" not in carriers(world)


def test_once_the_batch_host_is_dead_no_node_is_released() -> None:
    world = training()
    world.power_off("n0")
    world.run_until(recovered(world))
    world.signal("n1")
    world.run_until(recovered(world, 3))
    world.run_until(lambda: world.core.observed.gang("g").step_number > 30)
    assert verbs(world) == [("down", "n0"), ("drain", "n1")]


def test_a_job_whose_batch_host_died_is_completed_with_its_code() -> None:
    world = training()
    world.power_off("n0")
    world.run_until(recovered(world))
    world.finish()
    world.run_until(lambda: world.gang.phase is Phase.DONE)
    assert [(c.verb, c.exit_code) for c in world.slurm] == [("down", 0), ("complete", 0)]


def test_a_job_that_has_lost_the_rest_of_its_script_has_a_code_of_its_own() -> None:
    world = training(own_nodes=("n0", "n1", "n2", "n3"), script_goes_on=True)
    world.power_off("n0")
    world.run_until(recovered(world))
    world.finish()
    world.run_until(lambda: world.gang.phase is Phase.DONE)
    assert (world.gang.exit_code, world.slurm[-1].verb, world.slurm[-1].exit_code) == (0, "complete", 91)
    assert world.gang.reason.endswith("is lost with a node: the job ends with 91")


def test_a_batch_host_that_dies_unseen_does_not_keep_its_job_for_ever() -> None:
    world = training()
    world.signal("n0")
    world.run_until(lambda: recovered(world)() and not world.agent("n0").alive)
    world.power_off("n0")
    world.finish()
    world.run_until(lambda: ("complete", "") in verbs(world), 30)


def test_a_users_own_script_may_go_on_until_slurm_has_lost_its_node() -> None:
    """Nobody knows whether it still runs. Muster's own script would have ended the job within seconds."""
    world = training(own_nodes=("n0", "n1", "n2", "n3"), script_goes_on=True)
    world.signal("n0")
    world.run_until(lambda: recovered(world)() and not world.agent("n0").alive)
    world.power_off("n0")
    world.finish()
    world.run_until(lambda: ("complete", "") in verbs(world), 120)
    assert "n0" not in world.gang.slurm.job_nodes
    assert world.slurm[-1].exit_code == 91


def test_a_job_that_ends_by_itself_needs_no_completing() -> None:
    world = training()
    world.finish()
    world.run_until(lambda: world.gang.phase is Phase.DONE)
    world.run_until(lambda: world.gang.slurm.job_over)
    world.run_for(40)
    assert world.slurm == []


def test_a_lost_node_is_fenced_by_time_once() -> None:
    world = training()
    world.power_off("n1")
    world.run_until(recovered(world))
    world.restart_coordinator()
    world.run_until(lambda: all(world.core.observed.gang("g").is_attached(n) for n in carriers(world)))
    before = world.now
    world.kill_rank("n2", 1)
    world.run_until(recovered(world, 3))
    assert world.now - before < 1.0


def test_a_rank_that_dies_is_restarted_in_place_and_blames_no_node() -> None:
    world = training()
    before = carriers(world)
    world.kill_rank("n1", -9)
    world.run_until(recovered(world))
    assert carriers(world) == before
    assert world.slurm == []
    assert world.gang.recovery.recoveries[-1].action == "restart in place"
    assert "signal 9" in world.gang.recovery.recoveries[-1].cause


def test_ranks_that_die_of_a_peers_reset_don_t_hide_the_dead_node() -> None:
    world = training()
    world.kill_rank("n2", 1)
    world.crash("n1")
    world.run_until(recovered(world))
    assert "n1" not in carriers(world)
    assert "n2" in carriers(world)
    assert "n1 is lost" in world.gang.recovery.recoveries[-1].cause
    assert world.gang.recovery.failures_in_a_row == 0


@pytest.mark.parametrize(
    ("own_nodes", "calls"),
    [((), [("requeue_off", "")]), (("n0", "n1"), [])],
    ids=["job.toml", "a user's own script may requeue itself"],
)
def test_a_script_that_always_dies_fails_without_blaming_a_node(
    own_nodes: tuple[str, ...], calls: list[tuple[str, str]]
) -> None:
    world = Scenario(2, 1, max_failures=3, own_nodes=own_nodes)
    for generation in (1, 2, 3):
        world.run_until(lambda g=generation: world.is_running(g))  # type: ignore[misc]
        world.kill_rank(carriers(world)[0], 1)
    world.run_until(lambda: world.gang.final)
    assert (world.gang.phase, world.gang.exit_code) == (Phase.FAILED, 93)
    assert verbs(world) == calls


def test_a_job_that_fails_for_good_ends_with_its_requeue_flag_off_though_slurm_was_mute() -> None:
    world = Scenario(2, 1, max_failures=1)
    world.run_until(lambda: world.is_running(1))
    world.world.slurm.unavailable_reason = "slurmctld is down"
    world.kill_rank(carriers(world)[0], 1)
    world.run_until(lambda: world.gang.final)
    world.run_for(20.0)
    assert world.world.cluster.jobs()[1].state is JobState.RUNNING
    world.world.slurm.unavailable_reason = ""
    world.run_until(lambda: world.world.cluster.jobs()[1].state.ended)
    job = world.world.cluster.jobs()[1]
    assert (job.state, job.exit_code, job.requeue) == (JobState.FAILED, 93, False)


def test_generations_without_progress_count_as_failures_though_they_make_steps() -> None:
    state = training().replayed_state()
    failures = []
    for generation, step in enumerate((30, 30, 29, 31, 31), 1):
        fenced = facts.GenerationFenced("g", generation, "rank 0 exited with 1", False, "n0", step, 0.0)
        seats = state.gangs["g"].roster.seats
        started = facts.GenerationStarted(
            "g", generation + 1, seats, (), "n0", 1, None, (), "", 0.0, "restart in place"
        )
        for fact in (fenced, started, facts.FirstStep("g", generation + 1, 1)):
            apply(state, fact, 0.0)
        failures.append(state.gangs["g"].recovery.failures_in_a_row)
    assert failures == [1, 2, 3, 1, 2]


@pytest.mark.parametrize(("stepped", "ran_s", "failures"), [(False, 86400, 1), (False, 600, 3), (True, 86400, 3)])
def test_a_long_run_of_a_script_that_never_declares_a_step_counts_as_progress(
    stepped: bool, ran_s: float, failures: int
) -> None:
    state, at = training().replayed_state(), 0.0
    gang = state.gangs["g"]
    gang.newest.started_at, gang.newest.stepped_generation, gang.recovery.furthest_step = 0.0, int(stepped), 0
    for generation in (1, 2, 3):
        at += ran_s
        fenced = facts.GenerationFenced("g", generation, "rank 0 exited with 1", False, "n0", 0, at)
        started = facts.GenerationStarted("g", generation + 1, gang.roster.seats, (), "n0", 1, None, (), "", at, "")
        for fact in (fenced, started):
            apply(state, fact, at)
    assert gang.recovery.failures_in_a_row == failures


def test_a_script_that_crashes_now_and_then_but_progresses_goes_on() -> None:
    world = training(max_failures=2)
    for generation in range(2, 8):
        world.kill_rank(carriers(world)[0], 1)
        world.run_until(recovered(world, generation))
        world.run_for(1)
    assert world.gang.recovery.failures_in_a_row == 1


def test_an_agent_that_ends_alone_costs_its_node_nothing_in_slurm() -> None:
    world = training()
    world.kill_agent("n1")
    world.run_until(recovered(world))
    assert "n1" not in carriers(world)
    assert world.core.state.node("n1").health is NodeHealth.FIT
    assert world.slurm == []


def test_one_accuser_evicts_no_node() -> None:
    """One witness is no quorum."""
    world = training()
    world.post_event(events.PeerAccused("g", "n2", "n1", Silence.NO_ANSWER))
    world.run_until(lambda: world.core.observed.gang("g").step_number > 20)
    assert world.gang.newest.generation == 1
    assert "n1" not in world.core.observed.gang("g").suspected_since


def test_no_spare_left_flushes_and_requeues_without_the_bad_nodes() -> None:
    world = training(nodes=3, spares=0, durable_dir="/d")
    world.power_off("n1")
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED)
    requeue = next(call for call in world.slurm if call.verb == "requeue")
    assert requeue.exclude == ("n1",)
    assert world.gang.checkpoint.durable_path.startswith("/d/step_")


def writing(**spec: object) -> Scenario:
    """A job that is done, while its last checkpoint is written for some seconds."""
    world = training(durable_dir="/d", flush_s=5.0, **spec)
    world.finish()
    world.run_until(lambda: world.gang.phase is Phase.DRAINING)
    return world


def test_a_node_lost_while_the_last_checkpoint_is_written_loses_nothing_of_it() -> None:
    world = writing()
    assert world.gang.checkpoint.flush is not None
    version, before = world.gang.checkpoint.flush.version, world.now
    world.power_off("n1")
    world.run_until(lambda: world.gang.final)
    assert (world.gang.phase, world.gang.checkpoint.durable_version) == (Phase.DONE, version)
    assert {source.node for source in world.gang.checkpoint.flush.sources}.isdisjoint({"n1"})
    assert world.core.state.node("n1").health is NodeHealth.LOST
    assert world.now - before < 20


def test_a_node_lost_while_a_requeue_waits_for_the_checkpoint_is_excluded_too() -> None:
    world = training(nodes=4, spares=0, durable_dir="/d", flush_s=5.0)
    world.power_off("n1")
    world.run_until(lambda: world.gang.phase is Phase.DRAINING)
    world.power_off("n3")
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED)
    assert next(call.exclude for call in world.slurm if call.verb == "requeue") == ("n1", "n3")
    assert world.gang.checkpoint.durable_path


def test_a_last_checkpoint_that_can_not_be_written_fails_the_job() -> None:
    world = writing()
    world.world.durable_storage.fails_until = world.now + 60
    world.run_until(lambda: world.gang.final)
    assert (world.gang.phase, world.gang.exit_code) == (Phase.FAILED, 97)
    assert "the last checkpoint could not be written" in world.gang.reason


def test_no_spare_left_and_no_requeue_fails() -> None:
    world = training(nodes=3, spares=0, requeue=False)
    world.power_off("n1")
    world.run_until(lambda: world.gang.final)
    assert (world.gang.phase, world.gang.exit_code) == (Phase.FAILED, 94)


def test_a_node_that_never_attaches_ends_the_gang_by_name() -> None:
    world = Scenario(3, 0, absent=["n1"], gather_timeout_s=20.0)
    world.run_until(lambda: world.gang.final)
    assert world.gang.exit_code == 95
    assert "missing: n1" in world.gang.reason


def test_a_missing_spare_delays_the_start_but_does_not_prevent_it() -> None:
    """It waits for as long as srun may try to start an agent there."""
    world = Scenario(3, 1, absent=["n3"], gather_timeout_s=300.0)
    world.run_for(100)
    assert world.gang.phase is Phase.GATHERING
    world.run_until(lambda: world.gang.phase is Phase.RUNNING, 30)
    assert len(carriers(world)) == 3


def test_cancel_ends_the_gang_and_its_job() -> None:
    world = training()
    world.post_event(events.CancelRequested("g", "uid 1000"))
    assert world.gang.phase is Phase.CANCELLED
    assert verbs(world) == [("cancel", "")]
    world.run_until(lambda: not any(world.agent(node).alive for node in world.machines), 1)


def test_repeated_requests_to_cancel_a_job_owe_slurm_one_call() -> None:
    """The attack: an owner asks again and again, while the gang is final and Slurm has not answered."""
    world = Scenario(3, 0, absent=["n1"], gather_timeout_s=20.0)
    world.run_until(lambda: world.gang.final)
    for _ in range(10):
        world.post_event(events.CancelRequested("g", "uid 1000"))
    assert [fact.verb for fact in world.facts(facts.SlurmCallOwed)] == ["cancel"]


def fail(world: Scenario, *nodes: str, words: str = "no space left on /shared") -> None:
    """Agents report an error that no order mends."""
    for node in nodes:
        world.agent(node).failure = words
        world.agent(node).status_changed(0.0)


def test_an_error_that_most_agents_meet_ends_the_gang_with_its_words() -> None:
    world = training()
    fail(world, "n0", "n1", "n2", "n4")
    world.run_until(lambda: world.gang.final)
    assert (world.gang.phase, world.gang.exit_code) == (Phase.FAILED, 96)
    assert world.gang.reason == "n0, n1, n2, n4: no space left on /shared"
    assert world.gang.newest.generation == 1


def gathering(spares: int, failing: dict[str, float]) -> Core:
    """The core of a job of 8 nodes. The `failing` agents attach at these times with an error, the others at 8 s."""
    core = Core(DurableState(), 0.0)
    nodes = tuple(f"n{i}" for i in range(8 + spares))
    core.decide(events.GangSubmitted("g", 1, 1, "", events.GangSpec(8, spares), "{}"), 0.0)
    core.decide(events.SlurmJobChanged("g", 1, nodes, 0, None), 0.5)
    at = 0.5
    for node in sorted(nodes, key=lambda node: failing.get(node, 8.0)):
        at = failing.get(node, 8.0)
        core.decide(events.Tick(), at)
        status = events.AgentStatus(failure="/scratch does not exist" if node in failing else "")
        core.decide(events.AgentAttached("g", node, 1, 0, f"i-{node}", "a:1", node == "n0", "", status), at)
        if core.state.gangs["g"].final:
            break
    for seconds in range(1, 60):
        core.decide(events.Tick(), at + seconds)
    return core


def test_a_bad_node_that_attaches_first_costs_a_job_with_spares_nothing() -> None:
    gang = gathering(2, {"n0": 1.0}).state.gangs["g"]
    assert (gang.phase, gang.reason) == (Phase.PREFLIGHT, "")
    assert gang.phase_at == 8.0, "nobody waits for n0"
    assert gang.roster.members["n0"].removal_reason == "n0: /scratch does not exist"


def test_bad_nodes_that_report_one_after_the_other_end_a_job_that_can_no_longer_gather() -> None:
    gang = gathering(2, {"n0": 1.0, "n1": 9.0, "n2": 18.0}).state.gangs["g"]
    assert (gang.phase, gang.exit_code) == (Phase.FAILED, 96)
    assert gang.reason == "n0, n1, n2: /scratch does not exist"


def test_an_error_of_one_agent_costs_its_node_its_place_and_nothing_else() -> None:
    world = training()
    fail(world, "n1", words="ended by SIGTERM")
    world.run_until(recovered(world))
    assert "n1" not in carriers(world)
    assert "SIGTERM" in world.gang.recovery.recoveries[-1].cause
    assert world.core.state.node("n1").health is NodeHealth.FIT
    assert world.gang.recovery.failures_in_a_row == 0
    world.run_until(lambda: bool(verbs(world)))
    assert verbs(world) == [("let_go", "n1")]


@pytest.mark.parametrize("reserves", [False, True])
def test_a_gang_of_which_no_node_opens_the_store_does_not_wait_for_ever(reserves: bool) -> None:
    """With `reserves`, n1 keeps a port free for rank 0, and n0, the node of rank 0, does not."""
    core, now = Core(DurableState(), 0.0), 1.0
    core.decide(events.GangSubmitted("g", 1, 1, "", events.GangSpec(2, 0), "{}"), now)
    for node in ("n0", "n1"):
        core.decide(events.AgentAttached("g", node, 1, 0, node, "a:1", node == "n0", "", events.AgentStatus()), now)
    gang = core.state.gangs["g"]
    while not gang.final and now < 3600:
        now += 1.0
        for node in ("n0", "n1"):
            opens = reserves and node == "n1" == gang.recovery.next_store_node
            status = events.AgentStatus(
                order_serial=gang.order_serial, store_port=5 * opens, store_generation=1, store_reserved=opens
            )
            core.decide(events.AgentReported("g", node, node, status), now)
        core.decide(events.Tick(), now)
    assert (gang.phase, gang.exit_code) == (Phase.FAILED, 96)
    assert "no node has opened a rendezvous store within 10 min" in gang.reason
    assert 600 < now < 700


def test_an_error_of_a_spare_stops_no_rank() -> None:
    world = training()
    fail(world, "n3")
    world.run_until(lambda: bool(world.gang.roster.members["n3"].removal_reason))
    world.run_for(5)
    assert world.gang.newest.generation == 1


@pytest.mark.parametrize(("spares", "exit_code"), [(0, 96), (1, 95)])
def test_an_error_while_nodes_gather_fails_a_gang_that_is_too_small_without_them(spares: int, exit_code: int) -> None:
    """The gang fails at once where no other node can come, otherwise after the gather timeout."""
    world = Scenario(3, spares, absent=["n3"] if spares else ["n1"])
    world.run_until(lambda: world.gang.phase is Phase.GATHERING)
    fail(world, "n2", words="the run folder /nowhere does not exist on this node")
    world.run_until(lambda: world.gang.final, 310 if spares else 10)
    assert world.gang.exit_code == exit_code
    assert "n2: the run folder" in world.gang.reason


def test_slurms_word_is_awaited_each_time_that_agents_get_sigterm() -> None:
    world = training()
    fail(world, *world.gang.roster.members, words="ended by SIGTERM")
    world.run_for(3)
    fail(world, *world.gang.roster.members, words="")
    world.run_for(60)
    fail(world, *world.gang.roster.members, words="ended by SIGTERM")
    world.run_for(3)
    assert not world.gang.final
    world.run_until(lambda: world.gang.final)


def test_scancel_shows_as_cancelled_though_its_signal_comes_first() -> None:
    world = training()
    world.agent("n1").failure = "ended by SIGTERM"
    world.kill_rank("n1", -15)
    world.kill_agent("n1")
    later = world.now + 3
    world.run_until(lambda: world.now > later)
    world.post_event(events.SlurmJobChanged("g", 1, (), 0, "CANCELLED"))
    assert world.gang.phase is Phase.CANCELLED
    assert world.slurm == []


def test_a_second_fault_during_recovery() -> None:
    world = training()
    world.power_off("n1")
    world.run_until(lambda: world.gang.phase is Phase.RECOVERING)
    world.crash("n2")
    world.run_until(lambda: world.gang.newest.stepped_generation == world.gang.newest.generation > 1)
    assert not {"n1", "n2"} & set(carriers(world))


def test_a_correlated_nvlink_error_blames_the_dead_peer_only() -> None:
    world = training()
    world.power_off("n1")
    world.signal("n2", "unfit_unless_explained", "Xid 74")
    world.run_until(recovered(world))
    world.run_until(lambda: world.core.observed.gang("g").step_number > 40)
    assert world.core.state.node("n2").health is NodeHealth.FIT


def test_an_nvlink_error_of_its_own_is_fatal() -> None:
    world = training()
    world.signal("n2", "unfit_unless_explained", "Xid 74")
    world.run_until(recovered(world))
    assert world.core.state.node("n2").health is NodeHealth.UNFIT


@pytest.mark.parametrize("fault", ["crash", "power_off", "signal", "kill_rank", "kill_agent"])
def test_a_coordinator_restarted_after_any_fact_completes_the_recovery(fault: str) -> None:
    whole = training()
    getattr(whole, fault)("n1")
    whole.run_until(recovered(whole))
    first = next(i for i, (_, fact) in enumerate(whole.journal) if isinstance(fact, facts.FirstStep))
    for position in range(first + 1, len(whole.journal)):
        world = training()
        getattr(world, fault)("n1")
        world.run_until(lambda w=world, p=position: len(w.journal) > p)  # type: ignore[misc]
        world.restart_coordinator()
        world.run_until(lambda w=world: w.gang.newest.stepped_generation == w.gang.newest.generation >= 2, 120)  # type: ignore[misc]
        assert world.replayed_state() == world.core.state
        if fault in ("crash", "power_off", "signal"):
            assert "n1" not in carriers(world)


def test_a_replay_gives_the_durable_state_and_encoding_loses_nothing() -> None:
    world = training()
    world.crash("n1")
    world.run_until(recovered(world))
    assert world.replayed_state() == world.core.state
    assert type(world.core.state).load(world.core.state.dump()) == world.core.state
    assert [facts.decode(*facts.encode(fact)) for _, fact in world.journal] == [fact for _, fact in world.journal]


def test_a_fence_that_arrived_late_makes_no_node_unfit() -> None:
    world = training()
    world.cut(("coordinator", "n1"))
    world.kill_rank("n2")
    world.run_for(15)
    assert world.core.state.node("n1").health is NodeHealth.FIT
    world.heal(("coordinator", "n1"))
    world.run_until(recovered(world))
    assert world.slurm == []


def test_ranks_that_can_not_be_killed_make_their_node_unfit() -> None:
    world = training()
    world.machines["n1"].ranks_unkillable_until = world.now + 100
    world.kill_rank("n2")
    world.run_until(lambda: world.core.state.node("n1").health is NodeHealth.UNFIT)
    world.run_until(recovered(world))
    assert "n1" not in carriers(world)


def test_one_agent_beside_the_coordinator_is_not_enough_where_there_are_two() -> None:
    """The coordinator can't ask the second agent, because it does not reach that one either."""
    world = Scenario(3, 0)
    world.run_until(lambda: world.is_running(1))
    wires = [("coordinator", "n1"), ("n0", "n1"), ("coordinator", "n2")]
    cut = [pair for a, b in wires for pair in ((a, b), (b, a))]
    world.cut(*cut)
    world.run_for(30.0)
    assert world.core.state.node("n1").health is NodeHealth.FIT
    world.heal(*cut)
    world.run_until(lambda: world.gang.phase is Phase.RUNNING)


def test_a_coordinator_that_is_cut_off_evicts_no_node() -> None:
    """The coordinator's word alone is no quorum."""
    world = training(nodes=2, spares=0)
    cut = [pair for n in ("n0", "n1") for pair in (("coordinator", n), (n, "coordinator"))]
    world.cut(*cut)
    world.run_for(25)
    world.heal(*cut)
    world.run_for(10)
    assert world.slurm == []
    assert world.gang.newest.generation == 1


def test_while_many_nodes_are_silent_not_even_the_first_is_evicted() -> None:
    world = training(nodes=6, spares=3)
    for node in ("n1", "n3", "n5"):
        world.power_off(node)
    world.run_for(50)
    assert world.slurm == []
    world.run_until(lambda: {("down", "n1"), ("down", "n3"), ("down", "n5")} <= set(verbs(world)), 30)


def test_a_silent_node_without_watched_peers_is_detected() -> None:
    world = training(nodes=1, spares=0)
    world.power_off("n0")
    world.run_for(14)
    world.world.boot("n0")
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED)
    assert "n0" in world.gang.reason


def test_a_job_that_slurm_takes_back_is_requeued_before_its_agents_return() -> None:
    world = training(nodes=2, spares=0)
    world.machines["n0"].frozen = True  # Slurm finds no node for it
    world.world.topology_changed()
    world.run_for(20)
    world.world.cluster.requeue(1, (), None)
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED)
    assert world.gang.newest.generation == 1


def test_a_node_removed_alive_ends_its_ranks_before_others_start() -> None:
    world = training()
    world.cut(("coordinator", "n1"))
    world.signal("n1")
    world.run_for(1)
    assert world.gang.phase is Phase.RECOVERING
    world.heal(("coordinator", "n1"))
    world.run_until(lambda: world.gang.phase is Phase.STARTING)
    assert not any(rank.is_active for rank in world.agent("n1").ranks.values())


def test_an_unfit_node_that_dies_before_its_ranks_have_ended_is_not_waited_for() -> None:
    world = training()
    world.cut(("coordinator", "n1"))
    world.signal("n1")
    world.run_for(0.3)
    world.power_off("n1")
    world.run_until(recovered(world))
    assert world.core.state.node("n1").health is NodeHealth.LOST


def test_memory_on_a_removed_node_that_dies_later_is_given_up() -> None:
    world = training()
    node, buddy = next(
        (seat.node, seat.holder) for seat in world.gang.roster.seats if "n0" not in (seat.node, seat.holder)
    )
    world.signal(node)
    world.signal(buddy)
    world.run_until(lambda: world.gang.phase is Phase.STARTING)
    assert {source.node for source in world.gang.restore.restore_sources} & {node, buddy}
    world.power_off(node)
    world.power_off(buddy)
    world.run_until(lambda: world.gang.final or world.gang.newest.stepped_generation > 1, 120)
    assert world.gang.phase is Phase.RUNNING
    assert world.facts(facts.GenerationStarted)[-1].version is None


def test_a_job_of_which_no_agent_ever_attaches_ends() -> None:
    world = Scenario(2, 0, absent=["n0", "n1"], gather_timeout_s=20.0)
    world.run_until(lambda: world.gang.final)
    assert (world.gang.phase, world.gang.exit_code) == (Phase.FAILED, 95)
    assert "missing: n0, n1" in world.gang.reason


def test_a_requeued_job_that_ends_before_its_agents_attach_ends_its_gang() -> None:
    world = training(nodes=2, spares=0)
    world.world.jobs.unstartable_nodes.update(world.machines)
    world.world.cluster.requeue(1, (), None)
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED)
    world.world.cluster.end_batch_script(1, 1)
    world.run_until(lambda: world.gang.final, 10)
    assert world.gang.phase is Phase.FAILED


def test_the_end_of_the_requeued_run_does_not_end_the_gang() -> None:
    world = training(nodes=2, spares=0)
    world.world.slurm.max_delay_s = 20.0
    world.power_off("n1")
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED)
    world.post_event(events.SlurmJobChanged("g", 1, (), 0, "FAILED"))
    assert world.gang.phase is Phase.REQUEUED


def test_a_durable_checkpoint_is_not_forgotten_by_a_start_from_memory() -> None:
    world = training(nodes=2, spares=0, durable_dir="/d")
    world.post_event(events.FlushRequested("g", "uid 1000"))
    world.run_until(lambda: world.gang.checkpoint.durable_path != "")
    written = world.gang.checkpoint.durable_path
    world.kill_rank("n1")
    world.run_until(recovered(world))
    world.world.durable_storage.fails_until = world.now + 1000
    world.world.kept_memory.damage_rate = 1.0
    world.requeue()
    world.run_until(lambda: world.gang.newest.generation == 3)
    assert world.gang.restore.restored_version is None
    assert world.gang.checkpoint.durable_path == written
    assert [fact.durable_path for fact in world.facts(facts.GenerationStarted)] == ["", "", written]


def test_fencing_by_time_counts_from_the_last_answer_of_any_member() -> None:
    world = training()
    world.cut(*[pair for n in ("coordinator", "n0", "n2") for pair in ((n, "n1"), ("n1", n))])
    world.run_until(lambda: world.gang.phase is Phase.RECOVERING)
    out_at = world.now
    world.cut(*[pair for n in ("n3", "n4", "n5") for pair in ((n, "n1"), ("n1", n))])
    world.run_until(lambda: world.gang.phase is Phase.STARTING)
    assert world.now - out_at >= 2.0
    assert not any(rank.is_active for rank in world.agent("n1").ranks.values())


def test_an_agent_out_of_the_coordinators_reach_is_removed_in_the_end() -> None:
    world = training(durable_dir="")
    world.cut(("coordinator", "n1"), ("n1", "coordinator"))
    world.run_for(60)
    assert world.gang.newest.generation == 1  # training goes on
    world.kill_rank("n2")
    world.run_until(recovered(world))
    assert "n1" not in carriers(world)
    assert world.core.state.node("n1").health is NodeHealth.FIT


def test_a_job_that_is_done_except_on_an_unreachable_node_ends_as_done() -> None:
    world = training()
    world.cut(("coordinator", "n1"), ("n1", "coordinator"))
    world.world.final_steps["g"] = world.core.observed.gang("g").step_number + 5
    world.run_until(lambda: world.gang.phase is Phase.DONE, 120)
    assert "n1" not in carriers(world)


def test_a_gang_that_makes_steps_runs_though_one_agent_can_not_report() -> None:
    world = Scenario(3, 0)
    world.run_until(lambda: world.gang.phase is Phase.PREFLIGHT)
    world.cut(("n1", "coordinator"))
    world.run_until(lambda: world.gang.phase is Phase.RUNNING)
    assert world.gang.newest.stepped_generation == 1


def test_steps_of_a_gang_that_starts_again_lower_count_as_progress() -> None:
    world = training(nodes=2, spares=2)
    world.run_until(lambda: world.core.observed.gang("g").step_number > 150)
    for lost in carriers(world):
        world.crash(lost)
    world.run_until(recovered(world))
    assert world.gang.restore.restored_version is None
    world.run_for(2 * 5.0 + 1)  # or the lost ones would count as silent with the next
    node = carriers(world)[1]
    world.world.set_stopped(world.agent(node), True)
    world.world.set_stopped(world.world.daemons[node], True)
    world.run_for(5)
    assert world.core.state.node(node).health is NodeHealth.FIT
    assert world.gang.newest.generation == 2


def test_ranks_ended_by_self_fencing_do_not_count_against_the_script() -> None:
    world = training(max_failures=1)
    world.cut(*[(node, "n1") for node in ("coordinator", "n2", "n3", "n4", "n5")])  # n0 is no majority
    world.run_until(lambda: world.gang.phase is Phase.RECOVERING)
    assert "n1 was cut off" in world.gang.recovery.recoveries[-1].cause
    world.run_until(recovered(world, 3))
    assert world.gang.recovery.failures_in_a_row == 0


def test_an_agent_that_does_not_reattach_after_a_restart_is_detected_without_any_other_event() -> None:
    world = training()
    core, now, asks = Core(world.replayed_state(), world.now), world.now, list[ProbeRequest]()
    while not asks:
        outcome = core.decide(events.Tick(), now)
        assert outcome.next_tick_at is not None
        asks, now = outcome.probe_requests, outcome.next_tick_at
    assert now - world.now < 10


def test_a_restart_gives_gathering_agents_time_to_attach_again() -> None:
    world = Scenario(3, 1, absent=["n3"], gather_timeout_s=20.0)
    world.run_until(lambda: world.gang.phase is Phase.GATHERING)
    world.world.coordinator_restart_s = 30.0
    world.restart_coordinator()
    world.run_until(lambda: world.gang.phase is Phase.RUNNING)


def test_a_restart_gives_flush_writers_time_to_report_again() -> None:
    world = training(nodes=2, spares=0, durable_dir="/d")
    world.post_event(events.FlushRequested("g", "uid 1000"))
    assert world.gang.checkpoint.flush is not None
    world.world.coordinator_restart_s = 130.0
    world.world.crash_coordinator("as the script says")
    world.run_until(lambda: world.gang.checkpoint.durable_path != "", 150)


def test_a_coordinator_frozen_during_a_recovery_blames_no_node() -> None:
    world = training()
    world.post_event(events.PeerAccused("g", "n0", "n1", Silence.NO_ANSWER))
    world.run_until(lambda: world.core.observed.gang("g").reachability.get("n1", (False, 0.0))[0])
    world.kill_rank("n2")
    world.run_until(lambda: world.gang.phase is Phase.RECOVERING)
    world.world.stall_coordinator(20.0)
    world.run_until(recovered(world))
    assert verbs(world) == []


def test_an_accusation_of_an_unknown_node_is_dropped() -> None:
    world = training()
    for number in range(50):
        world.post_event(events.PeerAccused("g", "n0", f"nobody{number}", Silence.CLOSED))
    seen = world.core.observed.gang("g")
    assert (seen.closed_by, seen.suspected_since) == ({}, {})


def test_an_agent_that_is_started_anew_ends_the_generation_with_that_reason() -> None:
    world = training()
    world.relaunch_agents("n1")
    world.run_until(lambda: bool(world.facts(facts.GenerationFenced)[1:]))
    assert world.facts(facts.GenerationFenced)[-1].cause == "muster-agent on n1 was started anew"


def test_the_new_agent_of_a_removed_member_does_not_come_back() -> None:
    world = training()
    world.kill_agent("n1")
    world.run_until(recovered(world))
    world.relaunch_agents("n1")
    world.run_for(5)
    assert world.gang.roster.members["n1"].removed


def test_an_agent_that_comes_after_the_end_joins_nothing() -> None:
    world = training()
    world.post_event(events.CancelRequested("g", "uid 1000"))
    joined = len(world.facts(facts.MemberJoined))
    world.post_event(events.AgentAttached("g", "n9", 1, 0, "late", "a:1", False, "", events.AgentStatus()))
    assert len(world.facts(facts.MemberJoined)) == joined


def test_a_minor_signal_makes_a_fit_node_degraded_and_nothing_else() -> None:
    world = training()
    world.signal("n1", "degraded", "row remapping is pending")
    world.signal("n1", "degraded", "row remapping is pending")
    world.signal("n2", "ignore", "a signal that the policy ignores")
    world.run_for(5)
    health = [(fact.node, fact.health) for fact in world.facts(facts.NodeJudged)]
    assert health == [("n1", NodeHealth.DEGRADED)]
    assert (world.gang.newest.generation, world.slurm) == (1, [])


@pytest.mark.parametrize(("signal", "says"), [(24, "ulimit -t"), (25, "ulimit -f"), (9, "")])
def test_a_rank_that_a_limit_of_the_submitting_shell_ends_says_which(signal: int, says: str) -> None:
    world = Scenario(2, 0)
    world.run_until(lambda: world.is_running(1))
    world.kill_rank("n1", exit_code=-signal)
    world.run_until(lambda: bool(world.gang.recovery.recoveries))
    assert f"was ended by signal {signal}" in world.gang.recovery.recoveries[-1].cause
    assert ("ulimit" in world.gang.recovery.recoveries[-1].cause) == bool(says)
    assert says in world.gang.recovery.recoveries[-1].cause
