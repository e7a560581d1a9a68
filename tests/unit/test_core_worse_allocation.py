"""What a job does before it starts on nodes where its groups would lie wider than it asks."""

from __future__ import annotations

import pytest

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.events import IfWorse
from muster.daemon.coordinator.core.state.limits import Limits
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.exit_codes import EXIT_NOT_PACKED
from muster.simulator.scenario import Scenario

WIDE = "tensor groups of 6 nodes: 1 of 1 spans 2 leaves"


def world(
    if_worse: IfWorse, *, required: bool = False, nodes: int = 6, spares: int = 0, tensor: int = 6, **more: object
) -> Scenario:
    """A job of two leaves: n0, n2, ... and n1, n3, ..."""
    packed = "require leaf" if required else "leaf"
    return Scenario(nodes, spares, tensor=tensor, packed=packed, if_worse=if_worse, retries=2, **more)  # type: ignore[arg-type]


def given_back(scenario: Scenario) -> list[str]:
    return [fact.reason for fact in scenario.facts(facts.PhaseChanged) if fact.given_back]


def test_it_gives_the_nodes_back_so_often_and_then_starts() -> None:
    scenario = world(IfWorse.WAIT)
    scenario.run_until(lambda: scenario.gang.newest.stepped_generation == 1)
    first, second = given_back(scenario)
    assert first.startswith(f"{WIDE}; predicted communication of a step: ")
    assert first.endswith("; the job gives these nodes back (1 of 2): requeue")
    assert second.endswith("(2 of 2): requeue")
    assert [call.verb for call in scenario.slurm if call.verb == "requeue"] == ["requeue", "requeue"]
    assert all(not call.exclude for call in scenario.slurm)
    assert scenario.gang.roster.wider_groups.startswith(WIDE)
    # A later run of the job has the same number of tries again.
    assert scenario.gang.slurm.runs_given_back == 0
    assert scenario.replayed_state().gangs == scenario.core.state.gangs


def test_a_required_group_does_not_start_wider() -> None:
    scenario = world(IfWorse.WAIT, required=True)
    scenario.run_until(lambda: scenario.gang.final)
    assert len(given_back(scenario)) == 2
    assert scenario.facts(facts.GenerationStarted) == []
    (end,) = scenario.facts(facts.GangEnded)
    assert (end.phase, end.exit_code) == (Phase.FAILED, EXIT_NOT_PACKED)
    tried = "no better nodes came in 3 runs: raise placement.retries, or prefer"
    assert end.reason == f"{WIDE}, which [placement] requires; {tried}"


@pytest.mark.parametrize("required", [False, True])
def test_a_job_that_may_not_be_requeued_does_not_wait(required: bool) -> None:
    scenario = world(IfWorse.WAIT, required=required, requeue=False)
    scenario.run_until(lambda: bool(scenario.gang.final or scenario.gang.newest.stepped_generation))
    assert given_back(scenario) == []
    assert scenario.gang.final == required
    if required:
        assert scenario.gang.reason.endswith("the job may not be requeued for better nodes: set requeue, or prefer")


def test_by_default_it_starts() -> None:
    scenario = world(IfWorse.START, required=True)
    scenario.run_until(lambda: scenario.gang.newest.stepped_generation == 1)
    assert given_back(scenario) == []
    assert scenario.gang.roster.wider_groups.startswith(WIDE)


def test_observe_mode_changes_nothing() -> None:
    scenario = world(IfWorse.WAIT, required=True, limits=Limits(observe=True))
    scenario.run_until(lambda: scenario.gang.newest.stepped_generation == 1)
    assert given_back(scenario) == []


def test_it_shrinks_to_the_replicas_that_are_packed() -> None:
    """The leaves have 5 and 4 nodes: two replicas of 3 nodes fit, three don't."""
    scenario = world(IfWorse.SHRINK, nodes=9, tensor=3, smaller=(3, 6))
    scenario.run_until(lambda: scenario.gang.newest.stepped_generation == 1)
    (shrunk,) = scenario.facts(facts.GangShrunk)
    assert shrunk.nodes == 6
    assert shrunk.reason.endswith("6 of 9 nodes hold whole data-parallel replicas as the job asks")
    gang = scenario.gang
    assert (gang.spec.nodes, gang.spec.spares, len(gang.roster.seats), len(gang.roster.spares)) == (6, 3, 6, 3)
    assert gang.roster.wider_groups == ""
    # It goes on with as many replicas: the state of a rank fits only then.
    lost = gang.roster.seats[0].node
    scenario.crash(lost)
    scenario.run_until(lambda: scenario.gang.newest.stepped_generation == 2)
    assert len(scenario.gang.roster.seats) == 6
    assert scenario.replayed_state().gangs == scenario.core.state.gangs


def test_where_no_replica_is_packed_it_waits() -> None:
    scenario = world(IfWorse.SHRINK, nodes=8, tensor=8, smaller=())
    scenario.run_until(lambda: scenario.gang.newest.stepped_generation == 1)
    assert len(given_back(scenario)) == 2
    assert scenario.facts(facts.GangShrunk) == []


def test_after_a_start_it_shrinks_no_more() -> None:
    """The state was written by all replicas."""
    scenario = world(IfWorse.SHRINK, nodes=6, tensor=3, smaller=(3,), idle_nodes=2)
    scenario.run_until(lambda: scenario.gang.newest.stepped_generation == 1)
    assert scenario.gang.roster.wider_groups == ""
    scenario.crash("n6")
    scenario.crash("n0")
    scenario.run_until(lambda: scenario.gang.newest.stepped_generation == 2, limit_s=3600)
    assert [seat.node for seat in scenario.gang.roster.seats if seat.node in ("n2", "n4")] == ["n2", "n4"]
    assert len(given_back(scenario)) == 2
    assert scenario.facts(facts.GangShrunk) == []
    assert len(scenario.gang.roster.seats) == 6
