"""What a node lacks for a job, found when its agent starts: before it attaches, and so before the first generation.

The batch process on the job's first node gives the tokens of the job's folders to the agents, in their environment.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from muster.checkpoint.durable import locations, trusted_folder
from muster.checkpoint.durable.locations import is_url
from muster.checkpoint.durable.object_store import PackageMissing
from muster.checkpoint.format import durable_folders
from muster.daemon.agent.start_checks import job_paths, shared_folder
from muster.daemon.host.process.cgroup_memory import MemoryLeft, memory_limit
from muster.v1.common_pb2 import JobSpec
from muster.wording import gigabytes

RUN_TOKEN = "MUSTER_RUN_TOKEN"
"""Environment variable with the token in run_dir."""
DURABLE_TOKEN = "MUSTER_DURABLE"
"""Environment variable with the token in durable_dir."""
USER_NAME = "MUSTER_USER_NAME"
"""Environment variable with the name of the job's user as the first node knows it. Empty: it knows none."""


def write_tokens(spec: JobSpec, environ: MutableMapping[str, str]) -> None:
    """Write a token into each folder that all nodes of the job must share. Put the tokens, and what else the nodes are
    compared by, into the environment of the agents."""
    environ[RUN_TOKEN] = shared_folder.create_token(spec.run_dir)
    environ[DURABLE_TOKEN] = durable_token(spec.durable_dir)
    environ[USER_NAME] = _name_of(os.getuid())


def find_problems(spec: JobSpec, environ: Mapping[str, str], search_path: str) -> str:
    """All that this node lacks, in words; empty: nothing.

    Args:
        environ: the environment that Slurm gave to this agent.
        search_path: PATH of the ranks.
    """
    problems = [
        problem_of_user(os.getuid(), environ.get(USER_NAME, "")),
        _problem_of_run_dir(spec.run_dir, environ.get(RUN_TOKEN, "")),
        *(missing.full for missing in job_paths.find_missing(spec.work_dir, spec.command, search_path)),
        problem_of_durable_dir(spec.durable_dir, environ.get(DURABLE_TOKEN, ""), trusts_store=spec.trust_durable_store),
        problem_of_memory(spec.memory_bytes, memory_limit()),
    ]
    return "; ".join(filter(None, problems))


def problem_of_user(uid: int, name: str) -> str:
    """Why scripts that ask for their user's name or home fail here and not on the first node; empty: they don't.

    Slurm starts a job on a node whose name service does not know its user. Nothing is wrong where no node knows it.

    Args:
        name: the user on the job's first node; empty: nothing is compared.
    """
    if not name or _name_of(uid):
        return ""
    return f"the user {name} is not known here, and is on the job's first node: getent passwd {uid} must find them"


def problem_of_memory(needed: int, limit: MemoryLeft | None) -> str:
    """Why memory checkpoints can't fit into what Slurm allows the job on this node; empty: they may.

    `muster submit` has compared them with --mem, or with the whole node. The limit also follows from the site's
    AllowedRAMSpace, and from the node that Slurm chose.

    Args:
        needed: bytes; 0: not known.
    """
    if limit is None or needed <= limit.of_bytes:
        return ""
    return (
        f"memory checkpoints need {gigabytes(needed)} of this node, and {limit.limit} is {gigabytes(limit.of_bytes)}: "
        "ask for more (--mem), or set checkpoint.memory = false"
    )


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return ""


def _problem_of_run_dir(folder: str, token: str) -> str:
    try:
        if another := shared_folder.why_another(folder, token):
            return f"run_dir = {folder!r} {another}"
    except OSError as error:
        return f"run_dir = {folder!r}: {error.strerror}"
    if not os.path.isdir(folder):
        return f"run_dir = {folder!r} does not exist: name a folder that all nodes share"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"run_dir = {folder!r} can't be written to: give the job's user the right"
    return ""


def durable_token(folder: str) -> str:
    """As `shared_folder.create_token`, for `durable_dir`. A URL is the same place for all nodes."""
    return "" if not folder or is_url(folder) else shared_folder.create_token(folder)


def problem_of_durable_dir(folder: str, token: str, *, trusts_store: bool = False) -> str:
    """Why no checkpoint can be written to `folder`, or would be restored from it; empty: nothing is found. It is known
    before the first step, not when the first checkpoint is written or read.

    Args:
        folder: `durable_dir`; empty: the job wants no durable checkpoints.
        token: the result of `durable_token` on the batch host; empty: compare no token.
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
