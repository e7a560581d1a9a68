"""Subscriptions: live records for readers of the journal, and a flag for readers of a gang's view.

No reader ever blocks the coordinator. A subscription whose reader falls too far behind is ended; a reader of a view
sees the newest view only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class Changes:
    """What has happened to a gang since a reader of its view has cleared the flags."""

    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Its view may have changed."""
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    """Something was decided about it: its view has changed by more than a step of the training."""

    def clear(self) -> None:
        """Nothing has happened."""
        self.changed.clear()
        self.decided.clear()


class GangSubscribers:
    """The flags of those who watch the view of a gang."""

    def __init__(self) -> None:
        self._flags: dict[str, list[Changes]] = {}

    @contextmanager
    def subscribe(self, gang: str) -> Iterator[Changes]:
        """Flags that are set whenever the view of `gang` may have changed. The reader clears them."""
        flags = Changes()
        self._flags.setdefault(gang, []).append(flags)
        try:
            yield flags
        finally:
            self._flags[gang] = [other for other in self._flags[gang] if other is not flags]
            if not self._flags[gang]:
                del self._flags[gang]

    def watched(self) -> list[str]:
        """The gangs that somebody watches."""
        return list(self._flags)

    def notify(self, gang: str, *, decided: bool = False) -> None:
        """Set the flags of `gang` (empty: of all gangs): its view may have changed. `decided`: by a decision."""
        for flags in self._flags.get(gang, []) if gang else [one for each in self._flags.values() for one in each]:
            flags.changed.set()
            if decided:
                flags.decided.set()
