"""Sending a shard to one of its places: a whole copy, or a part that combines it with others.

The sender offers the shard with the digest of every piece, and with the bytes of small pieces. The holder fetches the
pieces that it lacks, and answers when it has all. Replicas of data parallelism mostly lack none, so that
nothing but the offer travels.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from muster.checkpoint.format.errors import CorruptShard
from muster.checkpoint.redundancy.scheme import Place
from muster.checkpoint.redundancy.wire import address_offer
from muster.checkpoint.store.memory.shards import Shard
from muster.checkpoint.store.replication import shard_offers
from muster.checkpoint.store.streams.transport import PieceTransport

if TYPE_CHECKING:
    from muster.v1.peer_pb2_grpc import PeerServiceAsyncStub

OFFER_TIMEOUT_S = 30.0
"""Seconds for an offer of which no piece is fetched."""
LEAST_BYTES_PER_S = 20 << 20
"""A slower transfer is given up."""


class ReplicaRefused(Exception):
    """The holder does not take the shard. The message says why."""


async def replicate(
    gang_id: str,
    node: str,
    shard: Shard,
    stub: "PeerServiceAsyncStub",
    transport: PieceTransport,
    note_sent: Callable[[int, float], None],
    place: Place,
) -> int:
    """Bring `shard` to its `place`, whose holder is behind `stub` and fetches what it lacks through `transport`.
    `note_sent` is told the bytes of pieces that were fetched, and the seconds.

    Returns:
        How many bytes of pieces were sent.

    Raises:
        ReplicaRefused: the holder refuses the shard.
        grpc.aio.AioRpcError: the holder can't be reached.
        CorruptShard: the shard's own bytes have changed.
    """
    with shard.held(), transport.grant(shard) as grant:
        offer = shard_offers.make_offer(gang_id, node, shard, grant.access, inline=True)
        address_offer(offer, place)
        stored = await stub.Offer(offer, timeout=OFFER_TIMEOUT_S + shard.bytes / LEAST_BYTES_PER_S)
        sent_bytes, seconds = grant.sent
        if grant.changed:
            raise CorruptShard(grant.changed)
    if stored.refused:
        raise ReplicaRefused(stored.refused)
    note_sent(sent_bytes, seconds)
    return sent_bytes + sum(len(piece.data) for piece in offer.pieces)
