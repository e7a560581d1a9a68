"""Which durable checkpoints may be unpickled: unpickling runs what the file says, as the user of the training job.

A checkpoint is believed if nobody but the job's user and root can have written it:

- The folder and each file that is read belong to the job's user or to root.
- Neither the group nor others may write to them, or to the folder that the checkpoint lies in. That one may have the
  sticky bit instead, like /tmp.

The folder is opened once, and the checks look at that descriptor. The files are then read through it, so what was
checked is what is read: nobody else can exchange a file of a folder that only its owner can write to.

Unlike StrictModes of sshd, the folders further above are not checked. Whoever can rename one can bring in another
folder, but only one that passes the same checks: another checkpoint of the same owner. And inside a container
of a user, the folders above often belong to "nobody".
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import TracebackType
from typing import Self

from muster.checkpoint.format.errors import UntrustedCheckpoint

_ROOT = 0
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def why_not_restored(folder: Path) -> str:
    """Why checkpoints that lie in `folder` would not be restored; empty: nothing is known against it.

    Raises:
        OSError: it can't be looked at.
    """
    mode = folder.stat().st_mode
    if not _others_can_write(mode, sticky_is_safe=True):
        return ""
    return (
        f"others can write to {folder} (mode {stat.S_IMODE(mode):04o}), so its checkpoints would not be restored: "
        f"chmod go-w {folder} (or, if several users share it, chmod +t {folder})"
    )


def _others_can_write(mode: int, *, sticky_is_safe: bool) -> bool:
    return bool(mode & _OTHERS_WRITE) and not (sticky_is_safe and mode & stat.S_ISVTX)


class TrustedFolder:
    """A checkpoint folder that may be read, while the block of `with` lasts.

    Raises:
        UntrustedCheckpoint: others can have written it.
        OSError: it is no folder, or can't be read.
    """

    def __init__(self, folder: Path | str, uid: int | None = None) -> None:
        """`uid`: the user who reads; None: this process's."""
        self._folder = folder = Path(folder)
        self._uid = os.geteuid() if uid is None else uid
        self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._check(os.fstat(self._descriptor), folder)
            self._check(os.stat("..", dir_fd=self._descriptor), folder.absolute().parent, sticky_is_safe=True)
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    @property
    def path(self) -> Path:
        """The opened folder itself, whatever has its name now. Files must be read below this path."""
        return Path(f"/proc/self/fd/{self._descriptor}")

    def check_file(self, name: str) -> None:
        """Check a file of the folder before it is read.

        Raises:
            UntrustedCheckpoint: others can have written it, or it is no plain file of this folder.
            OSError: it can't be read.
        """
        if os.path.basename(name) != name:
            raise UntrustedCheckpoint(f"{self._folder} names the file {name!r}, which is not a file of this folder")
        found = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode):
            raise UntrustedCheckpoint(f"{self._folder / name} must be a plain file, not a link or a device")
        self._check(found, self._folder / name)

    def _check(self, found: os.stat_result, path: Path, *, sticky_is_safe: bool = False) -> None:
        why = "it would run as your user if it were loaded"
        if found.st_uid not in (_ROOT, self._uid) and not sticky_is_safe:
            raise UntrustedCheckpoint(
                f"{path} belongs to uid {found.st_uid}, not to you (uid {self._uid}) or root: {why}. "
                "Copy the checkpoint as your own user if you trust that user"
            )
        if _others_can_write(found.st_mode, sticky_is_safe=sticky_is_safe):
            raise UntrustedCheckpoint(
                f"others can write to {path} (mode {stat.S_IMODE(found.st_mode):04o}), so the checkpoint may not be "
                f"yours: {why}. If you trust what is there: chmod go-w {path}"
            )
