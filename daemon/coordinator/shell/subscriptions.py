"""Subscriptions: live records for readers of the journal, and a flag for readers of a gang's view.

No reader ever blocks the coordinator. A subscription whose reader falls too far behind is ended; a reader of a view
sees the newest view only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from muster.daemon.coordinator.journal.history import Record

MAX_BACKLOG = 10_000
"""Records that a subscriber of the journal may be behind."""


class JournalSubscribers:
    """The queues of those who read the journal live."""

    def __init__(self) -> None:
        self._queues: set[asyncio.Queue[Record | None]] = set()

    @property
    def count(self) -> int:
        """How many queues are filled."""
        return len(self._queues)

    @contextmanager
    def subscribe(self) -> Iterator[asyncio.Queue[Record | None]]:
        """A queue that gets every record from now on. None in the queue: the reader gets no more,
        because it was too slow or `end_all` was called."""
        queue: asyncio.Queue[Record | None] = asyncio.Queue(MAX_BACKLOG + 1)
        self._queues.add(queue)
        try:
            yield queue
        finally:
            self._queues.discard(queue)

    def publish(self, record: Record) -> None:
        """Put `record` into every queue."""
        for queue in list(self._queues):
            if queue.qsize() >= MAX_BACKLOG:
                self._queues.discard(queue)
                queue.put_nowait(None)
            else:
                queue.put_nowait(record)

    def end_all(self) -> None:
        """Put None into every queue: no reader gets more."""
        for queue in self._queues:
            queue.put_nowait(None)
        self._queues.clear()


class GangSubscribers:
    """The flags of those who watch the view of a gang."""

    def __init__(self) -> None:
        self._flags: dict[str, set[asyncio.Event]] = {}

    @contextmanager
    def subscribe(self, gang: str) -> Iterator[asyncio.Event]:
        """A flag that is set whenever the view of `gang` may have changed. The reader clears the flag."""
        flag = asyncio.Event()
        self._flags.setdefault(gang, set()).add(flag)
        try:
            yield flag
        finally:
            self._flags[gang].discard(flag)
            if not self._flags[gang]:
                del self._flags[gang]

    def watched(self) -> list[str]:
        """The gangs that somebody watches."""
        return list(self._flags)

    def notify(self, gang: str) -> None:
        """Set the flags of `gang` (empty: of all gangs): its view may have changed."""
        changed = [self._flags.get(gang, set())] if gang else list(self._flags.values())
        for flags in changed:
            for flag in flags:
                flag.set()
