"""What a flush reads of one rank's shard: the slot itself, or a copy of what is still to be written.

A rank can't write into a slot while a flush reads it. On slow storage that may be half an hour. So a source can move:
it copies the pieces that are still to be written, and needs the slot no more. All pieces of the shard are verified, at
the latest when the source moves.

One thread asks for the parts and hands them to storage. Another one may have the source moved at any moment.
"""

import mmap
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait

from muster.checkpoint.format import layout
from muster.checkpoint.format.block_digests import trailer_bytes
from muster.checkpoint.format.errors import CorruptShard
from muster.checkpoint.store.flush.written_bytes import WrittenBytes
from muster.checkpoint.store.flush.written_file import WrittenFile
from muster.checkpoint.store.memory.pieces import digest_of
from muster.checkpoint.store.memory.shards import Shard


class RankSource:
    """The published items of a shard, in the order in which a flush writes them.

    Whoever makes it holds the shard until everything is written, or until `move` has returned.

    `rank`, `digest`: of the shard. After `begin`: `world_size`; `items`: (number, offset in the file, length) of each
    published item; `file_bytes`: size of all items; `durable_metadata`: with placeholders, empty but for rank 0.
    `owns_bytes`: what is still to be written is not read from the shard any more.
    """

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self.rank, self.digest = shard.rank, shard.digest
        self.world_size, self.file_bytes = 0, 0
        self.items: list[tuple[int, int, int]] = []
        self.durable_metadata = b""
        self.owns_bytes = False
        self._lock = threading.Lock()
        self._view = memoryview(b"")
        self._is_prepared = self._is_counted = False
        self._offsets = [piece.offset for piece in shard.pieces]
        self._checked: set[int] = set()
        self._parts: list[tuple[int, int]] = []
        """Where all that is written begins and ends in the shard, in this order. No part crosses a piece's border."""
        self._next = 0
        self._file: WrittenFile | None = None

    @property
    def is_in_place(self) -> bool:
        """Whether the shard's bytes are one range of memory. Others are brought together when they are needed."""
        return not self._shard.references

    def begin(self, counted: WrittenBytes) -> None:
        """Read the index, and count how much there is to write. A second call does nothing.

        Raises:
            CorruptShard: the index, or an object's length, has changed.
        """
        with self._lock:
            self._prepare()
            if not self._is_counted:
                counted.begin(self.file_bytes + trailer_bytes(self.file_bytes))
            self._is_counted = True

    def write_to(self, file: WrittenFile, raise_if_given_up: Callable[[], None]) -> None:
        """Write all published items, then verify what is not published.

        Raises:
            CorruptShard: some byte of the shard has changed, published or not.
            OSError: the file can't be written.
        """
        self._file = file
        while self._next < len(self._parts):
            raise_if_given_up()
            file.wait_for_room()
            with self._lock:
                begin, end = self._parts[self._next]
                self._check(begin, end)
                file.append(self._view[begin:end])
                self._next += 1
        for piece in self._shard.pieces:
            with self._lock:
                self._check(piece.offset, piece.offset + piece.length)
        raise_if_given_up()

    def bytes_to_move(self) -> int:
        """How much memory `move` would take now.

        Raises:
            CorruptShard: as `begin`.
        """
        with self._lock:
            self._prepare()
            return 0 if self.owns_bytes else sum(self._shard.pieces[n].length for n in self._needed())

    def move(self) -> None:
        """Copy what is still to be written, and return when nothing reads the shard any more.

        Raises:
            CorruptShard: some byte of the shard has changed.
            OSError: there is no memory.
        """
        with self._lock:
            self._prepare()
            if not self.owns_bytes:
                kept = memoryview(mmap.mmap(-1, len(self._view)))  # pages that are not written take no memory
                needed = self._needed()
                for number, piece in enumerate(self._shard.pieces):
                    begin, end = piece.offset, piece.offset + piece.length
                    self._check(begin, end)
                    if number in needed:
                        kept[begin:end] = self._view[begin:end]
                self._view, self.owns_bytes = kept, True
            under_way = self._file.leave_memory() if self._file is not None else []
        wait(under_way)

    def end(self) -> None:
        """All is written: free the copy, if there is one."""
        with self._lock:
            self._view, self._parts, self.owns_bytes = memoryview(b""), [], True

    def _prepare(self) -> None:
        if self._is_prepared:
            return
        shard = self._shard
        if shard.references:
            self._view = memoryview(b"".join(shard.piece(n) for n in range(len(shard.pieces))))
            self.owns_bytes = True
        else:
            self._view = shard.memory.view
        view = self._view
        self._check(len(view) - layout.FOOTER_BYTES, len(view))
        self._check(layout.read_footer(view).header_offset, len(view))
        index = layout.read_index(view)
        file_offsets: dict[int, int] = {}
        """Where an item of the shard is in the file, by its offset in the shard. Several items may share one offset."""
        for item in index.published:
            if item.length is None:
                self._check(item.offset, item.offset + layout.LENGTH_BYTES)
            length = len(layout.published_bytes(view, item))
            if item.offset not in file_offsets:
                file_offsets[item.offset] = self.file_bytes
                begin = item.offset + (layout.LENGTH_BYTES if item.length is None else 0)
                self._parts += ((first, last) for _, first, last in self._in_pieces(begin, begin + length))
                self.file_bytes += length
            self.items.append((item.number, file_offsets[item.offset], length))
        self.world_size, self.durable_metadata = index.world_size, layout.read_durable_metadata(view)
        self._is_prepared = True

    def _needed(self) -> set[int]:
        """The numbers of the pieces that have bytes which are still to be written."""
        return {bisect_right(self._offsets, begin) - 1 for begin, _ in self._parts[self._next :]}

    def _in_pieces(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """A range, divided at the borders of pieces: the number of the piece, begin and end."""
        number = bisect_right(self._offsets, begin) - 1
        while begin < end:
            piece = self._shard.pieces[number]
            piece_end = piece.offset + piece.length
            yield number, begin, min(end, piece_end)
            begin, number = piece_end, number + 1

    def _check(self, begin: int, end: int) -> None:
        """Verify all pieces that have bytes of this range, each of them once. Raises CorruptShard."""
        for number, _, _ in self._in_pieces(begin, end):
            if number not in self._checked:
                piece = self._shard.pieces[number]
                if digest_of(self._view[piece.offset : piece.offset + piece.length]) != piece.digest:
                    raise CorruptShard(f"rank {self.rank}'s shard of {self._shard.version} has changed in memory")
                self._checked.add(number)


def move_all(sources: Sequence[RankSource], check_room: Callable[[int], None]) -> None:
    """Move all sources of a node. Blocks: run it in a thread.

    Args:
        check_room: raises NoMemoryLeft if there is no room for so many bytes.

    Raises:
        NoMemoryLeft: there is no room.
        CorruptShard: some byte of a shard has changed.
    """
    check_room(sum(source.bytes_to_move() for source in sources))
    for source in sources:
        source.move()
