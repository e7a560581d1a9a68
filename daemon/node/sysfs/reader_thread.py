"""Reads files in a thread, with a deadline: a driver that waits for dying hardware can hold a read for minutes.

Such a read can't be ended. Until it returns, no other one is started, so one thread hangs at most. The thread stays
between reads: a new one for each read takes memory that the allocator does not give back.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class ReadHangs(Exception):
    """The files did not answer within the deadline, or an earlier read still waits for them."""


class ReaderThread(Generic[T]):
    """Calls `work` in a thread of its own. `deadline_s`: seconds that a call may take."""

    def __init__(self, work: Callable[[], T], deadline_s: float) -> None:
        self._work = work
        self._deadline_s = deadline_s
        self._asked: SimpleQueue[asyncio.Future[T] | None] | None = None
        self._running: asyncio.Future[T] | None = None

    async def read(self) -> T:
        """What `work` returns.

        Raises:
            ReadHangs: see above.
        """
        if self._running is None:
            self._running = asyncio.get_running_loop().create_future()
            self._queue().put(self._running)
        done, _ = await asyncio.wait([self._running], timeout=self._deadline_s)
        if not done:
            raise ReadHangs(f"no answer for {self._deadline_s:g} s")
        finished, self._running = self._running, None
        return finished.result()

    def close(self) -> None:
        """End the thread, as soon as its read returns. A later `read` starts another one."""
        if self._asked is not None:
            self._asked.put(None)
        self._asked = self._running = None

    def _queue(self) -> SimpleQueue[asyncio.Future[T] | None]:
        if self._asked is None:
            self._asked = SimpleQueue()
            # A daemon thread: a read that hangs must not hold up the end of the process.
            threading.Thread(target=self._answer, args=(self._asked,), name="sysfs", daemon=True).start()
        return self._asked

    def _answer(self, asked: SimpleQueue[asyncio.Future[T] | None]) -> None:
        while (future := asked.get()) is not None:
            try:
                answer = partial(future.set_result, self._work())
            except BaseException as error:  # noqa: BLE001  # the caller gets it
                answer = partial(future.set_exception, error)
            _call(future, answer)


def _call(future: asyncio.Future[T], answer: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the loop has ended meanwhile
        future.get_loop().call_soon_threadsafe(answer)
