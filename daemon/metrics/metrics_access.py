"""Who may read a daemon's metrics: whoever has the token, a certificate, or both, as the site says.

Metrics show all jobs and all nodes, so nobody reads them without a proof. The token would be read by others on the
way: the server answers in plain text on a loopback address only, and with TLS everywhere else. Prometheus' own
exporters prove callers in the same two ways.
"""

from __future__ import annotations

import hmac
import logging
import os
import ssl
from dataclasses import dataclass
from pathlib import Path

from muster.daemon.host.addresses import is_loopback
from muster.daemon.transport import authority
from muster.daemon.transport.site_config import Site, SiteError, split_address
from muster.daemon.transport.tls import TlsError

FEWEST_TOKEN_CHARS = 16
"""`openssl rand -hex 32` has 64."""
_OPEN_TO_OTHERS = 0o027
"""Bits of the mode of the token's file. A site may have a group that reads it, and no group that writes it."""
_log = logging.getLogger(__name__)


class MetricsToken:
    """The token in a file, which is read for each caller, so that it can be replaced."""

    def __init__(self, path: Path) -> None:
        """Raises SiteError: the file can't be used."""
        self._path = path
        self._token = self._read()

    def proves(self, header: str) -> bool:
        """Whether the header by which a caller is authorized holds the token. While the file can't be read, the last
        token counts."""
        try:
            self._token = self._read()
        except SiteError as error:
            _log.error("%s: the token that was read before is used", error)
        return hmac.compare_digest(header.encode(), b"Bearer " + self._token)

    def _read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                mode, token = os.fstat(file.fileno()).st_mode, file.read().strip()
        except OSError as error:
            raise SiteError(f"metrics_token: {self._path} can't be read: {error.strerror}") from None
        if mode & _OPEN_TO_OTHERS:
            raise SiteError(f"metrics_token: others can read {self._path}: chmod 0600 (or 0640, for a group that may)")
        if len(token) < FEWEST_TOKEN_CHARS:
            raise SiteError(f"metrics_token: {self._path} must hold {FEWEST_TOKEN_CHARS} characters or more")
        return token


class ServerFiles:
    """What the server proves itself with, in files that are read again when they change."""

    def __init__(self, certificate: Path, key: Path, client_authority: Path | None) -> None:
        """`client_authority`: callers need a certificate of it; None: they need none. Raises SiteError."""
        self._certificate, self._key, self._client_authority = certificate, key, client_authority
        self._seen = self._changes()
        self._context = self._read()

    def context(self) -> ssl.SSLContext:
        """For one connection. Files that can't be used change nothing."""
        if (changes := self._changes()) != self._seen:
            self._seen = changes
            try:
                self._context = self._read()
            except SiteError as error:
                _log.error("%s: what was read before is used", error)
        return self._context

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            authority.read_certificate_files(self._certificate, self._key)
            context.load_cert_chain(self._certificate, self._key)
        except (TlsError, OSError) as error:
            raise SiteError(f"metrics need TLS: {error}. {_HOW}") from None
        if self._client_authority is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(self._client_authority)
            except OSError as error:
                raise SiteError(f"metrics_client_authority: {self._client_authority}: {error}") from None
        return context

    def _changes(self) -> list[tuple[int, int]]:
        files = (self._certificate, self._key, self._client_authority or self._key)
        return [(path.stat().st_ino, path.stat().st_ctime_ns) if path.exists() else (0, 0) for path in files]


_HOW = (
    "metrics_certificate and metrics_key in muster.toml name the files; without TLS, metrics_listen must be a loopback \
address, as 127.0.0.1:9464"
)


@dataclass(frozen=True, slots=True)
class MetricsAccess:
    """Where metrics are served, and to whom. `token`: callers send it; None: they have certificates. `files`: None: the
    server answers in plain text, on a loopback address."""

    host: str
    port: int
    token: MetricsToken | None = None
    files: ServerFiles | None = None

    @classmethod
    def of_site(cls, site: Site) -> MetricsAccess | None:
        """As the site says; None: no metrics are served.

        Raises:
            SiteError: something is missing, or can't be used.
        """
        if not site.metrics_listen:
            return None
        host, port = split_address(site.metrics_listen)
        local = is_loopback(host) or host == "localhost"
        if site.metrics_token is None and (local or site.metrics_client_authority is None):
            raise SiteError(
                f"metrics_listen = {site.metrics_listen!r} needs metrics_token, the file with the token of those who "
                "may read metrics" + ("" if local else ", or metrics_client_authority")
            )
        token = MetricsToken(site.metrics_token) if site.metrics_token is not None else None
        if local:
            return cls(host, port, token)
        certificate = site.metrics_certificate or site.tls_certificate
        return cls(
            host, port, token, ServerFiles(certificate, site.metrics_key or site.tls_key, site.metrics_client_authority)
        )
