"""What watchers are sent: the view of a gang whenever it has changed, and the records of the journal."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.stored_names import stored_class
from muster.daemon.coordinator.journal.history import MOST_POSITION, Record
from muster.daemon.coordinator.journal.journal import Journal, JournalError
from muster.daemon.coordinator.services.callers_gangs import LastingRight
from muster.daemon.coordinator.services.rpc_errors import internal, invalid_argument
from muster.daemon.coordinator.shell.subscriptions import Changes, GangSubscribers
from muster.daemon.host import clock
from muster.v1 import api_pb2 as pb

HISTORY_PAGE_RECORDS, HISTORY_PAGE_CHARS = 500, 256 * 1024
"""Records of history, and their characters, that are read at once. Reading them takes some milliseconds."""

MIN_VIEW_INTERVAL_S = 0.1
"""Minimum of seconds between two views that are sent to one client."""

WATCHERS_SHARE = 0.008
"""Of a core, for all who watch together while nothing is decided: with many of them, views come less often."""

SEND_S, SEND_S_PER_BYTE = 1e-3, 4e-9
"""CPU seconds to wake the call of one client and to send a view to it: of each view, and of each byte. What making the
view costs is measured. Where views come one by one, no cache holds what the next one needs: 0.9 to 1.3 ms for 8 kB,
without TLS."""

MakeView = Callable[[], pb.GangView]


def checked_position(field: str, position: int) -> int:
    """A position in the journal, as a caller names it.

    Raises:
        CallRefused: no journal has so many records.
    """
    if position > MOST_POSITION:
        raise invalid_argument(f"{field} is {position}: a position in the journal is {MOST_POSITION} at most")
    return position


def history_page(journal: Journal, gang: str, after: int) -> list[Record]:
    """The next records of a gang after a position; `gang` empty: of all gangs.

    Raises:
        CallRefused: the journal can't be read.
    """
    try:
        return journal.history(gang, after, HISTORY_PAGE_RECORDS, HISTORY_PAGE_CHARS)
    except JournalError as error:
        raise internal(str(error)) from None


def has_no_more_events(state: DurableState, id: str, live: asyncio.Queue[Record | None]) -> bool:
    """Whether no more events can follow: the gang is final and owes Slurm nothing."""
    gang = state.gangs.get(id)
    if gang is None:
        return bool(id)  # the gang has left the durable state; later events concern other gangs
    if not gang.final or not live.empty():
        return False
    return all(call.gang != id for call in state.owed.values())


def concerns(record: Record, gang: Gang | None) -> bool:
    """The record is about the gang, or about a node of it. `gang`: None for all gangs."""
    if gang is None or record.gang == gang.id:
        return True
    return record.name == "NodeJudged" and record.node in gang.roster.members


def record_message(record: Record) -> pb.EventRecord:
    """The message of a record."""
    return pb.EventRecord(
        position=record.position,
        at_s=record.at,
        gang_id=record.gang,
        name=record.name,
        text=record.text,
        json=_without_spec(record),
    )


def _without_spec(record: Record) -> str:
    """The record's JSON. The job's spec is left out: its environment may be secret, also to operators."""
    if record.name != stored_class(facts.GangRegistered):
        return record.json
    fields = json.loads(record.json)
    fields.pop("spec_json", None)
    return json.dumps(fields)


class SharedView:
    """The view of one gang for all who watch it: each is made once, by whoever waits first."""

    def __init__(self, changes: Changes, pause_s: Callable[[], float]) -> None:
        """`pause_s`: seconds between two views while nothing is decided."""
        self._changes, self._pause_s = changes, pause_s
        self._turn = asyncio.Lock()
        self._newest, self._without_ages, self._serial = pb.GangView(), b"", 0
        self.watchers, self.spent_s = 0, 0.0
        """`spent_s`: CPU seconds that the newest view has cost, and what it costs to send it to all who watch."""

    def fresh(self, make: MakeView) -> tuple[int, pb.GangView]:
        """A view as it is now, and its number."""
        began = clock.thread_cpu()
        one = make()
        if (now := _without_ages(one)) != self._without_ages:
            self._newest, self._without_ages, self._serial = one, now, self._serial + 1
        sent_s = SEND_S + SEND_S_PER_BYTE * len(now)
        self.spent_s = clock.thread_cpu() - began + sent_s * self.watchers
        return self._serial, one

    async def after(self, serial: int, make: MakeView, is_open: Callable[[], bool]) -> tuple[int, pb.GangView]:
        """The newest view after that number. If the coordinator stops: any."""
        async with self._turn:
            while serial == self._serial and is_open():
                await self._changes.changed.wait()
                await self._pause()
                self.fresh(make)  # may end this watcher: then the flags are for the next one
                self._changes.clear()
            return self._serial, self._newest

    async def _pause(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._pause_s()):
                await self._changes.decided.wait()
                await asyncio.sleep(MIN_VIEW_INTERVAL_S)


class WatchedGangs:
    """The gangs that somebody watches."""

    def __init__(self, subscribers: GangSubscribers) -> None:
        self._subscribers = subscribers
        self._shared: dict[str, tuple[SharedView, ExitStack]] = {}

    @contextmanager
    def watch(self, gang: str) -> Iterator[SharedView]:
        """The view that is shared with all others who watch the gang."""
        if gang not in self._shared:
            stack = ExitStack()
            changes = stack.enter_context(self._subscribers.subscribe(gang))
            self._shared[gang] = SharedView(changes, self.pause_s), stack
        shared, stack = self._shared[gang]
        shared.watchers += 1
        try:
            yield shared
        finally:
            shared.watchers -= 1
            if not shared.watchers:
                del self._shared[gang]
                stack.close()

    def pause_s(self) -> float:
        """Seconds between two views of a gang about which nothing is decided."""
        return max(MIN_VIEW_INTERVAL_S, sum(shared.spent_s for shared, _ in self._shared.values()) / WATCHERS_SHARE)


async def changed_views(
    make: MakeView, shared: SharedView, right: LastingRight, is_open: Callable[[], bool]
) -> AsyncIterator[pb.GangView]:
    """The view, and again when it has changed, up to the final one. The gang may end while a view is sent.

    Raises:
        CallRefused: the caller has lost the `right` to it.
    """
    serial, one = shared.fresh(make)
    while True:
        yield one
        if one.final or not is_open():
            return
        serial, one = await right.wait_for(partial(shared.after, serial, make, is_open))


def _without_ages(view: pb.GangView) -> bytes:
    copy = pb.GangView()
    copy.CopyFrom(view)
    copy.ClearField("goodput")  # it grows all the time
    for node in copy.nodes:
        node.ClearField("heard_s_ago")
        if node.verdict == "SUSPECT":
            node.ClearField("reason")  # contains a duration
    return copy.SerializeToString(deterministic=True)
