"""The files of a durable checkpoint, as torch's FileSystemReader opens them: trusted, and verified while they are read.

Checkpoints that Muster has not written, or an earlier version of it, have no digests. They are read as they are.
"""

import io
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import xxhash
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from muster.checkpoint.durable.durable_store import DurableStore
from muster.checkpoint.durable.newest import finished_steps_of
from muster.checkpoint.durable.verified_file import VerifiedFile
from muster.checkpoint.format import durable_folders
from muster.checkpoint.format.block_digests import trailer_bytes
from muster.checkpoint.format.errors import CheckpointError, CorruptCheckpoint
from muster.checkpoint.training.durable_loading.load_progress import LoadProgress

MOST_THREADS = 8
"""Threads of a rank that read and digest. Three of them digest more than most storage gives to a node."""
_MOST_METADATA_BYTES = 16 << 30
_MOST_SMALL_BYTES = 1 << 20
"""Larger items are read straight into their tensors: one more copy of them would cost more than the parts do."""


class CheckpointFiles:
    """The file system of one checkpoint, for torch's reader. A context manager: damage that was found is raised
    at its end.

    Args:
        where: the checkpoint as messages name it.
        store: the checkpoint itself.
        check_file: called with the name of a file before it is read. It raises UntrustedCheckpoint.
        progress: is told how much is needed, and how much was read.
    """

    def __init__(
        self,
        where: str,
        store: DurableStore,
        check_file: Callable[[str], None],
        progress: LoadProgress,
    ) -> None:
        self._where, self._store, self._check_file, self.progress = where, store, check_file, progress
        self._threads = ThreadPoolExecutor(_threads_of_a_rank(), thread_name_prefix="durable")
        self._manifest: dict[str, Any] | None = None
        self._damage: CorruptCheckpoint | None = None

    def __enter__(self) -> "CheckpointFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()
        if self._damage is not None:
            raise self._damage  # torch may have made another error of it

    def reader(self) -> FileSystemReader:
        """Torch's reader of these files."""
        return _Reader(self)

    def finished_steps(self) -> int:
        """The number of finished steps that the checkpoint holds. Raises CheckpointError: nothing says it."""
        return finished_steps_of(self._where, self._store)

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        """A file of the checkpoint: there are no folders in it."""
        return suffix

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file for reading.

        Raises:
            CorruptCheckpoint: some byte is not what was written, found now or when it is read.
            OSError: it can't be read.
        """
        name = os.fspath(path)
        self._check_file(name)
        try:
            if name == durable_folders.METADATA:
                yield io.BytesIO(self._metadata())
                return
            with self._open(name) as file:
                yield file
        except CorruptCheckpoint as error:
            self._damage = self._damage or error
            raise

    def _metadata(self) -> bytes:
        data = self._store.read(durable_folders.METADATA, _MOST_METADATA_BYTES)
        wanted = self._what_was_written().get("metadata_xxh3_128")
        if wanted is not None and xxhash.xxh3_128_hexdigest(data) != wanted:
            raise CorruptCheckpoint(
                f"{self._where}/{durable_folders.METADATA} is damaged: its bytes 0 to {len(data) - 1} are not those "
                "that were written"
            )
        return data

    def _open(self, name: str) -> VerifiedFile:
        path, file = f"{self._where}/{name}", self._store.open(name)
        try:
            known = durable_folders.digests_of_file(self._what_was_written(), name)
            if known is None:
                return VerifiedFile(path, file, file.size, None, self._threads, self.progress.add)
            digests = bytearray(trailer_bytes(known.data_bytes))
            if file.size != known.data_bytes + len(digests):
                raise CorruptCheckpoint(
                    f"{path} is damaged: it has {file.size} bytes, and {known.data_bytes + len(digests)} were written"
                )
            file.read_into(known.data_bytes, memoryview(digests))
            if xxhash.xxh3_128_hexdigest(digests) != known.blocks_xxh3_128:
                raise CorruptCheckpoint(
                    f"{path} is damaged: its bytes from {known.data_bytes} on, which are digests, are not those that "
                    "were written"
                )
            return VerifiedFile(path, file, known.data_bytes, bytes(digests), self._threads, self.progress.add)
        except BaseException:
            file.close()
            raise

    def _what_was_written(self) -> dict[str, Any]:
        """The manifest; empty: there is none."""
        if self._manifest is None:
            self._manifest = {}
            with suppress(FileNotFoundError):
                self._check_file(durable_folders.MANIFEST)
                text = self._store.read(durable_folders.MANIFEST, durable_folders.MOST_MANIFEST_BYTES)
                self._manifest = self._parsed(text)
        return self._manifest

    def _parsed(self, text: bytes) -> dict[str, Any]:
        try:
            manifest = json.loads(text)
        except ValueError as error:
            raise CorruptCheckpoint(f"{self._where}/{durable_folders.MANIFEST} is damaged: {error}") from None
        if not isinstance(manifest, dict):
            raise CheckpointError(f"{self._where}/{durable_folders.MANIFEST} is not the manifest of a checkpoint")
        return manifest


class _Reader(FileSystemReader):  # type: ignore[misc]  # torch is not there for mypy
    """Reads each file from its begin to its end, and says beforehand how much it will read."""

    def __init__(self, files: CheckpointFiles) -> None:
        super().__init__("")
        self.fs, self.path = files, ""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The same plan, in another order."""
        places = {item.storage_index: self.storage_data[item.storage_index] for item in plan.items}
        self.fs.progress.expect(sum(place.length for place in places.values()))

        def place_of(item: ReadItem) -> tuple[str, int]:
            place = places[item.storage_index]
            return place.relative_path, place.offset

        return replace(plan, items=sorted(plan.items, key=place_of))

    def _slice_file(self, file: io.IOBase, place: Any) -> Any:
        """The bytes of an item, for torch.load, which reads them in some twenty parts. So a small item is read from
        storage at once, and its parts from memory."""
        if place.length > _MOST_SMALL_BYTES:
            return super()._slice_file(file, place)
        file.seek(place.offset)
        return io.BytesIO(file.read(place.length))


def _threads_of_a_rank() -> int:
    """Ranks of one node share its processors."""
    local_ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    cores = len(os.sched_getaffinity(0)) // (int(local_ranks) if local_ranks.isdigit() and int(local_ranks) else 1)
    return max(2, min(MOST_THREADS, cores))
