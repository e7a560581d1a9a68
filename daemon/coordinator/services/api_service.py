"""The public API: the requests of the `muster` command and of any authorized client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from types import MappingProxyType

import grpc
import grpc.aio

from muster.compatibility import Side, own_side
from muster.daemon.coordinator.core import drains
from muster.daemon.coordinator.core.detection import circuit_breaker
from muster.daemon.coordinator.core.state import events
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.journal.history import Record
from muster.daemon.coordinator.journal.journal import JournalError
from muster.daemon.coordinator.services import conversion, job_specs, registration, views
from muster.daemon.coordinator.services.api_handlers import stream_handler, unary_handler
from muster.daemon.coordinator.services.caller_limits import UserCalls
from muster.daemon.coordinator.services.callers_gangs import CallersGangs
from muster.daemon.coordinator.services.job_specs import SpecWork
from muster.daemon.coordinator.services.login_names import LoginNames, ReaderNames
from muster.daemon.coordinator.services.roll_call import roll_call
from muster.daemon.coordinator.services.rpc_errors import (  # fmt: skip
    aborted,
    already_exists,
    internal,
    invalid_argument,
    not_found,
    permission_denied,
    resource_exhausted,
    unavailable,
)
from muster.daemon.coordinator.services.watching import (
    HISTORY_PAGE_CHARS,
    WatchedGangs,
    changed_views,
    checked_position,
    concerns,
    has_no_more_events,
    history_page,
    record_message,
)
from muster.daemon.coordinator.shell.engine import Engine
from muster.daemon.coordinator.shell.load_shedding import Shedding
from muster.daemon.coordinator.slurm.fair_queue import FairQueue
from muster.daemon.coordinator.slurm.lookup import SlurmLookup
from muster.daemon.coordinator.slurm.roster import SlurmRoster
from muster.daemon.coordinator.view_parts.node_history import visible_page
from muster.daemon.host import clock
from muster.daemon.host.plain_text import plain
from muster.daemon.transport import job_limits
from muster.daemon.transport.authorization import Rights
from muster.daemon.transport.identity import Caller, current_caller
from muster.daemon.transport.server_limits import SITE_CALLS, StreamLimits
from muster.slurm.client.types import Job, Unknown
from muster.v1 import api_pb2 as pb
from muster.v1 import api_pb2_grpc
from muster.v1.common_pb2 import JobSpec
from muster.v1.node_pb2 import DriverLines

_Context = grpc.aio.ServicerContext[object, object]

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
        reader_names: ReaderNames | None = None,
        private_jobs: bool = False,
        goodput: views.GoodputOf = views.no_goodput,
        driver_lines: Mapping[str, DriverLines] = MappingProxyType({}),
    ) -> None:
        """`private_jobs`: nodes that no job of the caller has are shown to operators only. So they are if Slurm hides
        jobs or nodes. `goodput`: the account of a gang until now. `driver_lines`: as in NodeService."""
        self._driver_lines = driver_lines
        self.stream_limits = stream_limits
        self.side = own_side("the coordinator")
        self._site_calls = UserCalls(site_calls, "calls for all nodes or all jobs")
        self._site_turn = FairQueue(1)
        self._specs = SpecWork()
        self._watched = WatchedGangs(engine.gang_subscribers)
        self._engine = engine
        self._lookup = lookup
        self._roster = roster
        self.callers_gangs = CallersGangs(engine, rights, reader_names)
        self._login_names = login_names
        self._private_jobs = private_jobs
        self.goodput = goodput

    @unary_handler
    async def Register(self, request: pb.RegisterRequest, context: _Context) -> pb.RegisterReply:
        """See api.proto. Idempotent."""
        caller = current_caller()
        if not self._is_registered(request, caller):
            registration.check_id_is_for(request.gang_id, caller.uid)
            await self._check_may_register(request.slurm_job_id, caller)
            self._register(request, caller, await job_specs.submitted(self._specs, request, caller.uid))
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
        if names_run and request.HasField("like") and self.callers_gangs.known(request) is None:
            return await self._beside(request)
        return self._view(self.callers_gangs.find(request))

    async def _beside(self, ref: pb.GangRef) -> pb.GangView:
        """The newest gang of the caller that is another job of the same name in the same folder, and what differs."""
        gangs, like, uid = self._engine.core.state.gangs.values(), ref.like, current_caller().uid
        try:
            job_specs.check_variables(like)
        except conversion.InvalidMessage as error:
            raise invalid_argument(str(error)) from None
        gang = registration.newest_beside(gangs, like.name, like.durable_dir, uid)
        if gang is None:
            raise self.callers_gangs.no_such_job(ref)
        view = self._view(self.callers_gangs.find(pb.GangRef(gang_id=gang.id)))
        read = partial(self._registration, gang)
        differs = await self._specs.do_with(uid, read, partial(job_specs.differences, like))
        if differs is None:
            raise self.callers_gangs.no_such_job(ref)
        view.differs.extend(differs)
        return view

    @unary_handler
    async def Attend(self, request: pb.BatchRef, context: _Context) -> pb.GangView:
        """See api.proto."""
        gang = self.callers_gangs.find(pb.GangRef(gang_id=request.gang_id))
        if not gang.slurm.run_is_over(request.slurm_job_id, request.slurm_restart_count):
            unlaunched = tuple(sorted(set(gang.slurm.job_nodes).intersection(request.unlaunched_nodes)))
            codes = request.failed_nodes
            failed = tuple((node, codes[node]) for node in gang.slurm.job_nodes if node in codes)
            run = (request.slurm_job_id, request.slurm_restart_count)
            said = (
                plain(" ".join(words[: job_limits.MAX_TEXT_CHARS].split()))
                for words in (request.unsupervised, request.interrupted, request.split_segments)
            )
            self._post(events.BatchHeartbeat(gang.id, *run, unlaunched, failed, *said))
        view = self._view(gang, for_people=False)
        view.final = self._engine.core.batch_may_end(gang, request.slurm_job_id, request.slurm_restart_count)
        return view

    @stream_handler
    async def Watch(self, request: pb.GangRef, context: _Context) -> AsyncIterator[pb.GangView]:
        """See api.proto. A view in which only ages differ is not sent."""
        gang = self.callers_gangs.find(request)
        self._check_may_watch(Shedding.NEW_WATCHERS)

        def view() -> pb.GangView:
            self._check_may_watch(Shedding.ALL_WATCHERS)
            return self._view(gang)

        right = self.callers_gangs.lasting_right(lambda: self.callers_gangs.find(pb.GangRef(gang_id=gang.id)))
        with self._watched.watch(gang.id) as shared:
            async for one in changed_views(view, shared, right, lambda: self._engine.running):
                yield one

    @unary_handler
    async def List(self, request: pb.ListRequest, context: _Context) -> pb.ListReply:
        """See api.proto."""
        reply = pb.ListReply()
        async with self.one_of_the_site():
            for gang in self.callers_gangs.listed(array=request.array):
                reply.gangs.append(self._view(gang, brief=request.brief))
                await asyncio.sleep(0)
        return reply

    @stream_handler
    async def Events(self, request: pb.EventsRequest, context: _Context) -> AsyncIterator[pb.EventRecord]:
        """See api.proto. The live events of one gang end when no more can follow."""
        id = self.callers_gangs.whose_events(request.gang)
        position = checked_position("after", request.after)
        if request.follow:
            self._check_may_watch(Shedding.NEW_WATCHERS)
        gang = self._engine.core.state.gangs.get(id)
        right = self.callers_gangs.lasting_right(lambda: self.callers_gangs.whose_events(request.gang))
        with self._engine.journal_subscribers.subscribe() as live:
            while page := history_page(self._engine.journal, id, position):
                await right.ask()
                for record in page:
                    position = record.position
                    yield record_message(record)
            yield pb.EventRecord(sentinel=True, position=position)
            while request.follow and not has_no_more_events(self._engine.core.state, id, live):
                fresh = await right.wait_for(live.get)
                if fresh is None:
                    self._check_may_watch(Shedding.ALL_WATCHERS)
                    raise resource_exhausted(f"too slow: ask again for the events after position {position}")
                if fresh.position > position and concerns(fresh, gang):
                    position = fresh.position
                    yield record_message(fresh)

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
        before = gang.checkpoint.flush
        self._post(events.FlushRequested(gang.id, by))
        flush = gang.checkpoint.flush
        if flush is None or (flush is before and flush.is_over):
            raise aborted(
                "there is nothing to flush: no version is committed in memory (see committed in muster status)"
            )
        return pb.FlushReply(serial=flush.serial)

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
        if not self.callers_gangs.allows(None):
            raise permission_denied(f"only operators may drain a node{self.callers_gangs.place_hint()}")
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
        async with self.one_of_the_site():
            return await self._roll_call(self.callers_gangs.listed())

    @asynccontextmanager
    async def one_of_the_site(self) -> AsyncIterator[None]:
        """Wait until no other call for all nodes or all jobs is answered: the event loop builds one at a time.

        Raises:
            CallRefused: the caller has too many of them under way.
        """
        uid = current_caller().uid
        with self._site_calls.one(uid):
            async with self._site_turn.place(uid):
                yield

    async def _roll_call(self, gangs: list[Gang]) -> pb.NodesReply:
        core, now = self._engine.core, self._engine.clock.now()
        private_unknown = "" if self._private_jobs else self._roster.private_unknown
        reply = pb.NodesReply(slurm_unknown=self._roster.unknown, private_unknown=private_unknown)
        of_all, private, limits = self.callers_gangs.allows(None), self._hides_nodes(), self._engine.limits
        called = roll_call(
            core.state, core.observed, self._roster, gangs, now, limits,
            of_all_jobs=of_all, of_all_nodes=of_all or not private,
        )  # fmt: skip
        for count, view in enumerate(called):
            self._add_driver_lines(view, with_text=of_all)
            reply.nodes.append(view)
            if count % NODES_PER_LOOP_TURN == NODES_PER_LOOP_TURN - 1:
                await asyncio.sleep(0)
        return reply

    @unary_handler
    async def NodeHistory(self, request: pb.NodeHistoryRequest, context: _Context) -> pb.NodeHistoryReply:
        """See api.proto. Who sees the node in Nodes sees its history, but for what belongs to jobs of others."""
        async with self.one_of_the_site():
            core, now, node = self._engine.core, self._engine.clock.now(), request.node
            of_all, gangs = self.callers_gangs.allows(None), self.callers_gangs.listed()
            view = next(
                roll_call(
                    core.state, core.observed, self._roster, gangs, now, self._engine.limits,
                    of_all_jobs=of_all, of_all_nodes=of_all or not self._hides_nodes(), only=node,
                ),
                None,
            )  # fmt: skip
            if view is None:
                raise not_found(f"{node[:80]!r} is no node that you may see: muster nodes lists them")
            self._add_driver_lines(view, with_text=of_all)
            records, before = self._node_records(node, request)
        return pb.NodeHistoryReply(node=view, records=map(record_message, records), before=before)

    def _add_driver_lines(self, view: pb.NodeView, *, with_text: bool) -> None:
        if said := self._driver_lines.get(view.node):
            view.driver_lines, view.newest_driver_line = said.count, said.newest if with_text else ""

    def _node_records(self, node: str, request: pb.NodeHistoryRequest) -> tuple[list[Record], int]:
        def read(before: int, limit: int) -> list[Record]:
            return self._engine.journal.node_history(node, before, limit, HISTORY_PAGE_CHARS)

        before = checked_position("before", request.before)
        try:
            return visible_page(read, self.callers_gangs.may_read_cached(), before, request.limit)
        except JournalError as error:
            raise internal(str(error)) from None

    def _hides_nodes(self) -> bool:
        """Users see the nodes of their own jobs only."""
        return self._private_jobs or self._roster.hides_nodes

    async def _find_for_request(self, ref: pb.GangRef) -> tuple[Gang, str]:
        """The gang that `ref` names, and the login name of the caller, who requests something of the gang."""
        self.callers_gangs.find(ref)  # nobody's name is looked up who has no right to the call
        by = await self._login_names(current_caller().uid)
        return self.callers_gangs.find(ref), by

    async def _check_may_register(self, job: int, caller: Caller) -> None:
        found = await self._lookup.job(job, caller.uid, since=clock.monotonic())
        match found:
            case Unknown():
                raise unavailable(f"can't get job {job} from Slurm: {found.reason}")
            case Job() if self.callers_gangs.allows(found.user_id):
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

    def _view(self, gang: Gang, *, brief: bool = False, for_people: bool = True) -> pb.GangView:
        core, now = self._engine.core, self._engine.clock.now()
        return views.gang_view(
            core.state,
            core.observed,
            gang,
            now,
            self._engine.limits,
            brief=brief,
            for_people=for_people,
            goodput=self.goodput,
        )

    async def registered_spec(self, gang: Gang) -> JobSpec | None:
        """The spec of a gang; None: there is none that this version can read. Raises CallRefused: the journal can't be
        read."""
        return await self._specs.do_with(current_caller().uid, partial(self._registration, gang), job_specs.read_spec)

    def _registration(self, gang: Gang) -> Record | None:
        try:
            return job_specs.registration_of(self._engine.journal, gang.id)
        except JournalError as error:
            raise internal(str(error)) from None


class BesideApi:
    """A service beside `api`: the same callers may name the same gangs, within the same limits."""

    def __init__(self, engine: Engine, api: MusterService) -> None:
        self.stream_limits = api.stream_limits
        self._engine, self._api = engine, api

    @property
    def side(self) -> Side:
        """What this coordinator says of its version."""
        return self._api.side

    @property
    def callers_gangs(self) -> CallersGangs:
        """Which gangs the caller may name."""
        return self._api.callers_gangs


def _checked_reason(reason: str) -> str:
    """The caller's words, for the journal and for Slurm.

    Raises:
        CallRefused: they are too long, or no plain text.
    """
    if len(reason) > MAX_REASON_CHARS:
        raise invalid_argument(f"the reason has {len(reason)} characters: {MAX_REASON_CHARS} are allowed")
    if not reason.isprintable():
        raise invalid_argument("the reason has characters that can't be printed: write one line of plain text")
    return reason.strip()
