"""Whether all nodes of a job see the same folder: the job's first node writes a random token into it, and each agent
compares it. That is true of every file system, whatever its kind.

Several users may share the folder: each has a file of their own there, and what another user has made in its place is
not read.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from pathlib import Path

from muster.checkpoint.format import durable_folders

IS_ANOTHER = "is not the folder that the job's first node sees: name one that all nodes share"
_TOKEN = re.compile(rb"[0-9a-f]{32}")
_READ_BYTES = 64
"""More than a token has."""


def token_file(folder: str, uid: int | None = None) -> Path:
    """The file with the token of the user `uid`; None: of this process's user."""
    return Path(folder, f".muster-{os.geteuid() if uid is None else uid}")


def create_token(folder: str) -> str:
    """Return the token in the folder; write one if there is none. Return an empty string if that fails: the agents
    report why, or nothing is compared."""
    file = token_file(folder)
    try:
        file.parent.mkdir(durable_folders.FOLDER_MODE, parents=True, exist_ok=True)
        try:
            with file.open("x") as fresh:
                fresh.write(secrets.token_hex(16))
        except FileExistsError:
            pass
        return _read_token(file)
    except OSError:
        return ""


def is_another(folder: str, token: str) -> bool:
    """Whether the folder is not the one with the token of the job's first node.

    Args:
        token: the result of `create_token` there; empty: nothing is compared.

    Raises:
        OSError: the token can't be read.
    """
    try:
        return bool(token) and _read_token(token_file(folder)) != token
    except (FileNotFoundError, NotADirectoryError):
        return True


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
