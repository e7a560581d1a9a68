"""Ranks fail while nobody coordinates. The first one to fail is named, whichever agent attaches first."""

import pytest

from muster.daemon.agent.ranks.rank_process import RankId, RankProcess
from muster.daemon.coordinator.core.detection import attribution
from muster.daemon.coordinator.core.detection.attribution import RankExit
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.events import RankState
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.services import conversion
from muster.simulator.scenario import Scenario
from muster.v1 import agent_pb2

VICTIM, CULPRIT = "n0", "n1"


def failed_while_detached(exit_code: int) -> Scenario:
    """The rank on CULPRIT has failed, and then the one on VICTIM because of that. No coordinator runs yet."""
    world = Scenario(2, 0)
    world.run_until(lambda: world.gang.phase is Phase.RUNNING and world.core.observed.gang("g").step_number >= 2)
    world.world.coordinator_restart_s = 1.0
    world.world.crash_coordinator("as the script says")
    world.kill_rank(CULPRIT, exit_code)
    world.run_for(0.2)
    world.kill_rank(VICTIM, 1)
    return world


def fence_when_attached_first(world: Scenario, first: str, later: str) -> facts.GenerationFenced:
    """The fence, after the agent on `first` has attached, and `later` a second after it."""
    pairs = ((later, "coordinator"), ("coordinator", later))
    world.world.slurmd_connected.add(later)
    world.cut(*pairs)
    world.run_until(lambda: world.world.coordinator.alive and world.core.observed.gang("g").is_attached(first))
    world.run_for(1.0)
    world.heal(*pairs)
    world.run_until(lambda: world.gang.recovery.fenced_generation == 1)
    return world.facts(facts.GenerationFenced)[-1]


@pytest.mark.parametrize("exit_code", [-9, -11, 1])
@pytest.mark.parametrize("order", [(VICTIM, CULPRIT), (CULPRIT, VICTIM)])
def test_the_first_to_fail_is_named_whoever_attaches_first(order: tuple[str, str], exit_code: int) -> None:
    fenced = fence_when_attached_first(failed_while_detached(exit_code), *order)
    assert fenced.crashed_on == CULPRIT
    assert fenced.cause.startswith(f"rank 1 on {CULPRIT}")
    assert not fenced.hardware


def test_a_rank_that_dies_just_after_a_coordinator_has_started_may_have_died_of_an_earlier_crash() -> None:
    world = Scenario(2, 0)
    world.run_until(lambda: world.gang.phase is Phase.RUNNING and world.core.observed.gang("g").step_number >= 2)
    pairs = ((CULPRIT, "coordinator"), ("coordinator", CULPRIT))
    world.world.slurmd_connected.add(CULPRIT)
    world.world.coordinator_restart_s = 0.5
    world.world.crash_coordinator("as the script says")
    world.cut(*pairs)
    world.run_for(0.45)
    world.kill_rank(CULPRIT, -11)
    world.run_for(0.1)
    world.kill_rank(VICTIM, 1)
    world.run_for(0.5)
    world.heal(*pairs)
    world.run_until(lambda: world.gang.recovery.fenced_generation == 1)
    assert world.facts(facts.GenerationFenced)[-1].crashed_on == CULPRIT


def test_a_crash_counts_although_its_agent_was_cut_off_later() -> None:
    """The agent of the culprit ends its other rank by itself, which says nothing of why the first one had ended."""
    world = Scenario(3, 0, ranks_per_node=2)
    world.run_until(lambda: world.gang.phase is Phase.RUNNING and world.core.observed.gang("g").step_number >= 2)
    world.world.coordinator_restart_s = 8.0
    world.world.crash_coordinator("as the script says")
    culprit = world.agent(CULPRIT)
    culprit.rank_exited(next(iter(culprit.ranks.values())), -11, "")
    world.run_for(0.2)
    world.kill_rank(VICTIM, 1)
    pairs = [pair for peer in ("coordinator", VICTIM, "n2") for pair in ((CULPRIT, peer), (peer, CULPRIT))]
    world.cut(*pairs)
    world.run_for(5.0)
    world.heal(*pairs)
    world.run_until(lambda: world.gang.recovery.fenced_generation == 1)
    fenced = world.facts(facts.GenerationFenced)[-1]
    assert (fenced.crashed_on, fenced.hardware) == (CULPRIT, False)


@pytest.mark.parametrize("exit_code", [1, -11])
def test_a_node_is_named_for_its_first_rank_although_another_one_died_of_the_reset(exit_code: int) -> None:
    """A rank on the other node crashes by itself, too, but later."""
    world = Scenario(2, 0, ranks_per_node=2)
    world.run_until(lambda: world.gang.phase is Phase.RUNNING and world.core.observed.gang("g").step_number >= 2)
    world.world.coordinator_restart_s = 3.0
    world.world.crash_coordinator("as the script says")
    culprit, training = world.agent(CULPRIT), world.world.newest_training("g")
    assert training is not None
    culprit.rank_exited(min(culprit.ranks.values(), key=lambda rank: rank.rank), exit_code, "")
    training.reset_connections(VICTIM, 1.0, within_s=0.2)
    world.run_for(1.5)
    world.kill_rank(VICTIM, -11)
    world.run_until(lambda: world.gang.recovery.fenced_generation == 1)
    assert world.facts(facts.GenerationFenced)[-1].crashed_on == CULPRIT


def test_an_agent_that_does_not_come_is_not_awaited_for_longer_than_a_silent_one() -> None:
    world = failed_while_detached(1)
    world.power_off(CULPRIT)
    began = world.now
    world.run_until(lambda: world.gang.recovery.fenced_generation == 1)
    assert world.now - began < 10.0


def test_a_failure_that_the_coordinator_could_see_is_answered_at_once() -> None:
    world = Scenario(2, 0)
    world.run_until(lambda: world.gang.phase is Phase.RUNNING and world.core.observed.gang("g").step_number >= 2)
    world.kill_agent(CULPRIT)
    began = world.now
    world.kill_rank(VICTIM, 1)
    world.run_until(lambda: world.gang.recovery.fenced_generation == 1)
    assert world.now - began < 0.5


def test_of_exits_at_the_same_time_one_by_a_fault_is_named() -> None:
    reset = RankExit("n0", RankState(0, 1, False, 1), 10.0)
    aborted = RankExit("n1", RankState(1, 1, False, -6), 10.1)
    killed = RankExit("n2", RankState(2, 1, False, -9), 10.2)
    late = RankExit("n3", RankState(3, 1, False, -11), 20.0)
    assert attribution.first_to_fail([reset, aborted]) is reset
    assert attribution.first_to_fail([reset, aborted, killed, late]) is killed
    assert attribution.first_to_fail([late, reset]) is reset


def test_the_age_of_an_exit_comes_over_the_wire() -> None:
    ended = agent_pb2.RankStatus(rank=1, phase=agent_pb2.RANK_PHASE_EXITED, exit_code=1, ended_ms_ago=2500)
    of_earlier_agent = agent_pb2.RankStatus(rank=2, phase=agent_pb2.RANK_PHASE_EXITED, exit_code=1)
    status = conversion.status(agent_pb2.AgentStatus(ranks=[ended, of_earlier_agent]), ())
    assert [rank.ended_s_ago for rank in status.ranks] == [2.5, None]


def test_an_agent_says_how_long_ago_its_rank_has_ended() -> None:
    rank = RankProcess(RankId(0, 0, 1), lambda: None)
    assert not rank.status(None).HasField("ended_ms_ago")
    rank.handle_message({"say": "exit", "code": 1, "tail": ""})
    first = rank.status(None).ended_ms_ago
    rank.handle_message({"say": "gone"})
    assert rank.status(None).ended_ms_ago >= first
