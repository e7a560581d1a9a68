"""On which ports an agent listens: any free ones, or ports of the site's range (`agent_ports` of muster.toml), which a
firewall can name. The agents of all jobs on a node share that range.

An agent has one port for calls, and one for streams of pieces of checkpoints. A measurement of a link opens another one
for some seconds.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress

import grpc
import grpc.aio

from muster.daemon.host.port_range import PortRange
from muster.daemon.transport.channel import ListenError, bind, check_listen_address
from muster.daemon.transport.site_config import split_address

_ALL_ADDRESSES = frozenset({"", "0.0.0.0", "::"})


def listen(
    server: grpc.aio.Server,
    address: str,
    ports: PortRange | None,
    certificates: Callable[[], grpc.ServerCredentials] | None,
) -> int:
    """Listen on `address` as `muster.daemon.transport.channel.bind` does, and return the port. If the address has port
    0 and there are `ports`, listen on a free one of them.

    `certificates` is called for each try, because gRPC takes its result once; None: plain text.

    Raises:
        ListenError: the address is in use, or does not belong to this host; or no port of `ports` is free.
    """
    host, port = split_address(address)
    if port or ports is None:
        return bind(server, address, certificates() if certificates else None)
    check_listen_address(address)
    for port in ports.from_random_place():
        with suppress(ListenError):
            # gRPC logs an error for each port that it can't have, and is content with one family of addresses.
            check_listen_address(_at(host, port))
            return bind(server, _at(host, port), certificates() if certificates else None)
    raise ListenError(_no_port_free(ports))


def listen_for_streams(host: str, ports: PortRange | None, backlog: int) -> socket.socket:
    """A socket that listens for plain TCP connections. `host`: the local address, as of the agent's server.

    Raises:
        ListenError: no port is free.
    """
    address = "" if host in _ALL_ADDRESSES else host.strip("[]")
    # As gRPC does: all addresses are those of both families, where the host has both.
    both = not address and socket.has_dualstack_ipv6()
    families = [socket.AF_INET6] if both or ":" in address else []
    if ":" not in address:
        families.append(socket.AF_INET)
    for port in ports.from_random_place() if ports else (0,):
        for family in families:
            dual = both and family == socket.AF_INET6
            with suppress(OSError):
                return socket.create_server((address, port), family=family, backlog=backlog, dualstack_ipv6=dual)
    raise ListenError(_no_port_free(ports))


def _no_port_free(ports: PortRange | None) -> str:
    if ports is None:
        return "no port of this node is free"
    return (
        f"no port is free from {ports.first} to {ports.last} on this node: muster.toml has agent_ports = "
        f'"{ports}", and each agent needs two ports'
    )


def _at(host: str, port: int) -> str:
    if host in _ALL_ADDRESSES:
        return f":{port}"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
