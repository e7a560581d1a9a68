"""Where the messages come from: the coordinator, or a recording.

A job comes by Watch and Events: the coordinator sends when something has changed, and nobody asks again and again. Of
all jobs and nodes there is no stream: they are asked for with pauses that are long beside the answer, so that a screen
takes less than a hundredth of what the coordinator has for everybody.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Protocol, TextIO

from muster.daemon.host import clock
from muster.launcher.coordinator_client import CoordinatorClient
from muster.launcher.errors import LauncherError, Unavailable
from muster.launcher.top.messages import Message, to_line
from muster.v1.api_pb2 import EventsRequest, GangRef, ListReply

LIST_PAUSE_S = 5.0
"""Seconds, at least, between two questions for all jobs and nodes."""
_PAUSE_FACTOR = 100
"""So many times the seconds of the answer is the pause at least."""
_Put = Callable[[object], None]


class Feed(Protocol):
    """A source of messages."""

    def now(self) -> float:
        """The time of the messages that come now (seconds since the epoch)."""

    def messages(self, gang_id: str) -> AsyncIterator[Message]:
        """The messages of a job; empty: of all jobs and nodes. Ends when no more can follow."""


class LiveFeed:
    """From the coordinator. `recording`: what comes is written there, too."""

    def __init__(
        self, coordinator: CoordinatorClient, recording: TextIO | None = None, list_pause_s: float = LIST_PAUSE_S
    ) -> None:
        self._coordinator, self._recording, self._list_pause_s = coordinator, recording, list_pause_s

    def now(self) -> float:
        """See Feed.now."""
        return clock.wall()

    async def messages(self, gang_id: str) -> AsyncIterator[Message]:
        """See Feed.messages."""
        arrived: asyncio.Queue[Message | None] = asyncio.Queue()

        def put(content: object) -> None:
            message = Message(clock.wall(), content)  # type: ignore[arg-type]  # each caller puts what a message holds
            if self._recording is not None:
                print(to_line(message), file=self._recording, flush=True)
            arrived.put_nowait(message)

        works = [self._views(gang_id, put), self._events(gang_id, put)] if gang_id else [self._fleet(put)]
        reading = asyncio.create_task(_all(works, arrived))
        try:
            while (message := await arrived.get()) is not None:
                yield message
            await reading
        finally:
            reading.cancel()

    async def _views(self, gang_id: str, put: _Put) -> None:
        async for view in self._coordinator.follow(GangRef(gang_id=gang_id), lambda words: put(_waits(words))):
            put(view)

    async def _events(self, gang_id: str, put: _Put) -> None:
        request = EventsRequest(gang=GangRef(gang_id=gang_id), follow=True)
        # Why nothing comes is said once, by the other stream.
        async for record in self._coordinator.follow_events(request, lambda words: None):
            record.gang_id = gang_id  # what happened to a node of the job has none
            put(record)

    async def _fleet(self, put: _Put) -> None:
        while True:
            began = clock.monotonic()
            try:
                put(ListReply(gangs=await self._coordinator.gangs(brief=True)))
                put(await self._coordinator.nodes())
            except Unavailable as error:
                put(_waits(error.message))
                await self._coordinator.reconnect()
                continue
            except LauncherError as error:  # it may be too busy for this question
                put(error.message)
            await asyncio.sleep(max(self._list_pause_s, _PAUSE_FACTOR * (clock.monotonic() - began)))


def _waits(words: str) -> str:
    return f"{words}; training continues; waiting for the coordinator"


async def _all(works: Sequence[Coroutine[object, object, None]], arrived: asyncio.Queue[Message | None]) -> None:
    """Do all of the works. What ends them becomes the last message."""
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except* LauncherError as errors:
        first = errors.exceptions[0]
        words = first.message if isinstance(first, LauncherError) else str(first)
        arrived.put_nowait(Message(clock.wall(), f"{words}; nothing more comes"))
    finally:
        arrived.put_nowait(None)


class Replay:
    """From a recording, `speed` times as fast. It plays once, whatever is opened meanwhile."""

    def __init__(self, recorded: Sequence[Message], speed: float) -> None:
        self._rest, self._speed = list(reversed(recorded)), speed
        self._first_s, self._last_s = recorded[0].at_s, recorded[-1].at_s
        self._began = clock.monotonic()

    def now(self) -> float:
        """See Feed.now. The time stands still at the end of the recording."""
        return min(self._last_s, self._first_s + (clock.monotonic() - self._began) * self._speed)

    async def messages(self, gang_id: str) -> AsyncIterator[Message]:
        """See Feed.messages."""
        while self._rest:
            await asyncio.sleep(max(0.0, (self._rest[-1].at_s - self.now()) / self._speed))
            yield self._rest.pop()
