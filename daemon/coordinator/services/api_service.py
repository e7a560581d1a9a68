"""The public API: the requests of the `muster` command and of any authorized client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import grpc
import grpc.aio

from muster.compatibility import own_side
from muster.daemon.coordinator.core import drains
from muster.daemon.coordinator.core.detection import circuit_breaker
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.limits import GANG_KEPT_S
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.state.stored_names import stored_class
from muster.daemon.coordinator.journal.history import Record
from muster.daemon.coordinator.journal.journal import JournalError
from muster.daemon.coordinator.services import conversion, job_specs, registration, views
from muster.daemon.coordinator.services.api_handlers import stream_handler, unary_handler
from muster.daemon.coordinator.services.caller_limits import UserCalls
from muster.daemon.coordinator.services.job_specs import SpecWork, read_spec, registration_of, submitted
from muster.daemon.coordinator.services.login_names import LoginNames
from muster.daemon.coordinator.services.roll_call import roll_call
from muster.daemon.coordinator.services.rpc_errors import (  # fmt: skip
    RpcAbort,
    aborted,
    already_exists,
    invalid_argument,
    not_found,
    permission_denied,
    resource_exhausted,
    unavailable,
)
from muster.daemon.coordinator.shell.engine import Engine
from muster.daemon.coordinator.shell.load_shedding import Shedding
from muster.daemon.coordinator.slurm.fair_queue import FairQueue
from muster.daemon.coordinator.slurm.lookup import SlurmLookup
from muster.daemon.coordinator.slurm.roster import SlurmRoster
from muster.daemon.host import clock
from muster.daemon.transport import gang_ids
from muster.daemon.transport.authorization import Rights
from muster.daemon.transport.identity import Caller, current_caller, current_method
from muster.daemon.transport.server_limits import SITE_CALLS, StreamLimits
from muster.slurm.client.types import Job, Unknown
from muster.v1 import api_pb2 as pb
from muster.v1 import api_pb2_grpc
from muster.v1.common_pb2 import JobSpec

_Context = grpc.aio.ServicerContext[object, object]

HISTORY_PAGE_RECORDS, HISTORY_PAGE_CHARS = 500, 256 * 1024
"""Records of history, and their characters, that are read at once. Reading them takes some milliseconds."""

MIN_VIEW_INTERVAL_S = 0.1
"""Minimum of seconds between two views that are sent to one client."""

NODES_PER_LOOP_TURN = 200
"""Nodes of a roll call that are built before the event loop runs again."""


MAX_REASON_CHARS = 200
"""Characters of a caller's reason. Slurm shows a reason in one line."""


class MusterService(api_pb2_grpc.MusterServicer):
    """The servicer. It reads the engine's durable state and posts the requests of users as events."""

    def __init__(
        self,
        engine: Engine,
        lookup: SlurmLookup,
        roster: SlurmRoster,
        rights: Rights,
        stream_limits: StreamLimits,
        *,
        site_calls: int = SITE_CALLS,
        login_names: LoginNames,
        private_jobs: bool = False,
    ) -> None:
        """`private_jobs`: nodes that no job of the caller has are shown to operators only. So they are if Slurm hides
        jobs or nodes."""
        self.stream_limits = stream_limits
        self.side = own_side("the coordinator")
        self._site_calls = UserCalls(site_calls, "calls for all nodes or all jobs")
        self._site_turn = FairQueue(1)
        self._specs = SpecWork()
        self._engine = engine
        self._lookup = lookup
        self._roster = roster
        self._rights = rights
        self._login_names = login_names
        self._private_jobs = private_jobs

    @unary_handler
    async def Register(self, request: pb.RegisterRequest, context: _Context) -> pb.RegisterReply:
        """See api.proto. Idempotent."""
        caller = current_caller()
        if not self._is_registered(request, caller):
            registration.check_id_is_for(request.gang_id, caller.uid)
            await self._check_may_register(request.slurm_job_id, caller)
            self._register(request, caller, await submitted(self._specs, request, caller.uid))
        return pb.RegisterReply()

    def _register(self, request: pb.RegisterRequest, caller: Caller, event: events.GangSubmitted) -> None:
        """Register the gang. Nothing else runs between the checks and the event."""
        gangs = self._engine.core.state.gangs
        if self._is_registered(request, caller):
            return
        if known := gangs.get(request.gang_id):
            whose = f"job {known.slurm.job}" if known.account.owner_uid == caller.uid else "taken"
            raise already_exists(f"gang {request.gang_id} is {whose}: use another id for the new gang")
        registration.check_job_is_free(gangs.values(), request.gang_id, request.slurm_job_id, caller.uid)
        limits, now = self._engine.limits, self._engine.clock.now()
        registration.check_budget(gangs.values(), caller.uid, len(event.spec_json), limits, now)
        self._post(event)

    def _is_registered(self, request: pb.RegisterRequest, caller: Caller) -> bool:
        known = self._engine.core.state.gangs.get(request.gang_id)
        return known is not None and (known.account.owner_uid, known.slurm.job) == (caller.uid, request.slurm_job_id)

    @unary_handler
    async def Describe(self, request: pb.GangRef, context: _Context) -> pb.GangView:
        """See api.proto."""
        names_run = request.WhichOneof("ref") == "job_identity"  # else it would tell whether others have such a job
        if names_run and request.HasField("like") and self._known(request) is None:
            return await self._beside(request)
        return self._view(self.find(request))

    async def _beside(self, ref: pb.GangRef) -> pb.GangView:
        """The newest gang of the caller that is another job of the same name in the same folder, and what differs."""
        gangs, like, uid = self._engine.core.state.gangs.values(), ref.like, current_caller().uid
        try:
            job_specs.check_variables(like)
        except conversion.InvalidMessage as error:
            raise invalid_argument(str(error)) from None
        gang = registration.newest_beside(gangs, like.name, like.durable_dir, uid)
        if gang is None:
            raise self._no_such_job(ref)
        view = self._view(self.find(pb.GangRef(gang_id=gang.id)))
        read = partial(self._registration, gang)
        differs = await self._specs.do_with(uid, read, partial(_differences, like))
        if differs is None:
            raise self._no_such_job(ref)
        view.differs.extend(differs)
        return view

    @unary_handler
    async def Attend(self, request: pb.BatchRef, context: _Context) -> pb.GangView:
        """See api.proto."""
        gang = self.find(pb.GangRef(gang_id=request.gang_id))
        if not gang.slurm.run_is_over(request.slurm_job_id, request.slurm_restart_count):
            unlaunched = tuple(sorted(set(gang.slurm.job_nodes).intersection(request.unlaunched_nodes)))
            self._post(events.BatchHeartbeat(gang.id, request.slurm_job_id, request.slurm_restart_count, unlaunched))
        view = self._view(gang)
        view.final = self._engine.core.batch_may_end(gang, request.slurm_job_id, request.slurm_restart_count)
        return view

    @stream_handler
    async def Watch(self, request: pb.GangRef, context: _Context) -> AsyncIterator[pb.GangView]:
        """See api.proto. A view in which only ages differ is not sent."""
        gang = self.find(request)
        self._check_may_watch(Shedding.NEW_WATCHERS)

        def view() -> pb.GangView:
            self._check_may_watch(Shedding.ALL_WATCHERS)
            return self._view(gang)

        with self._engine.gang_subscribers.subscribe(gang.id) as changed:
            async for one in changed_views(view, changed, lambda: self._engine.running):
                yield one

    @unary_handler
    async def List(self, request: pb.ListRequest, context: _Context) -> pb.ListReply:
        """See api.proto."""
        reply = pb.ListReply()
        async with self._one_of_the_site():
            for gang in self._listed():
                reply.gangs.append(self._view(gang))
                await asyncio.sleep(0)
        return reply

    @stream_handler
    async def Events(self, request: pb.EventsRequest, context: _Context) -> AsyncIterator[pb.EventRecord]:
        """See api.proto. The live events of one gang end when no more can follow."""
        id, position = self._whose_events(request.gang), request.after
        if request.follow:
            self._check_may_watch(Shedding.NEW_WATCHERS)
        gang = self._engine.core.state.gangs.get(id)
        with self._engine.journal_subscribers.subscribe() as live:
            while page := self._history(id, position):
                for record in page:
                    position = record.position
                    yield _record_message(record)
            yield pb.EventRecord(sentinel=True, position=position)
            while request.follow and not self._has_no_more_events(id, live):
                fresh = await live.get()
                if fresh is None:
                    self._check_may_watch(Shedding.ALL_WATCHERS)
                    raise resource_exhausted(f"too slow: ask again for the events after position {position}")
                if fresh.position > position and _concerns(fresh, gang):
                    position = fresh.position
                    yield _record_message(fresh)

    @unary_handler
    async def Cancel(self, request: pb.GangRef, context: _Context) -> pb.CancelReply:
        """See api.proto."""
        gang, by = await self._find_for_request(request)
        if gang.slurm.job_over or gang.phase is Phase.CANCELLED:
            return pb.CancelReply(text=f"nothing to cancel: {gang.account.name or gang.id} is {gang.phase}")
        was_final, lost = gang.final, views.lost_at_end(gang, self._engine.core.observed.gang(gang.id))
        if was_final:
            self._check_may_request(gang, f"scancel {gang.slurm.job} does the same")
        self._post(events.CancelRequested(gang.id, by))
        if was_final:
            text = (
                f"{gang.account.name or gang.id} is {gang.phase} already; Slurm is asked to cancel job {gang.slurm.job}"
            )
            return pb.CancelReply(text=text)
        words = f"{gang.account.name or gang.id} (job {gang.slurm.job}) is {gang.phase}: {gang.reason}"
        return pb.CancelReply(text="; ".join(filter(None, (words, lost))))

    @unary_handler
    async def Flush(self, request: pb.GangRef, context: _Context) -> pb.FlushReply:
        """See api.proto."""
        gang, by = await self._find_for_request(request)
        if not gang.spec.durable_dir:
            raise invalid_argument("this job has no durable_dir to flush to")
        if gang.phase is not Phase.RUNNING:
            text = f"the gang is {gang.phase}: a checkpoint can be requested only while the gang is RUNNING"
            raise aborted(text)
        self._check_may_request(gang)
        before = gang.checkpoint.flush.serial if gang.checkpoint.flush else 0
        self._post(events.FlushRequested(gang.id, by))
        if gang.checkpoint.flush is None or (
            gang.checkpoint.flush.serial == before and (gang.checkpoint.flush.path or gang.checkpoint.flush.error)
        ):
            raise aborted(
                "there is nothing to flush: no version is committed in memory (see committed in muster status)"
            )
        return pb.FlushReply(serial=gang.checkpoint.flush.serial)

    @unary_handler
    async def Swap(self, request: pb.SwapRequest, context: _Context) -> pb.SwapReply:
        """See api.proto."""
        gang, by = await self._find_for_request(request.gang)
        reason = _checked_reason(request.reason)
        if refused := self._engine.core.why_no_swap(gang, request.node, self._engine.clock.now()):
            raise (invalid_argument if refused.for_good else aborted)(refused.words)
        self._check_may_request(gang)
        self._post(events.SwapRequested(gang.id, request.node, by, reason))
        if gang.plans.swap is None:
            raise aborted("the state of the job has just changed: try again")
        of_gang = f"{gang.account.name or gang.id} (job {gang.slurm.job})"
        text = f"at the end of a step, a spare takes the place of {request.node} in {of_gang}"
        return pb.SwapReply(text=text, generation=gang.newest.generation, planned_s=gang.plans.swap.at)

    @unary_handler
    async def Drain(self, request: pb.DrainRequest, context: _Context) -> pb.DrainReply:
        """See api.proto."""
        core, node = self._engine.core, request.node
        if not self._allows(None):
            raise permission_denied(f"only operators may drain a node{self._place_hint()}")
        by = await self._login_names(current_caller().uid)
        if not (reason := _checked_reason(request.reason)):
            raise invalid_argument("a drain needs a reason: Slurm shows it to everybody")
        if node not in core.state.nodes and node not in self._roster.nodes:
            raise not_found(f"{node} is no node of this cluster: see muster nodes")
        if self._engine.limits.observe:
            raise aborted("the site has Muster in observe mode, in which no node is drained: use scontrol")
        if words := drains.drained_already(core.state, node):
            return pb.DrainReply(text=f"nothing to drain: {words}", jobs=self._jobs_on(node))
        self._post(events.DrainRequested(node, by, reason))
        return pb.DrainReply(text=f"Slurm is told to start nothing more on {node}", jobs=self._jobs_on(node))

    def _jobs_on(self, node: str) -> list[str]:
        """What becomes of each gang that has the node, now that it is drained."""
        return [self._fate(gang, node) for gang in self._engine.core.index.gangs_of(node)]

    def _fate(self, gang: Gang, node: str) -> str:
        of_gang = f"job {gang.slurm.job} ({gang.account.name or gang.id})"
        if gang.roster.members[node].removed:
            return f"{of_gang}: has left {node}"
        if node not in {seat.node for seat in gang.roster.seats}:
            return f"{of_gang}: keeps {node} as a spare that takes a seat only if no other is left"
        if gang.plans.swap is not None and gang.plans.swap.node == node:
            return f"{of_gang}: at the end of a step, a spare takes the place of {node}"
        refused = self._engine.core.why_no_swap(gang, node, self._engine.clock.now())
        why = f" ({refused.words})" if refused else ""
        return f"{of_gang}: keeps its ranks on {node} until a spare can take its place{why}"

    @unary_handler
    async def Nodes(self, request: pb.ListRequest, context: _Context) -> pb.NodesReply:
        """See api.proto. Every user may call it, as sinfo. Node checks are shown to those who may read their job. Where
        jobs or nodes are private, users see those of their own jobs: the verdicts of others tell what runs there."""
        async with self._one_of_the_site():
            return await self._roll_call(self._listed())

    @asynccontextmanager
    async def _one_of_the_site(self) -> AsyncIterator[None]:
        """Wait until no other call for all nodes or all jobs is answered: the event loop builds one at a time.

        Raises:
            RpcAbort: the caller has too many of them under way.
        """
        uid = current_caller().uid
        with self._site_calls.one(uid):
            async with self._site_turn.place(uid):
                yield

    async def _roll_call(self, gangs: list[Gang]) -> pb.NodesReply:
        core, now = self._engine.core, self._engine.clock.now()
        private_unknown = "" if self._private_jobs else self._roster.private_unknown
        reply = pb.NodesReply(slurm_unknown=self._roster.unknown, private_unknown=private_unknown)
        of_all, private, limits = self._allows(None), self._hides_nodes(), self._engine.limits
        called = roll_call(
            core.state, core.observed, self._roster, gangs, now, limits,
            of_all_jobs=of_all, of_all_nodes=of_all or not private,
        )  # fmt: skip
        for count, view in enumerate(called):
            reply.nodes.append(view)
            if count % NODES_PER_LOOP_TURN == NODES_PER_LOOP_TURN - 1:
                await asyncio.sleep(0)
        return reply

    def _hides_nodes(self) -> bool:
        """Users see the nodes of their own jobs only."""
        return self._private_jobs or self._roster.hides_nodes

    def _listed(self) -> list[Gang]:
        """The gangs that this method, which names none, shows to the caller."""
        if refused := self._rights.refusal(current_method(), current_caller().uid, names_job=False):
            raise permission_denied(refused)
        return [gang for gang in self._engine.core.state.gangs.values() if self._allows(gang.account.owner_uid)]

    def find(self, ref: pb.GangRef) -> Gang:
        """The gang that `ref` names (the newest one of a job), if the caller may call the present method for it.

        Raises:
            RpcAbort: there is no such gang, or the caller has no right to it.
        """
        self._check_id(ref)
        gang = self._known(ref)
        if gang is None or not self._allows(gang.account.owner_uid):
            raise self._no_such_job(ref)
        return gang

    async def _find_for_request(self, ref: pb.GangRef) -> tuple[Gang, str]:
        """The gang that `ref` names, and the login name of the caller, who requests something of the gang."""
        self.find(ref)  # nobody's name is looked up who has no right to the call
        by = await self._login_names(current_caller().uid)
        return self.find(ref), by

    def _check_id(self, ref: pb.GangRef) -> None:
        """Check that the id does not name another user as its owner, whether or not there is such a gang. `muster
        submit` asks before it calls sbatch."""
        owner_uid = gang_ids.owner_of(ref.gang_id)
        if owner_uid is not None and not self._allows(owner_uid):
            uid = current_caller().uid
            raise permission_denied(
                f"{_describe(ref)} names another user than you, who are uid {uid} here{self._place_hint()}"
            )

    def _no_such_job(self, ref: pb.GangRef) -> RpcAbort:
        """The answer where there is no such job, and where it is another user's: nobody learns which."""
        listed = f"muster status --all lists your jobs, those of the last {GANG_KEPT_S / 86400:.0f} days, too"
        return not_found(f"{_describe(ref)}: no such job, or not yours. {listed}{self._place_hint()}")

    def _known(self, ref: pb.GangRef) -> Gang | None:
        gangs = self._engine.core.state.gangs
        if ref.WhichOneof("ref") == "gang_id":
            return gangs.get(ref.gang_id)
        if ref.WhichOneof("ref") == "job_identity":
            return registration.newest_run(gangs.values(), ref.job_identity, current_caller().uid)
        of_job = [gang for gang in gangs.values() if gang.slurm.job == ref.slurm_job_id]
        return max(of_job, key=lambda gang: gang.account.registered_at, default=None)

    def _whose_events(self, ref: pb.GangRef) -> str:
        """The id of the gang that `ref` names, which may have ended long ago; empty for all gangs.

        Raises:
            RpcAbort: there is no such gang, or the caller has no right to read its events.
        """
        if not ref.WhichOneof("ref"):
            if not self._allows(None):
                only = "only operators may read the events of all gangs: name a job"
                raise permission_denied(f"{only}{self._place_hint()}")
            return ""
        self._check_id(ref)
        gang = self._known(ref)
        found = (gang.id, gang.account.owner_uid) if gang else self._registered(ref)
        if found is None or not self._allows(found[1]):
            raise self._no_such_job(ref)
        return found[0]

    def _allows(self, owner_uid: int | None) -> bool:
        """The caller may call this method for a job of `owner_uid`; None: for everything."""
        return self._rights.allows(current_method(), current_caller(), owner_uid=owner_uid)

    def _place_hint(self) -> str:
        """Words for an operator whose call has no operator's rights because of the host it comes from."""
        if not self._rights.calls_from_elsewhere(current_caller()):
            return ""
        return (
            " (an operator's rights count on the site's management hosts only; this call is from "
            f"{current_caller().address})"
        )

    async def _check_may_register(self, job: int, caller: Caller) -> None:
        found = await self._lookup.job(job, caller.uid, since=clock.monotonic())
        match found:
            case Unknown():
                raise unavailable(f"can't get job {job} from Slurm: {found.reason}")
            case Job() if self._allows(found.user_id):
                pass
            case _:
                raise not_found(f"Slurm has no job {job}, or it is not of uid {caller.uid}")

    def _check_may_request(self, gang: Gang, instead: str = "") -> None:
        """Check that the site's limits leave room in the journal for a request of a user."""
        state, limits, now = self._engine.core.state, self._engine.limits, self._engine.clock.now()
        if refused := circuit_breaker.why_no_request(state, gang.account, limits, now):
            raise resource_exhausted("; ".join(filter(None, (refused, instead))))

    def _check_may_watch(self, refused_at: Shedding) -> None:
        """End the call of a watcher if the load has reached the level `refused_at`."""
        if self._engine.shedding.level >= refused_at:
            raise resource_exhausted("the coordinator has too much to do for watchers: try again in some seconds")

    def _post(self, event: events.Event) -> None:
        self._engine.post(event)
        if not self._engine.running:
            raise unavailable("the coordinator is stopping: nothing was done")

    def _view(self, gang: Gang) -> pb.GangView:
        core = self._engine.core
        return views.gang_view(
            core.state, core.observed, gang, self._engine.clock.now(), self._engine.limits.lemon_after
        )

    def _history(self, gang: str, after: int) -> list[Record]:
        try:
            return self._engine.journal.history(gang, after, HISTORY_PAGE_RECORDS, HISTORY_PAGE_CHARS)
        except JournalError as error:
            raise RpcAbort(grpc.StatusCode.INTERNAL, str(error)) from None

    async def registered_spec(self, gang: Gang) -> JobSpec | None:
        """The spec of a gang; None: there is none that this version can read. Raises RpcAbort: the journal can't be
        read."""
        return await self._specs.do_with(current_caller().uid, partial(self._registration, gang), read_spec)

    def _registration(self, gang: Gang) -> Record | None:
        try:
            return registration_of(self._engine.journal, gang.id)
        except JournalError as error:
            raise RpcAbort(grpc.StatusCode.INTERNAL, str(error)) from None

    def _registered(self, ref: pb.GangRef) -> tuple[str, int] | None:
        """Id and owner of a gang that has left the durable state."""
        try:
            return self._engine.journal.find_owner(ref.gang_id, ref.slurm_job_id)
        except JournalError as error:
            raise RpcAbort(grpc.StatusCode.INTERNAL, str(error)) from None

    def _has_no_more_events(self, id: str, live: asyncio.Queue[Record | None]) -> bool:
        """Whether no more events can follow: the gang is final and owes Slurm nothing."""
        state = self._engine.core.state
        gang = state.gangs.get(id)
        if gang is None:
            return bool(id)  # the gang has left the durable state; later events concern other gangs
        if not gang.final or not live.empty():
            return False
        return all(call.gang != id for call in state.owed.values())


def _differences(like: JobSpec, registered: Record | None) -> list[str] | None:
    """What differs from a registered spec; None: there is none that this version can read."""
    spec = read_spec(registered)
    return None if spec is None else gang_ids.differences(spec, like)


def _checked_reason(reason: str) -> str:
    """The caller's words, for the journal and for Slurm.

    Raises:
        RpcAbort: they are too long, or no plain text.
    """
    if len(reason) > MAX_REASON_CHARS:
        raise invalid_argument(f"the reason has {len(reason)} characters: {MAX_REASON_CHARS} are allowed")
    if not reason.isprintable():
        raise invalid_argument("the reason has characters that can't be printed: write one line of plain text")
    return reason.strip()


def _describe(ref: pb.GangRef) -> str:
    if ref.WhichOneof("ref") == "job_identity":
        return "an earlier run of this job"
    return f"gang {ref.gang_id}" if ref.WhichOneof("ref") == "gang_id" else f"Slurm job {ref.slurm_job_id}"


def _concerns(record: Record, gang: Gang | None) -> bool:
    if gang is None or record.gang == gang.id:
        return True
    return record.name == "NodeJudged" and record.node in gang.roster.members


def _record_message(record: Record) -> pb.EventRecord:
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
