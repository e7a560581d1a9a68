"""Check on every node that `durable_dir` can take a checkpoint, and that the checkpoint would be restored: before the
first step, not when the first checkpoint is written or read.
"""

from __future__ import annotations

import os
from pathlib import Path

from muster.checkpoint.durable import locations, trusted_folder
from muster.checkpoint.durable.locations import is_url
from muster.checkpoint.durable.object_store import PackageMissing
from muster.checkpoint.format import durable_folders
from muster.daemon.agent.start_checks import shared_folder


def create_token(folder: str) -> str:
    """As `shared_folder.create_token`. A URL is the same place for all nodes."""
    return "" if not folder or is_url(folder) else shared_folder.create_token(folder)


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
        if another := shared_folder.why_another(folder, token):
            return f"durable_dir = {folder!r} {another}"
    except OSError as error:
        return f"durable_dir = {folder!r}: {error.strerror}: {remedy}"
    return ""


def _find_problem_of_store(url: str, trusted: bool) -> str:
    if not trusted:
        return f"durable_dir = {url!r} is in a store of objects: it needs checkpoint.trust_durable_store = true"
    try:
        return locations.find_problem(url)
    except PackageMissing as error:
        return f"durable_dir = {error}"
