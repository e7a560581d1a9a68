"""Who is calling: credentials that prove a uid, and the caller as a handler sees it.

A credential proves a uid and a short text, the payload. `muster.daemon.transport.call_binding` says what the payload of
a call is. The payload is no secret: whoever sees a credential can read it. A credential is used up when it is accepted,
and expires `LIFETIME_S` after it was made.

One Protocol has two implementations: munge on a cluster; a secret file for `muster run --local`, where everything
belongs to one user on one machine. Both block (munge on its daemon's socket). `muster.daemon.transport.channel` calls
them in a thread with a deadline; every other user on an event loop must do the same.

Munge remembers used credentials on each host. So a credential that one host has accepted can be shown to another host:
the payload must name the host.
"""

from __future__ import annotations

import base64
import ctypes
import hmac
import os
import secrets
import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from muster.daemon.host import clock

LIFETIME_S = 60
"""Seconds in which a credential must be used. The clocks of two hosts may differ by as much."""


class IdentityError(Exception):
    """The caller's identity is not proved, or can't be proved here."""


class CredentialRefused(IdentityError):
    """The caller's fault: the credential is malformed, expired, used before, or made for another call."""


class OtherServer(CredentialRefused):
    """The credential was made for another server. The caller has reached a process that it did not mean."""


class IdentityUnavailable(IdentityError):
    """The site's fault: this host can't make or check credentials now."""


@dataclass(frozen=True)
class Caller:
    """A caller with a proved identity: `uid` and `gid` from its credential, `address` (IP, or "unix") from its
    connection."""

    uid: int
    gid: int
    address: str


class Proof(NamedTuple):
    """What a credential proves: a process of `uid` and `gid` has made it, with this payload."""

    uid: int
    gid: int
    payload: str


class Credentials(Protocol):
    """Makes and checks credentials. Both methods may block for seconds."""

    def issue(self, payload: str) -> str:
        """Make a credential of this process with `payload` (ASCII). It is ASCII without spaces or line ends.

        Raises:
            IdentityUnavailable: no credential can be made here.
        """
        ...

    def check(self, token: str) -> Proof:
        """Return what `token` proves. This uses the token up.

        Raises:
            CredentialRefused: the token proves nothing.
            IdentityUnavailable: the token can't be checked here.
        """
        ...


_caller: ContextVar[Caller] = ContextVar("muster_caller")
_method: ContextVar[str] = ContextVar("muster_method")


def current_caller() -> Caller:
    """The caller of the gRPC method that is being handled.

    Raises:
        IdentityError: no handler is running, or its method needs no credential.
    """
    try:
        return _caller.get()
    except LookupError:
        raise IdentityError("no call with a checked credential is being handled here") from None


def current_method() -> str:
    """The full name of the gRPC method that is being handled ("/muster.v1.Muster/List").

    Raises:
        IdentityError: as `current_caller` does.
    """
    try:
        return _method.get()
    except LookupError:
        raise IdentityError("no call with a checked credential is being handled here") from None


def set_call(caller: Caller, method: str) -> None:
    """Set caller and method for the rest of this task. For the server's interceptor and for tests of handlers."""
    _caller.set(caller)
    _method.set(method)


# --- munge ------------------------------------------------------------------------------------------------

_LIBRARY = "libmunge.so.2"
# MUNGE_OPT_TTL, MUNGE_OPT_ENCODE_TIME, MUNGE_OPT_DECODE_TIME and MUNGE_OPT_SOCKET in munge.h.
_OPT_TTL, _OPT_ENCODE_TIME, _OPT_DECODE_TIME, _OPT_SOCKET = 4, 6, 7, 8
_SUCCESS, _EXPIRED, _REWOUND = 0, 15, 16
# Values of munge_err_t that concern the credential. All others concern this host's munge.
_REFUSED = {
    3: "it is too long",
    8: "it is not a munge credential",
    9: "its munge version is not supported",
    10: "its cipher is not supported",
    11: "its MAC type is not supported",
    12: "its compression is not supported",
    13: "its realm is not recognised",
    14: "it was not made with this cluster's munge key",
    _EXPIRED: "it has expired",
    _REWOUND: "it was made in the future",
    17: "it has been used before",
    18: "it was made for another user to check",
}
_NO_DAEMON = {6: "munged does not answer on its socket", 7: "munged does not answer in time"}


class MungeCredentials:
    """Munge's credentials, as Slurm uses them, through libmunge.

    `socket`: munged's socket, if it is not the library's default. Thread-safe: each call has its own munge context.
    """

    def __init__(self, socket: Path | None = None) -> None:
        self._socket = socket
        self._lib = _load_library()

    def issue(self, payload: str) -> str:
        """See Credentials.issue."""
        token, data = ctypes.c_void_p(), payload.encode("ascii")
        with _Context(self._lib, self._socket) as context:
            self._lib.munge_ctx_set(context, ctypes.c_int(_OPT_TTL), ctypes.c_int(LIFETIME_S))
            status = self._lib.munge_encode(ctypes.byref(token), context, data, len(data))
            text = self._copy_and_free(token)
            if status != _SUCCESS or text is None:
                raise self._unavailable(status, "made")
        return text.decode("ascii")

    def check(self, token: str) -> Proof:
        """See Credentials.check."""
        if not token:
            raise CredentialRefused("the munge credential is refused: it is empty")
        data, length = ctypes.c_void_p(), ctypes.c_int()
        uid, gid = ctypes.c_uint32(), ctypes.c_uint32()
        with _Context(self._lib, self._socket) as context:
            status = self._lib.munge_decode(
                token.encode("ascii", "replace"),
                context,
                *map(ctypes.byref, (data, length, uid, gid)),
            )
            payload = self._copy_and_free(
                data, length.value
            )  # also set for expired and replayed credentials, and must be freed
            age_s = self._age_s(context)
        if status in _REFUSED:
            clocks = clock_words(age_s) if status in (_EXPIRED, _REWOUND) else ""
            raise CredentialRefused(f"the munge credential is refused: {_REFUSED[status]}{clocks}")
        if status != _SUCCESS:
            raise self._unavailable(status, "checked")
        return Proof(uid.value, gid.value, (payload or b"").decode("ascii", "replace"))

    def _age_s(self, context: ctypes.c_void_p) -> int:
        """Seconds from the making of the checked credential to now, each by the clock of its host."""
        made, checked = ctypes.c_int64(), ctypes.c_int64()
        for option, value in ((_OPT_ENCODE_TIME, made), (_OPT_DECODE_TIME, checked)):
            self._lib.munge_ctx_get(context, ctypes.c_int(option), ctypes.byref(value))
        return checked.value - made.value

    def _copy_and_free(self, pointer: ctypes.c_void_p, length: int = -1) -> bytes | None:
        """Copy the bytes at `pointer` (no length: up to NUL), which libmunge allocated, and free them."""
        if not pointer:
            return None
        try:
            return ctypes.string_at(pointer, length)
        finally:
            _libc.free(pointer)

    def _unavailable(self, status: int, verb: str) -> IdentityUnavailable:
        words = _NO_DAEMON.get(status) or self._lib.munge_strerror(status).decode()
        where = f" at {self._socket}" if self._socket else ""
        return IdentityUnavailable(
            f"no munge credential can be {verb} on {os.uname().nodename}: {words}{where}; is munged running?"
        )


class _Context:
    """A munge context for one call (threads must not share a context)."""

    def __init__(self, lib: ctypes.CDLL, socket: Path | None) -> None:
        self._lib = lib
        self._socket = socket

    def __enter__(self) -> ctypes.c_void_p:
        self._context = ctypes.c_void_p(self._lib.munge_ctx_create())
        if self._socket is not None:
            path = ctypes.c_char_p(os.fsencode(self._socket))
            self._lib.munge_ctx_set(self._context, ctypes.c_int(_OPT_SOCKET), path)
        return self._context

    def __exit__(self, *_: object) -> None:
        self._lib.munge_ctx_destroy(self._context)


_libc = ctypes.CDLL(None)
_libc.free.argtypes = [ctypes.c_void_p]
_libc.free.restype = None


def _load_library() -> ctypes.CDLL:
    try:
        lib = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise IdentityUnavailable(f"{_LIBRARY} can't be loaded ({error}): install munge (libmunge2)") from None
    pointer = ctypes.POINTER
    lib.munge_ctx_create.argtypes = []
    lib.munge_ctx_create.restype = ctypes.c_void_p
    lib.munge_ctx_destroy.argtypes = [ctypes.c_void_p]
    lib.munge_ctx_destroy.restype = None
    # munge_ctx_set is variadic: the call gives its last argument with an explicit type.
    lib.munge_ctx_set.argtypes = [ctypes.c_void_p, ctypes.c_int]
    lib.munge_ctx_set.restype = ctypes.c_int
    lib.munge_ctx_get.argtypes = [ctypes.c_void_p, ctypes.c_int]
    lib.munge_ctx_get.restype = ctypes.c_int
    lib.munge_encode.argtypes = [pointer(ctypes.c_void_p), ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int]
    lib.munge_encode.restype = ctypes.c_int
    lib.munge_decode.argtypes = [
        ctypes.c_char_p,
        ctypes.c_void_p,
        pointer(ctypes.c_void_p),
        pointer(ctypes.c_int),
        pointer(ctypes.c_uint32),
        pointer(ctypes.c_uint32),
    ]
    lib.munge_decode.restype = ctypes.c_int
    lib.munge_strerror.argtypes = [ctypes.c_int]
    lib.munge_strerror.restype = ctypes.c_char_p
    return lib


# --- a secret file ----------------------------------------------------------------------------------------


class SecretCredentials:
    """Credentials signed with a random secret that only its owner can read: for `muster run --local`.

    A caller that can read the file is the file's owner: `check` returns the file's uid and gid.
    """

    def __init__(self, path: Path, now: Callable[[], float] = clock.wall) -> None:
        """Raises IdentityUnavailable: the file is absent, empty, or readable by others."""
        self._now = now
        try:
            self._secret, found = path.read_bytes(), path.stat()
        except OSError as error:
            raise IdentityUnavailable(f"the secret file can't be read: {error}") from None
        if found.st_mode & 0o077:
            raise IdentityUnavailable(f"{path} is open to other users: it must have mode 0600")
        if len(self._secret) < 16:
            raise IdentityUnavailable(f"{path} holds no secret: it must hold at least 16 random bytes")
        self._owner = (found.st_uid, found.st_gid)
        self._used: dict[str, float] = {}
        self._lock = threading.Lock()

    @classmethod
    def create(cls, path: Path) -> SecretCredentials:
        """Write a new secret to `path`, which must not exist yet.

        Raises:
            FileExistsError: the file exists.
        """
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))
        return cls(path)

    def issue(self, payload: str) -> str:
        """See Credentials.issue."""
        text = base64.urlsafe_b64encode(payload.encode("ascii")).decode()
        stem = f"{round(self._now())}.{secrets.token_hex(16)}.{text}"
        return f"{stem}.{self._sign(stem)}"

    def check(self, token: str) -> Proof:
        """See Credentials.check."""
        stem, _, signature = token.rpartition(".")
        if not hmac.compare_digest(signature.encode(), self._sign(stem).encode()):
            raise CredentialRefused("the credential is refused: it was not made with this secret")
        made, _, rest = stem.partition(".")
        now = self._now()
        if abs(now - int(made)) > LIFETIME_S:
            raise CredentialRefused(f"the credential is refused: it has expired{clock_words(now - int(made))}")
        self._mark_used(stem, now)
        return Proof(*self._owner, base64.urlsafe_b64decode(rest.partition(".")[2]).decode("ascii"))

    def _sign(self, stem: str) -> str:
        return hmac.digest(self._secret, stem.encode(), "sha256").hex()

    def _mark_used(self, stem: str, now: float) -> None:
        with self._lock:
            if stem in self._used:
                raise CredentialRefused("the credential is refused: it has been used before")
            self._used[stem] = now
            # Oldest first. An expired credential is refused anyway: forget it.
            while (oldest := next(iter(self._used))) and now - self._used[oldest] > 2 * LIFETIME_S:
                del self._used[oldest]


def clock_words(age_s: float) -> str:
    """What the age of a refused credential says about the clocks of two hosts."""
    behind = "ahead of" if age_s < 0 else "behind"
    return (
        f". It is {age_s:.0f} s old, and may be {LIFETIME_S} s old. If it is new, the caller's clock is {behind} the "
        f"server's: set the clocks of both hosts (NTP)"
    )
