"""One node's part of a flush: the files of its ranks, written into the temporary folder. Needs no torch.

Every agent writes the published items of its ranks, one file a rank, and a note beside each file that says which item
is at which offset. The flush leader completes the folder (see `flush_publish`).

A node whose part fails removes its own files. A flush leader that gives up removes the declarations first (see
`flush_version`), then the temporary folder. A node that is still writing looks for the declarations after its last
file, so that nothing is left, whichever node is faster.

Several gangs may write to the same durable folder. Every name holds the gang, and a gang touches only its own names.
"""

import errno
import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from muster.checkpoint.format import durable_folders
from muster.checkpoint.format.errors import CorruptShard, FlushError
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.flush.rank_file import write_rank_file
from muster.checkpoint.store.memory.shards import Shard
from muster.daemon.host import own_folder

log = logging.getLogger(__name__)

_ABANDONED = "given up: the node that leads the flush has ended it, its own agent says why"
WRITERS = 4
"""Files that a node writes at a time. One writer rarely fills what a parallel file system can take from a node."""


@dataclass(frozen=True)
class FlushPart:
    """One node's part of a flush.

    `serial`: the number of the flush within the gang.
    `is_leader`: whether this node completes the folder.
    `declarations`: the folder with the declarations of all nodes; it exists until the flush leader ends the flush.
    `superseded`: set when this flush shall be given up.
    """

    version: Version
    serial: int
    durable_folder: Path
    gang_id: str
    reason: str
    is_leader: bool
    declarations: Path
    superseded: threading.Event

    @property
    def temporary_folder(self) -> Path:
        """Where all nodes write their files."""
        name = durable_folders.temporary_folder_name(self.version, self.gang_id, self.serial)
        return self.durable_folder / name

    @property
    def final_folder(self) -> Path:
        """The name of the folder once it is complete."""
        return self.durable_folder / durable_folders.folder_name(self.version, self.gang_id)

    def note_path(self, rank: int) -> Path:
        """The note beside a rank's file."""
        return self.temporary_folder / f"__{rank}.part"

    @property
    def failure_mark(self) -> Path:
        """A file that a node leaves when its part failed, so that the flush leader need not wait for the timeout."""
        return self.temporary_folder / ".failed"

    def is_abandoned(self) -> bool:
        """Whether the flush leader has given up: the declarations are gone, and the folder has no final name yet."""
        return not self.is_leader and not self.declarations.is_dir() and self.temporary_folder.is_dir()

    def raise_if_superseded(self) -> None:
        """Raise FlushError if a newer flush was ordered."""
        if self.superseded.is_set():
            raise FlushError(f"flush {self.serial} is given up: a newer one was ordered")


def write_part(part: FlushPart, shards: Iterable[Shard]) -> None:
    """Verify each of this node's `shards`, and write its file and its note.

    Raises:
        FlushError: the part failed; this node's files are removed.
    """
    written: list[Path] = []
    try:
        part.durable_folder.mkdir(durable_folders.FOLDER_MODE, parents=True, exist_ok=True)
        own_folder.make(part.temporary_folder, durable_folders.FOLDER_MODE)
    except OSError as error:
        raise FlushError(_describe_failure(part, error)) from error
    try:
        _write_rank_files(part, list(shards), written)
        if part.is_abandoned():
            raise FlushError(_ABANDONED)
    except (OSError, CorruptShard, FlushError) as error:
        failure = _describe_failure(part, error)
        _remove_files(part, written)
        raise FlushError(failure) from error


def _write_rank_files(part: FlushPart, shards: Sequence[Shard], written: list[Path]) -> None:
    """Write the files of all ranks, several at a time. The first failure ends all of them."""
    failed = threading.Event()

    def raise_if_given_up() -> None:
        part.raise_if_superseded()
        if failed.is_set():
            raise FlushError("another rank's file of this node can't be written")

    def write(shard: Shard) -> None:
        try:
            raise_if_given_up()
            _write_rank_file(part, shard, written, raise_if_given_up)
        except BaseException:
            failed.set()
            raise

    if not shards:
        return
    with ThreadPoolExecutor(min(len(shards), WRITERS), thread_name_prefix="flush") as pool:
        running = [pool.submit(write, shard) for shard in shards]
    errors = [error for task in running if (error := task.exception()) is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, FlushError)), errors[0])


def _describe_failure(part: FlushPart, error: Exception) -> str:
    folder_removed = isinstance(error, FileNotFoundError) and not part.temporary_folder.is_dir()
    return _ABANDONED if folder_removed else describe_error(error, part.durable_folder)


def describe_error(error: Exception, folder: Path) -> str:
    """What went wrong, in words for the user, with what to do about it."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{folder} is full ({error.strerror}): free space there, or name another durable_dir"
    if isinstance(error, PermissionError):
        return f"{error.filename} can't be written: give the job's user the right, or name another durable_dir"
    if isinstance(error, OSError):
        return f"{error.filename or folder} can't be written ({error.strerror}): name another durable_dir"
    return str(error)


def _write_rank_file(part: FlushPart, shard: Shard, written: list[Path], raise_if_given_up: Callable[[], None]) -> None:
    path, note_path = part.temporary_folder / durable_folders.rank_file_name(shard.rank), part.note_path(shard.rank)
    written += (path, _unfinished_path(note_path), note_path)
    note = write_rank_file(path, shard, raise_if_given_up)
    # A flush that was given up has released the shard: its rank may have changed the bytes meanwhile.
    raise_if_given_up()
    write_durably(note_path, json.dumps(asdict(note)).encode())


def write_durably(path: Path, data: bytes) -> None:
    """Write a file that has its name only once its bytes are on disk."""
    unfinished = _unfinished_path(path)
    with open(unfinished, "wb", opener=durable_folders.open_for_owner) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)


def _unfinished_path(path: Path) -> Path:
    return path.with_name(path.name + ".new")


def _remove_files(part: FlushPart, written: Iterable[Path]) -> None:
    """Remove this node's files, and mark the failure for a flush leader that waits for them."""
    try:
        for path in written:
            path.unlink(missing_ok=True)
        if part.temporary_folder.is_dir():
            part.failure_mark.touch()
        if part.is_abandoned():
            part.failure_mark.unlink(missing_ok=True)
            part.temporary_folder.rmdir()
    except OSError as error:
        # The folder is not empty while other nodes write there; they remove their own files. After any other error the
        # flush leader waits for its timeout.
        log.info("a part of %s can't be removed: %s", part.temporary_folder, error)
