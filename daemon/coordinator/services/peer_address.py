"""Where an agent says that others reach it: at its own node, and nowhere else.

The coordinator tells `peer_address` to the other agents of the gang, and probes it. An agent that could name any host
would have them, and the coordinator on its management node, call that host. So the host must be an IP address that the
node's daemon has reported (a node has several), or a name or address that Slurm has for the node.

No name is resolved here. A user could choose the name, and with it the name server that is slow to answer, or that
answers otherwise a second time.
"""

from __future__ import annotations

import os

from muster.daemon.coordinator.core.state.durable_state import Node
from muster.daemon.coordinator.services.rpc_errors import RpcAbort, permission_denied, unavailable
from muster.daemon.coordinator.slurm.lookup import SlurmLookup
from muster.daemon.host.addresses import comparable, comparable_host, is_loopback
from muster.daemon.transport.authorization import Rights
from muster.daemon.transport.identity import Caller
from muster.daemon.transport.site_config import split_address
from muster.slurm.client.types import Node as SlurmNode
from muster.slurm.client.types import Unknown


async def check_peer_address(
    peer_address: str, caller: Caller, node: Node, lookup: SlurmLookup, known: str = ""
) -> None:
    """Check that `peer_address` ("host:port") is an address of `node`.

    It is not checked if no daemon of the node has reported any address, as the address of the call is not
    (`Rights.calls_from_node`).

    Args:
        known: the address with which the agent was admitted before; while Slurm does not answer, it is valid still.

    Raises:
        RpcAbort: it is another host's, or Slurm does not say what the node's names are.
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


def _refusal(peer_address: str, node: Node, names: set[str]) -> RpcAbort:
    return permission_denied(
        f"the peer_address of an agent of {node.name} is an address of {node.name} ({' '.join(node.addresses)}), or a "
        f"name that Slurm has for it ({' '.join(sorted(names))}); {peer_address} is none"
    )
