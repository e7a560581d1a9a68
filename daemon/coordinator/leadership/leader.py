"""Leadership as a process sees it: wait for the lease, renew it, and exit at once if it is lost."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from muster.daemon.coordinator.leadership.lease import Lease, LeaseLost
from muster.daemon.host import clock

_log = logging.getLogger(__name__)
EXIT_LEASE_LOST = 75
"""EX_TEMPFAIL: systemd should start the process again, as the standby."""


class LeaseKeeper:
    """Renews an acquired lease on a thread of its own, for as long as the event loop runs.

    Args:
        lease: acquired before `start`.
        on_lost: is called with the reason, on any thread; ends the process.
        now: the clock that measures how long the event loop has not run; seconds.
    """

    def __init__(
        self, lease: Lease, on_lost: Callable[[str], None], now: Callable[[], float] = clock.monotonic
    ) -> None:
        self.lease, self._on_lost, self._now = lease, on_lost, now
        self._stopping = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_ran_at = 0.0
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def start(self) -> None:
        """Start to renew. Called on the event loop whose progress the renewals depend on."""
        self._loop = asyncio.get_running_loop()
        self._note_loop_ran()
        self._thread.start()

    def stop(self) -> None:
        """Stop to renew and release the lease."""
        self._stopping.set()
        self._thread.join()
        self.lease.release()

    def guard(self) -> float:
        """Seconds for which this process still holds the lease. Ends the process if it does not hold the lease.

        Call it before every action that only the leader may do (`slurm/client/deadline.py`).
        """
        try:
            self.lease.check()
        except LeaseLost as error:
            self._on_lost(str(error))
        return max(self.lease.remaining_s(), 0.0)

    def _renew(self) -> None:
        timeouts = self.lease.timeouts
        while not self._stopping.wait(timeouts.renew_interval_s):
            assert self._loop is not None
            with suppress(RuntimeError):  # the loop is closed: the process is about to end
                self._loop.call_soon_threadsafe(self._note_loop_ran)
            if self._now() - self._loop_ran_at > timeouts.loop_stalled_s:
                self._on_lost(f"the event loop has not run for {timeouts.loop_stalled_s:g} s")
                return
            try:
                self.lease.renew()
            except LeaseLost as error:
                self._on_lost(str(error))
                return

    def _note_loop_ran(self) -> None:
        self._loop_ran_at = self._now()


async def wait_for_lease(lease: Lease, stop_requested: asyncio.Event) -> bool:
    """Stand by until this process has acquired `lease` (True) or `stop_requested` is set (False).

    Raises:
        LeaseError: the folder can't be used.
    """
    logged_holder = ""
    while not stop_requested.is_set():
        if await asyncio.to_thread(lease.try_acquire):
            return True
        if (holder := lease.describe_holder()) != logged_holder:
            _log.info("standing by: %s holds the lease", holder)
            logged_holder = holder
        with suppress(TimeoutError):
            async with asyncio.timeout(lease.timeouts.poll_interval_s):
                await stop_requested.wait()
    return False


class Watchdog:
    """A kernel timer that ends this process by SIGALRM, for which there is no handler.

    A process that was suspended receives the signal before it executes anything else. Create it on the main thread.
    """

    def __init__(self) -> None:
        # A parent may have ignored or blocked the signal; children inherit both.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])

    def arm(self, seconds: float) -> None:
        """End this process in `seconds`, in place of the earlier setting; 0: never. Callable on any thread."""
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3) if seconds else 0.0)


def exit_at_once(reason: str) -> NoReturn:
    """End this process without cleanup: another coordinator may own what this one has begun."""
    _log.critical("not safe to go on: %s", reason)
    os._exit(EXIT_LEASE_LOST)
