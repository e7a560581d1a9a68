"""Whether all nodes of a job see the same folder: the job's first node writes a random token into it, and each agent
compares it. That is true of every file system, whatever its kind.

Several users may share the folder: each has a file of their own there. What another user has made in its place is not
read: then the token is in a second file, whose name holds it.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from muster.checkpoint.format import durable_folders
from muster.daemon.host.held_folder import others_can_rename

_TOKEN = re.compile(rb"[0-9a-f]{32}")
_READ_BYTES = 64
"""More than a token has."""


def token_file(folder: str, uid: int | None = None) -> Path:
    """The file with the token of the user `uid`; None: of this process's user."""
    return Path(folder, f".muster-{os.geteuid() if uid is None else uid}")


def _second_file(folder: str, token: str) -> Path:
    return Path(f"{token_file(folder)}-{token}")


def create_token(folder: str) -> str:
    """Return the token in the folder; write one if there is none. Return an empty string if that fails: the agents
    report why, or nothing is compared."""
    file = token_file(folder)
    try:
        file.parent.mkdir(durable_folders.FOLDER_MODE, parents=True, exist_ok=True)
        with suppress(OSError):
            if found := _written(file, secrets.token_hex(16)):
                return found
        token = secrets.token_hex(16)
        second = _second_file(folder, token)
        if not (found := _written(second, token)):
            second.unlink()  # this file server gives all files to one user
        return found
    except OSError:
        return ""


def _written(file: Path, token: str) -> str:
    """The token in `file`, which is written if there is none yet. Raises OSError."""
    with suppress(FileExistsError), file.open("x") as fresh:
        fresh.write(token)
    return _read_token(file)


def why_another(folder: str, token: str) -> str:
    """Why the folder can't be taken for the one with the token of the job's first node; empty: it is that one.

    Args:
        token: the result of `create_token` there; empty: nothing is compared.

    Raises:
        OSError: the token can't be read.
    """
    if not token or _holds(_second_file(folder, token), token) or _holds(token_file(folder), token):
        return ""
    removed = ""
    with suppress(OSError):
        if others_can_rename(os.stat(folder)):
            removed = f", or another user has removed {token_file(folder).name} from it (chmod +t prevents that)"
    return f"is not the folder that the job's first node sees{removed}: name one that all nodes share"


def _holds(file: Path, token: str) -> bool:
    try:
        return _read_token(file) == token
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):  # it is not there, or a link
            raise
        return False


def _read_token(file: Path) -> str:
    """The token in a file of this user; an empty string if it is another user's, or holds no token. Some file servers
    give all files to one user: then nothing is compared.

    Raises:
        OSError: it can't be read.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # it may be a named pipe
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            return ""
        text = os.read(descriptor, _READ_BYTES)
    finally:
        os.close(descriptor)
    return text.decode() if _TOKEN.fullmatch(text) else ""
