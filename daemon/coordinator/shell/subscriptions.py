"""Who wants to know: live journal records for followers, and a nudge for watchers of a gang's view.

Neither ever waits for a reader: a follower that falls too far behind is cut off, a watcher just sees the newest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from muster.daemon.coordinator.journal.journal import Record

BACKLOG = 10_000
"""Records that a follower may be behind."""


class Followers:
    """Queues of those who follow the journal."""

    def __init__(self) -> None:
        self._queues: set[asyncio.Queue[Record | None]] = set()

    @contextmanager
    def subscribe(self) -> Iterator[asyncio.Queue[Record | None]]:
        """A queue that gets every record from now on; None tells that the reader was too slow and is cut off."""
        queue: asyncio.Queue[Record | None] = asyncio.Queue(BACKLOG + 1)
        self._queues.add(queue)
        try:
            yield queue
        finally:
            self._queues.discard(queue)

    def publish(self, record: Record) -> None:
        """Hand `record` to every follower."""
        for queue in list(self._queues):
            if queue.qsize() >= BACKLOG:
                self._queues.discard(queue)
                queue.put_nowait(None)
            else:
                queue.put_nowait(record)


class Watchers:
    """Flags of those who watch a gang."""

    def __init__(self) -> None:
        self._flags: dict[str, set[asyncio.Event]] = {}

    @contextmanager
    def subscribe(self, gang: str) -> Iterator[asyncio.Event]:
        """A flag that is set whenever something of `gang` may have changed; whoever waits clears it."""
        flag = asyncio.Event()
        self._flags.setdefault(gang, set()).add(flag)
        try:
            yield flag
        finally:
            self._flags[gang].discard(flag)
            if not self._flags[gang]:
                del self._flags[gang]

    def touch(self, gang: str) -> None:
        """Something of `gang` (empty: of any gang) may have changed."""
        touched = [self._flags.get(gang, set())] if gang else list(self._flags.values())
        for flags in touched:
            for flag in flags:
                flag.set()
