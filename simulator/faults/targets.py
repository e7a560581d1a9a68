"""Which node or agent a fault strikes."""

from __future__ import annotations

from muster.simulator.world.agent import Agent
from muster.simulator.world.world import World


def nodes_with_agent(world: World, gang: str) -> list[str]:
    """Nodes on which the gang has a live agent."""
    return [node for (id, node), agent in world.agents.items() if id == gang and agent.alive]


def random_node(world: World, gang: str) -> str:
    """A node of the gang, more often one that carries ranks. Any node if the gang has none."""
    nodes = nodes_with_agent(world, gang)
    if not nodes:
        return world.rng.choice(list(world.machines))
    nodes_with_ranks = [name for name in nodes if any(rank.alive for rank in world.agents[gang, name].ranks.values())]
    return world.rng.choice(nodes_with_ranks if nodes_with_ranks and world.rng.random() < 0.75 else nodes)


def random_agent(world: World, gang: str) -> Agent | None:
    """The agent on a random node of the gang. None: no agent is alive there."""
    agent_there = world.agents.get((gang, random_node(world, gang)))
    return agent_there if agent_there is not None and agent_there.alive else None
