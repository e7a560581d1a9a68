"""Writes one rank's file of a flush: verified, digested and written in one pass over the shard's bytes.

One thread reads the bytes of a piece twice in a row, while they are in the processor's cache: its digest is compared,
and the digest of the file goes on. Another one writes them meanwhile. The kernel is told early to bring them to disk,
so that the last wait is short.
"""

import ctypes
import os
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

from muster.checkpoint.format import durable_folders, layout
from muster.checkpoint.format.errors import CorruptShard
from muster.checkpoint.store.memory.pieces import digest_of
from muster.checkpoint.store.memory.shards import Shard

WRITE_BACK_BYTES = 64 << 20
"""Bytes after which the kernel is told to begin with writing to disk."""

MOST_UNDER_WAY = 8
"""Parts of pieces that are digested and not written yet, 4 MiB each at most. They are not copied."""

_SYNC_FILE_RANGE_WRITE = 2
"""Begin to write the pages of a range, and wait for nothing."""


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


def write_rank_file(path: Path, shard: Shard, raise_if_given_up: Callable[[], None]) -> RankFileNote:
    """Write the published items of a shard to `path`. The bytes are on disk when this returns.

    Args:
        raise_if_given_up: called between chunks; whatever it raises ends the writing.

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
    with (
        open(path, "wb", buffering=0, opener=durable_folders.open_for_owner) as file,
        _WrittenFile(file.fileno()) as written,
    ):
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
    written or nothing writes any more.

    `size`: the bytes that were given to it.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._digest = xxhash.xxh3_128()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="flush")
        self._under_way: deque[Future[None]] = deque()
        self._written = self._told = self.size = 0

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
        """Wait until all is on disk. Raises OSError: something can't be written."""
        while self._under_way:
            self._under_way.popleft().result()
        os.fsync(self._descriptor)

    def __enter__(self) -> "_WrittenFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _write(self, data: memoryview) -> None:
        while len(data):
            count = os.write(self._descriptor, data)
            data, self._written = data[count:], self._written + count
        if self._written - self._told >= WRITE_BACK_BYTES:
            _begin_write_back(self._descriptor, self._told, self._written - self._told)
            self._told = self._written


def _begin_write_back(descriptor: int, offset: int, length: int) -> None:
    """Have the kernel begin to write a range to disk. A file system that can't do that does it later."""
    _libc.sync_file_range(descriptor, ctypes.c_int64(offset), ctypes.c_int64(length), _SYNC_FILE_RANGE_WRITE)


_libc = ctypes.CDLL(None)
