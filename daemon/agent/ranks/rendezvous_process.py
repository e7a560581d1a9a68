"""The rendezvous store of one generation, as the agent sees it.

If a zygote has torch, a process forked from it hosts the store. Otherwise the agent only reserves a port, on which rank
0 opens the store.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

from muster.daemon.host import packets, process_tree

log = logging.getLogger(__name__)


class RendezvousProcess:
    """A store for `generation`.

    port: 0 until the store listens or the port is reserved.
    hosted: a process of this node hosts the store; otherwise only the port is reserved.
    ended: the store has ended and must be opened again.
    """

    def __init__(self, generation: int, changed: Callable[[], None]) -> None:
        self.generation = generation
        self.port = 0
        self.hosted = True
        self.ended = False
        self._changed = changed
        self._pid = 0
        self._closing = False
        self._reserved: socket.socket | None = None

    @property
    def key(self) -> str:
        """The store's name in messages to and from the zygote."""
        return f"store of generation {self.generation}"

    def reserve(self, avoid: set[int]) -> None:
        """Reserve a port that is not in `avoid`: bind it without listening. Rank 0 can still listen on it, because both
        use SO_REUSEADDR."""
        self.hosted = False
        refused = []
        while (sock := _bind_socket()).getsockname()[1] in avoid:
            refused.append(sock)
        for other in refused:
            other.close()
        self._reserved, self.port = sock, sock.getsockname()[1]
        self._changed()

    def close(self) -> None:
        """End the store."""
        self._closing = True
        if self._reserved is not None:
            self._reserved.close()
        if self._pid and not self.ended:
            process_tree.kill(self._pid)

    def handle_message(self, message: packets.Message) -> bool:
        """See RankProcess.handle_message."""
        match message["say"]:
            case "started":
                self._pid = message["pid"]
                if self._closing:
                    self.close()
            case "store":
                self.port = message["port"]
                log.info("the %s listens on port %d", self.key, self.port)
                self._changed()
            case "exit":
                self.handle_zygote_exit()
            case "gone":
                return True
        return False

    def handle_zygote_exit(self) -> None:
        """The store has ended, with or without a request."""
        self.ended = True
        self.port = 0
        if not self._closing:
            log.warning("the %s has ended unexpectedly", self.key)
        self._changed()

    def mark_gone(self) -> None:
        """No process of the store is left: nothing to do."""


def _bind_socket() -> socket.socket:
    # Dual stack, as torch listens; IPv4 only if the node has no IPv6.
    sock = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    sock.bind(("", 0))
    return sock
