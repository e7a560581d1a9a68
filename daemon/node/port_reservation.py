"""Keeps the port of musterd for musterd while it restarts.

Otherwise any user of the node could listen on the port in that moment, answer probes in musterd's place, and receive
the credentials of those who probe.

A socket that is bound to the port and does not listen gets no connections. With SO_REUSEPORT, a second socket can be
bound to the port beside it, but only by the same user. systemd keeps the bound socket while musterd restarts, as it
keeps memory (`muster.daemon.node.kept_memory.systemd_fd_store`). gRPC's listening socket is bound beside it.

The bound socket has no SO_REUSEADDR: with that option on both sides, other users could be bound beside it as well.

When musterd is stopped, systemd closes the socket and the port is free. So musterd starts before slurmd.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping
from typing import Any

from muster.daemon.node.kept_memory.systemd_fd_store import FdStore
from muster.daemon.transport.channel import check_listen_address
from muster.daemon.transport.site_config import split_address

_log = logging.getLogger(__name__)

STORED_PREFIX = "port."
"""The names of the sockets in systemd's store begin with this."""
RETRY_S = 30.0
"""Seconds between two tries. Connections of a musterd without a reservation block the port for 60 s after its end."""
ALL_ADDRESSES = frozenset({"", "0.0.0.0", "::"})
"""Hosts of a listen address that mean every address of this machine."""

_Place = tuple[socket.AddressFamily, Any]


class PortReservation:
    """The reservation of one listen address ("host:port"). Port 0 needs none: nobody knows the port beforehand.

    Args:
        stored: what systemd gave this process at its start, by name. Others' names are left alone.
    """

    def __init__(self, address: str, stored: Mapping[str, int], store: FdStore) -> None:
        self._address = address
        self._store = store
        self._sockets = [
            socket.socket(fileno=fd) for name, fd in sorted(stored.items()) if name.startswith(STORED_PREFIX)
        ]

    @property
    def is_wanted(self) -> bool:
        """The server must be bound beside a reservation (`make_server(share_port=True)`)."""
        return split_address(self._address)[1] != 0

    @property
    def is_held(self) -> bool:
        """The port is reserved."""
        return bool(self._sockets)

    def take(self) -> None:
        """Reserve the port before the server listens on it. May block while a host name is resolved.

        If old connections block the reservation, it is not held yet, and the log says so.

        Raises:
            muster.daemon.transport.channel.ListenError: another process has the address, or it is not this host's.
        """
        if self.is_held and self._is_for(self._places()):
            return
        self._forget()
        if not self.is_wanted:
            return
        # Nobody may be there: a socket with SO_REUSEPORT would be bound beside another musterd.
        check_listen_address(self._address)
        self._reserve(self._places())
        if not self.is_held:
            _log.warning(
                "old connections still use %s: other users could take the port while musterd restarts", self._address
            )

    async def run(self, retry_s: float = RETRY_S) -> None:
        """Try again until the port is reserved."""
        while self.is_wanted and not self.is_held:
            await asyncio.sleep(retry_s)
            self._reserve(await asyncio.to_thread(self._places))
            if self.is_held:
                _log.info("%s is reserved for musterd", self._address)

    def close(self) -> None:
        """Close the sockets of this process. systemd keeps what it has stored."""
        for sock in self._sockets:
            sock.close()
        self._sockets = []

    def _places(self) -> list[_Place]:
        """What gRPC binds for the address; none if port 0 is wanted, or if the host can't be resolved now."""
        try:
            return _places(self._address) if self.is_wanted else []
        except OSError:
            return []

    def _is_for(self, places: list[_Place]) -> bool:
        """The sockets are those of the address, as far as it can be resolved."""
        return self.is_wanted and (not places or [_place_of(sock) for sock in self._sockets] == places)

    def _reserve(self, places: list[_Place]) -> None:
        try:
            for family, where in places:
                self._sockets.append(_bound(family, where))
        except OSError:
            self.close()
        for number, sock in enumerate(self._sockets):
            self._store.put(f"{STORED_PREFIX}{number}", sock.fileno())

    def _forget(self) -> None:
        """Give up what was reserved for another address."""
        for number in range(len(self._sockets)):
            self._store.remove(f"{STORED_PREFIX}{number}")
        self.close()


def _places(address: str) -> list[_Place]:
    """Each IP address of the host; one socket for all addresses of this machine.

    Raises:
        OSError: the host can't be resolved.
    """
    host, port = split_address(address)
    if host in ALL_ADDRESSES:
        return [_every_address(port)]
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return sorted({(family, where[:2]) for family, _, _, _, where in found})


def _every_address(port: int) -> _Place:
    """IPv6's "any" covers IPv4. A machine without IPv6 has only that of IPv4."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as tried:
            tried.bind(("::", 0))
    except OSError:
        return socket.AF_INET, ("0.0.0.0", port)
    return socket.AF_INET6, ("::", port)


def _place_of(sock: socket.socket) -> _Place:
    return sock.family, sock.getsockname()[:2]


def _bound(family: socket.AddressFamily, where: Any) -> socket.socket:
    """Raises OSError: another socket is in the way."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(where[0] != "::"))
        sock.bind(where)
    except OSError:
        sock.close()
        raise
    return sock
