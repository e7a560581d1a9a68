"""Durable checkpoints in a folder of a POSIX file system that all nodes share.

A folder is written under a temporary name, and gets its final name in one rename when all its bytes are on disk.

Several users may share the place, and members of a group may write to it. All that is written goes into folders that
this user has made, and that nobody else can write to. Each of them is opened as held_folder.py says, so neither a link
nor another user's folder in its place is used. Who may write to the place can rename these folders. So a folder is
removed only if it holds what a flush writes, and nothing else: another one of this user, which others have given its
name, stays.
"""

import ctypes
import errno
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from muster.checkpoint.durable.durable_store import Entry, FoundFolder, all_gangs
from muster.checkpoint.format import durable_folders
from muster.checkpoint.format.durable_folders import ParsedFolderName
from muster.checkpoint.format.versions import Version
from muster.daemon.host.held_folder import HeldFolder, others_can_rename

WRITE_BACK_BYTES = 16 << 20
"""Bytes after which the kernel is told to begin with writing to disk."""
WRITE_BACKS_UNDER_WAY = 2
"""Ranges that may be on their way to disk while the next bytes are written. More would only fill the page cache: bytes
that a slow disk has yet to take would count as written, and the last fsync would take minutes."""

WAIT_BEFORE, WRITE, WAIT_AFTER = 1, 2, 4
"""Flags of sync_file_range: wait for pages that are being written; begin to write; wait for what has begun."""
_WRITE_ERRORS = frozenset({errno.EIO, errno.ENOSPC, errno.EDQUOT})
"""What sync_file_range says of the disk. All else says that the file system has no such call."""

_libc = ctypes.CDLL(None, use_errno=True)


def sync_range(descriptor: int, part: tuple[int, int], flags: int) -> None:
    """Bring a part (offset and length) of a file to disk. A file system that can't do that does it with fsync.

    Raises:
        OSError: the disk has refused bytes. A later fsync would not say it again.
    """
    offset, length = part
    if _libc.sync_file_range(descriptor, ctypes.c_int64(offset), ctypes.c_int64(length), flags) != 0:
        number = ctypes.get_errno()
        if number in _WRITE_ERRORS:
            raise OSError(number, os.strerror(number))


@dataclass(frozen=True)
class WriteBack:
    """How the bytes of a file come to disk while it is written: so many at a time, by this call of the kernel."""

    bytes: int = WRITE_BACK_BYTES
    sync: Callable[[int, tuple[int, int], int], None] = sync_range


_WRITE_BACK = WriteBack()


class PosixFolder:
    """A `DurableStore` in the folder `path`. It is absolute, or relative to where this process runs."""

    poll_s = 0.01

    def __init__(self, path: Path, write_back: WriteBack = _WRITE_BACK) -> None:
        self.path, self._write_back = path, write_back

    @property
    def where(self) -> str:
        """The path of the folder."""
        return str(self.path)

    def prepare(self) -> None:
        """Make the folder."""
        self.path.mkdir(durable_folders.FOLDER_MODE, parents=True, exist_ok=True)

    def names(self, folder: str = "") -> list[str]:
        """The names in a folder."""
        with self._hold(folder) as held:
            return held.names()

    def entries(self, folder: str = "") -> list[Entry]:
        """The names in a folder, with what each is."""
        with self._hold(folder) as held:
            return [Entry(name, status.st_size, stat.S_ISREG(status.st_mode)) for name, status in held.statuses()]

    def folders(self, is_asked: Callable[[str], bool] = all_gangs) -> Iterator[FoundFolder]:
        """The folders with the name of a checkpoint. A link is none."""
        with HeldFolder.open(self.path) as place:
            may_be_renamed = others_can_rename(place.status())
            for name in place.names():
                label = durable_folders.parse_folder_name(name)
                if label is None or not is_asked(label.gang):
                    continue
                try:
                    with place.folder(name) as folder:
                        uid, completed_ns = folder.status().st_uid, _completed_ns(folder)
                except OSError:  # it was removed meanwhile, or is a link, or another user's own affair
                    continue
                yield FoundFolder(name, label, completed_ns, uid, may_be_renamed)

    def make_folder(self, name: str) -> None:
        """Make a folder of this user. One that others have given the name of a flush is refused."""
        with (
            HeldFolder.open(self.path) as place,
            place.make_own_folder(name, durable_folders.FOLDER_MODE) as made,
        ):
            if foreign := _not_of_a_flush(made):
                words = f"it holds {foreign[0]}, which no flush has written: give it another name"
                raise FileExistsError(errno.EEXIST, words, str(made.path))

    def create(self, name: str) -> "PosixFile":
        """Begin a file."""
        with self._hold_folder_of(name) as (folder, file):
            if file != durable_folders.METADATA and _completed_ns(folder) is not None:
                raise FileExistsError(errno.EEXIST, "a complete checkpoint has taken this name", str(folder.path))
            return PosixFile(folder.create(file), self._write_back)

    def write(self, name: str, data: bytes) -> None:
        """Write a file under another name, and rename it."""
        with self._hold_folder_of(name) as (folder, final):
            with open(folder.create(_unfinished(final)), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            folder.rename(_unfinished(final), final)

    def read(self, name: str, most_bytes: int) -> bytes:
        """Read a plain file."""
        with self._hold_folder_of(name) as (folder, file), open(folder.open_file(file), "rb") as data:
            if os.fstat(data.fileno()).st_size > most_bytes:
                raise OSError(errno.EINVAL, "it is too large", str(self.path / name))
            return data.read()

    def open(self, name: str) -> "PosixReadable":
        """Open a plain file."""
        with self._hold_folder_of(name) as (folder, file):
            return PosixReadable(self.path / name, folder.open_file(file))

    def remove(self, *names: str) -> None:
        """Remove files, and unfinished ones of these names. Those of a complete checkpoint of another name stay."""
        for name, files in groupby(names, os.path.dirname):
            with suppress(FileNotFoundError), self._hold(name) as folder:
                if _is_another_checkpoint(folder, name):
                    continue
                for file in map(os.path.basename, files):
                    folder.remove(file)
                    folder.remove(_unfinished(file))

    def remove_folder(self, name: str) -> None:
        """Remove a folder that a flush has written. It stays, with all its files, if it holds anything else, or is a
        complete checkpoint of another name."""
        with suppress(OSError):
            with self._hold(name) as folder:
                if _is_another_checkpoint(folder, name) or _not_of_a_flush(folder):
                    return
                # The metadata is the first: without it, the rest is no checkpoint.
                for file in sorted(folder.names()):
                    folder.remove(file)
            self.remove_empty_folder(name)

    def remove_empty_folder(self, name: str) -> None:
        """Remove an empty folder."""
        with HeldFolder.open(self.path) as place:
            place.remove_folder(name)

    def final_name(self, version: Version, gang: str, serial: int) -> str:
        """All flushes of a version give the same folder."""
        return durable_folders.folder_name(version, gang)

    def working_name(self, version: Version, gang: str, serial: int) -> str:
        """The temporary name."""
        return durable_folders.temporary_folder_name(version, gang, serial)

    def parse_leftover(self, name: str) -> tuple[ParsedFolderName, int] | None:
        """Read a temporary name."""
        return durable_folders.parse_temporary_folder_name(name)

    def is_open(self, working: str, final: str) -> bool:
        """The folder still has its temporary name."""
        try:
            with self._hold(working):
                return True
        except OSError:
            return False

    def complete(self, working: str, final: str) -> None:
        """Rename the folder. Its names, and then its own name, are on disk when this returns."""
        with self._hold(working) as folder:
            os.fsync(folder.descriptor)
        with HeldFolder.open(self.path) as place:
            try:
                place.rename(working, final)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
                raise FileExistsError(errno.EEXIST, "it is there already", str(self.path / final)) from error
            os.fsync(place.descriptor)

    def retire(self, name: str, working: str) -> str:
        """Give the folder a temporary name: the next flush of the gang removes what is left of it."""
        with HeldFolder.open(self.path) as place:
            place.rename(name, working)
        return working

    @contextmanager
    def _hold(self, folder: str) -> Iterator[HeldFolder]:
        """A folder of this user; empty: the place itself."""
        with HeldFolder.open(self.path) as place:
            if not folder:
                yield place
                return
            with place.own_folder(folder) as held:
                yield held

    @contextmanager
    def _hold_folder_of(self, name: str) -> Iterator[tuple[HeldFolder, str]]:
        """The folder that a file is in, and the file's name there."""
        folder, _, file = name.rpartition("/")
        with self._hold(folder) as held:
            yield held, file


class PosixFile:
    """A file that grows, and is brought to disk while it grows."""

    def __init__(self, descriptor: int, write_back: WriteBack = _WRITE_BACK) -> None:
        self._write_back = write_back
        self._descriptor = descriptor
        self._written = self._told = 0
        self._under_way: deque[tuple[int, int]] = deque()

    def write(self, data: memoryview) -> None:
        """Write, and wait for earlier bytes if too many are on their way to disk."""
        while len(data):
            count = os.write(self._descriptor, data)
            data, self._written = data[count:], self._written + count
        if self._written - self._told < self._write_back.bytes:
            return
        self._under_way.append((self._told, self._written - self._told))
        self._told = self._written
        self._write_back.sync(self._descriptor, self._under_way[-1], WRITE)
        if len(self._under_way) > WRITE_BACKS_UNDER_WAY:
            self._write_back.sync(self._descriptor, self._under_way.popleft(), WAIT_BEFORE | WRITE | WAIT_AFTER)

    def finish(self) -> None:
        """Bring all to disk, and close the file."""
        try:
            os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)

    def abandon(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class PosixReadable:
    """A file that threads read at any offset."""

    blocks_at_once = 1  # digested while it is in the processor's cache

    def __init__(self, path: Path, descriptor: int) -> None:
        """`path`: for messages."""
        self._path, self._descriptor = path, descriptor
        self.size = os.fstat(descriptor).st_size

    def read_into(self, offset: int, view: memoryview) -> None:
        """Read all of it."""
        while len(view):
            count = os.preadv(self._descriptor, [view], offset)
            if not count:
                raise OSError(errno.EIO, f"the file ends at {offset}", str(self._path))
            view, offset = view[count:], offset + count

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def _unfinished(name: str) -> str:
    return name + ".new"


def _completed_ns(folder: HeldFolder) -> int | None:
    """When the metadata of a checkpoint was written; None: it is not complete."""
    try:
        found = folder.status_of(durable_folders.METADATA)
    except FileNotFoundError:
        return None
    return found.st_mtime_ns if stat.S_ISREG(found.st_mode) else None


def _not_of_a_flush(folder: HeldFolder) -> list[str]:
    """What a folder holds that no flush writes."""
    found = folder.statuses()
    return sorted(name for name, one in found if not durable_folders.is_written_by_a_flush(name, one.st_size))


def _is_another_checkpoint(folder: HeldFolder, name: str) -> bool:
    """Whether a folder is a complete checkpoint that had another name before others renamed it."""
    if _completed_ns(folder) is None:
        return False
    parsed = durable_folders.parse_temporary_folder_name(name)
    try:
        with open(folder.open_file(durable_folders.MANIFEST), "rb") as file:
            manifest = durable_folders.parse_manifest(file.read(durable_folders.MOST_MANIFEST_BYTES))
    except FileNotFoundError:  # Muster has not written it
        return True
    return parsed is None or not durable_folders.says_its_name(manifest, parsed[0])
