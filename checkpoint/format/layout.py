"""The layout of a shard's bytes. The training process writes shards, the agent reads them; neither needs torch for it.

    offset          content
    0               tensors, each a finished item of a torch.distributed.checkpoint file
    objects_offset  Python objects: 8 bytes of length, the item, unused bytes
    header_offset   the index (JSON), the leaf directory (for a restore), the durable metadata (rank 0 only), zeros
    size - 64       the footer

Replicas of one model hold equal tensors, so all pieces before `objects_offset` are equal. The first `compared_bytes`
hold what must be equal in all ranks of a replica group: parameters and optimizer states, and no buffers. The bytes from
`header_offset` on are equal from snapshot to snapshot, so a buddy needs them once. All three are therefore borders of
pieces.

The durable metadata names offsets and lengths in files that only a flush writes, and an object's length changes from
snapshot to snapshot. So the metadata holds numbered placeholders of 8 bytes instead of offsets and lengths. Every
rank's index says which numbers are its own.
"""

import json
import re
import struct
from dataclasses import dataclass
from typing import NamedTuple

from muster.checkpoint.format.errors import CorruptShard, OtherLayout

FOOTER_BYTES = 64
ITEM_ALIGNMENT_BYTES = 64
"""Items begin at multiples of this: torch aligns the data inside an item so."""

PIECE_BYTES = 4 << 20
"""Largest piece, the unit of digests and transfers. A 1 GB shard has about 250 pieces in its offer."""

LEAST_SLOT_UNIT_BYTES, SLOT_UNITS = 64 << 10, 64
"""The size of a slot is a multiple of a unit: of so many bytes at least, of a piece at most, and else of the largest
power of two of which the slot has so many. So a slot is 1.6 % larger than its state at most, or 64 KiB."""

LENGTH_BYTES = 8
"""Bytes before an object that hold its length."""

_MAGIC_START = b"MUSTERs"
_MAGIC = _MAGIC_START + b"2"
"""Its last character is the layout. Raise it with every change after which an older version of Muster would misread a
shard: memory that is kept over a requeue may be of the version before. 2: the footer has the flag `sharded`."""
_FOOTER = struct.Struct("<8s4Q2I2Q")
"""The durable metadata has less than 4 GiB, so that the flag has room behind its length."""
_LENGTH = struct.Struct("<Q")

# A placeholder is an integer that pickle writes as LONG1 with 8 bytes: 4 bytes of number, then this tag.
_PLACEHOLDER_TAG = 0x4D535400
_PLACEHOLDER = re.compile(rb"\x8a\x08(.{4})" + re.escape(struct.pack("<I", _PLACEHOLDER_TAG)), re.DOTALL)


class Footer(NamedTuple):
    """The last 64 bytes of a shard: offsets and lengths in bytes.

    `replica_group`: names the ranks whose first `compared_bytes` must be equal. 0: no bytes are compared.
    `sharded`: the ranks hold different parts of one state, so that another number of ranks needs all shards.
    """

    objects_offset: int
    header_offset: int
    index_bytes: int
    directory_bytes: int
    metadata_bytes: int
    compared_bytes: int = 0
    replica_group: int = 0
    sharded: bool = False


@dataclass(frozen=True)
class PublishedItem:
    """One item of this rank's durable file: its number in the metadata, and its place in the shard.

    `length` is None for an object: the 8 bytes at `offset` hold its present length.
    """

    number: int
    offset: int
    length: int | None


@dataclass(frozen=True)
class ShardIndex:
    """What an agent needs to know about a shard to flush it."""

    rank: int
    world_size: int
    published: tuple[PublishedItem, ...]

    def dump(self) -> bytes:
        """The index as JSON. Equal indexes give equal bytes."""
        rows = [[p.number, p.offset, p.length] for p in self.published]
        return json.dumps({"rank": self.rank, "world_size": self.world_size, "published": rows}).encode()

    @classmethod
    def load(cls, data: bytes) -> "ShardIndex":
        """The reverse of `dump`.

        Raises:
            CorruptShard: `data` is no index.
        """
        try:
            fields = json.loads(data)
            rows = tuple(_published_item(*row) for row in fields["published"])
            return cls(int(fields["rank"]), int(fields["world_size"]), rows)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CorruptShard(f"the index of a shard can't be read: {error!r:.200}") from None


def _published_item(number: object, offset: object, length: object) -> PublishedItem:
    if type(number) is not int or type(offset) is not int or not (length is None or type(length) is int):
        raise TypeError("an item has a number, an offset and a length")
    if min(number, offset, length or 0) < 0:
        raise ValueError("an item lies before the shard's begin")
    return PublishedItem(number, offset, length)


def align_up(offset: int) -> int:
    """The next offset at which an item may begin."""
    return -(-offset // ITEM_ALIGNMENT_BYTES) * ITEM_ALIGNMENT_BYTES


def slot_bytes(state_bytes: int) -> int:
    """The size of a slot for a state with its header and footer.

    It is rounded up: the state of a restored run often has some bytes more, such as those of a counter that has grown.
    It shall fit into the slots that are there.
    """
    unit = 1 << max(0, (state_bytes // SLOT_UNITS).bit_length() - 1)
    unit = min(PIECE_BYTES, max(LEAST_SLOT_UNIT_BYTES, unit))
    return -(-state_bytes // unit) * unit


def write_footer(shard: memoryview, footer: Footer) -> None:
    """Write the footer into the last bytes of `shard`."""
    *offsets, compared_bytes, replica_group, sharded = footer
    shard[len(shard) - FOOTER_BYTES :] = _FOOTER.pack(_MAGIC, *offsets, int(sharded), compared_bytes, replica_group)


def read_footer(shard: memoryview, shard_bytes: int | None = None) -> Footer:
    """The footer of a shard. `shard_bytes`: the size of the whole shard, of which `shard` is the end.

    Raises:
        OtherLayout: another version of Muster has written the shard.
        CorruptShard: these bytes aren't a shard.
    """
    if len(shard) < FOOTER_BYTES:
        raise CorruptShard(f"{len(shard)} bytes are no shard: the footer alone has {FOOTER_BYTES}")
    magic, *numbers = _FOOTER.unpack(shard[len(shard) - FOOTER_BYTES :])
    sharded = bool(numbers.pop(5))
    footer = Footer(*numbers)._replace(sharded=sharded)
    if magic != _MAGIC and magic.startswith(_MAGIC_START):
        raise OtherLayout(
            f"written by another version of Muster with layout {magic[-1:].decode(errors='replace')}; "
            f"this version reads layout {_MAGIC[-1:].decode()}"
        )
    if magic != _MAGIC:
        raise CorruptShard(f"the footer begins with {magic!r}, not {_MAGIC!r}: the bytes are no shard")
    size = len(shard) if shard_bytes is None else shard_bytes
    body = footer.index_bytes + footer.directory_bytes + footer.metadata_bytes
    if footer.compared_bytes > footer.objects_offset or not (
        footer.objects_offset <= footer.header_offset <= footer.header_offset + body <= size - FOOTER_BYTES
    ):
        raise CorruptShard(f"the footer's offsets {footer} don't fit into {size} bytes")
    return footer


def read_index(shard: memoryview) -> ShardIndex:
    """The index of a shard. Call this only for verified bytes: a flipped bit in the index is not noticed."""
    footer = read_footer(shard)
    return ShardIndex.load(bytes(shard[footer.header_offset : footer.header_offset + footer.index_bytes]))


def read_leaf_directory(shard: memoryview) -> bytes:
    """The pickled leaf directory that the training process restores from."""
    footer = read_footer(shard)
    start = footer.header_offset + footer.index_bytes
    return bytes(shard[start : start + footer.directory_bytes])


def read_durable_metadata(shard: memoryview) -> bytes:
    """The durable metadata with placeholders; empty in all shards but rank 0's."""
    footer = read_footer(shard)
    start = footer.header_offset + footer.index_bytes + footer.directory_bytes
    return bytes(shard[start : start + footer.metadata_bytes])


def write_object(shard: memoryview, offset: int, data: bytes) -> None:
    """Write an object's length and bytes at `offset`."""
    _LENGTH.pack_into(shard, offset, len(data))
    shard[offset + LENGTH_BYTES : offset + LENGTH_BYTES + len(data)] = data


def read_object(shard: memoryview, offset: int) -> memoryview:
    """The bytes of the object at `offset`."""
    if offset + LENGTH_BYTES > len(shard):
        raise CorruptShard(f"the object at {offset} begins behind the end of a shard of {len(shard)} bytes")
    (length,) = _LENGTH.unpack_from(shard, offset)
    if offset + LENGTH_BYTES + length > len(shard):
        raise CorruptShard(f"the object at {offset} claims {length} bytes in a shard of {len(shard)}")
    return shard[offset + LENGTH_BYTES : offset + LENGTH_BYTES + length]


def published_bytes(shard: memoryview, item: PublishedItem) -> memoryview:
    """The bytes of a published item, as the durable file holds them.

    Raises:
        CorruptShard: the item does not lie in the shard.
    """
    if item.length is None:
        return read_object(shard, item.offset)
    if item.offset + item.length > len(shard):
        raise CorruptShard(f"item {item.number} of {item.length} bytes at {item.offset} is not in {len(shard)} bytes")
    return shard[item.offset : item.offset + item.length]


def offset_placeholder(number: int) -> int:
    """The placeholder for the offset of item `number` in the metadata."""
    return _PLACEHOLDER_TAG << 32 | 2 * number


def length_placeholder(number: int) -> int:
    """The placeholder for the length of item `number` in the metadata."""
    return _PLACEHOLDER_TAG << 32 | 2 * number + 1


def number_of_placeholder(placeholder: int) -> int:
    """The number of the item whose offset or length a placeholder stands for."""
    return (placeholder & 0xFFFFFFFF) // 2


def fill_placeholders(durable: bytes, places: dict[int, tuple[int, int]]) -> bytes:
    """The metadata with every placeholder replaced.

    Args:
        durable: pickled metadata with placeholders.
        places: for the number of each item, its (offset, length) in its file.

    Raises:
        CorruptShard: placeholders and places differ, so that the shards do not belong to one plan.
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

    filled = _PLACEHOLDER.sub(value, durable)
    if used != places.keys():
        raise CorruptShard(
            f"items {sorted(places.keys() - used)[:5]} are not in the durable metadata: the shards are not of one plan"
        )
    return filled
