"""The client of the coordinator: one method for each call that a command makes. gRPC errors become LauncherErrors."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, TypeVar

import grpc
import grpc.aio

from muster.daemon.transport.calls.connection_errors import why_unreached
from muster.daemon.transport.channel import open_first_ready_channel
from muster.daemon.transport.gang_ids import job_identity
from muster.daemon.transport.identity import Credentials, IdentityError
from muster.daemon.transport.server_limits import ORDER_BYTES
from muster.daemon.transport.site_config import split_addresses
from muster.daemon.transport.tls import SAME_CONNECTIONS, Trust, is_answer_without_tls, is_proof_failure, may_want_tls
from muster.launcher.errors import (
    Busy,
    LauncherError,
    NoCredential,
    NotAllowed,
    NotNow,
    SiteFault,
    Unavailable,
    WrongInput,
)
from muster.launcher.version_check import VersionCheck
from muster.v1 import api_pb2 as pb
from muster.v1.api_pb2_grpc import MusterStub
from muster.v1.common_pb2 import JobSpec

if TYPE_CHECKING:  # one command needs them
    from muster.v1 import diagnosis_pb2, goodput_pb2
    from muster.v1.diagnosis_pb2_grpc import DiagnosisAsyncStub
    from muster.v1.goodput_pb2_grpc import GoodputAsyncStub

CALL_TIMEOUT_S = 20.0
"""Seconds for one answer. A healthy coordinator needs milliseconds. One whose disk is slow does nothing else while it
writes, and answers then: a user would only have to call again. One that gives up a call says why within 15 s: munged is
silent, or calls of the user are in the way. A host that is silent ends the call within 8 s, by keepalive.

No call is repeated. A connection that lives loses nothing, and a busy coordinator would have the call twice."""

MEASURE_TIMEOUT_S = 25.0
"""Seconds for one measured link. The coordinator gives an agent 20 s."""

_MAX_JOB_ID = (1 << 32) - 1
_NO_GANG = "-"
"""No gang has this id."""

RECONNECT_INTERVAL_S = 0.25
"""Seconds between two attempts to reach the coordinator again."""

BUSY_PAUSE_S = 15.0
"""Seconds, at most, that a watcher waits before it comes again to a coordinator that has too much to do. The wait is
random, at least half of it: a thousand watchers must not come at once."""

OnUnavailable = Callable[[str], None]
"""Is called with the reason when the coordinator does not answer at the moment."""

_T = TypeVar("_T")
_Request = TypeVar("_Request")


OF_THE_SITE = (
    "look there with: systemctl status muster-coordinator. The address comes from --coordinator, MUSTER_COORDINATOR or "
    "`coordinator` of /etc/muster/muster.toml"
)
"""Where to look if the coordinator of a site does not answer."""


def gang_ref(text: str) -> pb.GangRef:
    """Converts the user's name of a job: a Slurm job id or a gang id."""
    known = text.isascii() and text.isdigit() and int(text) <= _MAX_JOB_ID  # Slurm's job ids are not larger
    return pb.GangRef(slurm_job_id=int(text)) if known else pb.GangRef(gang_id=text)


class CoordinatorClient:
    """A client for the duration of one command; an asynchronous context manager. `address` is "host:port", or several
    addresses separated by commas if a standby runs.
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        trust: Trust | None = None,
        busy_pause_s: float = BUSY_PAUSE_S,
        versions: VersionCheck | None = None,
        where_to_look: str = OF_THE_SITE,
    ) -> None:
        """`trust`: whom to take for a coordinator; None: plain text. `versions`: what this command says of its version;
        None: a misfit is told to nobody. `where_to_look`: what helps if it does not answer."""
        self._where_to_look = where_to_look
        self._versions = versions or VersionCheck()
        self._busy_pause_s = busy_pause_s
        self.address = address
        self._credentials = credentials
        self._trust = trust
        self._channels: list[grpc.aio.Channel] = []

    async def __aenter__(self) -> CoordinatorClient:
        await self._connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for channel in self._channels:
            await channel.close(None)

    async def _connect(self) -> None:
        """Connects to the coordinator that answers now. Calls on an earlier connection continue."""
        addresses = split_addresses(self.address)
        self._channels.append(
            await open_first_ready_channel(
                addresses,
                self._credentials,
                trust=self._trust,
                receive_bytes=ORDER_BYTES,
                keepalive=True,
                metadata=self._versions.metadata,
            )
        )
        self._stub = MusterStub(self._channels[-1])

    async def check(self) -> None:
        """Checks that the coordinator runs, accepts the credentials, and fits the version of this command.

        Raises:
            LauncherError: the coordinator cannot be reached or refuses.
        """
        await self._find(pb.GangRef(gang_id=_NO_GANG))
        self._versions.check()

    async def has_gang(self, gang_id: str) -> bool:
        """Whether the coordinator has this gang.

        Raises:
            LauncherError: the coordinator cannot be reached or refuses.
        """
        return await self._find(pb.GangRef(gang_id=gang_id)) is not None

    async def newest_run(self, spec: JobSpec) -> pb.GangView | None:
        """The caller's gang that is a run of a job (gang_ids.job_identity): the one that is queued or runs, else the
        newest one. Else their newest one with a checkpoint of equal name and durable_dir; then the view says what
        makes it another job. None: the coordinator knows none."""
        like = JobSpec(
            name=spec.name, durable_dir=spec.durable_dir, command=spec.command, env=spec.env, work_dir=spec.work_dir
        )
        return await self._find(pb.GangRef(job_identity=job_identity(spec), like=like))

    async def _find(self, ref: pb.GangRef) -> pb.GangView | None:
        call = self._stub.Describe(ref, timeout=CALL_TIMEOUT_S)
        try:
            view = await call
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.NOT_FOUND:
                self._raise_error(error)
            view = None
        self._versions.meet(await call.initial_metadata())
        return view

    async def register(self, gang_id: str, job: int, spec: JobSpec) -> None:
        """Registers a gang that was just queued. Idempotent."""
        request = pb.RegisterRequest(gang_id=gang_id, slurm_job_id=job, spec=spec)
        await self._answer(self._stub.Register(request, timeout=CALL_TIMEOUT_S))

    async def describe(self, ref: pb.GangRef) -> pb.GangView:
        """The current state of the gang."""
        return await self._answer(self._stub.Describe(ref, timeout=CALL_TIMEOUT_S))

    async def gangs(self, *, brief: bool = False, array: int = 0) -> list[pb.GangView]:
        """The caller's gangs; for an operator, all gangs. `brief`, `array`: as in ListRequest."""
        request = pb.ListRequest(brief=brief, array=array)
        reply = await self._answer(self._stub.List(request, timeout=CALL_TIMEOUT_S))
        return list(reply.gangs)

    async def tasks(self, ref: pb.GangRef, *, brief: bool = False) -> list[pb.GangView]:
        """The gangs of the tasks of an array job that have launched; empty: `ref` names no array, or none has."""
        if not ref.slurm_job_id:
            return []
        found = await self.gangs(brief=brief, array=ref.slurm_job_id)
        return [view for view in found if view.array_task]  # an earlier version lists all jobs

    async def nodes(self) -> pb.NodesReply:
        """Every node that Slurm has or that a node daemon has reported."""
        return await self._answer(self._stub.Nodes(pb.ListRequest(), timeout=CALL_TIMEOUT_S))

    async def node_history(self, node: str, before: int, limit: int) -> pb.NodeHistoryReply:
        """One node and its newest records before a position of the journal; 0: from the newest on.

        Raises:
            WrongInput: there is no such node, or it is not shown to the caller.
        """
        request = pb.NodeHistoryRequest(node=node, before=before, limit=limit)
        return await self._answer(self._stub.NodeHistory(request, timeout=CALL_TIMEOUT_S))

    async def cancel(self, ref: pb.GangRef) -> str:
        """Cancels the gang. Returns the coordinator's answer in words."""
        return (await self._answer(self._stub.Cancel(ref, timeout=CALL_TIMEOUT_S))).text

    async def flush(self, ref: pb.GangRef) -> int:
        """Has the newest step in memory written to durable storage. Returns the number of the flush within the gang.

        Raises:
            WrongInput: the job has no durable_dir.
            NotNow: nothing can be flushed now.
        """
        return (await self._answer(self._stub.Flush(ref, timeout=CALL_TIMEOUT_S))).serial

    async def swap(self, ref: pb.GangRef, node: str, reason: str) -> pb.SwapReply:
        """Asks that a spare takes the place of `node`.

        Raises:
            WrongInput: the gang can never leave that node.
            NotNow: the gang can't leave it now.
        """
        request = pb.SwapRequest(gang=ref, node=node, reason=reason)
        return await self._answer(self._stub.Swap(request, timeout=CALL_TIMEOUT_S))

    async def drain(self, node: str, reason: str) -> pb.DrainReply:
        """Has Slurm start nothing more on `node`, and gangs leave it as they have spares.

        Raises:
            NotAllowed: the caller is no operator.
            NotNow: the site has Muster in observe mode.
        """
        request = pb.DrainRequest(node=node, reason=reason)
        return await self._answer(self._stub.Drain(request, timeout=CALL_TIMEOUT_S))

    async def measurements(self, ref: pb.GangRef) -> diagnosis_pb2.JobMeasurements:
        """What was measured of a job."""
        return await self._answer(self._diagnosis().Measurements(ref, timeout=CALL_TIMEOUT_S))

    async def measure_link(self, ref: pb.GangRef, sender: str, receiver: str) -> diagnosis_pb2.LinkRate:
        """Has the agent on `sender` send to the one on `receiver` for a moment.

        Raises:
            NotNow: another link of the job is being measured, or an agent does not answer.
        """
        from muster.v1.diagnosis_pb2 import MeasureLinkRequest

        request = MeasureLinkRequest(gang=ref, from_node=sender, to_node=receiver)
        return await self._answer(self._diagnosis().MeasureLink(request, timeout=MEASURE_TIMEOUT_S))

    def _diagnosis(self) -> DiagnosisAsyncStub:
        from muster.v1.diagnosis_pb2_grpc import DiagnosisStub

        return DiagnosisStub(self._channels[-1])

    async def account(self, since_s: float, by: str) -> AsyncIterator[goodput_pb2.GoodputPage]:
        """To what the time of the nodes has gone since then, in pages. `by`: "job", "account", "cause", "node", "leaf".

        Raises:
            LauncherError: the coordinator cannot be reached or refuses.
        """
        from muster.v1 import goodput_pb2
        from muster.v1.goodput_pb2_grpc import GoodputStub

        group = goodput_pb2.GoodputGroup.Value(f"GOODPUT_GROUP_{by.upper()}")
        stub: GoodputAsyncStub = GoodputStub(self._channels[-1])
        request = goodput_pb2.GoodputRequest(since_s=since_s, by=group)
        async for page in self._stream(stub.Account(request, timeout=CALL_TIMEOUT_S)):
            yield page

    async def watch(self, ref: pb.GangRef) -> AsyncIterator[pb.GangView]:
        """Yields the gang after every change, until the gang is final."""
        async for view in self._stream(self._stub.Watch(ref)):
            yield view

    async def follow(self, ref: pb.GangRef, on_unavailable: OnUnavailable) -> AsyncIterator[pb.GangView]:
        """Like `watch`, but continues after restarts of the coordinator, once the coordinator has answered. Calls
        `on_unavailable` for each interruption.
        """
        answered = False
        while True:
            busy, words = False, f"the coordinator at {self.address} has stopped"
            try:
                async for view in self.watch(ref):
                    answered = True
                    yield view
                    if view.final:
                        return
            except Unavailable as error:
                if not answered:
                    raise
                words, busy = error.message, isinstance(error, Busy)
            on_unavailable(words)
            await self._come_again(busy)

    async def follow_events(
        self, request: pb.EventsRequest, on_unavailable: OnUnavailable
    ) -> AsyncIterator[pb.EventRecord]:
        """Like `events` with `follow`, but continues after restarts of the coordinator. Yields each event once."""
        rest = pb.EventsRequest(gang=request.gang, follow=True, after=request.after)
        answered = False
        while True:
            try:
                async for record in self.events(rest):
                    rest.after = max(rest.after, record.position)
                    if not (record.sentinel and answered):
                        yield record
                    answered |= record.sentinel
                return
            except Unavailable as error:
                if not answered:
                    raise
                on_unavailable(error.message)
                busy = isinstance(error, Busy)
            await self._come_again(busy)

    async def _come_again(self, busy: bool) -> None:
        """Waits until the call may be made again. A busy coordinator is left alone meanwhile."""
        if busy:
            await asyncio.sleep(random.uniform(self._busy_pause_s / 2, self._busy_pause_s))
        else:
            await self.reconnect()

    async def reconnect(self) -> None:
        """Waits until a coordinator answers, and connects to it."""
        while True:
            await asyncio.sleep(RECONNECT_INTERVAL_S)
            try:
                async with CoordinatorClient(self.address, self._credentials, self._trust) as other:
                    await other.has_gang(_NO_GANG)
            except Unavailable:
                continue
            await self._connect()
            return

    async def events(self, request: pb.EventsRequest) -> AsyncIterator[pb.EventRecord]:
        """Yields the requested part of the journal."""
        async for record in self._stream(self._stub.Events(request)):
            yield record

    async def _answer(self, call: grpc.aio.UnaryUnaryCall[_Request, _T]) -> _T:
        try:
            answer = await call
        except grpc.aio.AioRpcError as error:
            self._raise_error(error)
        self._versions.meet(await call.initial_metadata())
        self._versions.tell()
        return answer

    async def _stream(self, call: grpc.aio.UnaryStreamCall[_Request, _T]) -> AsyncIterator[_T]:
        met = False
        try:
            async for item in call:
                if not met:
                    self._versions.meet(await call.initial_metadata())
                    self._versions.tell()
                    met = True
                yield item
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise Busy(error.details() or "the coordinator has too much to do") from None
            self._raise_error(error)
        finally:
            call.cancel()

    def _raise_error(self, error: grpc.aio.AioRpcError) -> NoReturn:
        if isinstance(error.__cause__, IdentityError):
            raise identity_fault(error.__cause__) from None
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise self._versions.refused(error.details() or "", error.initial_metadata()) from None
        raise _to_launcher_error(error, self.address, self._trust, self._where_to_look) from None


def identity_fault(error: IdentityError) -> NoCredential:
    """The error for credentials that are not available."""
    hint = "start munged on this host, as for Slurm (Debian: apt install munge)" if "munge" in str(error) else ""
    return NoCredential(f"can't authenticate: {error}", hint)


def _to_launcher_error(
    error: grpc.aio.AioRpcError, address: str, trust: Trust | None, where_to_look: str
) -> LauncherError:
    details = error.details() or error.code().name
    words, place = why_unreached(details), " or ".join(split_addresses(address))
    match error.code():
        case grpc.StatusCode.UNAVAILABLE if "munge" in details:  # the words name the host
            return Unavailable(
                f"the coordinator at {place} can't tell who calls: {words}", "look there with: systemctl status munge"
            )
        # CANCELLED: the coordinator is stopping and has ended the call.
        case grpc.StatusCode.UNAVAILABLE if is_proof_failure(details):
            return SiteFault(
                f"the server at {place} does not prove that it is a coordinator of this site: {words}",
                "check its certificate with `muster pki show` there, and tls_authority in /etc/muster/muster.toml",
            )
        case grpc.StatusCode.UNAVAILABLE if is_answer_without_tls(details, trust):
            return SiteFault(
                f"the server at {place} answers in plain text, and this host uses TLS: no credential was sent",
                f"{SAME_CONNECTIONS}. If they are the same, another program listens there",
            )
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.DEADLINE_EXCEEDED | grpc.StatusCode.CANCELLED:
            tls = (
                f". Or it uses TLS, and this host does not. {SAME_CONNECTIONS}" if may_want_tls(details, trust) else ""
            )
            return Unavailable(
                f"the coordinator at {place} does not answer: {words}",
                f"{where_to_look}{tls}",
            )
        case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.FAILED_PRECONDITION:
            return SiteFault(
                f"the coordinator at {place} rejects the authentication: {words}",
                "check that both hosts have the same munge key and that their clocks agree",
            )
        case grpc.StatusCode.PERMISSION_DENIED:
            return NotAllowed(words)
        case grpc.StatusCode.NOT_FOUND | grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.ALREADY_EXISTS:
            return WrongInput(words)
        case grpc.StatusCode.ABORTED:
            return NotNow(words)
        case code:
            return LauncherError(f"the coordinator at {place} answered {code.name}: {words}")
