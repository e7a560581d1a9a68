"""An HTTP proxy in front of an S3 server, which throttles, refuses, resets or never answers as a test says."""

import http.client
import socket
import struct
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Fault = Callable[[str, str], str]
"""The fault of a request, from its method and path: "slow down", "denied", "reset", "reset in body", "hang"; or
none."""
_CODES = {"slow down": (503, "SlowDown", "Please reduce your request rate."), "denied": (403, "AccessDenied", "Denied")}


def no_fault(method: str, path: str) -> str:
    """Every request is answered."""
    return ""


class FaultyProxy(ThreadingHTTPServer):
    """Forwards to the server at `port` of this host. A context manager.

    `fault`: may be changed at any time. `requests`: (method, path, fault) of each request so far.
    """

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream_port = port
        self.fault: Fault = no_fault
        self.requests: list[tuple[str, str, str]] = []
        self.ended = threading.Event()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> "FaultyProxy":
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The client has closed the connection: that is what these tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyProxy

    def _serve(self) -> None:
        fault = self.server.fault(self.command, self.path)
        self.server.requests.append((self.command, self.path, fault))
        length = int(self.headers.get("Content-Length") or 0)
        if fault == "reset in body":
            self.rfile.read(length // 2)
        if fault.startswith("reset"):
            linger = struct.pack("ii", 1, 0)  # closes with RST
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.close_connection = True
            self.connection.close()
            return
        if fault == "hang":
            self.server.ended.wait()
            self.close_connection = True
            return
        body = self.rfile.read(length)
        if fault:
            code, name, words = _CODES[fault]
            self._answer(code, {}, f"<Error><Code>{name}</Code><Message>{words}</Message></Error>".encode())
            return
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.upstream_port)
        upstream.request(self.command, self.path, body, dict(self.headers))
        with upstream.getresponse() as response:
            data = response.read()
            self._answer(response.status, dict(response.getheaders()), data)
        upstream.close()

    def _answer(self, code: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(code)
        for name, value in headers.items():
            if name.lower() not in ("transfer-encoding", "connection", "content-length", "server", "date"):
                self.send_header(name, value)
        is_head = self.command == "HEAD"
        length = headers.get("Content-Length", "0") if is_head else str(len(body))
        self.send_header("Content-Length", length)
        self.end_headers()
        if not is_head:
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

    def log_message(self, format: str, *words: Any) -> None:
        """Tests print nothing."""
