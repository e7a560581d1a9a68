"""Faults of the network: cuts in one direction or both, around one host, between two parts, or again and again."""

from __future__ import annotations

from muster.simulator.environment.network import COORDINATOR
from muster.simulator.faults import targets
from muster.simulator.world.world import World


def cut(world: World, pairs: list[tuple[str, str]], seconds: float | None) -> None:
    """Cut links for this many seconds. None: permanently."""
    duration = "permanently" if seconds is None else f"for {seconds:.1f} s"
    world.note(f"FAULT: cut {duration}: {', '.join(f'{a} to {b}' for a, b in pairs)}")
    for src, dst in pairs:
        world.network.cut(src, dst)
    world.topology_changed()
    if seconds is None:
        world.permanent_cuts.update(pairs)
    else:
        world.schedule.call_later(seconds, _heal, world, pairs)


def _heal(world: World, pairs: list[tuple[str, str]]) -> None:
    world.note(f"healed: {', '.join(f'{a} to {b}' for a, b in pairs)}")
    for src, dst in pairs:
        world.network.heal(src, dst)
    world.topology_changed()


def _cut_perhaps_permanently(world: World, pairs: list[tuple[str, str]], longest: float) -> None:
    """Cut links, sometimes permanently."""
    cut(world, pairs, None if world.rng.random() < 0.1 else world.durations.fault_s(longest))


def _directions(world: World, a: str, b: str) -> list[tuple[str, str]]:
    """Both directions of a link, or one."""
    return world.rng.choice([[(a, b), (b, a)], [(a, b), (b, a)], [(a, b)], [(b, a)]])


def cut_link(world: World, gang: str) -> None:
    """Cut the link between a node and another host."""
    node = targets.random_node(world, gang)
    others = [name for name in (*world.machines, COORDINATOR) if name != node]
    cut(world, _directions(world, node, world.rng.choice(others)), world.durations.fault_s(20.0))


def cut_from_coordinator(world: World, gang: str) -> None:
    """Cut the link between one node and the coordinator."""
    _cut_perhaps_permanently(world, _directions(world, targets.random_node(world, gang), COORDINATOR), 30.0)


def cut_from_coordinator_during_phase(world: World, gang: str) -> None:
    """Cut one node off from the coordinator for long, while all ranks are in a declared phase.

    Slurm still sees the node.
    """
    training = world.newest_training(gang)
    if training is not None and training.began and not training.over and not training.in_declared_phase:
        node = world.rng.choice([rank.agent.node for rank in training.ranks.values()])
        training.declare_phase(50.0)
        world.slurmd_connected.add(node)
        cut(world, [(node, COORDINATOR), (COORDINATOR, node)], 45.0)


def cut_from_coordinator_during_crash(world: World, gang: str) -> None:
    """Cut one node off from the coordinator just when a rank on another node crashes."""
    training = world.newest_training(gang)
    if training is not None and not training.over:
        ranks = list(training.ranks.values())
        node = world.rng.choice(ranks).agent.node
        cut(world, [(node, COORDINATOR), (COORDINATOR, node)], 2.0 + 11.0 * world.rng.random())
        for rank in [rank for rank in ranks if rank.agent.node != node and rank.is_active][:1]:
            world.schedule.call_later(0.1, rank.agent.rank_exited, rank, 1, "RuntimeError: NCCL error")


def isolate_node(world: World, gang: str) -> None:
    """One node reaches no host, or no host reaches it, or both."""
    node = targets.random_node(world, gang)
    hosts = [name for name in (*world.machines, COORDINATOR) if name != node]
    outgoing, incoming = [(node, host) for host in hosts], [(host, node) for host in hosts]
    _cut_perhaps_permanently(
        world, world.rng.choice([outgoing + incoming, outgoing + incoming, outgoing, incoming]), 30.0
    )


def isolate_node_with_resets(world: World, gang: str) -> None:
    """One node is isolated, and ranks on other nodes crash at once because their transfers fail."""
    training = world.newest_training(gang)
    if training is not None and not training.over:
        node = world.rng.choice([rank.agent.node for rank in training.ranks.values()])
        hosts = [name for name in (*world.machines, COORDINATOR) if name != node]
        pairs = [pair for host in hosts for pair in ((node, host), (host, node))]
        cut(world, pairs, 3.0 + 20.0 * world.rng.random())
        training.reset_connections(node, 0.8)


def isolate_for_long(world: World, node: str) -> None:
    """One node reaches no host, for longer than its ranks live if it fences itself."""
    hosts = [name for name in (*world.machines, COORDINATOR) if name != node]
    cut(world, [pair for host in hosts for pair in ((node, host), (host, node))], 12.0 + 10.0 * world.rng.random())


def isolate_coordinator(world: World, gang: str) -> None:
    """Cut the coordinator's own link."""
    outgoing = [(COORDINATOR, node) for node in world.machines]
    incoming = [(node, COORDINATOR) for node in world.machines]
    cut(
        world,
        world.rng.choice([outgoing + incoming, outgoing + incoming, outgoing, incoming]),
        1.0 + 39.0 * world.rng.random(),
    )


def partition(world: World, gang: str) -> None:
    """Split the nodes into two parts. The coordinator is in one of them."""
    nodes = list(world.machines)
    world.rng.shuffle(nodes)
    first_part = nodes[: world.rng.randint(1, max(1, len(nodes) - 1))]
    second_part = [*(n for n in nodes if n not in first_part), COORDINATOR]
    cut(
        world,
        [pair for a in first_part for b in second_part for pair in ((a, b), (b, a))],
        world.durations.fault_s(25.0),
    )


def isolate_spare(world: World, gang: str) -> None:
    """A spare is isolated while the other nodes train on."""
    gang_state = world.gang(gang)
    if gang_state is not None and gang_state.roster.spares:
        node = world.rng.choice(gang_state.roster.spares).node
        hosts = [name for name in (*world.machines, COORDINATOR) if name != node]
        pairs = [pair for host in hosts for pair in ((node, host), (host, node))]
        cut(world, pairs, world.rng.choice([6.0, 10.0, 80.0]))


def flap_link(world: World, gang: str) -> None:
    """A node's link goes down and up several times."""
    node = targets.random_node(world, gang)
    hosts = [name for name in (*world.machines, COORDINATOR) if name != node]
    pairs = [pair for host in hosts for pair in ((node, host), (host, node))]
    starts_in_s = 0.0
    for _ in range(world.rng.randint(2, 4)):
        down_s = 0.2 + 3.0 * world.rng.random()
        world.schedule.call_later(starts_in_s, cut, world, pairs, down_s)
        starts_in_s += down_s + 0.3 + 3.0 * world.rng.random()


def isolate_nodes_of_every_gang(world: World, gang: str) -> None:
    """One or two nodes of each gang are isolated: a switch that all of them share has failed."""
    nodes = []
    for id in {id: None for id, _ in world.agents}:
        alive = [node for (other, node), agent in world.agents.items() if other == id and agent.alive]
        nodes += world.rng.sample(alive, min(len(alive), 2))
    hosts = [*world.machines, COORDINATOR]
    pairs = [pair for node in nodes for host in hosts if host != node for pair in ((node, host), (host, node))]
    cut(world, list(dict.fromkeys(pairs)), 4.0 + 20.0 * world.rng.random())
