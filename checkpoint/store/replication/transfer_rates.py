"""What copies of shards to other nodes have reached: bytes and seconds, for `muster diagnose`.

They are no measurement of the link alone: the receiver verifies the bytes, and other transfers share the link. So a
rate is what the link carries at least, and equal nodes can be compared.
"""

from __future__ import annotations

from muster.v1.agent_pb2 import ReplicaTransfer

LEAST_BYTES = 16 << 20
"""A smaller copy takes about as long as its calls, whatever the link has."""
NODES_KEPT = 8
"""The newest so many receivers. A node has one buddy at a time."""


class TransferRates:
    """The newest copy to each node."""

    def __init__(self) -> None:
        self._newest: dict[str, ReplicaTransfer] = {}
        self._count = 0

    def note(self, node: str, sent: int, seconds: float) -> None:
        """`sent` bytes of pieces went to `node` in `seconds`."""
        if sent < LEAST_BYTES or seconds <= 0:
            return
        self._count += 1
        self._newest.pop(node, None)
        self._newest[node] = ReplicaTransfer(node=node, bytes=sent, seconds=seconds, number=self._count)
        while len(self._newest) > NODES_KEPT:
            del self._newest[next(iter(self._newest))]

    def newest(self) -> list[ReplicaTransfer]:
        """One for each node."""
        return list(self._newest.values())
