"""Writes one rank's file of a flush: verified, digested and written in one pass over the shard's bytes.

One thread reads the bytes of a piece twice in a row, while they are in the processor's cache: its digest is compared,
and the digest of the file goes on. Another one writes them meanwhile.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import xxhash

from muster.checkpoint.durable.durable_store import DurableFile, DurableStore
from muster.checkpoint.format import layout
from muster.checkpoint.format.errors import CorruptShard
from muster.checkpoint.store.flush.written_bytes import WrittenBytes
from muster.checkpoint.store.memory.pieces import digest_of
from muster.checkpoint.store.memory.shards import Shard

MOST_UNDER_WAY = 8
"""Parts of pieces that are digested and not written yet, 4 MiB each at most. They are not copied."""


@dataclass(frozen=True)
class RankFileNote:
    """What a rank's file holds. `items`: (number, offset, length) of each published item in the file."""

    rank: int
    world_size: int
    shard_digest: str
    file_bytes: int
    file_digest: str
    items: list[tuple[int, int, int]]


def contiguous_bytes(shard: Shard) -> memoryview:
    """The bytes of a shard as one range: its memory, or a copy if the shard refers to pieces of other shards."""
    if not shard.references:
        return shard.memory.view
    return memoryview(b"".join(shard.piece(n) for n in range(len(shard.pieces))))


def write_rank_file(
    store: DurableStore, name: str, shard: Shard, raise_if_given_up: Callable[[], None], counted: WrittenBytes
) -> RankFileNote:
    """Write the published items of a shard to the file `name`. The bytes are durable when this returns.

    Args:
        raise_if_given_up: called between chunks; whatever it raises ends the writing.
        counted: counts what is written.

    Raises:
        CorruptShard: some byte of the shard has changed, published or not.
        OSError: the file can't be written.
    """
    view = contiguous_bytes(shard)
    verified = _VerifiedBytes(shard, view)
    verified.check(len(view) - layout.FOOTER_BYTES, len(view))
    verified.check(layout.read_footer(view).header_offset, len(view))
    index = layout.read_index(view)
    items: list[tuple[int, int, int]] = []
    file_offsets: dict[int, int] = {}
    """Where an item of the shard is in the file, by its offset in the shard. Several items may share one offset."""
    counted.begin(sum({item.offset: len(layout.published_bytes(view, item)) for item in index.published}.values()))
    with _WrittenFile(store.create(name), counted) as written:
        for item in index.published:
            if item.length is None:
                verified.check(item.offset, item.offset + layout.LENGTH_BYTES)
            data = layout.published_bytes(view, item)
            if item.offset not in file_offsets:
                file_offsets[item.offset] = written.size
                start = item.offset + (layout.LENGTH_BYTES if item.length is None else 0)
                for first, last in verified.chunks(start, start + len(data)):
                    raise_if_given_up()
                    written.append(view[first:last])
            items.append((item.number, file_offsets[item.offset], len(data)))
        verified.check(0, len(view))
        raise_if_given_up()
        written.finish()
    return RankFileNote(shard.rank, index.world_size, shard.digest.hex(), written.size, written.digest, items)


class _VerifiedBytes:
    """The bytes of a shard, each piece verified before its bytes are used for the first time."""

    def __init__(self, shard: Shard, view: memoryview) -> None:
        self._shard, self._view = shard, view
        self._offsets = [piece.offset for piece in shard.pieces]
        self._checked: set[int] = set()

    def check(self, start: int, end: int) -> None:
        """Verify all pieces that have bytes of this range. Raises CorruptShard."""
        for _ in self.chunks(start, end):
            pass

    def chunks(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The range, divided at the borders of pieces. A piece is verified when its part is asked for.

        Raises:
            CorruptShard: the bytes of a piece do not match its digest.
        """
        number = bisect_right(self._offsets, start) - 1
        while start < end:
            piece = self._shard.pieces[number]
            piece_end = piece.offset + piece.length
            if number not in self._checked:
                if digest_of(self._view[piece.offset : piece_end]) != piece.digest:
                    raise CorruptShard(
                        f"rank {self._shard.rank}'s shard of {self._shard.version} has changed in memory"
                    )
                self._checked.add(number)
            yield start, min(end, piece_end)
            start, number = piece_end, number + 1


class _WrittenFile:
    """A file that grows. A thread writes while the caller digests what follows. A context manager: at its end, all is
    written, or nothing writes any more and the file is abandoned.

    `size`: the bytes that were given to it.
    """

    def __init__(self, file: DurableFile, counted: WrittenBytes) -> None:
        self._file, self._counted = file, counted
        self._digest = xxhash.xxh3_128()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="flush")
        self._under_way: deque[Future[None]] = deque()
        self._ended = False
        self.size = 0

    @property
    def digest(self) -> str:
        """XXH3-128 of the whole file."""
        return self._digest.hexdigest()

    def append(self, data: memoryview) -> None:
        """Raises OSError: earlier data can't be written."""
        self._digest.update(data)
        self.size += len(data)
        self._under_way.append(self._thread.submit(self._write, data))
        if len(self._under_way) > MOST_UNDER_WAY:
            self._under_way.popleft().result()

    def finish(self) -> None:
        """Wait until all is durable. Raises OSError: something can't be written."""
        while self._under_way:
            self._under_way.popleft().result()
        self._ended = True
        self._file.finish()

    def __enter__(self) -> "_WrittenFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)
        if not self._ended:
            self._file.abandon()

    def _write(self, data: memoryview) -> None:
        self._file.write(data)
        self._counted.add(len(data))
