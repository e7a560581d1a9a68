"""What one bare TCP connection carries over loopback: the yardstick for a restore from another node's memory."""

from __future__ import annotations

import mmap
import socket
import time

_BUFFER_BYTES = 256 << 20
"""Sent and received into, again and again. Larger than any cache."""
_CALL_BYTES = 16 << 20


class SocketEnd:
    """One end, in a process of its own. Served by a `worker.Worker`."""

    def __init__(self) -> None:
        self._buffer = memoryview(mmap.mmap(-1, _BUFFER_BYTES))
        self._buffer[:] = bytes(range(256)) * (_BUFFER_BYTES // 256)  # touches every page
        self._server = socket.create_server(("127.0.0.1", 0))

    def port(self) -> int:
        """Where `receive` accepts the connection."""
        return int(self._server.getsockname()[1])

    def receive(self, size: int) -> float:
        """Accept a connection and read `size` bytes. The moment (time.monotonic) when the last one was there."""
        connection, _ = self._server.accept()
        with connection:
            done = 0
            while done < size:
                start = done % _BUFFER_BYTES
                done += connection.recv_into(self._buffer[start : start + min(_CALL_BYTES, size - done)])
        return time.monotonic()

    def send(self, port: int, size: int) -> float:
        """Send `size` bytes. The moment when it began."""
        with socket.create_connection(("127.0.0.1", port)) as connection:
            began = time.monotonic()
            for done in range(0, size, _CALL_BYTES):
                start = done % _BUFFER_BYTES
                connection.sendall(self._buffer[start : start + min(_CALL_BYTES, size - done)])
        return began
