"""Sending a replica: an agent brings a second copy of its shard to its buddy.

The sender offers the shard with the digest of every piece, and with the bytes of small pieces. The buddy answers which
pieces it lacks, and the sender sends only these. Replicas of data parallelism mostly lack none, so that one call is
enough.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from muster.checkpoint.store.memory.shards import Shard
from muster.checkpoint.store.replication import transfer
from muster.daemon.host import clock

if TYPE_CHECKING:
    from muster.v1.peer_pb2_grpc import PeerServiceAsyncStub

OFFER_TIMEOUT_S = 10.0
PUT_TIMEOUT_S = 120.0
"""Seconds for one call. A put carries up to a whole shard."""


class ReplicaRefused(Exception):
    """The buddy does not take the shard. The message says why."""


async def replicate(
    gang_id: str,
    node: str,
    shard: Shard,
    stub: "PeerServiceAsyncStub",
    plain_stub: Callable[[int], "PeerServiceAsyncStub"],
    note_sent: Callable[[int, float], None],
) -> int:
    """Bring a replica of `shard` to the buddy behind `stub`. `plain_stub` reaches the buddy at another port, in plain
    text: the pieces go there if the buddy asks for it. `note_sent` is told the bytes of pieces that a call has carried,
    and its seconds.

    Returns:
        How many bytes of pieces were sent.

    Raises:
        ReplicaRefused: the buddy refuses the shard.
        grpc.aio.AioRpcError: the buddy can't be reached.
        CorruptShard: the shard's own bytes have changed.
    """
    with shard.held():
        inline_bytes = sum(piece.length for piece in shard.pieces if piece.length <= transfer.INLINE_PIECE_BYTES)
        need = await stub.Offer(transfer.make_offer(gang_id, node, shard, inline=True), timeout=OFFER_TIMEOUT_S)
        if need.refused:
            raise ReplicaRefused(need.refused)
        if not need.missing:
            return inline_bytes
        offer = transfer.make_offer(gang_id, node, shard)
        receiver = plain_stub(need.plain_port) if need.plain_port else stub
        started = clock.monotonic()
        stored = await receiver.Put(transfer.shard_messages(offer, shard, need.missing), timeout=PUT_TIMEOUT_S)
        seconds = clock.monotonic() - started
    if stored.refused:
        raise ReplicaRefused(stored.refused)
    sent = sum(shard.pieces[n].length for n in need.missing)
    note_sent(sent, seconds)
    return inline_bytes + sent
