"""Whether a node has the memory that snapshots will need: found when slots are asked for, not when a copy comes.

Slots are allocated at once. Copies of other nodes' shards are sparse memory that is allocated as their bytes come, long
after the slots. A limit that they would break would end the job then. So their need is counted beforehand: this node
keeps as many copies as other nodes have ranks whose buddy it is, each of them of two versions, and each without the
bytes that the ranks of this node hold as well. What two copied ranks hold in common is stored once, but how much that
is shows only when it comes: it is counted for each of them. Parts that combine shards hold all bytes. The shards of
other nodes are taken to be as large as those of this one.
"""

from dataclasses import dataclass, field

from muster.checkpoint.redundancy.scheme import VERSIONS_KEPT
from muster.checkpoint.store.memory.sealed_memory import NoMemoryLeft, left_to_this_process, sparse_bytes

MOST_LEFT_FREE = 2 << 30
"""Bytes that a flush leaves to the job beside the copy that it makes, or as many again as it copies if that is less. To
keep a slot is better than to have the training killed for its next allocation."""


@dataclass
class CopiesOfOthers:
    """What this node's copies for other nodes need, and its parts that combine their shards.

    `share_of_parts`: how many times the slot of a rank these parts need, for one version. `words`: what all this is.
    `copied_ranks`: the ranks of other nodes of which this node keeps copies; `local_ranks`: those that run here.
    """

    copied_ranks: int = 0
    local_ranks: int = 1
    _own_bytes: dict[int, int] = field(default_factory=dict)
    """For each local rank that has asked for slots: the bytes of its shard that no other rank holds."""
    share_of_parts: float = 0.0
    words: str = "copies of other nodes' states"
    _slot_bytes: int = 0

    def note(self, rank: int, slot_bytes: int, shared_bytes: int) -> None:
        """A rank of this node asks for slots."""
        self._own_bytes[rank] = max(0, slot_bytes - shared_bytes)
        self._slot_bytes = max(self._slot_bytes, slot_bytes)

    @property
    def bytes(self) -> int:
        """What all copies will need."""
        ranks_each = -(-self.copied_ranks // max(1, self.local_ranks))
        parts = VERSIONS_KEPT * round(self.share_of_parts * self._slot_bytes)
        return VERSIONS_KEPT * ranks_each * sum(self._own_bytes.values()) + parts


def check_memory(rank: int, slots: int, slot_bytes: int, copies: CopiesOfOthers, upload_bytes: int = 0) -> None:
    """Check that the node has the memory for `slots` new slots of a rank, for all copies that it will keep, and for
    uploads of durable checkpoints. Slots that come from the node's reserve do not count.

    Raises:
        NoMemoryLeft: it has not. The message names each part, and the limit.
    """
    size = max(0, slots) * slot_bytes
    check_bytes(f"rank {rank} needs {size >> 20} MiB for {slots} slots", size, copies, upload_bytes)


def check_bytes(words: str, size: int, copies: CopiesOfOthers, upload_bytes: int = 0) -> None:
    """As `check_memory`, for slots of `size` bytes together. `words`: who needs how much.

    Raises:
        NoMemoryLeft: the node has too little.
    """
    coming, left = max(0, copies.bytes - sparse_bytes()), left_to_this_process()
    if size + coming + upload_bytes > left.bytes:
        of_copies = f"{copies.words} need {coming >> 20} MiB, " if coming else ""
        uploads = f"uploads of durable checkpoints need {upload_bytes >> 20} MiB, " if upload_bytes else ""
        raise NoMemoryLeft(
            f"{words}, {of_copies}{uploads}and {left.bytes >> 20} MiB are left to this job on this node ({left.limit})"
        )


def check_room_for_flush(size: int, copies: CopiesOfOthers, upload_bytes: int = 0) -> None:
    """Check that a flush may copy `size` bytes, so that ranks get their slots back before all is written.

    `upload_bytes`: what uploads may still need.

    Raises:
        NoMemoryLeft: the node, or the job's limit, has too little memory left for it.
    """
    left, coming = left_to_this_process(), max(0, copies.bytes - sparse_bytes())
    spare = min(size, MOST_LEFT_FREE) + upload_bytes
    if size + spare + coming > left.bytes:
        raise NoMemoryLeft(
            f"to copy the {size >> 20} MiB that are still to be written, {spare >> 20} MiB more must be free; "
            f"{copies.words} need {coming >> 20} MiB, and {left.bytes >> 20} MiB are left to this job on this node "
            f"({left.limit})"
        )
