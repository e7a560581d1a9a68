"""The certificates that agents and node daemons get when they attach."""

from __future__ import annotations

from typing import Protocol

from muster.daemon.coordinator.services.rpc_errors import invalid_argument
from muster.daemon.transport.authority import Authority
from muster.daemon.transport.tls import TlsError, certificate_name


class _Hello(Protocol):
    @property
    def public_key(self) -> bytes: ...
    @property
    def certified_by(self) -> bytes: ...


class CertificateIssuer:
    """Issues certificates at attach."""

    def __init__(self, authority: Authority | None) -> None:
        """`authority` issues them; None: connections are plain text, and need none."""
        self._authority = authority
        self._identifier = authority.identifier if authority else b""
        self.authorities = authority.pem if authority else b""
        """The authorities of all issued certificates (PEM)."""

    def issue(self, server: str, hello: _Hello) -> bytes:
        """A certificate (PEM) of the server with this name (`muster.daemon.transport.call_binding`) and hello's key.

        Empty: connections are plain text, or the caller says that it has a certificate of this authority. If that is
        not so, the caller harms itself only: nobody takes it for what it says.

        Raises:
            RpcAbort: hello has no usable key.
        """
        if self._authority is None or hello.certified_by == self._identifier:
            return b""
        try:
            return self._authority.issue(hello.public_key, [certificate_name(server)])
        except TlsError as error:
            raise invalid_argument(f"hello.public_key: {error}") from None
