"""A state folder that can't be written for now: the coordinator waits, and goes on once it can.

A disk that is full or read-only ends a coordinator that is about to write a fact. Without this wait, systemd would
start it again and again, each second, until the disk is repaired. The wait holds no lease and listens on no port. Other
faults of the folder are left to the journal, which ends the process.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from contextlib import suppress
from pathlib import Path

from muster.daemon.host.lasting_problem import LastingProblem

ROOM_BYTES = 4 << 20
"""Bytes that must be free before a coordinator starts: the term, and some hundred recoveries."""
RETRY_S = 1.0
"""Seconds between two tries to write."""
_FULL, _READ_ONLY = frozenset({errno.ENOSPC, errno.EDQUOT}), frozenset({errno.EROFS})
_log = logging.getLogger(__name__)


async def wait_until_writable(folder: Path, stop_requested: asyncio.Event) -> None:
    """Wait until the disk of `folder` is neither full nor read-only, or until `stop_requested` is set."""
    problem = LastingProblem(_log, f"{folder} can be written again")
    while not stop_requested.is_set() and (words := await asyncio.to_thread(find_problem, folder)):
        problem.meet(f"the coordinator waits and does not act: {words}")
        with suppress(TimeoutError):
            async with asyncio.timeout(RETRY_S):
                await stop_requested.wait()
    problem.end()


def find_problem(folder: Path) -> str:
    """What keeps the coordinator from writing in `folder`, and what would be right; empty if the disk is neither full
    nor read-only. May block as long as the disk does."""
    try:
        _write_and_remove(folder / "room")
    except OSError as error:
        if error.errno in _FULL:
            return f"the disk of {folder} is full ({error.strerror}): free at least {ROOM_BYTES >> 20} MiB there"
        if error.errno in _READ_ONLY:
            return f"the disk of {folder} is read-only: mount it so that it can be written"
    return ""


def _write_and_remove(path: Path) -> None:
    handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(handle, 0, ROOM_BYTES)
        os.fsync(handle)
    finally:
        os.close(handle)
        path.unlink(missing_ok=True)
