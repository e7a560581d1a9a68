"""The only module that makes gRPC channels and servers.

Every call carries a credential in its metadata (`muster-credential`). The credential is made for that call
(`muster.daemon.transport.call_binding`) and is checked before anything else of the call is read
(`muster.daemon.transport.credential_check`). `open_channel` adds it. A bidirectional streaming call is different: its
caller passes `credential_metadata`, because gRPC's interceptor for such calls costs a task and a queue for every
message and leaves both pending when the peer dies.

A call without a valid credential ends with UNAUTHENTICATED and the reason. If munged does not answer, the call ends
with UNAVAILABLE, like any other temporary fault of a host. A handler reads the caller from
`muster.daemon.transport.identity.current_caller()`. The caller's rights are in `muster.daemon.transport.authorization`.

Each side receives messages up to a size of its own (`muster.daemon.transport.server_limits`).

A channel with a `Trust` and a port with certificates use TLS (`muster.daemon.transport.tls`). The server proves its
name before the caller sends a credential. Without them the connection is plain text.

gRPC's keepalive is off between daemons: Muster's own pings detect silence, with deadlines that the tests measure. A
command that follows a job turns `keepalive` on, because a command sends no pings of its own.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import grpc
import grpc.aio

from muster.daemon.transport import call_binding
from muster.daemon.transport.call_binding import CREDENTIAL_KEY, ServerNames
from muster.daemon.transport.calls import departed_clients
from muster.daemon.transport.identity import Credentials, IdentityUnavailable, Proof
from muster.daemon.transport.server_limits import LOCAL_SERVER, SMALL_MESSAGE_BYTES, ServerLimits
from muster.daemon.transport.site_config import split_address
from muster.daemon.transport.tls import Trust

if TYPE_CHECKING:
    from muster.daemon.transport.credential_check import CredentialCheck, MoreCalls, RefuseCaller, ShareOf

CONNECT_TIMEOUT_S = 5.0
"""Seconds that a coordinator, or the first of several, has to answer a connection. On a login node with twenty times
more work than CPUs an answer took more than 2 s."""
RECONNECT_TIMEOUT_S = 20.0
"""The same for agents and node daemons. After a restart thousands of them connect at once, and a coordinator needs a
millisecond for each. Whoever gives up early and connects again adds to that work: with 1 s and 3,000 nodes, most of it
was for connections that had been given up (measured)."""

HANDLERS_END_S = 5.0
"""Seconds that the handlers of cancelled calls get to end. Thousands of them need a second."""
TURNS_AFTER_A_CALL = 3
"""Turns of the event loop in which gRPC ends its own tasks of a call whose handler has ended."""

IDENTITY_DEADLINE_S = 5.0
PING_IDENTITY_DEADLINE_S = 0.2
"""Seconds that a Ping waits for munged. A refusal after that time still says that this process is alive. Without one,
a node whose munged hangs would be silent to every probe (which take 0.4 s at least), and be taken for HUNG."""
_PING = "/muster.v1.ProbeService/Ping"
# munged answers in about 0.2 ms (measured). The threads are needed when it does not.
_threads = ThreadPoolExecutor(max_workers=8, thread_name_prefix="identity")

_CLIENT_OPTIONS: list[tuple[str, int]] = [
    # Find a restarted daemon within 2 s, not within gRPC's default of 2 minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # A new channel starts without the backoff of an older channel to the same address.
    ("grpc.use_local_subchannel_pool", 1),
    # A repeated call would show its credential twice, and a credential is valid once.
    ("grpc.enable_retries", 0),
    # Daemons talk to each other directly, whatever the environment says about proxies.
    ("grpc.enable_http_proxy", 0),
]
_KEEPALIVE_OPTIONS: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 3000),
    # Ping for as long as nothing else is sent: gRPC's default is two pings, then one per minute.
    ("grpc.http2.max_pings_without_data", 0),
]


class ListenError(OSError):
    """The site's fault: this process can't listen on the address."""


def open_channel(
    address: str,
    credentials: Credentials,
    *,
    trust: Trust | None = None,
    server: str = "",
    receive_bytes: int = SMALL_MESSAGE_BYTES,
    identity_deadline_s: float = IDENTITY_DEADLINE_S,
    connect_s: float = 1.0,
    keepalive: bool = False,
    metadata: Sequence[tuple[str, bytes]] = (),
) -> grpc.aio.Channel:
    """Return a channel to `address` ("host:port") whose calls carry credentials. Nothing is sent before the first call.

    With `trust` the connection uses TLS, and the server must prove that it is `server`. None: plain text. `server` is
    also the server for which the credentials are made; empty: the host of the address.

    A call ends with RESOURCE_EXHAUSTED if the server answers with a message larger than `receive_bytes`. An attempt to
    connect ends after `connect_s`.

    A call that streams its requests needs `credential_metadata` as its metadata. With `keepalive`, a call to a host
    that has become silent ends within 8 s. If no credential can be made within `identity_deadline_s`, the call ends
    with UNAVAILABLE. `metadata`: what each call carries besides.
    """
    proofs = _CallProofs(credentials, server or call_binding.name_of_address(address), identity_deadline_s, metadata)
    interceptors: list[Any] = [_UnaryUnary(proofs), _UnaryStream(proofs)]
    received = ("grpc.max_receive_message_length", receive_bytes)
    # In spite of its name, gRPC's limit for one attempt to connect.
    connecting = ("grpc.min_reconnect_backoff_ms", round(1000 * connect_s))
    options = [*_CLIENT_OPTIONS, received, connecting, *(_KEEPALIVE_OPTIONS if keepalive else ())]
    if trust is None:
        channel = grpc.aio.insecure_channel(address, options=options, interceptors=interceptors)
    else:
        options += trust.options(server)
        channel = grpc.aio.secure_channel(address, trust.credentials(), options=options, interceptors=interceptors)
    _proofs_of[channel] = proofs
    return channel


async def open_first_ready_channel(
    addresses: Sequence[str],
    credentials: Credentials,
    *,
    trust: Trust | None = None,
    receive_bytes: int = SMALL_MESSAGE_BYTES,
    deadline_s: float = CONNECT_TIMEOUT_S,
    keepalive: bool = False,
    metadata: Sequence[tuple[str, bytes]] = (),
) -> grpc.aio.Channel:
    """Return a channel (see `open_channel`) to the first of `addresses` that answers as a gRPC server.

    If none answers within `deadline_s`, or there is only one address, return a channel to the first address: the next
    call then shows the error.
    """
    channels = [
        open_channel(
            address,
            credentials,
            trust=trust,
            receive_bytes=receive_bytes,
            connect_s=deadline_s,
            keepalive=keepalive,
            metadata=metadata,
        )
        for address in addresses
    ]
    if len(channels) == 1:
        return channels[0]
    # A paused process is never ready, although its kernel accepts connections.
    ready = [asyncio.ensure_future(channel.channel_ready()) for channel in channels]
    try:
        await asyncio.wait(ready, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        chosen = next((n for n, task in enumerate(ready) if task.done() and not task.cancelled()), 0)
    except BaseException:
        chosen = -1
        raise
    finally:
        for task in ready:
            task.cancel()
        await asyncio.gather(*ready, return_exceptions=True)
        for number, channel in enumerate(channels):
            if number != chosen:
                await channel.close(None)
    return channels[chosen]


def make_server(
    credentials: Credentials,
    limits: ServerLimits,
    *,
    server_names: ServerNames | None = None,
    refuse: RefuseCaller | None = None,
    share_of: ShareOf | None = None,
    more_calls: MoreCalls = lambda method, uid: 0,
    share_port: bool = False,
    identity_deadline_s: float = IDENTITY_DEADLINE_S,
) -> grpc.aio.Server:
    """Return a server that checks the credential of every call before it reads the call's message. Register the
    servicers, call `bind`, then start the server.

    `server_names`: a credential must be made for one of these names (`muster.daemon.transport.call_binding`); None: the
    names that this host has now.

    A caller that may not call a method gets PERMISSION_DENIED, also before its message is read. `refuse` decides that;
    None: the table of `muster.daemon.transport.authority_table`, for a server that knows no operators but root and its
    own user. If a credential can't be checked within `identity_deadline_s`, or that of a Ping within
    `PING_IDENTITY_DEADLINE_S`, the call ends with UNAVAILABLE.

    `share_of`: the share of the server's calls among which one counts; None: all calls are `limits.calls`.
    `more_calls`: how many a user may have beyond those of every user.

    With `share_port`, `bind` succeeds beside another socket of the same user that shares the port as well.
    """
    # A command of a user calls, and is no server.
    from muster.daemon.transport.authorization import Rights
    from muster.daemon.transport.credential_check import CredentialCheck

    async def check(token: str, method: str) -> Proof:
        deadline_s = min(identity_deadline_s, PING_IDENTITY_DEADLINE_S) if method == _PING else identity_deadline_s
        return await _call_munge(lambda: credentials.check(token), deadline_s)

    own_names = call_binding.names_of_this_host() if server_names is None else frozenset()
    interceptor = CredentialCheck(
        check,
        server_names or (lambda: own_names),
        limits,
        refuse or Rights(frozenset()).refusal,
        share_of or (lambda method, uid: limits.calls),
        more_calls,
    )
    departed_clients.log_none()
    # Two daemons on one port are a mistake: report it instead of sharing the load.
    reuse = ("grpc.so_reuseport", int(share_port))
    server = grpc.aio.server(interceptors=[interceptor], options=[reuse, *limits.options()])
    _interceptor_of[server] = interceptor
    return server


def make_local_server(limits: ServerLimits = LOCAL_SERVER) -> grpc.aio.Server:
    """Return a server for a Unix socket, which checks no credential: every user of this host may call it."""
    from muster.daemon.transport.calls.local_calls import LocalCalls

    departed_clients.log_none()
    return grpc.aio.server(interceptors=[LocalCalls(limits.calls)], options=limits.options())


async def stop_server(server: grpc.aio.Server, grace_s: float) -> None:
    """Stop a server of `make_server`. Calls under way get `grace_s` seconds to end; then they are cancelled.

    Returns when their handlers have ended, too. gRPC does not wait for them, and logs a traceback for each one that the
    end of the event loop ends.
    """
    await server.stop(grace_s)
    await _interceptor_of[server].wait_for_calls(HANDLERS_END_S)
    for _ in range(TURNS_AFTER_A_CALL):
        await asyncio.sleep(0)


def bind(server: grpc.aio.Server, address: str, certificates: grpc.ServerCredentials | None = None) -> int:
    """Listen on `address` ("host:port"; no host: all addresses; port 0: any free port) and return the port.

    With `certificates` the port takes TLS only; None: plain text only.

    Raises:
        ListenError: the address is in use, or does not belong to this host.
    """
    where = f"[::]{address}" if address.startswith(":") else address
    try:
        port = server.add_secure_port(where, certificates) if certificates else server.add_insecure_port(where)
    except RuntimeError:
        port = 0
    if port == 0:
        raise _listen_error(address)
    return port


def check_listen_address(address: str) -> None:
    """Check that `bind` could listen on `address`, without listening. May block while the host name is resolved.

    Raises:
        ListenError: as `bind` does.
    """
    try:
        host, port = split_address(address)
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        tried = [_can_bind(family, where) for family, _, _, _, where in found]
    except (OSError, ValueError) as error:
        raise _listen_error(address) from error
    if not any(tried):
        raise _listen_error(address)


def _can_bind(family: int, where: Any) -> bool:
    """Return False if this host has no such address, for example "::" without IPv6. Raises OSError: the address is in
    use."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as tried:
            # As gRPC does: old connections of an earlier process do not block the address.
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                tried.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            tried.bind(where)
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            return False
        raise
    return True


def _listen_error(address: str) -> ListenError:
    return ListenError(f"can't listen on {address}: is it in use, or not an address of this host?")


# --- client -----------------------------------------------------------------------------------------------


def raise_if_cancelled() -> None:
    """Raise CancelledError if this task was cancelled.

    If a stream ends while its reader is cancelled, grpc.aio may raise the stream's error instead, or end the stream
    normally. Code that would continue after the stream calls this function.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling() > 0:
        raise asyncio.CancelledError


def unavailable_error(error: IdentityUnavailable) -> grpc.aio.AioRpcError:
    """The error of a call that this process can't make now, because it can't prove who it is, or ask who the other is.
    It is UNAVAILABLE, like any other temporary fault."""
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, str(error), None)


def raise_unexpected_error(task: asyncio.Task[Any]) -> None:
    """Raise the error of a finished task, unless the error only says that the call or the task ended."""
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, _EXPECTED_ERRORS):
        raise error


_EXPECTED_ERRORS = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)

_interceptor_of: WeakKeyDictionary[grpc.aio.Server, CredentialCheck] = WeakKeyDictionary()

_T = TypeVar("_T")
_Details = Any  # grpc.aio.ClientCallDetails, a named tuple; its stubs know neither _replace nor Metadata


async def _call_munge(what: Callable[[], _T], deadline_s: float) -> _T:
    """Run a blocking call of munge, for `deadline_s` at most. After that, its thread runs on until libmunge gives up.

    Raises:
        IdentityUnavailable: no answer in time.
    """
    call = asyncio.get_running_loop().run_in_executor(_threads, what)
    try:
        async with asyncio.timeout(deadline_s):
            return await call
    except TimeoutError:
        where = os.uname().nodename
        raise IdentityUnavailable(
            f"munged has not answered for {deadline_s:g} s on {where}: if it hangs, restart it"
        ) from None


@dataclass(frozen=True, slots=True)
class _CallProofs:
    """Makes the credentials of a channel's calls."""

    credentials: Credentials
    server: str
    deadline_s: float
    more: Sequence[tuple[str, bytes]]

    async def metadata(self, method: str, first_message: bytes) -> grpc.aio.Metadata:
        """Metadata with a new credential. Raises as `credential_metadata`."""
        payload = call_binding.payload_of_call(method, self.server, first_message)
        try:
            token = await _call_munge(lambda: self.credentials.issue(payload), self.deadline_s)
        except IdentityUnavailable as error:
            raise unavailable_error(error) from error
        return grpc.aio.Metadata((CREDENTIAL_KEY, token), *self.more)

    async def add(self, details: _Details, first_message: bytes) -> _Details:
        """Return the call's details with a new credential. Raises as `credential_metadata`."""
        method = details.method.decode() if isinstance(details.method, bytes) else details.method
        proved = await self.metadata(method, first_message)
        return details._replace(metadata=grpc.aio.Metadata(*(details.metadata or ()), *proved))


_proofs_of: WeakKeyDictionary[grpc.aio.Channel, _CallProofs] = WeakKeyDictionary()


async def credential_metadata(channel: grpc.aio.Channel, method: str, first_message: Any) -> grpc.aio.Metadata:
    """Return metadata with a new credential, valid for one call of `method` ("/muster.v1.PeerService/Link") on a
    channel of `open_channel`. The call must begin with `first_message`.

    Raises:
        grpc.aio.AioRpcError: UNAVAILABLE: no credential can be made, like any other temporary fault.
    """
    return await _proofs_of[channel].metadata(method, call_binding.encoded(first_message))


class _CredentialAdder:
    def __init__(self, proofs: _CallProofs) -> None:
        self._proofs = proofs


# grpc.aio sorts interceptors by class and takes each for one kind of call only. (Its stubs make these classes
# generic; at runtime they are not.)
class _UnaryUnary(_CredentialAdder, grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(await self._proofs.add(client_call_details, call_binding.encoded(request)), request)


class _UnaryStream(_CredentialAdder, grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[type-arg]
    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(await self._proofs.add(client_call_details, call_binding.encoded(request)), request)
