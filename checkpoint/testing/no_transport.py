"""A `PieceTransport` for tests of a node that has no other node."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from muster.checkpoint.store.memory.pieces import Piece
from muster.checkpoint.store.memory.sealed_memory import SealedMemory
from muster.checkpoint.store.memory.shards import Shard
from muster.checkpoint.store.streams.transport import Arrivals, FetchFailed, Holder, PieceGrant


class NoTransport:
    """Nothing can be fetched, and nothing is granted."""

    @contextmanager
    def grant(self, shard: Shard) -> Iterator[PieceGrant]:
        raise AssertionError(f"rank {shard.rank}'s shard is granted to a node that does not exist")
        yield

    async def fetch(
        self,
        holders: Sequence[Holder],
        pieces: Sequence[Piece],
        wanted: Sequence[int],
        memory: SealedMemory,
        arrivals: Arrivals | None = None,
        *,
        restoring: bool = False,
    ) -> None:
        raise FetchFailed("there is no other node")

    def close(self) -> None:
        """Nothing is open."""
