"""How a shard's bytes are arranged: what the rank's library writes and an agent can read, without torch.

    0          tensors, each a finished item of a torch.distributed.checkpoint file
    cut        python objects: 8 bytes of length, the pickle, slack
    header     the index (JSON), the skeleton (for restoring), the metadata of the durable format (rank 0 alone)
    size - 64  the footer

Replicas of one model hold equal tensors, so everything before `cut` is equal piece by piece. What stands at `header`
and after stays alike from snapshot to snapshot, so a buddy needs it once. `cut` and `header` are therefore borders of
pieces.

The durable metadata names places in files that are written only at a flush, and an object's length changes. So it
holds numbered marks instead of offsets and lengths (each 8 bytes wide), and every rank's index says which marks are
its own.
"""

import json
import re
import struct
from dataclasses import dataclass
from typing import NamedTuple

from muster.checkpoint.format.errors import CorruptShard

FOOTER_BYTES = 64
ITEM_ALIGNMENT_BYTES = 64
"""Items begin at multiples of this, as torch aligns the data inside them."""
PIECE_BYTES = 4 << 20
LENGTH_BYTES = 8

_MAGIC = b"MUSTERs1"
_FOOTER = struct.Struct("<8s5Q16x")
_LENGTH = struct.Struct("<Q")

# A mark is an integer that pickle writes as LONG1 with 8 bytes: 4 bytes of number, then these.
_MARK_TAG = 0x4D535400
_MARK = re.compile(rb"\x8a\x08(.{4})" + re.escape(struct.pack("<I", _MARK_TAG)), re.DOTALL)


class Footer(NamedTuple):
    """The last 64 bytes of a shard: offsets and lengths in bytes."""

    objects_offset: int
    header_offset: int
    index_bytes: int
    directory_bytes: int
    metadata_bytes: int


@dataclass(frozen=True)
class PublishedItem:
    """One item that goes to this rank's durable file: its number in the metadata, and where it stands in the shard.

    `length` is None for an object: its true length stands in the 8 bytes at `offset`.
    """

    number: int
    offset: int
    length: int | None


@dataclass(frozen=True)
class ShardIndex:
    """What an agent has to know of a shard to flush it."""

    rank: int
    world_size: int
    published: tuple[PublishedItem, ...]

    def dump(self) -> bytes:
        """As JSON; the same index gives the same bytes."""
        rows = [[p.number, p.offset, p.length] for p in self.published]
        return json.dumps({"rank": self.rank, "world_size": self.world_size, "published": rows}).encode()

    @classmethod
    def load(cls, data: bytes) -> "ShardIndex":
        """The reverse of `dump`."""
        fields = json.loads(data)
        rows = tuple(PublishedItem(*row) for row in fields["published"])
        return cls(fields["rank"], fields["world_size"], rows)


def align_up(offset: int) -> int:
    """The next place where an item may begin."""
    return -(-offset // ITEM_ALIGNMENT_BYTES) * ITEM_ALIGNMENT_BYTES


def write_footer(shard: memoryview, footer: Footer) -> None:
    """Write the footer into the last bytes of `shard`."""
    shard[len(shard) - FOOTER_BYTES :] = _FOOTER.pack(_MAGIC, *footer)


def read_footer(shard: memoryview) -> Footer:
    """The footer of a shard.

    Raises:
        CorruptShard: these bytes aren't a shard.
    """
    if len(shard) < FOOTER_BYTES:
        raise CorruptShard(f"{len(shard)} bytes are no shard: a footer alone has {FOOTER_BYTES}")
    magic, *numbers = _FOOTER.unpack(shard[len(shard) - FOOTER_BYTES :])
    footer = Footer(*numbers)
    if magic != _MAGIC:
        raise CorruptShard(
            f"the footer begins with {magic!r}, not {_MAGIC!r}: the bytes are no shard, or of another version of Muster"
        )
    body = footer.index_bytes + footer.directory_bytes + footer.metadata_bytes
    if not footer.objects_offset <= footer.header_offset <= footer.header_offset + body <= len(shard) - FOOTER_BYTES:
        raise CorruptShard(f"the footer's offsets {footer} don't fit into {len(shard)} bytes")
    return footer


def read_index(shard: memoryview) -> ShardIndex:
    """The index of a shard (verified bytes only: CorruptShard tells no lie from a flipped bit)."""
    footer = read_footer(shard)
    return ShardIndex.load(bytes(shard[footer.header_offset : footer.header_offset + footer.index_bytes]))


def read_leaf_directory(shard: memoryview) -> bytes:
    """The pickled skeleton that the rank's library restores from."""
    footer = read_footer(shard)
    start = footer.header_offset + footer.index_bytes
    return bytes(shard[start : start + footer.directory_bytes])


def read_durable_metadata(shard: memoryview) -> bytes:
    """The durable format's metadata with marks in it; empty in all shards but rank 0's."""
    footer = read_footer(shard)
    start = footer.header_offset + footer.index_bytes + footer.directory_bytes
    return bytes(shard[start : start + footer.metadata_bytes])


def write_object(shard: memoryview, offset: int, data: bytes) -> None:
    """Write an object's length and bytes at `offset`."""
    _LENGTH.pack_into(shard, offset, len(data))
    shard[offset + LENGTH_BYTES : offset + LENGTH_BYTES + len(data)] = data


def read_object(shard: memoryview, offset: int) -> memoryview:
    """The bytes of the object at `offset`."""
    (length,) = _LENGTH.unpack_from(shard, offset)
    if offset + LENGTH_BYTES + length > len(shard):
        raise CorruptShard(f"the object at {offset} claims {length} bytes in a shard of {len(shard)}")
    return shard[offset + LENGTH_BYTES : offset + LENGTH_BYTES + length]


def published_bytes(shard: memoryview, item: PublishedItem) -> memoryview:
    """The bytes of a published item, as they stand in a durable file."""
    return read_object(shard, item.offset) if item.length is None else shard[item.offset : item.offset + item.length]


def offset_placeholder(number: int) -> int:
    """Stands for the offset of item `number` in the metadata until a flush fills it in."""
    return _MARK_TAG << 32 | 2 * number


def length_placeholder(number: int) -> int:
    """Stands for the length of item `number` in the metadata until a flush fills it in."""
    return _MARK_TAG << 32 | 2 * number + 1


def fill_placeholders(durable: bytes, places: dict[int, tuple[int, int]]) -> bytes:
    """The metadata with every mark replaced.

    Args:
        durable: pickled metadata with marks in it.
        places: (offset, length) in its file, for each item's number.

    Raises:
        CorruptShard: a mark has no place, or a place no mark: the shards aren't of one plan.
    """
    used: set[int] = set()

    def value(found: re.Match[bytes]) -> bytes:
        code = int.from_bytes(found.group(1), "little")
        if code // 2 not in places:
            raise CorruptShard(
                f"no shard holds item {code // 2} of the durable metadata: the shards are not of one plan"
            )
        used.add(code // 2)
        return b"\x8a\x08" + _LENGTH.pack(places[code // 2][code % 2])

    filled = _MARK.sub(value, durable)
    if used != places.keys():
        raise CorruptShard(
            f"items {sorted(places.keys() - used)[:5]} are not in the durable metadata: the shards are not of one plan"
        )
    return filled
