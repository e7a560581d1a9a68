"""The logs of a job's ranks stay within the job's limit, as far as old ones can be removed.

The kernel writes from a rank directly to its file, so nothing cuts a file that grows. The agent of rank 0 removes logs
of generations that are over, when a generation starts and now and then while it runs. What is too much even so is said.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from muster.daemon.host import rank_log_files
from muster.daemon.host.lasting_problem import LastingProblem
from muster.daemon.host.worker_threads import run_in_own_thread

log = logging.getLogger(__name__)
LOOK_S, AGAIN_S = 10.0, 600.0
"""Seconds between two looks whether a generation has started, and between two looks at the files of one."""


class LogLimit:
    """Removes old logs of `gang` in `run_dir`.

    Args:
        most_bytes: of all logs of the gang; 0: no limit.
        generation: the running generation, if this node runs its rank 0; else 0.
    """

    def __init__(
        self,
        run_dir: str,
        gang: str,
        most_bytes: int,
        generation: Callable[[], int],
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._run_dir, self._gang, self._most_bytes = run_dir, gang, most_bytes
        self._generation, self._pause = generation, pause
        self._looked_at, self._left_s = 0, 0.0
        self._too_much = LastingProblem(log, "the logs of the ranks are within their limit again")
        self._unread = LastingProblem(log, "old logs of the ranks can be removed again")

    async def run(self) -> None:
        """Look until cancelled."""
        while self._most_bytes:
            await self.look()
            await self._pause(LOOK_S)

    async def look(self) -> None:
        """Remove old logs if a generation has started here, or runs for long."""
        generation = self._generation()
        self._left_s -= LOOK_S
        if not generation or (generation == self._looked_at and self._left_s > 0):
            return
        self._looked_at, self._left_s = generation, AGAIN_S
        remove = partial(rank_log_files.remove_old, self._run_dir, self._gang, generation, self._most_bytes)
        try:
            left, removed = await run_in_own_thread(remove, "muster-logs")
        except FileNotFoundError:  # no rank has opened its log yet
            return
        except OSError as error:
            self._unread.meet(f"old logs of the ranks can't be removed: {error}")
            return
        self._unread.end()
        if removed:
            log.info("logs of old generations removed: %d; the logs take %.1f GB now", removed, left / 1e9)
        if left > self._most_bytes:
            self._too_much.meet(
                f"the logs of the job take more than log_limit_gb = {self._most_bytes / 1e9:g}, and hold only the "
                "newest generations and ranks that have failed: nothing is cut; let the ranks write less"
            )
        else:
            self._too_much.end()
