"""Whether `durable_dir` will take a checkpoint: asked of every node before the first step, not when a week's work is to
be written.

The batch process leaves a word in the folder, and the agents look for it: so it is known that all of them see the same
one.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

TOKEN_VARIABLE = "MUSTER_DURABLE"
"""The batch process's word, for the agents that it starts."""
TOKEN_FILE = ".muster"


def create_token(folder: str) -> str:
    """The word that stands in the folder, written there if none does; empty where that can't be: the agents say why."""
    file = Path(folder, TOKEN_FILE)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with file.open("x") as fresh:
                fresh.write(word := secrets.token_hex(16))
                return word
        except FileExistsError:
            return file.read_text()
    except OSError:
        return ""


def find_problem(folder: str, word: str) -> str:
    """Why no checkpoint can be written here, in words; empty: it can, as far as can be told.

    Args:
        folder: `durable_dir`; empty: none is wanted.
        word: what `create_token` has given on the batch host; empty: nothing is to be found.
    """
    if not folder:
        return ""
    other = "give the job's user the right, or name another folder that all nodes share"
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            return f"durable_dir = {folder!r} can't be written to: {other}"
        if word and Path(folder, TOKEN_FILE).read_text() != word:
            raise FileNotFoundError
    except FileNotFoundError:
        return (
            f"durable_dir = {folder!r} is not the folder that the job's first node sees: name one that all nodes share"
        )
    except OSError as error:
        return f"durable_dir = {folder!r}: {error.strerror}: {other}"
    return ""
