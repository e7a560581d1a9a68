"""Who is calling is known before anything that the caller sends is read.

gRPC runs a server's interceptor with the method and the metadata of a call, before the first message of the call is
received. The interceptor checks the credential there. A refused call ends at once, and no message of it is received,
whatever the caller sends on.

A check occupies a thread and munged, so the number of checks at the same time is limited. Then the call is counted, for
its user and in all (`calls.call_places`), before a message of it is read. A call beyond a limit ends
with RESOURCE_EXHAUSTED before any work is done. For a probe that is an answer: the process is alive.

A credential is for one first message (`muster.daemon.transport.call_binding`). The call's first message is compared
with it before it is parsed. A message that can't be read ends its call with INVALID_ARGUMENT. gRPC itself would log a
traceback for each.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any
from urllib.parse import unquote

import grpc
import grpc.aio

from muster.daemon.transport import authority_table, call_binding
from muster.daemon.transport.call_binding import CREDENTIAL_KEY, ServerNames
from muster.daemon.transport.calls.call_messages import Unreadable, read_message, timed_handler
from muster.daemon.transport.calls.call_places import Places, ShareCalls
from muster.daemon.transport.calls.call_refused import CallRefused
from muster.daemon.transport.calls.call_share import CallShare
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
ShareOf = Callable[[str, int | None], CallShare]
"""Returns the share among whose calls a call of a method by a uid counts. None: the method needs no credential, and
all its callers count as one user."""
MoreCalls = Callable[[str, int], int]
"""Returns how many calls of a method a uid may have beyond those of every user."""

_Context = grpc.aio.ServicerContext[Any, Any]


class CredentialCheck(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Passes a call to its handler after its credential is checked."""

    def __init__(
        self,
        check: CheckCredential,
        server_names: ServerNames,
        limits: ServerLimits,
        refuse: RefuseCaller,
        share_of: ShareOf,
        more_calls: MoreCalls,
    ) -> None:
        self._check = check
        self._server_names = server_names
        self._refuse_caller = refuse
        self._share_of = share_of
        self._more_calls = more_calls
        self._checks = Places(limits.credential_checks, "credentials that wait for their check")
        self._shares: dict[CallShare, ShareCalls] = {}
        self._lingering = Places(MAX_LINGERING, "refused streams")

    async def wait_for_calls(self, timeout_s: float) -> None:
        """Wait until the handlers of all calls have ended, for `timeout_s` at most."""
        if under_way := [task for calls in self._shares.values() for task in calls.tasks]:
            await asyncio.wait(under_way, timeout=timeout_s)

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # gRPC answers that there is no such method
        method: str = handler_call_details.method
        try:
            if authority_table.is_public(method):
                place = self._calls_of(self._share_of(method, None)).take(None)
                return timed_handler(handler, partial(read_message, handler.request_deserializer), place)
            proof, digest = await self._identify(method, handler_call_details.invocation_metadata)
            more = partial(self._more_calls, method, proof.uid)
            place = self._calls_of(self._share_of(method, proof.uid)).take(proof.uid, more)
        except CallRefused as refused:
            # The exception itself would keep this frame alive in a cycle, until the garbage collector runs.
            end = partial(self._end_call, refused.code, str(refused), handler.request_streaming)
            return grpc.stream_stream_rpc_method_handler(end)
        begin = partial(_set_caller, method, proof)
        return timed_handler(handler, _MessageReader(handler.request_deserializer, digest), place, begin)

    def _calls_of(self, share: CallShare) -> ShareCalls:
        if share not in self._shares:
            self._shares[share] = ShareCalls(share)
        return self._shares[share]

    async def _identify(self, method: str, metadata: Any) -> tuple[Proof, str]:
        """Who calls, and the digest of the call's first message. Raises CallRefused."""
        token = dict(metadata or ()).get(CREDENTIAL_KEY)
        if token is None:
            raise CallRefused(grpc.StatusCode.UNAUTHENTICATED, f"{method} needs a credential ({CREDENTIAL_KEY})")
        with self._checks.one():
            try:
                proof = await self._check(str(token), method)
                digest = call_binding.check_call(proof.payload, method, self._server_names())
            except OtherServer as error:
                raise CallRefused(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from error
            except CredentialRefused as error:
                raise CallRefused(grpc.StatusCode.UNAUTHENTICATED, str(error)) from error
            except IdentityUnavailable as error:
                raise CallRefused(grpc.StatusCode.UNAVAILABLE, str(error)) from error
        if refused := self._refuse_caller(method, proof.uid):
            raise CallRefused(grpc.StatusCode.PERMISSION_DENIED, refused)
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


def _set_caller(method: str, proof: Proof, context: _Context) -> None:
    set_call(Caller(proof.uid, proof.gid, address_of(context.peer())), method)


class _MessageReader:
    """Reads the messages of one call."""

    def __init__(self, deserialize: Callable[[bytes], Any], digest: str) -> None:
        self._deserialize = deserialize
        self._digest: str | None = digest

    def __call__(self, message: bytes) -> Any:
        """The message; in its place Unreadable, if it is not the first message of this call, or can't be read."""
        if self._digest is not None:
            if not call_binding.is_first_message(message, self._digest):
                return _OTHER_MESSAGE
            self._digest = None
        return read_message(self._deserialize, message)


_OTHER_MESSAGE = Unreadable(
    grpc.StatusCode.UNAUTHENTICATED, "the credential is refused: it was made for another message than this one"
)


def address_of(peer: str) -> str:
    """The IP address in gRPC's name of a peer ("ipv4:10.0.0.1:4242", "ipv6:%5B::1%5D:4242"); for others "unix"."""
    family, _, rest = unquote(peer).partition(":")
    if family not in ("ipv4", "ipv6"):
        return family
    address = ipaddress.ip_address(rest.rpartition(":")[0].strip("[]").partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
