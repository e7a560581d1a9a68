"""Connections to a port of pieces whose token has not come yet.

Whoever reaches the port may open a connection and say nothing. So these are few, each ends soon, and a new one takes
the place of an old one: that of the address with the most, and of that address the oldest. Those who fetch send their
token at once, so a stranger who keeps connections open drops his own.
"""

import socket
import threading

from muster.checkpoint.store.streams import stream_sockets


class UnknownConnections:
    """The connections whose token has not come yet, by the address that they come from. Threads may use it.

    `most`: so many at once, each with a thread.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._by_address: dict[str, list[socket.socket]] = {}

    def add(self, connection: socket.socket, address: str) -> None:
        """Take a new connection in. If there are too many, one is cut."""
        with self._lock:
            self._by_address.setdefault(address, []).append(connection)
            if sum(map(len, self._by_address.values())) <= self._most:
                return
            most = max(self._by_address, key=lambda address: len(self._by_address[address]))
            self._cut(self._by_address[most].pop(0), most)

    def leave(self, connection: socket.socket, address: str) -> bool:
        """Its token has come, or it is over. False: it has been cut."""
        with self._lock:
            connections = self._by_address.get(address, [])
            if connection not in connections:
                return False
            connections.remove(connection)
            if not connections:
                del self._by_address[address]
            return True

    def close(self) -> None:
        """Cut all."""
        with self._lock:
            for address in list(self._by_address):
                for connection in self._by_address.pop(address):
                    stream_sockets.cut(connection)

    def _cut(self, connection: socket.socket, address: str) -> None:
        stream_sockets.cut(connection)
        if not self._by_address[address]:
            del self._by_address[address]
