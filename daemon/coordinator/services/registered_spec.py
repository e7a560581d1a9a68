"""The spec of a job as it was registered, from the journal; what makes two runs of a job comparable; and work on whole
specs, beside the event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from google.protobuf.json_format import MessageToDict, Parse, ParseError

from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.journal.history import Record
from muster.daemon.coordinator.journal.journal import Journal
from muster.daemon.coordinator.services import conversion
from muster.daemon.coordinator.services.rpc_errors import invalid_argument
from muster.daemon.coordinator.slurm.fair_queue import FairQueue
from muster.v1.agent_pb2 import AgentHello
from muster.v1.api_pb2 import RegisterRequest
from muster.v1.common_pb2 import JobSpec

_Read = TypeVar("_Read")
_T = TypeVar("_T")

_COMPARED = (
    "nodes",
    "ranks_per_node",
    "command",
    "tensor_parallel",
    "pipeline_parallel",
    "data_parallel",
    "context_parallel",
    "expert_parallel",
    "parallel_order",
    "node_options",
    "estimate_tables",
)
"""What the time of a step follows from. The environment is left out: it names runs, hosts and folders."""
_SHOWN = (
    "name",
    "nodes",
    "spares",
    "ranks_per_node",
    "tensor_parallel",
    "pipeline_parallel",
    "data_parallel",
    "context_parallel",
    "expert_parallel",
    "parallel_order",
    "traffic",
    "estimate_tables",
)
"""What a diagnosis needs. Environment and command may hold secrets, also to operators."""


class SpecWork:
    """Work on whole specs in threads: on the event loop, all heartbeats would wait for it. One work at a time, for the
    waiting users in turn: beyond that, threads take the event loop's time."""

    def __init__(self) -> None:
        self._turn = FairQueue(1)

    async def do(self, uid: int, work: Callable[[], _T]) -> _T:
        """What `work` returns. It runs in a thread, so it may use only what is its own. `uid`: who waits for it."""
        return await self.do_with(uid, lambda: None, lambda _: work())

    async def do_with(self, uid: int, read: Callable[[], _Read], work: Callable[[_Read], _T]) -> _T:
        """What `work` returns of what `read` has read. `read` is called here when the turn has come: callers who wait
        keep nothing large."""
        async with self._turn.place(uid):
            running = asyncio.ensure_future(asyncio.to_thread(work, read()))
            try:
                return await asyncio.shield(running)
            finally:  # a thread goes on when its caller has left, and keeps its place as long
                await asyncio.gather(running, return_exceptions=True)


async def submitted(specs: SpecWork, request: RegisterRequest | AgentHello, uid: int) -> events.GangSubmitted:
    """The event with which user `uid` registers a gang.

    Raises:
        RpcAbort: the spec is not valid.
    """
    work = partial(conversion.submitted, request.gang_id, request.slurm_job_id, uid, request.spec)
    try:
        return await specs.do(uid, work)
    except conversion.InvalidMessage as error:
        raise invalid_argument(str(error)) from None


def registered_spec(journal: Journal, gang: str) -> JobSpec | None:
    """The spec with which the gang was registered; None if the journal has none that this version can read.

    Raises:
        JournalError: the journal can't be read.
    """
    return read_spec(registration_of(journal, gang))


def registration_of(journal: Journal, gang: str) -> Record | None:
    """The first record of a gang, which is its registration.

    Raises:
        JournalError: the journal can't be read.
    """
    return next(iter(journal.history(gang, 0, 1)), None)


def read_spec(record: Record | None) -> JobSpec | None:
    """The spec in a registration; None: there is none that this version can read. A large one takes 0.2 s."""
    if record is not None:
        with suppress(ValueError, KeyError, ParseError):
            fact = facts.decode(record.name, record.json)
            if isinstance(fact, facts.GangRegistered):
                return Parse(fact.spec_json or "{}", JobSpec(), ignore_unknown_fields=True)
    return None


def settings_digest(spec: JobSpec) -> str:
    """Equal for runs whose steps can be compared."""
    return hashlib.sha256(json.dumps(_fields(spec, _COMPARED), sort_keys=True).encode()).hexdigest()[:32]


def shown(spec: JobSpec) -> JobSpec:
    """The part that is shown to those who ask for a diagnosis."""
    return JobSpec(**{name: getattr(spec, name) for name in _SHOWN})


def _fields(spec: JobSpec, names: tuple[str, ...]) -> dict[str, object]:
    kept = MessageToDict(spec, preserving_proto_field_name=True)
    return {name: kept[name] for name in names if name in kept}
