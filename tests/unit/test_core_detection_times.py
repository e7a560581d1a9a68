"""How long it takes, in virtual time, until a node that carries ranks is out of its gang, and until the next generation
starts. Whoever changes the detection of failures sees here what becomes slower.

The figures are in golden/detection_times.txt: MUSTER_GOLDEN=write writes them again; read the diff. Slurm takes a
silent node out of its job after 30 s here. So a figure above that means that no other agent could be asked.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.node_health import NodeHealth
from muster.simulator.scenario import Scenario
from muster.simulator.world.agent import Agent
from muster.simulator.world.observer import InvariantViolation

GOLDEN = Path(__file__).parent / "golden" / "detection_times.txt"
SIZES = (1, 2, 3, 8)
LIMIT_S = 40.0
KNOWN_S = 2.0
"""Seconds in which everybody has heard of a member."""


def start(nodes: int, spares: int, **given: object) -> Scenario:
    world = Scenario(nodes, spares, **given)  # type: ignore[arg-type]
    world.run_until(lambda: world.gang.newest.stepped_generation == 1, 300.0)
    world.run_for(KNOWN_S)
    return world


def spare_of(world: Scenario) -> str:
    [seat] = world.gang.roster.spares
    return seat.node


def without_spare(nodes: int) -> Scenario:
    return start(nodes, 0)


def with_spare(nodes: int) -> Scenario:
    return start(nodes, 1)


def spare_relaunched(nodes: int) -> Scenario:
    world = start(nodes, 1)
    world.relaunch_agents(spare_of(world))
    world.run_until(lambda: len(world.facts(facts.MemberJoined)) == nodes + 2)
    return world


def late_spare(nodes: int) -> Scenario:
    """The agent of the spare attaches while the ranks train."""
    world = start(nodes, 1, absent=[f"n{nodes}"])
    identity = replace(world.agent("n0").identity, on_batch_host=False, incarnation="late")
    world.world.add_agent(Agent(world.world, world.machines[f"n{nodes}"], identity))
    world.run_for(KNOWN_S)
    assert len(world.gang.roster.present()) == nodes + 1
    return world


def comes_back(nodes: int, launch_s: float) -> Scenario:
    """The spare was repaired, and is about to come back with a job of its own."""
    world = start(nodes, 1, launch_s=launch_s)
    spare = spare_of(world)
    world.signal(spare)
    world.run_until(lambda: world.core.state.node(spare).health is NodeHealth.UNFIT)
    world.run_until(lambda: world.world.cluster.nodes()[spare].drained)
    world.repair(spare)
    world.run_until(lambda: world.facts(facts.PoolJobQueued) != [])
    return world


def repaired_spare(nodes: int) -> Scenario:
    world = comes_back(nodes, 0.02)
    world.run_until(lambda: len(world.gang.roster.present()) == nodes + 1)
    world.run_for(KNOWN_S)
    return world


def repaired_spare_comes_later(nodes: int) -> Scenario:
    return comes_back(nodes, 3.0)


def coordinator_restarted(begin: Callable[[int], Scenario]) -> Callable[[int], Scenario]:
    def begun(nodes: int) -> Scenario:
        world = begin(nodes)
        world.restart_coordinator()
        return world

    return begun


ROWS: dict[str, Callable[[int], Scenario]] = {
    "no spare": without_spare,
    "no spare, coordinator restarted": coordinator_restarted(without_spare),
    "spare": with_spare,
    "spare, coordinator restarted": coordinator_restarted(with_spare),
    "spare relaunched": spare_relaunched,
    "spare relaunched, coordinator restarted": coordinator_restarted(spare_relaunched),
    "late spare": late_spare,
    "late spare, coordinator restarted": coordinator_restarted(late_spare),
    "repaired spare": repaired_spare,
    "repaired spare, coordinator restarted": coordinator_restarted(repaired_spare),
    "repaired spare comes later": repaired_spare_comes_later,
}


def cut(world: Scenario, node: str) -> None:
    others = [name for name in (*world.machines, "coordinator") if name != node]
    world.cut(*[pair for other in others for pair in ((node, other), (other, node))])


def stop_agent(world: Scenario, node: str) -> None:
    """Where several nodes carry ranks, they train on without it."""
    world.world.set_stopped(world.agent(node), True)


FAULTS: dict[str, Callable[[Scenario, str], None]] = {
    "cut": cut,
    "power": Scenario.power_off,
    "crash": Scenario.crash,
    "pause": Scenario.pause,
    "agent stops": stop_agent,
}


def times(begin: Callable[[int], Scenario], nodes: int, fault: Callable[[Scenario, str], None]) -> str:
    """Seconds until the node of the last seat is out of the gang, and until the gang goes on: its next generation
    starts, or it is back in Slurm's queue."""
    world = begin(nodes)
    node, at = world.gang.roster.seats[-1].node, world.now
    fault(world, node)
    try:
        removed = passed(world, at, lambda: gone(world, node))
        goes_on = passed(world, at, lambda: went_on(world))
    except InvariantViolation:
        return "two at once"
    return f"{removed} {goes_on}"


def went_on(world: Scenario) -> bool:
    return world.gang.newest.generation > 1 or world.gang.phase is Phase.REQUEUED


def gone(world: Scenario, node: str) -> bool:
    members = world.gang.roster.members
    return node not in members or members[node].removed


def passed(world: Scenario, at: float, condition: Callable[[], bool]) -> str:
    try:
        world.run_until(condition, at + LIMIT_S - world.now)
    except TimeoutError:
        return "-"
    return f"{world.now - at:.1f}"


def table() -> Iterator[str]:
    yield f"{'':50}" + "".join(f"{fault:>14}" for fault in FAULTS)
    for nodes in SIZES:
        for row, begin in ROWS.items():
            cells = (times(begin, nodes, fault) for fault in FAULTS.values() if nodes == 1 or fault is not stop_agent)
            yield f"{nodes} {row:48}" + "".join(f"{cell:>14}" for cell in cells)


def test_nothing_takes_longer_until_a_node_is_out_and_the_next_generation_starts() -> None:
    text = "\n".join(table()) + "\n"
    if os.environ.get("MUSTER_GOLDEN") == "write":
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()
