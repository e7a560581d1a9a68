"""Folders that are held open: what a job writes or trusts is reached through a descriptor, and no link leads elsewhere.

A path that is checked and then opened can mean two places, because another user may rename a folder meanwhile, or have
laid a link. So a folder is opened once, the checks look at the descriptor, and all below it is opened relative to it.
Each call passes one name, without a slash, and O_NOFOLLOW refuses a link of that name. So openat2 with RESOLVE_BENEATH
and RESOLVE_NO_SYMLINKS, which newer kernels have, would refuse nothing more, and is not used.

The path that opens the first folder may hold links: a user has named it, and sites lay links above (/home). What others
can do to such a shared place they may do: Muster trusts only the folders that it makes there for this user.

- Shared by several users: each can make any free name, also one that a job needs next.
- No sticky bit, or another user's: others can rename whatever is there. They can't write into it.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self  # since Python 3.11

_ROOT = 0
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
OWN_MODE = 0o755
"""Of a folder that only its owner may write to, whatever the umask."""
FILE_MODE = 0o644
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a named pipe would never be opened
_NOT_PLAIN = "it must be a plain file, not a device or a named pipe: remove it"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class UntrustedPath(OSError):
    """Others can have made what has this name, or have led it elsewhere."""


def others_can_write(status: os.stat_result) -> bool:
    """Whether the mode lets the group or others write."""
    return bool(status.st_mode & OTHERS_WRITE)


def others_can_rename(status: os.stat_result, uid: int | None = None) -> bool:
    """Whether others than the user `uid` and root can rename what that user has made in a folder."""
    return _is_foreign(status, uid) or (others_can_write(status) and not status.st_mode & stat.S_ISVTX)


def others_can_lay_links(status: os.stat_result) -> bool:
    """Whether others can lay links in a folder that this user's programs follow. In a sticky folder of all users the
    kernel follows only those of this user and of the folder's owner (fs.protected_symlinks), in one of a group all."""
    return others_can_rename(status) or (others_can_write(status) and not status.st_mode & stat.S_IWOTH)


def _is_foreign(status: os.stat_result, uid: int | None = None) -> bool:
    return status.st_uid not in (_ROOT, os.geteuid() if uid is None else uid)


class HeldFolder:
    """An open folder. A context manager, which closes it.

    All names are names in this folder. Every method raises UntrustedPath for a link, for what belongs to another user,
    and for a name that is a path; and OSError, as the call of the kernel does.
    """

    def __init__(self, descriptor: int, path: Path) -> None:
        """`descriptor`: is closed with this. `path`: for messages."""
        self.descriptor, self.path = descriptor, path

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open a folder that the user has named: links are followed."""
        return cls(os.open(path, _FOLDER), Path(path))

    @classmethod
    def open_to_pass(cls, path: Path | str) -> Self:
        """The same without the right to read it, which the folder above a user's own one may deny (mode 0711): `names`
        and `statuses` don't work, and what needs the name of something in it does."""
        return cls(os.open(f"{path}/.", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), Path(path))  # "/." mounts it

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self.descriptor)

    def status(self) -> os.stat_result:
        """What the kernel says of this folder."""
        return os.fstat(self.descriptor)

    def status_of(self, name: str) -> os.stat_result:
        """What the kernel says of a name; of a link itself."""
        return os.stat(self._one_name(name), dir_fd=self.descriptor, follow_symlinks=False)

    def folder(self, name: str) -> HeldFolder:
        """Open a folder, whoever owns it."""
        return HeldFolder(self._open(name, _FOLDER | os.O_NOFOLLOW), self.path / name)

    def own_folder(self, name: str) -> HeldFolder:
        """Open a folder of this user."""
        found = self.folder(name)
        try:
            self._check_owner(found.status(), found.path)
        except BaseException:
            os.close(found.descriptor)
            raise
        return found

    def make_own_folder(self, name: str, mode: int = OWN_MODE) -> HeldFolder:
        """Make a folder, or open the one that another process of this user has made. Others can't write to it."""
        self.make_folder(name, mode)
        made = self.own_folder(name)
        try:
            if others_can_write(status := made.status()):  # an earlier version made it, or the file system did
                os.fchmod(made.descriptor, stat.S_IMODE(status.st_mode) & ~OTHERS_WRITE)
        except BaseException:
            os.close(made.descriptor)
            raise
        return made

    def make_folder(self, name: str, mode: int) -> None:
        """Make a folder, if there is nothing of that name."""
        with suppress(FileExistsError), self._errors_of(name):
            os.mkdir(self._one_name(name), mode, dir_fd=self.descriptor)

    def names(self) -> list[str]:
        """All names."""
        return os.listdir(self.descriptor)

    def statuses(self) -> Iterator[tuple[str, os.stat_result]]:
        """All names, with what the kernel says of each; of a link itself."""
        for name in self.names():
            with suppress(FileNotFoundError):  # it was removed meanwhile
                yield name, self.status_of(name)

    def open_file(self, name: str) -> int:
        """Open a plain file for reading: one of this user's, of root's, or of whoever owns this folder."""
        descriptor = self._open(name, os.O_RDONLY | _FILE)
        try:
            found = os.fstat(descriptor)
            self._check_plain(found, name)
            if found.st_uid != self.status().st_uid:
                self._check_owner(found, self.path / name)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def create(self, name: str, mode: int = FILE_MODE) -> int:
        """Begin a new file. One that is there is removed first: it may be a link, or the other name of another file."""
        self.remove(name)
        return self._open(name, _NEW, mode)

    def append(self, name: str, mode: int = FILE_MODE) -> int:
        """Open a file of this user for appending; create it if it is not there. It may have no other name."""
        descriptor = self._open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _FILE, mode)
        try:
            found = os.fstat(descriptor)
            self._check_plain(found, name)
            self._check_owner(found, self.path / name)
            if found.st_nlink > 1:
                raise self._untrusted(name, "it is a file that has another name, too: remove this name")
            os.set_blocking(descriptor, True)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def rename(self, name: str, new: str) -> None:
        """Give what has a name another one."""
        names = (self._one_name(name), self._one_name(new))
        with self._errors_of(name):
            os.rename(*names, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def remove(self, name: str) -> None:
        """Remove a file; an absent one is no error."""
        with suppress(FileNotFoundError), self._errors_of(name):
            os.unlink(self._one_name(name), dir_fd=self.descriptor)

    def remove_folder(self, name: str) -> None:
        """Remove an empty folder."""
        with self._errors_of(name):
            os.rmdir(self._one_name(name), dir_fd=self.descriptor)

    def read_link(self, name: str) -> str:
        """Where a link leads."""
        return os.readlink(self._one_name(name), dir_fd=self.descriptor)

    def _open(self, name: str, flags: int, mode: int = 0) -> int:
        try:
            with self._errors_of(name):
                return os.open(self._one_name(name), flags, mode, dir_fd=self.descriptor)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR) and self._is_link(name):
                raise self._untrusted(name, "it is a link, which others may have laid: remove it") from None
            if error.errno == errno.ENXIO:  # a named pipe or a socket, for writing
                raise self._untrusted(name, _NOT_PLAIN) from None
            raise

    @contextmanager
    def _errors_of(self, name: str) -> Iterator[None]:
        """Errors in the block name the whole path."""
        try:
            yield
        except OSError as error:
            error.filename, error.filename2 = str(self.path / name), None
            raise

    def _is_link(self, name: str) -> bool:
        try:
            return stat.S_ISLNK(self.status_of(name).st_mode)
        except FileNotFoundError:
            return False

    def _one_name(self, name: str) -> str:
        if "/" in name or name in ("", ".", ".."):
            raise self._untrusted(name, "it is a path, and must be one name")
        return name

    def _check_plain(self, status: os.stat_result, name: str) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise self._untrusted(name, _NOT_PLAIN)

    def _check_owner(self, status: os.stat_result, path: Path) -> None:
        if _is_foreign(status) and status.st_uid != self._uid_of_new_files():
            raise UntrustedPath(
                errno.EPERM, f"it belongs to uid {status.st_uid}: another user has taken this name", str(path)
            )

    def _uid_of_new_files(self) -> int:
        """The uid that a new file here gets: some file servers give all files to one user."""
        try:
            descriptor, name = tempfile.mkstemp(prefix=".owner-", dir=f"/proc/self/fd/{self.descriptor}")
        except OSError:  # this user can't write here, so the name is another one's
            return os.geteuid()
        try:
            return os.fstat(descriptor).st_uid
        finally:
            os.close(descriptor)
            os.unlink(name)

    def _untrusted(self, name: str, words: str) -> UntrustedPath:
        return UntrustedPath(errno.EPERM, words, str(self.path / name))
