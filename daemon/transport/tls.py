"""TLS 1.3 for Muster's connections: the server proves its name, the caller then proves a uid with a credential. The
package `muster.daemon` rules out older versions of TLS.

Two kinds of server differ in where their certificate comes from:

- A coordinator has certificate files of the site (`CertificateFiles`). All other processes know the site's authority.
- A node's daemon and an agent have none at first. Each makes a key of its own (`ServerKey`), which never leaves the
  process. It sends the public key to the coordinator and gets a certificate back (`muster.daemon.transport.authority`).
  The coordinator, and the other agents of a gang, know the authority that issued it.

A certificate names the server as `muster.daemon.transport.call_binding` does. `certificate_name` gives the form that
fits into a certificate.
"""

from __future__ import annotations

import hashlib
import logging
import ssl
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

from muster.daemon.host import clock
from muster.daemon.transport.calls.connection_errors import why_unreached

_log = logging.getLogger(__name__)

_NAME_DIGITS = 40
_DAY_S = 86400.0

WARN_DAYS = 30
"""Days before its certificate expires, from which on a coordinator says so once a day."""

AUTHORITY_DAYS = 3650
"""How long the certificates of Muster's own authorities are valid."""
ISSUED_DAYS = 14
"""How long certificates of node daemons and agents are valid."""
RENEW_AFTER_S = ISSUED_DAYS * 86400 / 2
"""The age of its certificate, in seconds, at which a node's daemon or an agent attaches again for a new one."""


TLS, PLAIN_TEXT = "tls", "plain text, the network is trusted"
"""The two values of the setting `connections`."""


class TlsError(Exception):
    """The site's fault: a certificate or a key can't be used."""


def certificate_name(server: str) -> str:
    """The DNS name in the certificate of a node's daemon or an agent, whose names may be long and hold "/"."""
    return f"{hashlib.sha256(server.encode()).hexdigest()[:_NAME_DIGITS]}.muster"


@dataclass(frozen=True, slots=True)
class Trust:
    """Whom a client takes for its server: a server with a certificate of these authorities.

    authorities: returns their certificates (PEM), read anew for each channel, so that they can be replaced.
    """

    authorities: Callable[[], bytes]

    def credentials(self) -> grpc.ChannelCredentials:
        """For one channel."""
        return grpc.ssl_channel_credentials(self.authorities())

    def options(self, server: str) -> list[tuple[str, str]]:
        """gRPC's options for a channel to `server`; empty: the server has the name of the host in the address."""
        return [("grpc.ssl_target_name_override", certificate_name(server))] if server else []


def trust_in_file(path: Path) -> Trust:
    """Trust in the authorities whose certificates are in `path`. While the file can't be read, the last certificates
    count.

    Raises:
        TlsError: the file can't be read now, or holds no certificate.
    """
    last = _read_authorities(path, None)

    def authorities() -> bytes:
        nonlocal last
        try:
            last = _read_authorities(path, last)
        except TlsError as error:
            _log.error("%s: the certificates that were read before are used", error)
        return last

    return Trust(authorities)


def _read_authorities(path: Path, known: bytes | None) -> bytes:
    """`known`: certificates that were read before; None: none were."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise TlsError(f"the authority's certificate {path} can't be read: {error.strerror}") from None
    if text != known:
        _check_certificates(path, text)
    return text


def _check_certificates(path: Path, text: bytes) -> None:
    """Raises TlsError: there is no certificate, or one is damaged."""
    try:
        # Of the standard library: a program that makes no certificate does not wait for the import of cryptography.
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError):
        raise TlsError(f"{path} holds no certificate (PEM), or a damaged one") from None


def is_proof_failure(details: str) -> bool:
    """Whether a call's error says that the server did not prove its name, in gRPC's words."""
    return any(words in details for words in _PROOF_FAILURES)


_PROOF_FAILURES = ("CERTIFICATE_VERIFY_FAILED", "Hostname Verification Check failed", "certificate signature failure")


def is_answer_without_tls(details: str, trust: Trust | None) -> bool:
    """Whether a call's error says, in gRPC's words, that the server answers in plain text, where this side uses TLS.
    `trust`: of this side; None: plain text."""
    return trust is not None and _ANSWER_WITHOUT_TLS in details


def may_want_tls(details: str, trust: Trust | None) -> bool:
    """Whether a call's error may come from a server that uses TLS, where this side uses plain text (`trust` is None).
    Such a server closes the connection. So does one that is just ending."""
    return trust is None and all(words in details for words in _CLOSED_AT_ONCE)


def explain(details: str, trust: Trust | None) -> str:
    """A call's error for a log, with the setting that may be wrong. `trust`: of this side; None: plain text."""
    if is_answer_without_tls(details, trust):
        return f"the server answers in plain text, and this host uses TLS. {SAME_CONNECTIONS} ({details})"
    words = why_unreached(details)
    if may_want_tls(details, trust):
        return f"{words}. Does the server use TLS? This host does not. {SAME_CONNECTIONS}"
    return words


SAME_CONNECTIONS = (
    "Every host needs the same `connections` in muster.toml: "
    f'"{TLS}", or "{PLAIN_TEXT}" on all of them, the coordinators\' included'
)
_ANSWER_WITHOUT_TLS, _CLOSED_AT_ONCE = "WRONG_VERSION_NUMBER", ("failed to connect to all addresses", "Socket closed")


class ServerKey:
    """The key of a process that gets its certificate from the coordinator. `name`: see `certificate_name`."""

    def __init__(self, name: str, now: Callable[[], float] = clock.monotonic) -> None:
        # Imported here: a program without TLS does not wait for the import.
        from muster.daemon.transport import authority

        self._now = now
        self._certified_at, self._issuer = now(), b""
        self._key = authority.make_key()
        self._pem = authority.pem_of_key(self._key)
        self.public_key = authority.bytes_of_public_key(self._key)
        """For `authority.Authority.issue` (DER)."""
        # Other agents call before the coordinator has sent a certificate. gRPC logs an error for each caller who asks
        # for a name that no certificate has.
        self._configuration = self._configuration_of(authority.self_signed(self._key, certificate_name(name)))

    def use(self, certificate: bytes) -> None:
        """Prove the name in this certificate (PEM), which belongs to this key, to callers from now on."""
        from muster.daemon.transport import authority

        self._configuration = self._configuration_of(certificate)
        self._certified_at, self._issuer = self._now(), authority.issuer_of(certificate)

    @property
    def renewal_due(self) -> bool:
        """Whether it is time to attach again for a new certificate."""
        return self._now() - self._certified_at > RENEW_AFTER_S

    @property
    def certified_by(self) -> bytes:
        """The authority that issued the certificate in use (its subject key identifier); empty: a new certificate is
        needed."""
        return b"" if self.renewal_due else self._issuer

    def certificates(self) -> grpc.ServerCredentials:
        """For `muster.daemon.transport.channel.bind`."""
        return _certificates_of(lambda: self._configuration)

    def _configuration_of(self, certificate: bytes) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self._pem, certificate)])


def pinned_context() -> tuple[ssl.SSLContext, str]:
    """What a port proves itself with whose certificate (PEM, also returned) its callers get over a connection that they
    trust. Nobody has issued it."""
    from muster.daemon.transport import authority

    key = authority.make_key()
    certificate = authority.self_signed(key, "")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.TemporaryFile() as file:  # the standard library reads a key from a file only
        file.write(authority.pem_of_key(key) + certificate)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context, certificate.decode()


def _certificates_of(current: Callable[[], grpc.ServerCertificateConfiguration]) -> grpc.ServerCredentials:
    """What a port proves itself with. gRPC calls `current` for each connection.

    gRPC must be told of a new configuration only if it is new: it then frees the old one, while other connections may
    still read it, and the process dies of that.
    """
    given = current()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal given
        newest = current()
        if newest is given:
            return None
        given = newest
        return newest

    return grpc.dynamic_ssl_server_credentials(given, fetch)  # type: ignore[arg-type]  # None: no new one


class CertificateFiles:
    """The certificate and the key of a coordinator, in two files (PEM). They are read again when they change."""

    def __init__(self, certificate: Path, key: Path, now: Callable[[], float] = clock.wall) -> None:
        """`now` returns seconds since the epoch. Raises TlsError: the files can't be used; the message says why."""
        self._paths = (certificate, key)
        self._now = now
        self._seen = self._stamp()
        self._configuration, self.names, self._expires_at = self._read()
        self._warned_at = float("-inf")
        self._warn_of_expiry()

    def certificates(self) -> grpc.ServerCredentials:
        """For `muster.daemon.transport.channel.bind`."""
        return _certificates_of(self.current)

    def current(self) -> grpc.ServerCertificateConfiguration:
        """What gRPC takes now: it asks for each connection. Files that can't be used change nothing."""
        stamp = self._stamp()
        if stamp != self._seen:
            self._seen = stamp
            try:
                self._configuration, self.names, self._expires_at = self._read()
                self._warned_at = float("-inf")
                _log.info("the certificate %s is read again", self._paths[0])
            except TlsError as error:
                _log.error("%s: the certificate that was read before is used", error)
        self._warn_of_expiry()
        return self._configuration

    def _warn_of_expiry(self) -> None:
        now = self._now()
        days = (self._expires_at - now) / _DAY_S
        if days > WARN_DAYS or now - self._warned_at < _DAY_S:
            return
        self._warned_at = now
        if days > 0:
            _log.warning("the certificate %s expires in %.1f days: replace it", self._paths[0], days)
        else:
            _log.error("the certificate %s has expired: callers refuse it until it is replaced", self._paths[0])

    def _stamp(self) -> tuple[tuple[int, int], ...]:
        """What changes when a file is replaced or written, or gets another mode or owner."""
        found = []
        for path in self._paths:
            try:
                status = path.stat()
            except OSError:
                found.append((0, 0))
            else:
                found.append((status.st_ino, status.st_ctime_ns))
        return tuple(found)

    def _read(self) -> tuple[grpc.ServerCertificateConfiguration, frozenset[str], float]:
        """What gRPC takes, the names in the certificate, and when it expires."""
        from muster.daemon.transport import authority

        certificate, key = authority.read_certificate_files(*self._paths)
        configuration = grpc.ssl_server_certificate_configuration([(key, certificate)])
        return configuration, authority.names_in_certificate(certificate), authority.expires_at(certificate)
