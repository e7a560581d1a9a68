"""A stranger who opens as many connections as it can, as a program: it is started in a network namespace of its own.

    python connection_flood.py ADDRESS PORT CONNECTIONS [--own ADDRESS] [--tls]

Each connection speaks HTTP/2 (with --tls within TLS) and makes no call. The first line of the output is a JSON object:
how many connections the server's kernel has accepted, and how many the server itself has answered. Then the program
opens every connection that ends again, until its input ends.
"""

import argparse
import asyncio
import json
import resource
import ssl
import sys

HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""The preface of HTTP/2, and an empty SETTINGS frame."""
CONNECT_TIMEOUT_S = 3.0
"""A packet that a firewall drops has no answer."""
PAUSE_S = 0.02


class Flood:
    """The connections to one server."""

    def __init__(self, address: str, port: int, connections: int, own: str = "", *, tls: bool = False) -> None:
        self._server = (address, port)
        self._own = (own, 0) if own else None
        self._tls = _any_server() if tls else None
        self._connections = connections
        self.accepted = self.answered = 0

    async def run(self) -> None:
        """Open all connections, print what came of them, and hold them until the input ends."""
        held = await asyncio.gather(*(self._open() for _ in range(self._connections)))
        print(json.dumps({"accepted": self.accepted, "answered": self.answered}), flush=True)
        tasks = [asyncio.create_task(self._hold(*connection)) for connection in held if connection]
        await asyncio.to_thread(sys.stdin.read)
        for task in tasks:
            task.cancel()

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(*self._server, local_addr=self._own, ssl=self._tls)
        except OSError:
            return None
        self.accepted += 1
        try:
            writer.write(HELLO)
            greeting = await reader.read(1)
            self.answered += bool(greeting)
        except OSError:
            pass
        return reader, writer

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                while await reader.read(65536):
                    pass
            except OSError:
                pass
            writer.transport.abort()
            await asyncio.sleep(PAUSE_S)
            if (opened := await self._open()) is None:
                return
            reader, writer = opened


def _any_server() -> ssl.SSLContext:
    """TLS with a server that need not prove its name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("port", type=int)
    parser.add_argument("connections", type=int)
    parser.add_argument("--own", default="")
    parser.add_argument("--tls", action="store_true")
    flags = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(Flood(flags.address, flags.port, flags.connections, flags.own, tls=flags.tls).run())
