"""The certificates that agents and node daemons get when they attach."""

from __future__ import annotations

from muster.daemon.coordinator.services.rpc_errors import invalid_argument
from muster.daemon.transport.authority import Authority
from muster.daemon.transport.tls import TlsError, certificate_name


def issue_certificate(issuing: Authority, server: str, public_key: bytes) -> bytes:
    """A certificate (PEM) for the server with this name (`muster.daemon.transport.call_binding`) and this public key.

    Raises:
        RpcAbort: hello has no usable key.
    """
    try:
        return issuing.issue(public_key, [certificate_name(server)])
    except TlsError as error:
        raise invalid_argument(f"hello.public_key: {error}") from None
