"""Check on every node that `durable_dir` can take a checkpoint, and that the checkpoint would be restored: before the
first step, not when the first checkpoint is written or read.

The batch process writes a random token into the folder. Each agent compares the token, so that all nodes are known to
see the same folder.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from muster.checkpoint.format import durable_folders, trusted_folder

TOKEN_VARIABLE = "MUSTER_DURABLE"
"""Environment variable in which the batch process gives the token to the agents."""
TOKEN_FILE = ".muster"


def create_token(folder: str) -> str:
    """Return the token in the folder; write one if there is none. Return an empty string if that fails: the agents
    report why."""
    file = Path(folder, TOKEN_FILE)
    try:
        file.parent.mkdir(durable_folders.FOLDER_MODE, parents=True, exist_ok=True)
        try:
            with file.open("x") as fresh:
                fresh.write(token := secrets.token_hex(16))
                return token
        except FileExistsError:
            return file.read_text()
    except OSError:
        return ""


def find_problem(folder: str, token: str) -> str:
    """Return why no checkpoint can be written to `folder`; an empty string if the check finds no problem.

    Args:
        folder: `durable_dir`; empty: the job wants no durable checkpoints.
        token: the result of `create_token` on the batch host; empty: compare no token.
    """
    if not folder:
        return ""
    remedy = "give the job's user the right, or name another folder that all nodes share"
    try:
        Path(folder).mkdir(durable_folders.FOLDER_MODE, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            return f"durable_dir = {folder!r} can't be written to: {remedy}"
        if unsafe := trusted_folder.why_not_restored(Path(folder)):
            return f"durable_dir = {folder!r}: {unsafe}"
        if token and Path(folder, TOKEN_FILE).read_text() != token:
            raise FileNotFoundError
    except FileNotFoundError:
        return (
            f"durable_dir = {folder!r} is not the folder that the job's first node sees: name one that all nodes share"
        )
    except OSError as error:
        return f"durable_dir = {folder!r}: {error.strerror}: {remedy}"
    return ""
