"""Who is calling is known before anything that the caller sends is read.

gRPC runs a server's interceptor with the method and the metadata of a call, before the first message of the call is
received. The interceptor checks the credential there. A refused call ends at once, and no message of it is received,
whatever the caller sends on.

A check occupies a thread and munged, so the number of checks at the same time is limited. So is the number of calls
under way: a caller with a credential may leave its call open. A call beyond a limit ends with RESOURCE_EXHAUSTED before
any work is done. For a probe that is an answer: the process is alive.

A credential is for one first message (`muster.daemon.transport.call_binding`). The call's first message is compared
with it before it is parsed. A message that can't be read ends its call with INVALID_ARGUMENT. gRPC itself would log a
traceback for each.
"""

from __future__ import annotations

import asyncio
import inspect
import ipaddress
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import unquote

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from muster.daemon.transport import authority_table, call_binding
from muster.daemon.transport.call_binding import CREDENTIAL_KEY, ServerNames
from muster.daemon.transport.identity import (
    Caller,
    CredentialRefused,
    IdentityUnavailable,
    OtherServer,
    Proof,
    set_call,
)
from muster.daemon.transport.server_limits import ServerLimits

REFUSED_KEY = "muster-refused"
"""In the trailing metadata of a call that this server has refused. gRPC's own UNAVAILABLE, which says that no process
answered, does not have it."""

LINGER_S = 0.2
"""Seconds for which a refused stream stays open, unread. A client of grpc.aio whose write finds the call ended reports
"Internal error from Core" instead of the status, so the writes that are under way get this time."""
MAX_LINGERING = 32
"""Refused streams that stay open at the same time. Others end at once."""

CheckCredential = Callable[[str, str], Awaitable[Proof]]
"""Returns what a credential proves that came with a call of a method. Raises CredentialRefused, IdentityUnavailable."""
RefuseCaller = Callable[[str, int], str]
"""Returns why a uid may not call a method; empty: it may, as far as the method's name tells."""

_Context = grpc.aio.ServicerContext[Any, Any]
_Handler = Callable[[Any, _Context], Any]


class CredentialCheck(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Passes a call to its handler after its credential is checked."""

    def __init__(
        self,
        check: CheckCredential,
        server_names: ServerNames,
        limits: ServerLimits,
        refuse: RefuseCaller,
    ) -> None:
        self._check = check
        self._server_names = server_names
        self._refuse_caller = refuse
        self._checks = _Places(limits.credential_checks, "credentials that wait for their check")
        self._calls = _Places(limits.calls, "calls under way")
        self._public_calls = _Places(limits.public_calls, "calls without a credential")
        self._lingering = _Places(MAX_LINGERING, "refused streams")

    async def wait_for_calls(self, timeout_s: float) -> None:
        """Wait until the handlers of all calls have ended, for `timeout_s` at most."""
        if under_way := [*self._calls.tasks, *self._public_calls.tasks]:
            await asyncio.wait(under_way, timeout=timeout_s)

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # gRPC answers that there is no such method
        method: str = handler_call_details.method
        try:
            if authority_table.is_public(method):
                self._public_calls.take_for_call()
                return handler
            proof, digest = await self._identify(method, handler_call_details.invocation_metadata)
            self._calls.take_for_call()
        except _CallRefused as refused:
            # The exception itself would keep this frame alive in a cycle, until the garbage collector runs.
            end = partial(self._end_call, refused.code, str(refused), handler.request_streaming)
            return grpc.stream_stream_rpc_method_handler(end)
        return _with_caller(handler, method, proof, digest)

    async def _identify(self, method: str, metadata: Any) -> tuple[Proof, str]:
        """Who calls, and the digest of the call's first message. Raises _CallRefused."""
        token = dict(metadata or ()).get(CREDENTIAL_KEY)
        if token is None:
            raise _CallRefused(grpc.StatusCode.UNAUTHENTICATED, f"{method} needs a credential ({CREDENTIAL_KEY})")
        with self._checks.one():
            try:
                proof = await self._check(str(token), method)
                digest = call_binding.check_call(proof.payload, method, self._server_names())
            except OtherServer as error:
                raise _CallRefused(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from error
            except CredentialRefused as error:
                raise _CallRefused(grpc.StatusCode.UNAUTHENTICATED, str(error)) from error
            except IdentityUnavailable as error:
                raise _CallRefused(grpc.StatusCode.UNAVAILABLE, str(error)) from error
        if refused := self._refuse_caller(method, proof.uid):
            raise _CallRefused(grpc.StatusCode.PERMISSION_DENIED, refused)
        return proof, digest

    async def _end_call(
        self, code: grpc.StatusCode, message: str, streams: bool, request: Any, context: _Context
    ) -> None:
        """The handler of a refused call. A call of any kind may get this handler: it receives no message."""
        if streams and self._lingering.free:
            with self._lingering.one():
                await asyncio.sleep(LINGER_S)
        context.set_trailing_metadata(((REFUSED_KEY, "1"),))
        # `context.abort` would do the same with an exception, which leaves a cycle for the garbage collector.
        context.set_code(code)
        context.set_details(message)


class _CallRefused(Exception):
    """The call ends with `code`. The message says what is wrong."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class _Places:
    """Counts what happens at the same time. `what`: for the message to a caller who finds no place. `tasks`: those that
    handle the calls that have a place."""

    def __init__(self, most: int, what: str) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()
        self._most = self.free = most
        self._what = what

    @contextmanager
    def one(self) -> Iterator[None]:
        """Take a place for a block. Raises _CallRefused: none is free."""
        self._take()
        try:
            yield
        finally:
            self.free += 1

    def take_for_call(self) -> None:
        """Take a place until this task, which handles one call, is done. Raises _CallRefused: none is free."""
        self._take()
        task = asyncio.current_task()
        assert task is not None, "gRPC handles each call in a task of its own"
        self.tasks.add(task)
        task.add_done_callback(self._give_back)

    def _take(self) -> None:
        if not self.free:
            raise _CallRefused(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"busy, try again: {self._most} {self._what} are the most here"
            )
        self.free -= 1

    def _give_back(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        self.free += 1


def _with_caller(handler: Any, method: str, proof: Proof, digest: str) -> Any:
    """The handler of `method`, which runs with the caller set. `digest`: of the first message that it may receive."""
    kind = _handler_field(handler)
    function = getattr(handler, kind)
    # A handler may be a coroutine (which writes its stream itself) or an asynchronous generator. A coroutine runs
    # both here, because gRPC lets a coroutine answer a stream through context.write.
    if handler.response_streaming and inspect.isasyncgenfunction(function):
        guarded = partial(_run_generator, function, method, proof)
    elif inspect.iscoroutinefunction(function):
        guarded = partial(_run_coroutine, function, method, proof)
    else:
        raise TypeError(f"the handler of {method} must be asynchronous")
    read = _MessageReader(handler.request_deserializer, digest)
    return handler._replace(**{kind: guarded, "request_deserializer": read})


async def _run_coroutine(handler: _Handler, method: str, proof: Proof, request: Any, context: _Context) -> Any:
    set_call(Caller(proof.uid, proof.gid, address_of(context.peer())), method)
    return await handler(await _readable(request, context), context)


async def _run_generator(handler: _Handler, method: str, proof: Proof, request: Any, context: _Context) -> None:
    set_call(Caller(proof.uid, proof.gid, address_of(context.peer())), method)
    answers: AsyncIterator[Any] = handler(await _readable(request, context), context)
    async with aclosing(answers):  # type: ignore[type-var]
        async for answer in answers:
            await context.write(answer)


@dataclass(frozen=True, slots=True)
class _Refused:
    """In place of a message that no handler gets: the status that ends the call, and why."""

    code: grpc.StatusCode
    details: str


_UNREADABLE = _Refused(grpc.StatusCode.INVALID_ARGUMENT, "this is no message of this method: it can't be read")
_OTHER_MESSAGE = _Refused(
    grpc.StatusCode.UNAUTHENTICATED, "the credential is refused: it was made for another message than this one"
)


class _MessageReader:
    """Reads the messages of one call."""

    def __init__(self, deserialize: Callable[[bytes], Any], digest: str) -> None:
        self._deserialize = deserialize
        self._digest: str | None = digest

    def __call__(self, message: bytes) -> Any:
        """The message; in its place _Refused, if it is not the first message of this call, or can't be read."""
        if self._digest is not None:
            if not call_binding.is_first_message(message, self._digest):
                return _OTHER_MESSAGE
            self._digest = None
        try:
            return self._deserialize(message)
        except DecodeError:
            return _UNREADABLE


async def _readable(request: Any, context: _Context) -> Any:
    """The request, or the stream of requests, that a handler gets. Ends the call at a refused message."""
    if isinstance(request, AsyncIterable):
        return _readable_stream(request, context)
    if isinstance(request, _Refused):
        await context.abort(request.code, request.details)
    return request


async def _readable_stream(requests: AsyncIterable[Any], context: _Context) -> AsyncIterator[Any]:
    async for request in requests:
        if isinstance(request, _Refused):
            await context.abort(request.code, request.details)
        yield request


def _handler_field(handler: Any) -> str:
    """The name of the handler's field that holds its function, for example "unary_stream"."""
    asked = "stream" if handler.request_streaming else "unary"
    answered = "stream" if handler.response_streaming else "unary"
    return f"{asked}_{answered}"


def address_of(peer: str) -> str:
    """The IP address in gRPC's name of a peer ("ipv4:10.0.0.1:4242", "ipv6:%5B::1%5D:4242"); for others "unix"."""
    family, _, rest = unquote(peer).partition(":")
    if family not in ("ipv4", "ipv6"):
        return family
    address = ipaddress.ip_address(rest.rpartition(":")[0].strip("[]").partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
