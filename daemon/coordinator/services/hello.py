"""The first message of an agent or a node daemon: what it must hold, at which address its sender is, and the
certificate that it is answered with.

The coordinator tells `peer_address` to the other agents of the gang, and probes it. An agent that could name any host
would have them, and the coordinator on its management node, call that host. So the host must be an IP address that the
node's daemon has reported (a node has several), or a name or address that Slurm has for the node.

No name is resolved here. A user could choose the name, and with it the name server that is slow to answer, or that
answers otherwise a second time.
"""

from __future__ import annotations

import ipaddress
import os
from typing import Protocol

from muster.daemon.coordinator.core.state.durable_state import Node
from muster.daemon.coordinator.services.conversion import InvalidMessage, check_count, check_length, check_name
from muster.daemon.coordinator.services.rpc_errors import invalid_argument, permission_denied, unavailable
from muster.daemon.coordinator.slurm.lookup import SlurmLookup
from muster.daemon.host.addresses import comparable, comparable_host, is_loopback
from muster.daemon.transport import job_limits
from muster.daemon.transport.authority import Authority
from muster.daemon.transport.authorization import Rights
from muster.daemon.transport.calls.call_refused import CallRefused
from muster.daemon.transport.identity import Caller
from muster.daemon.transport.site_config import split_address
from muster.daemon.transport.tls import TlsError, certificate_name
from muster.slurm.client import names as slurm_names
from muster.slurm.client.types import Node as SlurmNode
from muster.slurm.client.types import Unknown
from muster.v1 import agent_pb2, node_pb2


def check_hello(message: agent_pb2.AgentHello | node_pb2.NodeHello) -> None:
    """Check every name in the first message of an agent or of a node daemon.

    Raises:
        InvalidMessage: a name is none.
    """
    check_name(slurm_names.check_node, message.node)
    words = [("incarnation", message.incarnation)]
    if isinstance(message, agent_pb2.AgentHello):
        check_name(slurm_names.check_gang, message.gang_id)
        words += [("peer_address", message.peer_address), ("nvlink_domain", message.nvlink_domain)]
    else:
        check_count("addresses", len(message.addresses), job_limits.MAX_ADDRESSES)
        words += [("boot_id", message.boot_id), ("probe_address", message.probe_address)]
        words += [("addresses", address) for address in message.addresses]
    for field, word in words:
        check_length(field, word, job_limits.MAX_NAME_CHARS)
        check_name(slurm_names.check_word, word)
        if field in ("peer_address", "probe_address") and word:
            _check_address(field, word)


def _check_address(field: str, address: str) -> None:
    """Check that a process can listen at `address`. Others would ask gRPC and the resolver for whatever it says."""
    try:
        host, _ = split_address(address)
    except ValueError as error:
        raise InvalidMessage(f"{field}: {error}") from None
    try:
        ipaddress.ip_address(host)
    except ValueError:
        check_name(slurm_names.check_node, host)


async def check_peer_address(
    peer_address: str, caller: Caller, node: Node, lookup: SlurmLookup, known: str = ""
) -> None:
    """Check that `peer_address` ("host:port") is an address of `node`.

    It is not checked if no daemon of the node has reported any address, as the address of the call is not
    (`Rights.calls_from_node`).

    Args:
        known: the address with which the agent was admitted before; while Slurm does not answer, it is valid still.

    Raises:
        CallRefused: it is another host's, or Slurm does not say what the node's names are.
    """
    host = split_address(peer_address)[0]
    if Rights.is_address_of_node(comparable(host), node.addresses):
        return
    names = _own_names(caller) | {node.name}
    if _is_one_of(host, names):
        return
    match await lookup.node(node.name, caller.uid):
        case Unknown(reason):
            if peer_address == known:
                return
            raise unavailable(f"can't get the names of node {node.name} from Slurm: {reason}")
        case SlurmNode(address=address, hostname=hostname):
            names |= {name for name in (address, hostname) if name}
    if not _is_one_of(host, names):
        raise _refusal(peer_address, node, names)


def _own_names(caller: Caller) -> set[str]:
    """The names of this machine, if the agent runs here, too. Then it calls from a loopback address, and knows no
    address of the node but its name."""
    name = os.uname().nodename
    return {name, name.partition(".")[0]} if is_loopback(caller.address) else set()


def _is_one_of(host: str, names: set[str]) -> bool:
    return comparable_host(host) in set(map(comparable_host, names))


def _refusal(peer_address: str, node: Node, names: set[str]) -> CallRefused:
    return permission_denied(
        f"the peer_address of an agent of {node.name} is an address of {node.name} ({' '.join(node.addresses)}), or a "
        f"name that Slurm has for it ({' '.join(sorted(names))}); {peer_address} is none"
    )


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
            CallRefused: hello has no usable key.
        """
        if self._authority is None or hello.certified_by == self._identifier:
            return b""
        try:
            return self._authority.issue(hello.public_key, [certificate_name(server)])
        except TlsError as error:
            raise invalid_argument(f"hello.public_key: {error}") from None
