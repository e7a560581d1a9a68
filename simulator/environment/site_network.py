"""The network of a simulated site, as Slurm and the site's file describe it: leaf switches, racks and power feeds."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

from muster.daemon.coordinator.core.state.events import FabricSeen, TopologySeen
from muster.fabric.model.node import Node
from muster.fabric.sources.nesting import NodeSet, fabric_of
from muster.fabric.sources.tiers import Tiers


def describe_network(leaves: Iterable[tuple[str, str]], chance: random.Random) -> FabricSeen:
    """The network with these leaves, as (node, leaf). Chance puts the nodes into racks and on power feeds, or says
    nothing of them."""
    leaf = dict(leaves)
    racks, feeds = chance.randint(0, 3), chance.randint(0, 2)
    details = [Node(node, rack=_one_of("r", racks, chance), power_feed=_one_of("p", feeds, chance)) for node in leaf]
    return network_of(leaf, details)


def network_of(leaves: Mapping[str, str], details: Sequence[Node] = ()) -> FabricSeen:
    """The network of the nodes in `leaves`, each with its leaf switch. `details`: what is known of nodes."""
    below: dict[str, set[str]] = {}
    for node, switch in leaves.items():
        below.setdefault(switch, set()).add(node)
    sets = [NodeSet(frozenset(nodes), switch) for switch, nodes in below.items()]
    return FabricSeen((TopologySeen(fabric_of(sets, leaves, Tiers(), details)),))


def recable(leaves: Mapping[str, str], chance: random.Random) -> dict[str, str]:
    """The leaves with one node on another one."""
    node, leaf = chance.choice(list(leaves)), chance.choice([*sorted(set(leaves.values())), "s9"])
    return {**leaves, node: leaf}


def _one_of(prefix: str, count: int, chance: random.Random) -> str:
    return f"{prefix}{chance.randrange(count)}" if count else ""
