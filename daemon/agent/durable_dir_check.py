"""Check on every node that `durable_dir` can take a checkpoint, and that the checkpoint would be restored: before the
first step, not when the first checkpoint is written or read.

The batch process writes a random token into the folder. Each agent compares the token, so that all nodes are known to
see the same folder. Several users may share the folder: each has a file of their own there, and what another user has
made in its place is not read.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from pathlib import Path

from muster.checkpoint.durable import store_check, trusted_folder
from muster.checkpoint.durable.locations import is_url
from muster.checkpoint.durable.object_store import PackageMissing
from muster.checkpoint.format import durable_folders

TOKEN_VARIABLE = "MUSTER_DURABLE"
"""Environment variable in which the batch process gives the token to the agents."""
_TOKEN = re.compile(rb"[0-9a-f]{32}")
_READ_BYTES = 64
"""More than a token has."""


def token_file(folder: str, uid: int | None = None) -> Path:
    """The file with the token of the user `uid`; None: of this process's user."""
    return Path(folder, f".muster-{os.geteuid() if uid is None else uid}")


def create_token(folder: str) -> str:
    """Return the token in the folder; write one if there is none. Return an empty string if that fails: the agents
    report why, or nothing is compared. A URL is the same place for all nodes."""
    if is_url(folder):
        return ""
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


def find_problem(folder: str, token: str, *, trusts_store: bool = False) -> str:
    """Return why no checkpoint can be written to `folder`; an empty string if the check finds no problem.

    Args:
        folder: `durable_dir`; empty: the job wants no durable checkpoints.
        token: the result of `create_token` on the batch host; empty: compare no token.
        trusts_store: the job says that whoever may write to a store of objects is trusted.
    """
    if not folder:
        return ""
    if is_url(folder):
        return _find_problem_of_store(folder, trusts_store)
    remedy = "give the job's user the right, or name another folder that all nodes share"
    try:
        Path(folder).mkdir(durable_folders.FOLDER_MODE, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            return f"durable_dir = {folder!r} can't be written to: {remedy}"
        if unsafe := trusted_folder.why_not_restored(Path(folder)):
            return f"durable_dir = {folder!r}: {unsafe}"
        if token and _read_token(token_file(folder)) != token:
            raise FileNotFoundError
    except FileNotFoundError:
        return (
            f"durable_dir = {folder!r} is not the folder that the job's first node sees: name one that all nodes share"
        )
    except OSError as error:
        return f"durable_dir = {folder!r}: {error.strerror}: {remedy}"
    return ""


def _find_problem_of_store(url: str, trusted: bool) -> str:
    if not trusted:
        return f"durable_dir = {url!r} is in a store of objects: it needs checkpoint.trust_durable_store = true"
    try:
        return store_check.find_problem(url)
    except PackageMissing as error:
        return f"durable_dir = {error}"
