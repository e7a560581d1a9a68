"""Where a run's code comes from: the commit and the changes of the script's repository, and the packages of its Python;
and to which cluster it goes.

All are asked of programs, which may be slow: a repository may be huge, or lie on storage that hangs. Each has a
deadline, and what is not known then is said in words. Nothing of the repository is executed: git's file system
monitor, external diff programs, filters of text and of files, and fetches of what is missing stay off, and no
repository in it is looked into.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from muster.launcher.runs import secrets

DEADLINE_S = 2.0
"""Seconds for all questions together. They are asked while sbatch and the coordinator answer."""
MOST_DIFF_CHARS = 256 * 1024
_GIT = ("git", "-c", "core.fsmonitor=false", "-c", "core.quotePath=false")
_DIFF = (
    "diff",
    "HEAD",
    "--no-ext-diff",
    "--no-textconv",
    "--no-color",
    "--submodule=short",
    "--ignore-submodules=dirty",
)
_PACKAGES = (
    "import importlib.metadata as m, json, platform, sys; "
    "print(json.dumps({'python': platform.python_version(), "
    "'packages': {d.metadata['Name']: d.version for d in m.distributions() if d.metadata['Name']}}))"
)


async def origins(command: Sequence[str], work_dir: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """What is known of the code of `command`, its repository and its packages, and of the cluster. Never raises, never
    takes longer than DEADLINE_S."""
    folder = script_folder(command, work_dir)
    async with asyncio.TaskGroup() as questions:  # a gather that is cancelled would not wait for all of them
        repository = questions.create_task(_within(_repository(folder)))
        packages = questions.create_task(_within(_packages(command, environ)))
        cluster = questions.create_task(cluster_name())
    return {"repository": repository.result(), "interpreter": packages.result(), "cluster": cluster.result()}


async def cluster_name() -> str:
    """The cluster of which this host's Slurm commands speak; empty: not known. Never takes longer than DEADLINE_S."""
    return str((await _within(_cluster())).get("name", ""))


def script_folder(command: Sequence[str], work_dir: str) -> Path:
    """The folder of the first file that the command names as an argument; the working folder if it names none."""
    for word in command[1:]:
        path = Path(work_dir or ".", word)
        with suppress(OSError, ValueError):
            if path.is_file():
                return path.parent
    return Path(work_dir or ".")


async def _within(question: Any) -> dict[str, Any]:
    try:
        async with asyncio.timeout(DEADLINE_S):
            answer: dict[str, Any] = await question
            return answer
    except TimeoutError:
        return {"unknown": f"no answer within {DEADLINE_S:g} s"}


async def _cluster() -> dict[str, Any]:
    shown = await _output("scontrol", "show", "config", most_chars=1 << 16)
    found = re.search(r"^ClusterName *= *(\S+)", shown or "", re.MULTILINE)
    return {"name": found[1]} if found else {}


async def _repository(folder: Path) -> dict[str, Any]:
    """Commit, branch, address and changes; why there is none, if that is so."""
    if shutil.which("git") is None:
        return {"unknown": "git is not installed here"}
    found = await _output(*_GIT, "-C", str(folder), "rev-parse", "--show-toplevel", "HEAD", "--abbrev-ref", "HEAD")
    lines = (found or "").split()
    if len(lines) != 3:
        return {"unknown": f"{folder} is in no repository with a commit"}
    top, commit, branch = lines
    quiet = await _without_filters(top)
    diff = await _output(*_GIT, "-C", top, *_DIFF, environ=quiet, most_chars=MOST_DIFF_CHARS + 1) or ""
    address = await _output(*_GIT, "-C", top, "remote", "get-url", "origin") or ""
    known: dict[str, Any] = {
        "folder": top,
        "commit": commit,
        "branch": branch,
        "diff": secrets.text(diff[:MOST_DIFF_CHARS]),
    }
    if len(diff) > MOST_DIFF_CHARS:
        known["diff_cut"] = True
    return known | ({"address": secrets.text(address.strip())} if address else {})


async def _without_filters(top: str) -> dict[str, str]:
    """The environment in which git filters no file of the repository and fetches nothing. Its settings name programs
    for both."""
    named = await _output(*_GIT, "-C", top, "config", "--null", "--name-only", "--get-regexp", r"^filter\.") or ""
    off = {key: "false" if key.endswith(".required") else "" for key in named.split("\0") if key}
    first = int(os.environ.get("GIT_CONFIG_COUNT") or 0)
    settings = {"GIT_CONFIG_COUNT": str(first + len(off))}
    for number, (key, value) in enumerate(off.items(), first):
        settings |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    return {**os.environ, **settings, "GIT_ALLOW_PROTOCOL": "none"}


async def _packages(command: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any]:
    """The versions of all packages of the command's interpreter, as this host sees it."""
    program = shutil.which(command[0], path=environ.get("PATH")) if command else None
    if program is None or not os.path.basename(program).startswith("python"):
        return {"unknown": "the command starts with no Python that this host has"}
    found = await _output(program, "-c", _PACKAGES, environ=dict(environ), most_chars=1 << 20)
    try:
        known: dict[str, Any] = json.loads(found or "")
    except ValueError:
        return {"unknown": f"{program} does not tell its packages"}
    return {"program": program, **known}


async def _output(*argv: str, environ: dict[str, str] | None = None, most_chars: int = 4096) -> str | None:
    """What a program prints, at most so many characters; None if it fails. It is killed when this is cancelled."""
    quiet = {**(environ or os.environ), "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    nothing = asyncio.subprocess.DEVNULL
    try:
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=nothing, stdout=asyncio.subprocess.PIPE, stderr=nothing, env=quiet
        )
    except OSError:
        return None
    assert process.stdout
    try:
        read = b""
        while len(read) < most_chars and (more := await process.stdout.read(most_chars - len(read))):
            read += more
        if len(read) < most_chars and await process.wait():
            return None
        return read.decode(errors="replace")
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
