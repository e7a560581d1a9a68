"""What a credential is for: one call of one method, at one server, with one first message.

The payload of a credential is "METHOD SERVER SHA256": the method's full name, the name of the server, and the SHA-256
of the bytes of the call's first message, in hex. So a credential that is read on its way, or that a dishonest server
passes on, is worth nothing at another server, for another method, or with another message.

The name of a server is the host that the caller dials; capitals do not count in it. A process that calls a node's
daemon or an agent knows more than an address, so these have names of their own: `name_of_node_daemon`, `name_of_agent`.

A person can make a credential by hand. For a call with an empty message at mgmt1:

    munge -n -s "/muster.v1.Muster/Nodes mgmt1 $(printf '' | sha256sum | cut -d ' ' -f 1)"
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection
from typing import Any

from muster.daemon.host.addresses import comparable_host, own_addresses
from muster.daemon.transport.identity import CredentialRefused, OtherServer
from muster.daemon.transport.site_config import split_address

ServerNames = Callable[[], Collection[str]]
"""Returns the names under which a server may be called. Asked at each call."""

CREDENTIAL_KEY = "muster-credential"
"""Of a call's metadata: its credential."""
_MAX_SHOWN_CHARS = 100


def payload_of_call(method: str, server: str, first_message: bytes) -> str:
    """The payload of the credential for one call. `first_message`: b"" if the call sends none."""
    return f"{method} {server} {hashlib.sha256(first_message).hexdigest()}"


def check_call(payload: str, method: str, server_names: Collection[str]) -> str:
    """Check that a credential's payload is for this method of this server. Returns the digest of the first message.

    `server_names`: names of hosts among them are in the form of `comparable_host`.

    Raises:
        CredentialRefused: it is for another method.
        OtherServer: it is for another server.
    """
    made_for, _, rest = payload.partition(" ")
    server, _, digest = rest.partition(" ")
    if made_for != method:
        raise CredentialRefused(f"the credential is refused: it was made for {_shown(made_for)}, not for {method}")
    if _comparable(server) not in server_names:
        raise OtherServer(
            f"the credential is refused: it was made for the server {_shown(server)}, and this server has another name"
        )
    return digest


def is_first_message(message: bytes, digest: str) -> bool:
    """Whether a credential with this digest is for a call that begins with `message`."""
    return hashlib.sha256(message).hexdigest() == digest


def encoded(message: Any) -> bytes:
    """The bytes of a message as gRPC sends them. `message`: of protobuf, or bytes already."""
    return message if isinstance(message, bytes) else bytes(message.SerializeToString())


def name_of_address(address: str) -> str:
    """The name of the server at "host:port": the host."""
    return split_address(address)[0]


def name_of_node_daemon(node: str) -> str:
    """The name of a node's daemon."""
    return f"musterd/{node}"


def name_of_agent(gang: str, node: str) -> str:
    """The name of a gang's agent on a node."""
    return f"agent/{gang}/{node}"


def names_of_this_host() -> frozenset[str]:
    """The host's name, with and without its domain, and its addresses; "localhost" too. See `comparable_host`."""
    name = comparable_host(os.uname().nodename)
    return frozenset({name, name.partition(".")[0], *own_addresses(), "localhost", "127.0.0.1", "::1"})


def _comparable(server: str) -> str:
    """The name of a server in the form of `server_names`. Names of daemons and agents hold names of Slurm and of gangs,
    in which capitals count."""
    return server if "/" in server else comparable_host(server)


def _shown(text: str) -> str:
    return repr(text[:_MAX_SHOWN_CHARS])
