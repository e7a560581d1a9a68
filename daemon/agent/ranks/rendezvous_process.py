"""The rendezvous store of one generation, seen from the agent.

Hosted by a process forked from a warm one where torch is warm; else only a port is set aside, on which rank 0 opens the
store itself.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

from muster.daemon.host import packets, process_tree

log = logging.getLogger(__name__)


class RendezvousProcess:
    """A store for `generation`. `port` is 0 until it listens (or is set aside); `ended` says that it must be opened
    anew.
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
        """Its name towards the warm process."""
        return f"store of generation {self.generation}"

    def reserve(self, avoid: set[int]) -> None:
        """Set a port aside, bound but not listening: rank 0 can still listen on it (both use SO_REUSEADDR)."""
        self.hosted = False
        refused = []
        while (sock := _bound()).getsockname()[1] in avoid:
            refused.append(sock)
        for other in refused:
            other.close()
        self._reserved, self.port = sock, sock.getsockname()[1]
        self._changed()

    def close(self) -> None:
        """End it."""
        self._closing = True
        if self._reserved is not None:
            self._reserved.close()
        if self._pid and not self.ended:
            process_tree.kill(self._pid)

    def handle_message(self, message: packets.Message) -> bool:
        """See RankProcess.heard."""
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
        """It has ended, asked or not."""
        self.ended = True
        self.port = 0
        if not self._closing:
            log.warning("the %s has ended by itself", self.key)
        self._changed()

    def mark_gone(self) -> None:
        """Nothing of it is left: nothing more to do."""


def _bound() -> socket.socket:
    # Dual stack, as torch listens; IPv4 alone where the node has no IPv6.
    sock = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    sock.bind(("", 0))
    return sock
