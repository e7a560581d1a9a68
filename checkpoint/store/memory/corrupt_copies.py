"""Which copies of shards were found corrupt, for the status of the agent."""

from muster.checkpoint.format.versions import Version
from muster.v1.agent_pb2 import CorruptCopy, Tier

MOST_REPORTED = 16
"""Entries of a status. The coordinator records each one when it sees it first."""


class CorruptCopies:
    """The newest corrupt copies of this node."""

    def __init__(self) -> None:
        self._newest: list[CorruptCopy] = []

    def note(
        self, rank: int, version: Version, tier: "Tier.ValueType", pieces: int, of_pieces: int, from_node: str = ""
    ) -> None:
        """Note that some pieces of a copy do not match. `from_node`: they came so from there."""
        copy = CorruptCopy(
            rank=rank,
            version=version.to_wire(),
            tier=tier,
            pieces=pieces,
            of_pieces=of_pieces,
            from_node=from_node,
        )
        if copy not in self._newest:
            self._newest = [*self._newest, copy][-MOST_REPORTED:]

    def newest(self) -> list[CorruptCopy]:
        """The copies, as the agent reports them."""
        return list(self._newest)
