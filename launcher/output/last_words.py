"""The last words of a job that has failed: the end of the log of the rank that failed first.

The coordinator names the rank in the reason. The log is a file in the job's run folder, so it is there when the
coordinator has forgotten what the rank wrote. Shared storage may hang, so nobody waits long for it.
"""

from __future__ import annotations

import asyncio
import re
from functools import partial

from muster.daemon.host import rank_log_files
from muster.daemon.host.plain_text import cut
from muster.daemon.host.worker_threads import run_in_own_thread
from muster.v1.api_pb2 import GangView

MOST_LINES, MOST_CHARS = 12, 400
"""Lines of the log, and characters of each."""
READ_S = 2.0
"""Seconds that the file may take."""
_RANK = re.compile(r"\brank (\d{1,9}) on \S+ (?:exited with|was ended by signal) ")
"""As failures._exit_reason of the coordinator's core writes it."""


def first_to_fail(view: GangView) -> int | None:
    """The rank that ended the job; None: it goes on, or no rank has ended it."""
    found = _RANK.search(view.reason) if view.final and view.phase == "FAILED" else None
    return int(found[1]) if found else None


async def last_words(view: GangView) -> list[str]:
    """The last lines of its log, plain; empty: there are none, or they can't be read from here."""
    rank = first_to_fail(view)
    if rank is None:
        return []
    read = partial(rank_log_files.log_tail, view.run_dir, view.gang_id, view.generation, rank)
    try:
        async with asyncio.timeout(READ_S):
            return lines_of(await run_in_own_thread(read, "muster-last-words"))
    except TimeoutError:
        return [f"(the log of rank {rank} can't be read: no answer for {READ_S:g} s)"]


def lines_of(text: str) -> list[str]:
    """The last lines of a log. A progress bar goes back to the start of its line: its last state counts."""
    states = (line.rstrip().rpartition("\r")[2] for line in text.split("\n"))
    return [cut(line.replace("\t", "    "), MOST_CHARS) for line in states if line.strip()][-MOST_LINES:]
