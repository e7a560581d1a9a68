"""How many calls each user has under way at one server, counted before any message is read.

A credential proves a user. A user may send as many calls as they like, and gRPC shows no message before it is complete.
So a call needs two kinds of places. It holds a place of its user from the check of its credential to its end, and a
reading place while its first messages come: no other call may hold a message that is half there. There are few of the
latter, so what one user's half messages take is bounded, whatever they are.

All counts change at once, between two steps of the event loop: no call passes while another one is counted.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any

import grpc.aio

from muster.daemon.transport.calls.call_refused import busy
from muster.daemon.transport.calls.call_share import FREE_BYTES, CallShare


class Places:
    """Counts what happens at the same time. `what`: for the message to a caller who finds no place."""

    def __init__(self, most: int, what: str) -> None:
        self._most = self.free = most
        self._what = what

    def take(self) -> None:
        """Take a place. Raises CallRefused: none is free."""
        if not self.free:
            raise busy(f"{self._most} {self._what} are the most here")
        self.free -= 1

    def give_back(self) -> None:
        """Give back what `take` took."""
        self.free += 1

    @contextmanager
    def one(self) -> Iterator[None]:
        """Take a place for a block. Raises CallRefused: none is free."""
        self.take()
        try:
            yield
        finally:
            self.give_back()


class _User:
    """What one user has under way in one share. `places`: all calls that have not ended. `calls`: those of them that
    count for the user."""

    def __init__(self, reading: int) -> None:
        self.places = self.calls = 0
        self.reading = asyncio.Semaphore(reading)
        self.unread_bytes = self.held_bytes = 0
        self.freed = asyncio.Event()


class CallPlace:
    """The place of one call. `share`: its limits. `uid`: whose it is; None: nobody has proved who calls."""

    def __init__(self, calls: ShareCalls, uid: int | None, user: _User) -> None:
        self.share = calls.share
        self.uid = uid
        self._calls = calls
        self._user = user
        self._admitted: Hashable = None
        self._begun = False
        self._unread = self._held = 0

    def admit(self, who: Hashable) -> None:
        """The call counts for `who`, and for its user no longer: the service has found that `who` may stay. Such calls
        count until they end, too: one that is given up stays while its client reads nothing.

        Raises:
            CallRefused: `who` has too many calls.
        """
        self._calls.take_admitted(who)
        self._user.calls -= 1
        self._admitted = who
        self.hold_only(0)

    def dismiss(self) -> None:
        """The call counts for its user again: the service is done with it. Its client may still keep it from ending."""
        self._calls.leave_admitted(self._admitted)
        self._user.calls += 1
        self._admitted = None

    def end(self) -> None:
        """Give back all that the call holds."""
        if self._admitted is not None:
            self.dismiss()
        self._calls.leave_user(self.uid, self._user)
        self.give_back_unread()
        self.hold_only(0)

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Hold a reading place for a block. Raises CallRefused: none is free for `reading_wait_s`."""
        places = (self._user.reading, self._calls.reading)
        try:
            async with asyncio.timeout(self.share.reading_wait_s):
                await places[0].acquire()
                try:
                    await places[1].acquire()
                except BaseException:
                    places[0].release()
                    raise
        except TimeoutError:
            raise busy(f"{self.share.reading} calls of one user are read at the same time here") from None
        try:
            yield
        finally:
            for place in places:
                place.release()

    async def hold(self, size: int) -> None:
        """Count a message of `size` bytes until the call is admitted, or ends. Waits for room, and the reading place of
        the call with it. Raises CallRefused: there is none for `reading_wait_s`."""
        user, most, counted = self._user, self.share.held_bytes, max(0, size - FREE_BYTES)
        try:
            async with asyncio.timeout(self.share.reading_wait_s):
                while most and counted and user.held_bytes and user.held_bytes + counted > most:
                    await user.freed.wait()
        except TimeoutError:
            raise busy(f"messages of {most} bytes of one user are handled at the same time here") from None
        user.held_bytes += counted
        self._held += counted

    def hold_only(self, size: int) -> None:
        """The service has dropped its messages but for `size` bytes: the rest is room for others of the user."""
        held = min(self._held, max(0, size - FREE_BYTES))
        self._user.held_bytes -= self._held - held
        self._held = held
        self._user.freed.set()
        self._user.freed = asyncio.Event()

    async def begin_answers(
        self, context: grpc.aio.ServicerContext[Any, Any], metadata: tuple[tuple[str, bytes], ...] = ()
    ) -> None:
        """Send the headers of the answers, once. Otherwise gRPC can't end the call while the first one is unread."""
        if not self._begun:
            self._begun = True
            await context.send_initial_metadata(metadata)

    def take_unread(self, size: int) -> None:
        """Count an answer of `size` bytes. One is always allowed. Raises CallRefused: too much is unread."""
        user, most = self._user, self.share.unread_answer_bytes
        if most and user.unread_bytes and user.unread_bytes + size > most:
            raise busy(f"answers of {most} bytes wait for you to read them, the most here")
        user.unread_bytes += size
        self._unread += size

    def give_back_unread(self) -> None:
        """All answers of this call are read, or it has ended."""
        self._user.unread_bytes -= self._unread
        self._unread = 0


class ShareCalls:
    """The calls of one share. `tasks`: those that handle them."""

    def __init__(self, share: CallShare) -> None:
        self.share = share
        self.tasks: set[asyncio.Task[Any]] = set()
        self.reading = asyncio.Semaphore(share.all_reading)
        self._places = Places(share.calls, "calls under way")
        self._users: dict[int | None, _User] = {}
        self._admitted: Counter[Hashable] = Counter()

    def take(self, uid: int | None, more: Callable[[], int] = lambda: 0) -> CallPlace:
        """Take a place until this task, which handles one call, is done. `more`: calls that this user may have beyond
        those of every user. Raises CallRefused: none is free."""
        user = self._users.get(uid) or _User(self.share.reading)
        if user.calls >= self.share.user_calls and user.calls >= self.share.user_calls + more():
            who = "callers without a credential have" if uid is None else f"uid {uid} has"
            raise busy(f"{who} {user.calls} calls under way, the most here")
        self._places.take()
        self._users[uid] = user
        user.places += 1
        user.calls += 1
        place = CallPlace(self, uid, user)
        self._until_the_task_ends(place)
        _place.set(place)
        return place

    def leave_user(self, uid: int | None, user: _User) -> None:
        """One call of a user has ended."""
        user.places -= 1
        user.calls -= 1
        if not user.places:
            del self._users[uid]

    def take_admitted(self, who: Hashable) -> None:
        """Count a call of one who is admitted. Raises CallRefused: there are too many."""
        if self._admitted[who] >= self.share.admitted_calls:
            raise busy(f"{self.share.admitted_calls} calls of this sender have not ended, the most here")
        self._admitted[who] += 1

    def leave_admitted(self, who: Hashable) -> None:
        """A call of one who is admitted has ended."""
        self._admitted[who] -= 1
        if not self._admitted[who]:
            del self._admitted[who]

    def _until_the_task_ends(self, place: CallPlace) -> None:
        task = asyncio.current_task()
        assert task is not None, "gRPC handles each call in a task of its own"

        def end(ended: asyncio.Task[Any]) -> None:
            self.tasks.discard(ended)
            self._places.give_back()
            place.end()

        self.tasks.add(task)
        task.add_done_callback(end)


_place: ContextVar[CallPlace | None] = ContextVar("muster_call_place", default=None)


def current_place() -> CallPlace | None:
    """The place of the call that is being handled; None: a test calls a handler without a server."""
    return _place.get()


@contextmanager
def admitted_call(who: Hashable) -> Iterator[None]:
    """See `CallPlace.admit`. After the block the call counts for its user again, until it ends: `who` may be gone by
    then, and a client that reads nothing keeps its call for as long as it likes."""
    place = _place.get()
    if not place:
        yield
        return
    place.admit(who)
    try:
        yield
    finally:
        place.dismiss()
