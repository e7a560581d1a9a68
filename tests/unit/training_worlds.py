"""Simulated worlds in which a gang trains, and what tests ask of them."""

from __future__ import annotations

from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.node_health import NodeHealth
from muster.simulator.scenario import Scenario


def training(nodes: int = 4, spares: int = 2, **given: object) -> Scenario:
    """A world whose gang has made some steps."""
    world = Scenario(nodes, spares, **given)  # type: ignore[arg-type]
    world.run_until(lambda: world.gang.phase is Phase.RUNNING and world.core.observed.gang("g").step_number >= 3)
    return world


def carrying(world: Scenario) -> list[str]:
    """The nodes with ranks."""
    return [seat.node for seat in world.gang.roster.seats]


def spare(world: Scenario) -> str:
    """A node without ranks."""
    return next(node for node in world.gang.roster.members if node not in carrying(world))


def verbs(world: Scenario) -> list[tuple[str, str]]:
    """What Slurm was asked for."""
    return [(call.verb, call.node) for call in world.slurm]


def health(world: Scenario, node: str) -> NodeHealth:
    """The health of a node."""
    return world.core.state.node(node).health
