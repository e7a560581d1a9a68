"""Shards that an agent leaves on its node when the job is requeued, and that the gang's next agent takes back."""

from muster.checkpoint.format.errors import CorruptShard
from muster.checkpoint.format.layout import read_footer
from muster.checkpoint.store.memory.sealed_memory import SealedMemory
from muster.checkpoint.store.memory.shards import Shard, ShardStore
from muster.checkpoint.store.replication import shard_offers
from muster.checkpoint.store.restore.recall import Recall
from muster.v1.agent_pb2 import TIER_OWN
from muster.v1.peer_pb2 import ShardOffer


def slot_shards(shard_store: ShardStore) -> list[Shard]:
    """The shards in this node's slots, of the two newest versions. Between two commits there are no more."""
    in_slots = [shard for shard in shard_store.all() if shard.tier == TIER_OWN]
    newest = sorted({shard.version for shard in in_slots})[-2:]
    return [shard for shard in in_slots if shard.version in newest]


async def adopt_shard(gang_id: str, recall: Recall, offer: ShardOffer, descriptor: int) -> None:
    """Add a shard of this gang to the slots. Every byte is verified. Arguments and errors as in the checkpoint
    service."""
    memory = SealedMemory.adopt(descriptor)
    try:
        pieces = shard_offers.pieces_of_offer(offer)
        if offer.gang_id != gang_id or memory.size != offer.bytes:
            raise CorruptShard(f"{memory.size} bytes are described as {offer.bytes} of gang {offer.gang_id}")
        read_footer(memory.view)
        version = shard_offers.version_of_offer(offer)
        await recall.add_slot_shard(offer.rank, version, pieces, offer.digest, memory)
    except BaseException:
        memory.close()
        raise
