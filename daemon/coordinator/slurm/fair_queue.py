"""A limit on what happens at the same time, shared fairly among users.

A user who waits for many places delays the others by one place each: free places go to the waiting users in turn.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairQueue:
    """`places` things at the same time. It belongs to one event loop."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: OrderedDict[int, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def place(self, uid: int) -> AsyncIterator[None]:
        """Wait for a place for `uid`, and hold it during the block."""
        await self._take(uid)
        try:
            yield
        finally:
            self._give_back()

    async def _take(self, uid: int) -> None:
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(uid, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back()  # the turn came at the same moment
            raise

    def _give_back(self) -> None:
        while self._waiting:
            uid, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[uid] = turns  # behind the other users
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
