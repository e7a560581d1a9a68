"""Holding the lease: waiting for it, renewing it, and ending at once where it is lost."""

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
EXIT_LEASE = 75
"""EX_TEMPFAIL: starting again is right, as the one that stands by."""


class Keeping:
    """Keeps a lease once it was taken: renews it on a thread of its own, for as long as the event loop moves.

    Args:
        lease: taken before `start`.
        lost: is told why, on any thread; ends the process.
        now: a clock for how long the event loop has stood still; seconds.
    """

    def __init__(self, lease: Lease, lost: Callable[[str], None], now: Callable[[], float] = clock.monotonic) -> None:
        self.lease, self._lost, self._now = lease, lost, now
        self._over = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._felt = 0.0
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def start(self) -> None:
        """Begin; from an event loop, which has to keep running."""
        self._loop = asyncio.get_running_loop()
        self._feel()
        self._thread.start()

    def stop(self) -> None:
        """Give the lease back."""
        self._over.set()
        self._thread.join()
        self.lease.release()

    def permit(self) -> float:
        """Before anything is done: the seconds that the lease still has. Ends the process where it is another's."""
        try:
            self.lease.check()
        except LeaseLost as error:
            self._lost(str(error))
        return max(self.lease.left(), 0.0)

    def _renew(self) -> None:
        patience = self.lease.patience
        while not self._over.wait(patience.renew_s):
            assert self._loop is not None
            with suppress(RuntimeError):  # it is closed: the process is about to end
                self._loop.call_soon_threadsafe(self._feel)
            if self._now() - self._felt > patience.stuck_s:
                self._lost(f"the event loop has stood still for {patience.stuck_s:g} s")
                return
            try:
                self.lease.renew()
            except LeaseLost as error:
                self._lost(str(error))
                return

    def _feel(self) -> None:
        self._felt = self._now()


async def stand_by(lease: Lease, told: asyncio.Event) -> bool:
    """Until the lease is ours: True; or until we are `told` to leave.

    Raises:
        LeaseError: the folder can't be used.
    """
    said = ""
    while not told.is_set():
        if await asyncio.to_thread(lease.try_take):
            return True
        if (holder := lease.holder()) != said:
            _log.info("stands by: %s holds the lease", holder)
            said = holder
        with suppress(TimeoutError):
            async with asyncio.timeout(lease.patience.look_s):
                await told.wait()
    return False


class Watchdog:
    """A timer of the kernel that ends this process by SIGALRM, which nothing here handles.

    Its signal is there before anything else is done by a process that stood still meanwhile. Made on the main thread.
    """

    def __init__(self) -> None:
        # Whoever started us may have had it ignored or blocked, and that is inherited.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])

    def arm(self, seconds: float) -> None:
        """End this process in `seconds`, instead of when it was to end before; 0: never. From any thread."""
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3) if seconds else 0.0)


def end_at_once(why: str) -> NoReturn:
    """End this process without another act: what is under way is nobody's any more."""
    _log.critical("not safe to go on: %s", why)
    os._exit(EXIT_LEASE)
