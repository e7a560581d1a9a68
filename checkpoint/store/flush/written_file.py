"""A file of a flush: one thread writes to storage while the caller digests what follows."""

import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import xxhash

from muster.checkpoint.durable.durable_store import DurableFile
from muster.checkpoint.format.block_digests import BlockDigests
from muster.checkpoint.store.flush.written_bytes import WrittenBytes

MOST_UNDER_WAY = 8
"""Parts of pieces that are digested and not written yet, 4 MiB each at most. They are not copied."""


@dataclass(eq=False)
class _Part:
    """Bytes that the thread writes next, or writes now."""

    data: memoryview
    is_begun: bool = False


class WrittenFile:
    """A file that grows. A context manager: at its end, all is written, or nothing writes any more and the file is
    abandoned.

    `size`: the bytes that were given to it. `data_bytes`, `blocks_digest`: after `finish`, its size without the digests
    of its blocks, and the digest of these digests.
    """

    def __init__(self, file: DurableFile, counted: WrittenBytes) -> None:
        self._file, self._counted = file, counted
        self._digest, self._blocks = xxhash.xxh3_128(), BlockDigests()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="flush")
        self._under_way: deque[tuple[Future[None], _Part]] = deque()
        self._lock = threading.Lock()
        self._ended = False
        self.size = self.data_bytes = 0
        self.blocks_digest = ""

    @property
    def digest(self) -> str:
        """XXH3-128 of the whole file."""
        return self._digest.hexdigest()

    def wait_for_room(self) -> None:
        """Wait until few enough parts are under way. Raises OSError: earlier data can't be written."""
        while len(self._under_way) >= MOST_UNDER_WAY:
            self._under_way[0][0].result()
            with self._lock:
                self._under_way.popleft()

    def append(self, data: memoryview) -> None:
        """Write these bytes next. They must stay as they are until they are written, or `leave_memory` was called."""
        self._blocks.update(data)
        self._append(data)

    def _append(self, data: memoryview) -> None:
        self._digest.update(data)
        self.size += len(data)
        part = _Part(data)
        with self._lock:
            self._under_way.append((self._thread.submit(self._write, part), part))

    def leave_memory(self) -> list[Future[None]]:
        """Copy the bytes that wait to be written. Returns the writes that still read what was given to `append`."""
        with self._lock:
            for _, part in self._under_way:
                if not part.is_begun:
                    part.data = memoryview(bytes(part.data))
            return [write for write, part in self._under_way if part.is_begun]

    def finish(self) -> None:
        """Append the digests of all blocks, and wait until all is durable.

        Raises:
            OSError: something can't be written.
        """
        blocks = self._blocks.finish()
        self.data_bytes, self.blocks_digest = self.size, xxhash.xxh3_128_hexdigest(blocks)
        if blocks:
            self._append(memoryview(blocks))
        for write, _ in self._under_way:
            write.result()
        self._ended = True
        self._file.finish()

    def __enter__(self) -> "WrittenFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)
        if not self._ended:
            self._file.abandon()

    def _write(self, part: _Part) -> None:
        with self._lock:
            part.is_begun, data, part.data = True, part.data, memoryview(b"")
        self._file.write(data)
        self._counted.add(len(data))
