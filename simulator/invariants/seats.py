"""Invariant 4 for seats: a generation starts on as many nodes as its job asks for, and its store is on one of them.

Invariant 13: seats follow the network that the coordinator has read. Groups that communicate most are on one leaf where
that is possible, and nodes that hold the same state and watched peers fail together with a node as seldom as possible.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.gang import Gang
from muster.fabric.model.fabric import Fabric
from muster.simulator.world.observer import require

if TYPE_CHECKING:
    from muster.simulator.world.world import World


class SeatInvariant:
    """Stateless: the fact holds everything."""

    def __init__(self, world: World) -> None:
        self._world = world

    def check_start(self, core: Core, gang: Gang, fact: facts.GenerationStarted) -> None:
        """The coordinator starts a generation."""
        if core.observed.fabric is not None and core.observed.fabric.topologies:
            fabric = core.observed.fabric.topologies[0].fabric
            self._check_holders(fabric, fact, gang.spec)
            if gang.spec.tensor == 2 and gang.spec.ranks_per_node == 1 and fact.generation == 1:
                self._check_pairs(fabric, gang, fact)
        require(
            fact.master_node in {seat.node for seat in fact.seats},
            f"invariant 4: the store of generation {fact.generation} is on {fact.master_node}, which carries no ranks",
        )
        first = min(fact.seats, key=lambda seat: seat.group_rank).node
        require(
            not self._world.rank_opens_store or fact.master_node == first,
            f"invariant 4: rank 0 of generation {fact.generation} is on {first}, and its store on {fact.master_node}",
        )
        # No spare waits while a seat is empty, and no fewer nodes train than the job asks for. A gang that has shrunk
        # stays small until it grows at the end of a step: a node that joins later waits for that. A gang whose growth
        # is undone goes back to as few as it had before.
        count = len(fact.seats)
        full = count == gang.spec.nodes or fact.action in (
            "restart in place", "swap", "planned swap", "more replicas"
        ) or bool(gang.recovery.recoveries and gang.recovery.recoveries[-1].seats_undone)  # fmt: skip
        require(
            gang.spec.fewest <= count <= gang.spec.nodes and (full or not fact.spares),
            f"invariant 4: generation {fact.generation} starts on {count} nodes and leaves {len(fact.spares)} spares "
            f"waiting",
        )

    def _check_holders(self, fabric: Fabric, fact: facts.GenerationStarted, spec: events.GangSpec) -> None:
        """The holders of a node's shards, and the peers that watch it, share as few failure domains with it as any
        other nodes would."""
        carriers = [seat.node for seat in fact.seats]
        everybody = carriers + [seat.node for seat in fact.spares]
        wanted = min(1 + spec.more_holders, len(carriers) - 1)
        if spec.group_nodes and wanted:
            self._check_groups(fact, spec.group_nodes)
            wanted = 0
        for seat in fact.seats:
            require(
                len(seat.holders) == wanted, f"invariant 13: {seat.node} has {len(seat.holders)} of {wanted} holders"
            )
        for seat in (*fact.seats, *fact.spares):
            for chosen, among in ((seat.holders, carriers), (seat.watched_peers, everybody)):
                shared = sorted(_shared(fabric, seat.node, other) for other in among if other != seat.node)
                found = sorted(_shared(fabric, seat.node, other) for other in chosen)
                require(
                    len({*chosen} - {seat.node}) == len(chosen),
                    f"invariant 13: {', '.join(chosen)} are not {len(chosen)} nodes beside {seat.node}",
                )
                require(
                    found == shared[: len(found)],
                    f"invariant 13: {', '.join(chosen)} fail together with {seat.node} more often than others would",
                )

    def _check_groups(self, fact: facts.GenerationStarted, most: int) -> None:
        """Each node with ranks is in one group, of `most` nodes at most, and not alone."""
        grouped = sorted(node for group in fact.protection_groups for node in group)
        sizes = {len(group) for group in fact.protection_groups}
        require(
            grouped == sorted(seat.node for seat in fact.seats) and min(sizes) >= 2 and max(sizes) <= max(most, 3),
            f"invariant 13: the nodes are not divided into groups of 2 to {most}: {fact.protection_groups}",
        )

    def _check_pairs(self, fabric: Fabric, gang: Gang, fact: facts.GenerationStarted) -> None:
        """As many pairs of tensor ranks are on one leaf as there can be."""
        if gang.spec.preflight or len(fact.seats) != gang.spec.nodes:
            return  # nodes that failed their checks get seats last
        unwanted = [seat.node for seat in fact.spares if self._world.coordinator.core.index.unwanted & {seat.node}]
        if unwanted:
            return
        leaf = {seat.node: fabric.leaf_name(seat.node) for seat in (*fact.seats, *fact.spares)}
        ranked = [seat.node for seat in sorted(fact.seats, key=lambda seat: seat.group_rank)]
        whole = sum(leaf[one] == leaf[other] for one, other in zip(ranked[::2], ranked[1::2], strict=True))
        possible = sum(count // 2 for count in Counter(leaf.values()).values())
        require(
            whole >= min(possible, len(ranked) // 2),
            f"invariant 13: {whole} of {len(ranked) // 2} tensor groups are on one leaf, and {possible} could be",
        )


def _shared(fabric: Fabric, one: str, other: str) -> int:
    return len(fabric.shared_failure_domains(one, other))
