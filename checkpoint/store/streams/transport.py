"""What the rest of the checkpoint service asks of the way that pieces travel. Sockets are one way (`socket_transport`);
one-sided reads of a network adapter (RDMA) would be another, since the receiver fetches and the holder only grants."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from muster.checkpoint.store.memory.pieces import Piece
from muster.checkpoint.store.memory.sealed_memory import SealedMemory
from muster.checkpoint.store.memory.shards import Shard


class FetchFailed(Exception):
    """Some pieces can't be had from any of the holders. The message says why, holder by holder."""


@dataclass(frozen=True)
class PieceAccess:
    """How the pieces of one shard can be fetched from their holder.

    `port`: of the holder's host.
    `token`: names the shard, and proves that the holder has answered this caller: 16 bytes.
    `certificate`: of the port (PEM), if the bytes are encrypted; empty: plain text.
    """

    port: int
    token: bytes
    certificate: str = ""


@dataclass(frozen=True)
class Holder:
    """A node that holds pieces. `numbers`: which pieces of the wanted shard it has, under the same numbers."""

    node: str
    host: str
    access: PieceAccess
    numbers: frozenset[int]


class PieceGrant(Protocol):
    """A shard whose pieces others may fetch, until the grant ends.

    The receiver verifies them. If one does not match, it has the holder verify its own bytes: these decide whether the
    copy is corrupt, or the way has damaged the piece.
    """

    @property
    def access(self) -> PieceAccess:
        """What the others need to know."""
        ...

    @property
    def changed(self) -> str:
        """Which piece has no longer the bytes of its digest, in words; empty: none that somebody had verified."""
        ...

    @property
    def changed_numbers(self) -> Sequence[int]:
        """The numbers of all such pieces."""
        ...

    @property
    def sent(self) -> tuple[int, float]:
        """Bytes that were fetched, and seconds from the first request to the last byte."""
        ...


class Arrivals(Protocol):
    """Is told of each piece while a fetch runs. The transport's threads call it."""

    def arrived(self, number: int, node: str) -> None:
        """A piece has come from `node`, and is verified."""
        ...

    def damaged(self, number: int, node: str) -> None:
        """What came from `node` does not match the piece's digest, though the bytes that `node` holds do."""
        ...


class PieceTransport(Protocol):
    """Grants the pieces of this node's shards to others, and fetches those of others."""

    def grant(self, shard: Shard) -> AbstractContextManager[PieceGrant]:
        """Let others fetch the pieces of `shard` inside a `with` block. The caller holds the shard.

        When the block ends, nothing more is sent.
        """
        ...

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
        """Fetch the numbered pieces into their places in `memory`. All of them are verified when this returns.

        A holder that is lost, or much slower than the others, is replaced by those that have the same pieces.
        `arrivals` is told of each piece: what came before a failure need not be asked again. `restoring`: nobody trains
        meanwhile, so that the transfer may take what the node has.

        Cancelling this ends the transfer: nothing writes to `memory` afterwards.

        Raises:
            FetchFailed: no holder has given some piece.
        """
        ...

    def close(self) -> None:
        """End all transfers."""
        ...
