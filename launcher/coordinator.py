"""The door to the coordinator: every question that a command asks, with its errors put in the caller's words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import NoReturn, TypeVar

import grpc
import grpc.aio

from muster.daemon.transport.channel import open_first_ready_channel
from muster.daemon.transport.identity import Credentials, IdentityError
from muster.daemon.transport.site_config import split_addresses
from muster.launcher.errors import LauncherError, NotAllowed, SiteFault, Unavailable, WrongInput
from muster.v1 import api_pb2 as pb
from muster.v1.api_pb2_grpc import MusterStub
from muster.v1.common_pb2 import JobSpec

DEADLINE_S = 5.0
"""For one answer. A healthy coordinator needs milliseconds."""

_JOB_MOST = (1 << 32) - 1

RETRY_S = 0.25
"""Between two looks whether the coordinator is back."""

Away = Callable[[str], None]
"""Is told, in words, that the coordinator is away for now."""

_T = TypeVar("_T")
_Request = TypeVar("_Request")


def gang_ref(text: str) -> pb.GangRef:
    """What a user names a job by: the number of its Slurm job, or its gang's id."""
    known = text.isascii() and text.isdigit() and int(text) <= _JOB_MOST  # no job of Slurm's has a larger number
    return pb.GangRef(slurm_job_id=int(text)) if known else pb.GangRef(gang_id=text)


class Coordinator:
    """The coordinator, for the length of a command: an asynchronous context manager. `address`: "host:port", or
    several of them with commas, where one stands by."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        self.address = address
        self._credentials = credentials
        self._channels: list[grpc.aio.Channel] = []

    async def __aenter__(self) -> Coordinator:
        await self._dial()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for channel in self._channels:
            await channel.close(None)

    async def _dial(self) -> None:
        """Turn to whichever coordinator answers now. What is asked through the one before goes on."""
        self._channels.append(
            await open_first_ready_channel(split_addresses(self.address), self._credentials, keepalive=True)
        )
        self._stub = MusterStub(self._channels[-1])

    async def knows(self, gang_id: str) -> bool:
        """Whether the coordinator has such a gang. The answer also proves that it is there and takes our word.

        Raises:
            LauncherError: it can't be asked.
        """
        try:
            await self._stub.Describe(pb.GangRef(gang_id=gang_id), timeout=DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.NOT_FOUND:
                return False
            self._refuse(error)
        return True

    async def register(self, gang_id: str, job: int, spec: JobSpec) -> None:
        """Tells of a gang that was just queued. Twice changes nothing."""
        request = pb.RegisterRequest(gang_id=gang_id, slurm_job_id=job, spec=spec)
        await self._answer(self._stub.Register(request, timeout=DEADLINE_S))

    async def describe(self, ref: pb.GangRef) -> pb.GangView:
        """The gang as it stands."""
        return await self._answer(self._stub.Describe(ref, timeout=DEADLINE_S))

    async def gangs(self) -> list[pb.GangView]:
        """The caller's gangs; all of them for an operator."""
        reply = await self._answer(self._stub.List(pb.ListRequest(), timeout=DEADLINE_S))
        return list(reply.gangs)

    async def nodes(self) -> pb.NodesReply:
        """Every node that Slurm has, or that the coordinator has heard from."""
        return await self._answer(self._stub.Nodes(pb.ListRequest(), timeout=DEADLINE_S))

    async def cancel(self, ref: pb.GangRef) -> str:
        """Cancels the gang; what was done, in words."""
        return (await self._answer(self._stub.Cancel(ref, timeout=DEADLINE_S))).text

    async def watch(self, ref: pb.GangRef) -> AsyncIterator[pb.GangView]:
        """The gang whenever it changes, until it is final."""
        async for view in self._stream(self._stub.Watch(ref)):
            yield view

    async def follow(self, ref: pb.GangRef, away: Away) -> AsyncIterator[pb.GangView]:
        """As `watch`, but over restarts of the coordinator, once it has answered; `away` is told of each."""
        answered = False
        while True:
            words = f"the coordinator at {self.address} has stopped"
            try:
                async for view in self.watch(ref):
                    answered = True
                    yield view
                    if view.final:
                        return
            except Unavailable as error:
                if not answered:
                    raise
                words = error.message
            away(words)
            await self._back()

    async def follow_events(self, request: pb.EventsRequest, away: Away) -> AsyncIterator[pb.EventRecord]:
        """As `events` with `follow`, but over restarts of the coordinator: each event once."""
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
                away(error.message)
            await self._back()

    async def _back(self) -> None:
        """Until a coordinator answers again."""
        while True:
            await asyncio.sleep(RETRY_S)
            try:
                async with Coordinator(self.address, self._credentials) as other:
                    await other.knows("-")
            except Unavailable:
                continue
            await self._dial()
            return

    async def events(self, request: pb.EventsRequest) -> AsyncIterator[pb.EventRecord]:
        """The journal as asked for."""
        async for record in self._stream(self._stub.Events(request)):
            yield record

    async def _answer(self, call: Awaitable[_T]) -> _T:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            self._refuse(error)

    async def _stream(self, call: grpc.aio.UnaryStreamCall[_Request, _T]) -> AsyncIterator[_T]:
        try:
            async for item in call:
                yield item
        except grpc.aio.AioRpcError as error:
            self._refuse(error)
        finally:
            call.cancel()

    def _refuse(self, error: grpc.aio.AioRpcError) -> NoReturn:
        if isinstance(error.__cause__, IdentityError):
            raise cannot_prove(error.__cause__) from None
        raise _in_words(error, self.address) from None


def cannot_prove(error: IdentityError) -> SiteFault:
    """We can't prove who we are."""
    hint = "start munged here, as for Slurm itself (Debian: apt install munge)" if "munge" in str(error) else ""
    return SiteFault(f"can't prove who we are: {error}", hint)


def _in_words(error: grpc.aio.AioRpcError, address: str) -> LauncherError:
    words = error.details() or error.code().name
    match error.code():
        # CANCELLED: it is on its way down and has ended the call.
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.DEADLINE_EXCEEDED | grpc.StatusCode.CANCELLED:
            return Unavailable(
                f"the coordinator at {address} does not answer: {words}",
                "is muster-coordinator running there? The address comes from --coordinator, MUSTER_COORDINATOR or"
                " /etc/muster/muster.toml",
            )
        case grpc.StatusCode.UNAUTHENTICATED:
            return SiteFault(
                f"the coordinator at {address} does not accept who we are: {words}",
                "are both hosts in one munge realm (same key, clocks that agree)?",
            )
        case grpc.StatusCode.PERMISSION_DENIED:
            return NotAllowed(words)
        case grpc.StatusCode.NOT_FOUND | grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.ALREADY_EXISTS:
            return WrongInput(words)
        case code:
            return LauncherError(f"the coordinator at {address} answered {code.name}: {words}")
