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
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field

from muster.checkpoint.durable.durable_store import DurableStore
from muster.checkpoint.format import durable_folders
from muster.checkpoint.format.errors import CorruptShard, FlushError
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.flush.give_up import ABANDONED, FlushCancellation
from muster.checkpoint.store.flush.rank_file import write_rank_file
from muster.checkpoint.store.flush.rank_source import RankSource
from muster.checkpoint.store.flush.written_bytes import WrittenBytes

log = logging.getLogger(__name__)

FAILURE_MARK = ".failed"
WRITERS = 4
"""Files that a node writes at a time. One writer rarely fills what a parallel file system can take from a node."""


@dataclass(frozen=True)
class FlushPart:
    """One node's part of a flush.

    `serial`: the number of the flush within the gang.
    `is_leader`: whether this node completes the folder.
    `store`: where the checkpoint is written.
    `declarations`: the folder with the declarations of all nodes; it exists until the flush leader ends the flush.
    `given_up`: set when this flush shall be given up.
    `written`: counts what this node has written.
    `job`: what the manifest says of the job that the gang is a run of.
    """

    version: Version
    serial: int
    store: DurableStore
    gang_id: str
    reason: str
    is_leader: bool
    declarations: str
    given_up: FlushCancellation
    written: WrittenBytes = field(default_factory=WrittenBytes)
    job: str = ""

    @property
    def working_folder(self) -> str:
        """Where all nodes write their files."""
        return self.store.working_name(self.version, self.gang_id, self.serial)

    @property
    def final_folder(self) -> str:
        """The name of the folder once it is complete."""
        return self.store.final_name(self.version, self.gang_id, self.serial)

    def file(self, name: str) -> str:
        """A file of the working folder."""
        return f"{self.working_folder}/{name}"

    @property
    def failure_mark(self) -> str:
        """A file that a node leaves when its part failed, so that the flush leader need not wait for the timeout."""
        return self.file(FAILURE_MARK)

    def is_open(self) -> bool:
        """Whether the working folder is there, and is no checkpoint yet."""
        return self.store.is_open(self.working_folder, self.final_folder)

    def is_abandoned(self) -> bool:
        """Whether the flush leader has given up: the declarations are gone, and the checkpoint is not complete."""
        return not self.is_leader and not _is_there(self.store, self.declarations) and self.is_open()

    def raise_if_given_up(self) -> None:
        """Raise FlushError if this flush shall end, for example because a newer one was ordered."""
        if self.given_up.is_set():
            raise FlushError(f"flush {self.serial} is given up: {self.given_up.why}")


def write_part(part: FlushPart, sources: Sequence[RankSource]) -> None:
    """Verify each shard of this node's ranks, and write its file and its note.

    Raises:
        FlushError: the part failed; this node's files are removed.
    """
    written: list[str] = []
    try:
        part.store.prepare()
        part.store.make_folder(part.working_folder)
    except OSError as error:
        raise FlushError(_describe_failure(part, error)) from error
    try:
        for source in sources:
            if source.is_in_place:  # then it costs nothing to know how much there is
                source.begin(part.written)
        _write_rank_files(part, sources, written)
        if part.is_abandoned():
            raise FlushError(ABANDONED)
    except (OSError, CorruptShard, FlushError) as error:
        failure = _describe_failure(part, error)
        _remove_files(part, written)
        raise FlushError(failure) from error


def remove_working_folder(part: FlushPart) -> None:
    """Remove what is left of a flush that was given up, as far as possible. A checkpoint stays."""
    with suppress(OSError):
        if part.is_open():
            part.store.remove_folder(part.working_folder)


def note_name(rank: int) -> str:
    """The note beside a rank's file."""
    return f"__{rank}.part"


def _is_there(store: DurableStore, folder: str) -> bool:
    try:
        return bool(store.names(folder))
    except FileNotFoundError:
        return False


def _write_rank_files(part: FlushPart, sources: Sequence[RankSource], written: list[str]) -> None:
    """Write the files of all ranks, several at a time. The first failure ends all of them."""
    failed = threading.Event()

    def raise_if_given_up() -> None:
        part.raise_if_given_up()
        if failed.is_set():
            raise FlushError("another rank's file of this node can't be written")

    def write(source: RankSource) -> None:
        try:
            raise_if_given_up()
            _write_rank_file(part, source, written, raise_if_given_up)
        except BaseException:
            failed.set()
            raise

    if not sources:
        return
    with ThreadPoolExecutor(min(len(sources), WRITERS), thread_name_prefix="flush") as pool:
        running = [pool.submit(write, source) for source in sources]
    errors = [error for task in running if (error := task.exception()) is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, FlushError)), errors[0])


def _describe_failure(part: FlushPart, error: Exception) -> str:
    if isinstance(error, FileNotFoundError) and not _is_there(part.store, part.working_folder):
        return ABANDONED
    return describe_error(error, part.store.where)


def describe_error(error: Exception, where: str) -> str:
    """What went wrong, in words for the user, with what to do about it."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{where} is full ({error.strerror}): free space there, or name another durable_dir"
    if isinstance(error, PermissionError):
        return f"{error.filename} can't be written: give the job's user the right, or name another durable_dir"
    if isinstance(error, OSError):
        return f"{error.filename or where} can't be written ({error.strerror}): name another durable_dir"
    return str(error)


def _write_rank_file(
    part: FlushPart, source: RankSource, written: list[str], raise_if_given_up: Callable[[], None]
) -> None:
    name, note_file = part.file(durable_folders.rank_file_name(source.rank)), part.file(note_name(source.rank))
    written += (name, note_file)
    note = write_rank_file(part.store, name, source, raise_if_given_up, part.written)
    # A flush that was given up has released the shard: its rank may have changed the bytes meanwhile.
    raise_if_given_up()
    part.store.write(note_file, json.dumps(asdict(note)).encode())


def _remove_files(part: FlushPart, written: Iterable[str]) -> None:
    """Remove this node's files, and mark the failure for a flush leader that waits for them."""
    try:
        part.store.remove(*written)
        if part.is_abandoned():
            part.store.remove(part.failure_mark)
            part.store.remove_empty_folder(part.working_folder)
        elif part.is_open():
            part.store.write(part.failure_mark, b"")
    except OSError as error:
        # The folder is not empty while other nodes write there; they remove their own files. After any other error the
        # flush leader waits for its timeout.
        log.info("a part of %s can't be removed: %s", part.working_folder, error)
