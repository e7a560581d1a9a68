"""Which parities a node holds, and which its ranks' shards belong to: by groups of nodes that the order names.

Ranks with the same place on the nodes of a group have one parity, which these nodes hold together. Each node holds a
part: the XOR of pieces of all ranks but its own. So one node of each group may be lost at a time. A node sends its
ranks' shards once, and receives as much, as with whole replicas; but of the N nodes of a group each one holds only
1/(N - 1) of its ranks' state.

This is the scheme "XOR" of SCR: A. Moody, G. Bronevetsky, K. Mohror and B. de Supinski, "Design, Modeling, and
Evaluation of a Scalable Multi-level Checkpointing System", SC10. It goes back to W. Gropp, R. Ross and N. Miller,
"Providing Efficient I/O Redundancy in MPI Environments", 2004.
"""

from dataclasses import dataclass

from muster.v1 import peer_pb2
from muster.v1.agent_pb2 import Order


@dataclass(frozen=True)
class PartPlace:
    """One part of a parity: as ParityPart in peer.proto, and the node that holds it."""

    ranks: tuple[int, ...]
    part: int
    holder: str

    @property
    def share(self) -> float:
        """How much of one rank's shard the part is."""
        return 1 / (len(self.ranks) - 1)

    def to_wire(self) -> peer_pb2.ParityPart:
        """Convert to the message."""
        return peer_pb2.ParityPart(ranks=self.ranks, part=self.part)


class ParityPlaces:
    """All parts of the parities that concern one node in a generation: nothing, if the order names no groups."""

    def __init__(self, order: Order, node: str) -> None:
        nodes = next((list(group.nodes) for group in order.parity_groups if node in group.nodes), [])
        ranks_on: dict[str, list[int]] = {member: [] for member in nodes}
        for seat in order.places:
            if seat.node in ranks_on:
                ranks_on[seat.node].append(seat.rank)
        self.sent: dict[int, tuple[PartPlace, ...]] = {}
        """For each rank of this node: the parts that its shard belongs to."""
        self.held: list[PartPlace] = []
        """The parts that this node holds."""
        for place in range(len(ranks_on.get(node, ()))):
            of = {member: sorted(ranks)[place] for member, ranks in ranks_on.items() if place < len(ranks)}
            parts = [PartPlace(tuple(of.values()), number, holder) for number, holder in enumerate(of)]
            self.held += [part for part in parts if part.holder == node and len(of) > 1]
            self.sent[of[node]] = tuple(part for part in parts if part.holder != node)
