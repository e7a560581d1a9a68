"""Folders that this user has made, in a place where other users can make names, too.

A folder that several users share may have the sticky bit, or belong to one of them. Another user who knows a name
beforehand can make it first. Links in that folder would then lead what is written to other files of this user.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path

FOLDER_MODE = 0o777
"""The user's umask takes away from it."""


def make(folder: Path, mode: int = FOLDER_MODE, uid: int | None = None) -> None:
    """Create `folder`, or find the one that another process of this user has created. Its parent must exist.

    `uid`: this user; None: that of this process.

    Raises:
        FileExistsError: it belongs to another user, or is no folder.
        OSError: it can't be created.
    """
    try:
        folder.mkdir(mode)
    except FileExistsError:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise FileExistsError(errno.EEXIST, "it is no folder", str(folder)) from None
        own = os.geteuid() if uid is None else uid
        if found.st_uid != own and found.st_uid != _uid_of_new_files(folder.parent):
            words = f"it belongs to uid {found.st_uid}: another user has taken this name"
            raise FileExistsError(errno.EEXIST, words, str(folder)) from None


def _uid_of_new_files(folder: Path) -> int:
    """The uid that a new file in `folder` gets: some file servers give all files to one user."""
    descriptor, name = tempfile.mkstemp(prefix=".owner-", dir=folder)
    try:
        return os.fstat(descriptor).st_uid
    finally:
        os.close(descriptor)
        os.unlink(name)
