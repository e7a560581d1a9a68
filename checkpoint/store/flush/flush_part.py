"""Writing a version from memory to a durable folder: copying, without torch.

Every agent writes the published items of its ranks, and a note beside each file that says what stands where. The
leader (the first of the nodes that hold rank 0) waits for all notes, fills their places into the metadata, writes the
manifest, and renames the folder. What fails takes its files away again: nothing half-done ever has the final name.
A leader that gives up takes its word back first (`choice`), then the files; who writes on looks for that word when it
has written, so that nothing is left whichever comes first.

Other gangs may write to the same folder. All names bear the gang, and nothing of another one is ever touched.
"""

import errno
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from muster.checkpoint.format import durable_folders, layout
from muster.checkpoint.format.errors import CorruptShard, FlushError
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.memory.pieces import bad_pieces
from muster.checkpoint.store.memory.shards import Shard

log = logging.getLogger(__name__)

PARTS_TIMEOUT_S = 120.0

_POLL_S = 0.02
_ABANDONED = "given up: the node that leads the flush has ended it, its own agent says why"
_WRITE_BYTES = 16 << 20


@dataclass(frozen=True)
class RankFileNote:
    """What a rank's file holds; `items` is (number, offset, length) of each published item in it."""

    rank: int
    world_size: int
    shard_digest: str
    file_bytes: int
    file_digest: str
    items: list[tuple[int, int, int]]


@dataclass(frozen=True)
class FlushPart:
    """This node's share of a flush, the `serial`-th of the gang.

    `leads`: this node puts the whole in place; `said`: where the leader's word stands until the flush is over;
    `superseded`: set when it shall be given up.
    """

    version: Version
    serial: int
    folder: Path
    gang_id: str
    reason: str
    leads: bool
    said: Path
    superseded: threading.Event

    @property
    def aside(self) -> Path:
        """Where the files are written."""
        return self.folder / durable_folders.temporary_folder_name(self.version, self.gang_id, self.serial)

    @property
    def final(self) -> Path:
        """The folder once it is whole."""
        return self.folder / durable_folders.folder_name(self.version, self.gang_id)

    def note(self, rank: int) -> Path:
        """The note beside a rank's file."""
        return self.aside / f"__{rank}.part"

    @property
    def failed(self) -> Path:
        """Left by a node whose write failed, so that the leader need not wait."""
        return self.aside / ".failed"

    def abandoned(self) -> bool:
        """Whether the leader has given up: its word is gone, and the files haven't got their final name."""
        return not self.leads and not self.said.is_dir() and self.aside.is_dir()

    def check(self) -> None:
        """Raise FlushError where the flush shall be given up."""
        if self.superseded.is_set():
            raise FlushError(f"flush {self.serial} is given up: a newer one was ordered")


def write(part: FlushPart, shards: Iterable[Shard]) -> None:
    """Write the files and notes of this node's `shards`, each verified first.

    Raises:
        FlushError: it failed; this node's files are gone again.
    """
    written: list[Path] = []
    try:
        part.folder.mkdir(parents=True, exist_ok=True)
        part.aside.mkdir(exist_ok=True)
        for shard in shards:
            part.check()
            if bad_pieces(shard):
                raise CorruptShard(f"rank {shard.rank}'s shard of {shard.version} has changed in memory")
            _write_rank(part, shard, _flat(shard), written)
        if part.abandoned():
            raise FlushError(_ABANDONED)
    except (OSError, CorruptShard, FlushError) as error:
        gone = isinstance(error, FileNotFoundError) and not part.aside.is_dir()
        _take_away(part, written)
        raise FlushError(_ABANDONED if gone else words(error, part.folder)) from error


def words(error: Exception, folder: Path) -> str:
    """What went wrong, for the user, with the next step to take."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{folder} is full ({error.strerror}): free space there, or name another durable_dir"
    if isinstance(error, PermissionError):
        return f"{error.filename} can't be written: give the job's user the right, or name another durable_dir"
    if isinstance(error, OSError):
        return f"{error.filename or folder} can't be written ({error.strerror}): name another durable_dir"
    return str(error)


def _flat(shard: Shard) -> memoryview:
    """The shard's bytes as one run: its memory, or, where pieces are borrowed, a copy put together."""
    if not shard.borrowed:
        return shard.memory.view
    return memoryview(b"".join(shard.piece(n) for n in range(len(shard.pieces))))


def _write_rank(part: FlushPart, shard: Shard, view: memoryview, written: list[Path]) -> None:
    index = layout.read_index(view)
    path = part.aside / durable_folders.rank_file_name(shard.rank)
    digest = xxhash.xxh3_128()
    items: list[tuple[int, int, int]] = []
    at: dict[int, int] = {}
    edge = 0
    with path.open("wb") as file:
        written.append(path)
        for item in index.published:
            data = layout.published_bytes(view, item)
            if item.offset not in at:
                at[item.offset] = edge
                edge += len(data)
                digest.update(data)
                for start in range(0, len(data), _WRITE_BYTES):
                    part.check()
                    file.write(data[start : start + _WRITE_BYTES])
            items.append((item.number, at[item.offset], len(data)))
        file.flush()
        os.fsync(file.fileno())
    note = RankFileNote(shard.rank, index.world_size, shard.digest.hex(), edge, digest.hexdigest(), items)
    written += (_fresh(part.note(shard.rank)), part.note(shard.rank))
    _write_whole(part.note(shard.rank), json.dumps(asdict(note)).encode())


def _write_whole(path: Path, data: bytes) -> None:
    """Write a file that appears under its name only when it is on disk."""
    fresh = _fresh(path)
    with fresh.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(path)


def _fresh(path: Path) -> Path:
    return path.with_name(path.name + ".new")


def _take_away(part: FlushPart, written: Iterable[Path]) -> None:
    """Remove this node's files; tell a leader that waits for them."""
    try:
        for path in written:
            path.unlink(missing_ok=True)
        if part.aside.is_dir():
            part.failed.touch()
        if part.abandoned():
            part.failed.unlink(missing_ok=True)
            part.aside.rmdir()
    except OSError as error:
        # Not empty: others write there, and do the same. Else the leader waits for its deadline.
        log.info("a part of %s can't be taken away: %s", part.aside, error)


def remove(aside: Path) -> None:
    """Remove all that was written to a folder, as far as that can be done."""
    shutil.rmtree(aside, ignore_errors=True)


def publish(part: FlushPart, first: Shard, timeout_s: float = PARTS_TIMEOUT_S) -> Path:
    """The leader's share: wait for every rank's note, write metadata and manifest, rename.

    Args:
        part: what is flushed.
        first: rank 0's shard.
        timeout_s: how long the other nodes may take.

    Returns:
        The final folder.

    Raises:
        FlushError: it failed or was superseded. What was written aside is there to be removed.
    """
    try:
        view = _flat(first)
        world_size, metadata = layout.read_index(view).world_size, layout.read_durable_metadata(view)
        notes = _await_notes(part, world_size, timeout_s)
        places = {number: (offset, length) for note in notes for number, offset, length in note.items}
        _write_whole(part.aside / durable_folders.METADATA, layout.fill_placeholders(metadata, places))
        manifest = _manifest(part, notes)
        _write_whole(part.aside / durable_folders.MANIFEST, manifest.dump())
        for note in notes:
            part.note(note.rank).unlink()
            if not note.items:
                (part.aside / durable_folders.rank_file_name(note.rank)).unlink()
        _sync_folder(part.aside)
        _rename(part, manifest)
    except (OSError, CorruptShard) as error:
        raise FlushError(words(error, part.folder)) from error
    _sweep(part)
    return part.final


def _await_notes(part: FlushPart, world_size: int, timeout_s: float) -> list[RankFileNote]:
    end = time.monotonic() + timeout_s
    notes: dict[int, RankFileNote] = {}
    while True:
        part.check()
        names = set(os.listdir(part.aside))
        for rank in range(world_size):
            if rank not in notes and part.note(rank).name in names:
                fields = json.loads(part.note(rank).read_bytes())
                notes[rank] = RankFileNote(**{**fields, "items": [tuple(row) for row in fields["items"]]})
        if len(notes) == world_size:
            return [notes[rank] for rank in range(world_size)]
        if part.failed.name in names:
            raise FlushError(f"a node could not write its part of {part.version}: its own agent says why")
        if time.monotonic() > end:
            absent = [rank for rank in range(world_size) if rank not in notes]
            raise FlushError(f"ranks {absent} were not written to {part.folder} within {timeout_s:.0f} s")
        part.superseded.wait(_POLL_S)


def _manifest(part: FlushPart, notes: list[RankFileNote]) -> durable_folders.Manifest:
    ranks = {
        str(n.rank): {
            "shard_digest": n.shard_digest,
            "file": durable_folders.rank_file_name(n.rank) if n.items else None,
            "file_bytes": n.file_bytes,
            "file_xxh3_128": n.file_digest,
        }
        for n in notes
    }
    return durable_folders.Manifest(
        part.version.step, part.version.generation, len(notes), part.gang_id, part.reason, ranks
    )


def _rename(part: FlushPart, manifest: durable_folders.Manifest) -> None:
    try:
        part.aside.rename(part.final)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        if not manifest.describes(part.final):
            raise FlushError(
                f"{part.final} is there already, and is not {part.version} of gang {part.gang_id} as it stands in "
                "memory: move it away, or name another durable_dir"
            ) from error
        # An earlier flush has written this version: these very bytes.
        shutil.rmtree(part.aside)
        return
    _sync_folder(part.folder)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sweep(part: FlushPart) -> None:
    """Remove what earlier flushes of this gang left when their agents died; never what a newer one writes."""
    for path in part.folder.iterdir():
        found = durable_folders.parse_temporary_folder_name(path.name)
        if found is None:
            continue
        label, serial = found
        if label.gang == part.gang_id and label.version <= part.version and serial < part.serial:
            shutil.rmtree(path, ignore_errors=True)
