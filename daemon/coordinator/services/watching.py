"""What watchers are sent: the view of a gang whenever it has changed, and the records of the journal."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.stored_names import stored_class
from muster.daemon.coordinator.journal.history import Record
from muster.daemon.coordinator.journal.journal import Journal, JournalError
from muster.daemon.coordinator.services.rpc_errors import internal
from muster.v1 import api_pb2 as pb

HISTORY_PAGE_RECORDS, HISTORY_PAGE_CHARS = 500, 256 * 1024
"""Records of history, and their characters, that are read at once. Reading them takes some milliseconds."""

MIN_VIEW_INTERVAL_S = 0.1
"""Minimum of seconds between two views that are sent to one client."""


def history_page(journal: Journal, gang: str, after: int) -> list[Record]:
    """The next records of a gang after a position; `gang` empty: of all gangs.

    Raises:
        RpcAbort: the journal can't be read.
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


async def changed_views(
    view: Callable[[], pb.GangView], changed: asyncio.Event, is_open: Callable[[], bool]
) -> AsyncIterator[pb.GangView]:
    """The view, and again whenever it has `changed`, up to the final one. The gang may end while a view is sent."""
    before = b""
    while True:
        one = view()
        if (now := _without_ages(one)) != before:
            before = now
            yield one
        if one.final or not is_open():
            return
        await changed.wait()
        await asyncio.sleep(MIN_VIEW_INTERVAL_S)
        changed.clear()


def _without_ages(view: pb.GangView) -> bytes:
    copy = pb.GangView()
    copy.CopyFrom(view)
    for node in copy.nodes:
        node.ClearField("heard_s_ago")
        if node.verdict == "SUSPECT":
            node.ClearField("reason")  # contains a duration
    return copy.SerializeToString(deterministic=True)
