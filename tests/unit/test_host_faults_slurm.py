"""slurmctld is down for an hour of virtual time: recoveries go on inside the job, and Slurm is told afterwards."""

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.node_health import NodeHealth
from muster.simulator.scenario import Scenario

HOUR_S = 3600.0


def test_an_hour_without_slurm_costs_no_recovery_and_no_drain() -> None:
    world = Scenario(nodes=3, spares=2, step_s=2.0)
    world.run_until(lambda: world.core.observed.gang("g").step_number >= 3)
    world.world.slurm.unavailable_reason = "slurmctld is down"
    world.run_for(HOUR_S / 4)
    world.kill_rank("n2")
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    world.power_off("n2")
    world.run_until(lambda: world.gang.newest.stepped_generation == 3)
    world.restart_coordinator()
    world.run_for(HOUR_S * 3 / 4)
    owed = [(call.verb, call.node) for call in world.core.state.owed.values()]
    assert ("down", "n2") in owed or ("drain", "n2") in owed, owed
    step = world.core.observed.gang("g").step_number
    world.world.slurm.unavailable_reason = ""
    world.run_until(lambda: not world.core.state.owed)
    assert world.gang.phase is Phase.RUNNING
    assert world.gang.newest.generation == 3
    world.run_until(lambda: world.core.observed.gang("g").step_number > step)
    unhealthy = {
        node.name: node.health for node in world.core.state.nodes.values() if node.health is not NodeHealth.FIT
    }
    assert unhealthy == {"n2": NodeHealth.LOST}
    assert [fact.error for fact in world.facts(facts.SlurmCallSettled) if fact.error] == []
