"""The public API: what `muster` and anyone entitled asks of the coordinator."""

from __future__ import annotations

import asyncio
import pwd
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from muster.daemon.coordinator.core.state import events
from muster.daemon.coordinator.core.state.durable_state import Gang
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.journal.journal import JournalError, Record
from muster.daemon.coordinator.services import conversion, views
from muster.daemon.coordinator.services.refusal import (  # fmt: skip
    Refused,
    answers,
    nonsense,
    not_found,
    not_permitted,
    streams,
    try_again,
)
from muster.daemon.coordinator.services.roll_call import roll_call
from muster.daemon.coordinator.shell.engine import Engine
from muster.daemon.coordinator.slurm.lookup import SlurmLookup
from muster.daemon.coordinator.slurm.roster import SlurmRoster
from muster.daemon.host import clock
from muster.daemon.transport.authorization import Rights
from muster.daemon.transport.identity import Caller, current_caller
from muster.slurm.client.types import Gone, Job, Unknown
from muster.v1 import api_pb2 as pb
from muster.v1 import api_pb2_grpc

_Context = grpc.aio.ServicerContext[object, object]

PAGE = 500
"""Records of history read at once: some milliseconds."""

WATCH_S = 0.1
"""Seconds between two views for one watcher, at least."""

NODES_A_TURN = 200
"""Nodes of a roll call between two turns of the event loop."""


class MusterService(api_pb2_grpc.MusterServicer):
    """The servicer; it reads the engine's durable state and posts what people ask for."""

    def __init__(self, engine: Engine, lookup: SlurmLookup, roster: SlurmRoster, rights: Rights) -> None:
        self._engine = engine
        self._lookup = lookup
        self._roster = roster
        self._rights = rights

    @answers
    async def Register(self, request: pb.RegisterRequest, context: _Context) -> pb.RegisterReply:
        """See api.proto. Twice changes nothing."""
        caller = current_caller()
        try:
            event = conversion.submitted(request.gang_id, request.slurm_job_id, caller.uid, request.spec)
        except conversion.Nonsense as error:
            raise nonsense(str(error)) from None
        await self._must_own(request.slurm_job_id, caller)
        known = self._engine.core.state.gangs.get(request.gang_id)
        if known and (known.owner_uid, known.job) != (caller.uid, request.slurm_job_id):
            raise Refused(
                grpc.StatusCode.ALREADY_EXISTS,
                f"gang {request.gang_id} is job {known.job} of uid {known.owner_uid}: give the new job another gang id",
            )
        if not known:
            self._post(event)
        return pb.RegisterReply()

    @answers
    async def Describe(self, request: pb.GangRef, context: _Context) -> pb.GangView:
        """See api.proto."""
        return self._view(self._find(request))

    @answers
    async def Attend(self, request: pb.BatchRef, context: _Context) -> pb.GangView:
        """See api.proto."""
        ref = pb.GangRef(gang_id=request.gang_id)
        gang = self._find(ref)
        if not self._rights.is_agent(current_caller(), gang.owner_uid):
            raise not_permitted(f"{_words(ref)} is attended by processes of its own job alone")
        if not gang.outlived(request.slurm_job_id, request.slurm_restart_count):
            self._post(events.BatchHeard(gang.id, request.slurm_job_id, request.slurm_restart_count))
        view = self._view(gang)
        view.final = self._engine.core.may_leave(gang, request.slurm_job_id, request.slurm_restart_count)
        return view

    @streams
    async def Watch(self, request: pb.GangRef, context: _Context) -> AsyncIterator[pb.GangView]:
        """See api.proto. Ages alone are no change."""
        gang, before = self._find(request), b""
        with self._engine.gang_subscribers.subscribe(gang.id) as changed:
            while True:
                view = self._view(gang)
                if (now := _without_ages(view)) != before:
                    before = now
                    yield view
                if gang.final or not self._engine.running:
                    return
                await changed.wait()
                await asyncio.sleep(WATCH_S)
                changed.clear()

    @answers
    async def List(self, request: pb.ListRequest, context: _Context) -> pb.ListReply:
        """See api.proto."""
        caller = current_caller()
        gangs = self._engine.core.state.gangs.values()
        seen = [gang for gang in gangs if self._rights.may_read(caller, gang.owner_uid)]
        return pb.ListReply(gangs=map(self._view, seen))

    @streams
    async def Events(self, request: pb.EventsRequest, context: _Context) -> AsyncIterator[pb.EventRecord]:
        """See api.proto. Live events of one gang end when nothing more can come."""
        id, position = self._whose_events(request.gang), request.after
        gang = self._engine.core.state.gangs.get(id)
        with self._engine.journal_subscribers.subscribe() as live:
            while page := self._history(id, position):
                for record in page:
                    position = record.position
                    yield _record(record)
            yield pb.EventRecord(sentinel=True, position=position)
            while request.follow and not self._over(id, live):
                fresh = await live.get()
                if fresh is None:
                    raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, f"too slow: go on after position {position}")
                if fresh.position > position and _concerns(fresh, gang):
                    position = fresh.position
                    yield _record(fresh)

    @answers
    async def Cancel(self, request: pb.GangRef, context: _Context) -> pb.CancelReply:
        """See api.proto."""
        gang = self._find(request, steer=True)
        if gang.job_over or gang.phase is Phase.CANCELLED:
            return pb.CancelReply(text=f"nothing to cancel: {gang.name or gang.id} is {gang.phase}")
        over = gang.final
        self._post(events.CancelAsked(gang.id, _name(current_caller())))
        if over:
            words = f"{gang.name or gang.id} is {gang.phase} already; Slurm is asked to cancel job {gang.job}"
            return pb.CancelReply(text=words)
        return pb.CancelReply(text=f"{gang.name or gang.id} (job {gang.job}) is {gang.phase}: {gang.reason}")

    @answers
    async def Flush(self, request: pb.GangRef, context: _Context) -> pb.FlushReply:
        """See api.proto."""
        gang = self._find(request, steer=True)
        if not gang.spec.durable_dir:
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, "this job has no durable_dir to flush to")
        if gang.phase is not Phase.RUNNING:
            words = f"the gang is {gang.phase}: a checkpoint can be asked for while it is RUNNING"
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, words)
        before = gang.flush.serial if gang.flush else 0
        self._post(events.FlushAsked(gang.id, _name(current_caller())))
        if gang.flush is None or (gang.flush.serial == before and (gang.flush.path or gang.flush.error)):
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                "there is nothing to flush: no step stands whole in memory (see committed in muster status)",
            )
        return pb.FlushReply(serial=gang.flush.serial)

    @answers
    async def Nodes(self, request: pb.ListRequest, context: _Context) -> pb.NodesReply:
        """See api.proto. Open to everyone, as sinfo is."""
        core, now, caller = self._engine.core, self._engine.clock.now(), current_caller()
        gangs = [gang for gang in core.state.gangs.values() if self._rights.may_read(caller, gang.owner_uid)]
        reply = pb.NodesReply(slurm_unknown=self._roster.unknown)
        for count, view in enumerate(roll_call(core.state, core.observed, self._roster, gangs, now)):
            reply.nodes.append(view)
            if count % NODES_A_TURN == NODES_A_TURN - 1:
                await asyncio.sleep(0)
        return reply

    def _find(self, ref: pb.GangRef, *, steer: bool = False) -> Gang:
        """The gang meant by `ref`, the newest of a job, if the caller may see (or steer) it."""
        gang = self._known(ref)
        if gang is None:
            raise _unknown(ref)
        self._allow(ref, gang.owner_uid, steer=steer)
        return gang

    def _known(self, ref: pb.GangRef) -> Gang | None:
        gangs = self._engine.core.state.gangs
        if ref.WhichOneof("ref") == "gang_id":
            return gangs.get(ref.gang_id)
        of_job = [gang for gang in gangs.values() if gang.job == ref.slurm_job_id]
        return max(of_job, key=lambda gang: gang.registered_at, default=None)

    def _whose_events(self, ref: pb.GangRef) -> str:
        """The id of the gang meant by `ref`, be it long over; empty for all, if the caller may see them."""
        if not ref.WhichOneof("ref"):
            if not self._rights.is_operator(current_caller()):
                raise not_permitted("the events of all gangs are for operators: name a job")
            return ""
        gang = self._known(ref)
        found = (gang.id, gang.owner_uid) if gang else self._registered(ref)
        if found is None:
            raise _unknown(ref)
        self._allow(ref, found[1])
        return found[0]

    def _allow(self, ref: pb.GangRef, owner_uid: int, *, steer: bool = False) -> None:
        caller = current_caller()
        allowed = self._rights.may_steer if steer else self._rights.may_read
        if not allowed(caller, owner_uid):
            raise not_permitted(f"{_words(ref)} belongs to uid {owner_uid}; you are uid {caller.uid}")

    async def _must_own(self, job: int, caller: Caller) -> None:
        found = await self._lookup.job(job, since=clock.monotonic())
        match found:
            case Unknown():
                raise try_again(f"Slurm doesn't tell about job {job}: {found.reason}")
            case Gone():
                raise not_found(f"Slurm has no job {job}")
            case Job() if not self._rights.may_register(caller, found.user_id):
                raise not_permitted(f"job {job} belongs to uid {found.user_id}, not to uid {caller.uid}")

    def _post(self, event: events.Event) -> None:
        self._engine.post(event)
        if not self._engine.running:
            raise try_again("the coordinator is on its way down: nothing was done")

    def _view(self, gang: Gang) -> pb.GangView:
        core = self._engine.core
        return views.gang_view(core.state, core.observed, gang, self._engine.clock.now())

    def _history(self, gang: str, after: int) -> list[Record]:
        try:
            return self._engine.journal.history(gang, after, PAGE)
        except JournalError as error:
            raise Refused(grpc.StatusCode.INTERNAL, str(error)) from None

    def _registered(self, ref: pb.GangRef) -> tuple[str, int] | None:
        """Id and owner of a gang that has left the durable state."""
        try:
            return self._engine.journal.find_owner(ref.gang_id, ref.slurm_job_id)
        except JournalError as error:
            raise Refused(grpc.StatusCode.INTERNAL, str(error)) from None

    def _over(self, id: str, live: asyncio.Queue[Record | None]) -> bool:
        """Nothing more can come: the gang is final and owes nothing."""
        state = self._engine.core.state
        gang = state.gangs.get(id)
        if gang is None:
            return bool(id)  # it has left the durable state; what comes concerns others
        if not gang.final or not live.empty():
            return False
        return all(call.gang != id for call in state.owed.values())


def _words(ref: pb.GangRef) -> str:
    return f"gang {ref.gang_id}" if ref.WhichOneof("ref") == "gang_id" else f"Slurm job {ref.slurm_job_id}"


def _unknown(ref: pb.GangRef) -> Refused:
    return not_found(f"{_words(ref)} is not known here: was it submitted with muster submit?")


def _name(caller: Caller) -> str:
    """The caller's login name, where this host knows it."""
    try:
        return pwd.getpwuid(caller.uid).pw_name
    except KeyError:
        return f"uid {caller.uid}"


def _concerns(record: Record, gang: Gang | None) -> bool:
    if gang is None or record.gang == gang.id:
        return True
    return record.name == "NodeJudged" and record.node in gang.members


def _record(record: Record) -> pb.EventRecord:
    return pb.EventRecord(
        position=record.position,
        at_s=record.at,
        gang_id=record.gang,
        name=record.name,
        text=record.text,
        json=record.json,
    )


def _without_ages(view: pb.GangView) -> bytes:
    bare = pb.GangView()
    bare.CopyFrom(view)
    for node in bare.nodes:
        node.ClearField("heard_s_ago")
        if node.verdict == "SUSPECT":
            node.ClearField("reason")  # says for how long
    return bare.SerializeToString(deterministic=True)
