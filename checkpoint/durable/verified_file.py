"""Reading a file of a durable checkpoint: every byte is verified before its reader has it.

A file block is verified as a whole, so that a reader of a part of it reads the whole block. Large reads go straight
into the reader's memory, with several threads: each reads a block, and digests it while it is in the processor's cache.
"""

import io
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, wait
from typing import Any, Protocol

import xxhash

from muster.checkpoint.format.block_digests import BLOCK_BYTES, DIGEST_BYTES
from muster.checkpoint.format.errors import CorruptCheckpoint

_BLOCKS_KEPT = 4
"""Blocks of which readers have wanted parts, and may want further parts."""


class ReadableFile(Protocol):
    """A file of a store, open for reading by several threads.

    `size`: in bytes. `blocks_at_once`: so many blocks are best read together.
    """

    size: int
    blocks_at_once: int

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes from `offset` on.

        Raises:
            OSError: they can't be read, or the file has fewer bytes.
        """

    def close(self) -> None:
        """End reading."""


class VerifiedFile(io.RawIOBase):
    """A binary stream over a file. `readinto` fills the whole buffer, but at the end of the file.

    Args:
        name: the file as messages name it.
        data_bytes: size of what may be read.
        digests: of all blocks, one after the other; None: nothing is known of the bytes, and nothing is verified.
        threads: read large parts.
        counted: called with the size of each part that was read.
    """

    def __init__(
        self,
        name: str,
        file: ReadableFile,
        data_bytes: int,
        digests: bytes | None,
        threads: Executor,
        counted: Callable[[int], None],
    ) -> None:
        super().__init__()
        self._name, self._file, self._size, self._digests = name, file, data_bytes, digests
        self._threads, self._counted = threads, counted
        self._position = 0
        self._kept: dict[int, memoryview] = {}

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """The offset of the next byte."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Read from there on."""
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, begin + offset)
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer.

        Raises:
            CorruptCheckpoint: some byte is not what was written.
            OSError: some byte can't be read.
        """
        view = memoryview(buffer).cast("B")
        view = view[: max(0, min(len(view), self._size - self._position))]
        begin, end = self._position, self._position + len(view)
        whole: list[tuple[int, int]] = []
        for first, last in self._in_blocks(begin, end):
            if first % BLOCK_BYTES == 0 and (last - first == BLOCK_BYTES or last == self._size):
                whole.append((first, last))
            else:
                block = self._kept_block(first // BLOCK_BYTES)
                view[first - begin : last - begin] = block[first % BLOCK_BYTES :][: last - first]
        together = self._file.blocks_at_once
        runs = [whole[n : n + together] for n in range(0, len(whole), together)]
        if len(runs) == 1:
            self._read_blocks(runs[0][0][0], view[runs[0][0][0] - begin : runs[0][-1][1] - begin])
        elif runs:
            places = [(run[0][0], view[run[0][0] - begin : run[-1][1] - begin]) for run in runs]
            tasks = [self._threads.submit(self._read_blocks, *place) for place in places]
            wait(tasks)  # after an error, too: the caller may free the buffer
            for task in tasks:
                task.result()
        self._position = end
        self._counted(len(view))
        return len(view)

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self._kept.clear()
            self._file.close()
        super().close()

    @staticmethod
    def _in_blocks(begin: int, end: int) -> Iterator[tuple[int, int]]:
        while begin < end:
            last = min(end, (begin // BLOCK_BYTES + 1) * BLOCK_BYTES)
            yield begin, last
            begin = last

    def _kept_block(self, number: int) -> memoryview:
        if number not in self._kept:
            begin = number * BLOCK_BYTES
            block = memoryview(bytearray(min(BLOCK_BYTES, self._size - begin)))
            self._read_blocks(begin, block)
            while len(self._kept) >= _BLOCKS_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[number] = block
        return self._kept[number]

    def _read_blocks(self, begin: int, view: memoryview) -> None:
        """Read whole blocks, and verify each of them."""
        self._file.read_into(begin, view)
        if self._digests is None:
            return
        for first, last in self._in_blocks(begin, begin + len(view)):
            wanted = self._digests[first // BLOCK_BYTES * DIGEST_BYTES :][:DIGEST_BYTES]
            if xxhash.xxh3_128_digest(view[first - begin : last - begin]) != wanted:
                raise CorruptCheckpoint(
                    f"{self._name} is damaged: its bytes {first} to {last - 1} are not those that were written"
                )
