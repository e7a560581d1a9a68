"""Durable checkpoints in a folder of a POSIX file system that all nodes share.

A folder is written under a temporary name, and gets its final name in one rename when all its bytes are on disk.
Several users may share the place. Whatever is written goes into folders that this user has made.
"""

import ctypes
import errno
import os
import shutil
import stat
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from muster.checkpoint.durable.durable_store import Entry, FoundFolder
from muster.checkpoint.format import durable_folders
from muster.checkpoint.format.durable_folders import ParsedFolderName
from muster.checkpoint.format.versions import Version
from muster.daemon.host import own_folder

WRITE_BACK_BYTES = 16 << 20
"""Bytes after which the kernel is told to begin with writing to disk."""
WRITE_BACKS_UNDER_WAY = 2
"""Ranges that may be on their way to disk while the next bytes are written. More would only fill the page cache: bytes
that a slow disk has yet to take would count as written, and the last fsync would take minutes."""

_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4
"""Flags of sync_file_range: wait for pages that are being written; begin to write; wait for what has begun."""
_WRITE_ERRORS = frozenset({errno.EIO, errno.ENOSPC, errno.EDQUOT})
"""What sync_file_range says of the disk. All else says that the file system has no such call."""


class PosixFolder:
    """A `DurableStore` in the folder `path`. It is absolute, or relative to where this process runs."""

    poll_s = 0.01

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def where(self) -> str:
        """The path of the folder."""
        return str(self.path)

    def prepare(self) -> None:
        """Make the folder."""
        self.path.mkdir(durable_folders.FOLDER_MODE, parents=True, exist_ok=True)

    def names(self, folder: str = "") -> list[str]:
        """The names in a folder."""
        return os.listdir(self.path / folder)

    def entries(self, folder: str = "") -> list[Entry]:
        """The names in a folder, with what each is."""
        found = []
        with os.scandir(self.path / folder) as scan:
            for entry in scan:
                with suppress(FileNotFoundError):  # it was removed meanwhile
                    status = entry.stat(follow_symlinks=False)
                    found.append(Entry(entry.name, status.st_size, stat.S_ISREG(status.st_mode)))
        return found

    def folders(self) -> Iterator[FoundFolder]:
        """All folders with the name of a checkpoint."""
        for name in self.names():
            label = durable_folders.parse_folder_name(name)
            if label is None:
                continue
            path = self.path / name
            metadata, completed_ns = path / durable_folders.METADATA, None
            try:
                of_name, of_folder = path.lstat(), path.stat()
                if metadata.is_file():
                    completed_ns = metadata.stat().st_mtime_ns
            except OSError:  # it was removed meanwhile, or it is another user's own affair
                continue
            yield FoundFolder(name, label, completed_ns, of_folder.st_uid, stat.S_ISLNK(of_name.st_mode))

    def make_folder(self, name: str) -> None:
        """Make a folder of this user."""
        own_folder.make(self.path / name, durable_folders.FOLDER_MODE)

    def create(self, name: str) -> "PosixFile":
        """Begin a file."""
        return PosixFile(self.path / name)

    def write(self, name: str, data: bytes) -> None:
        """Write a file under another name, and rename it."""
        unfinished = self.path / _unfinished(name)
        with open(unfinished, "wb", opener=durable_folders.open_for_owner) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(self.path / name)

    def read(self, name: str, most_bytes: int) -> bytes:
        """Read a plain file: a named pipe would never end."""
        descriptor = os.open(self.path / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_size > most_bytes:
                raise OSError(errno.EINVAL, "it is no plain file, or too large", str(self.path / name))
            return file.read()

    def open(self, name: str) -> "PosixReadable":
        """Open a plain file."""
        return PosixReadable(self.path / name)

    def remove(self, *names: str) -> None:
        """Remove files, and unfinished ones of these names."""
        for name in names:
            for path in (self.path / name, self.path / _unfinished(name)):
                path.unlink(missing_ok=True)

    def remove_folder(self, name: str) -> None:
        """Remove a folder with all that is in it."""
        shutil.rmtree(self.path / name, ignore_errors=True)

    def remove_empty_folder(self, name: str) -> None:
        """Remove an empty folder."""
        (self.path / name).rmdir()

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
        return (self.path / working).is_dir()

    def complete(self, working: str, final: str) -> None:
        """Rename the folder. Its names, and then its own name, are on disk when this returns."""
        _sync_folder(self.path / working)
        try:
            (self.path / working).rename(self.path / final)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            raise FileExistsError(errno.EEXIST, "it is there already", str(self.path / final)) from error
        _sync_folder(self.path)

    def retire(self, name: str, working: str) -> str:
        """Give the folder a temporary name: the next flush of the gang removes what is left of it."""
        (self.path / name).rename(self.path / working)
        return working


class PosixFile:
    """A file that grows, and is brought to disk while it grows."""

    def __init__(self, path: Path) -> None:
        self._descriptor = durable_folders.open_for_owner(
            str(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        )
        self._written = self._told = 0
        self._under_way: deque[tuple[int, int]] = deque()

    def write(self, data: memoryview) -> None:
        """Write, and wait for earlier bytes if too many are on their way to disk."""
        while len(data):
            count = os.write(self._descriptor, data)
            data, self._written = data[count:], self._written + count
        if self._written - self._told < WRITE_BACK_BYTES:
            return
        self._under_way.append((self._told, self._written - self._told))
        self._told = self._written
        _sync_range(self._descriptor, self._under_way[-1], _WRITE)
        if len(self._under_way) > WRITE_BACKS_UNDER_WAY:
            _sync_range(self._descriptor, self._under_way.popleft(), _WAIT_BEFORE | _WRITE | _WAIT_AFTER)

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

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._descriptor).st_size

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


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_range(descriptor: int, part: tuple[int, int], flags: int) -> None:
    """Bring a part (offset and length) of a file to disk. A file system that can't do that does it with fsync.

    Raises:
        OSError: the disk has refused bytes. A later fsync would not say it again.
    """
    offset, length = part
    if _libc.sync_file_range(descriptor, ctypes.c_int64(offset), ctypes.c_int64(length), flags) != 0:
        number = ctypes.get_errno()
        if number in _WRITE_ERRORS:
            raise OSError(number, os.strerror(number))


_libc = ctypes.CDLL(None, use_errno=True)
