"""The HTTP server of a daemon's metrics: `/metrics` in the formats of Prometheus and OpenMetrics, nothing else.

Each call has a thread, so that the event loop waits for no reader. The values are collected by whoever made the
registry. Callers without a proof get no value, and cost little: a bounded number of connections, each for a bounded
time.
"""

from __future__ import annotations

import logging
import socket
import socketserver
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app

from muster.daemon.metrics.metrics_access import MetricsAccess, MetricsToken
from muster.daemon.transport.channel import ListenError

MAX_CONNECTIONS = 16
"""At the same time. Two servers of Prometheus need two."""
SILENT_S, CALL_S = 5.0, 30.0
"""Seconds after which a silent caller is disconnected, and that one call may take."""
SWITCH_S = 0.0005
"""Seconds after which a thread that computes lets another one go on. Python's 5 ms would delay heartbeats, because the
text of a large site takes a thread some 25 ms."""
_OPENMETRICS = "application/openmetrics-text"
_log = logging.getLogger(__name__)


class NoValuesError(Exception):
    """The values can't be had now. The message says why."""


class MetricsServer:
    """Serves the metrics of `registry` from `start` to `stop`. A collector may raise NoValuesError."""

    def __init__(self, access: MetricsAccess, registry: CollectorRegistry) -> None:
        """Raises ListenError: the address can't be used."""
        self._server = _Server(access)
        self._server.set_app(_guarded(make_wsgi_app(registry), access.token))
        self.port = int(self._server.server_address[1])

    def start(self) -> None:
        """Start to answer."""
        sys.setswitchinterval(min(SWITCH_S, sys.getswitchinterval()))
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def stop(self) -> None:
        """Answer no more. Blocks for half a second at most."""
        self._server.shutdown()
        self._server.server_close()


def _guarded(app: Callable[[WSGIEnvironment, StartResponse], Iterable[bytes]], token: MetricsToken | None) -> Any:
    """`app` for callers who have the token, at `/metrics`."""

    def answer(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        if token is not None and not token.proves(environ.get("HTTP_AUTHORIZATION", "")):
            start("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
            return [b"send the token of metrics_token: Authorization: Bearer TOKEN\n"]
        if environ["PATH_INFO"] != "/metrics":
            start("404 Not Found", [("Content-Type", "text/plain")])
            return [b"metrics are at /metrics\n"]
        # The library understands no form of Accept but the usual ones. Each of both formats is in one version.
        asked = environ.get("HTTP_ACCEPT", "")
        environ["HTTP_ACCEPT"] = _OPENMETRICS if _OPENMETRICS in asked else ""
        try:
            return app(environ, start)
        except NoValuesError as error:
            start("503 Service Unavailable", [("Content-Type", "text/plain")])
            return [f"{error}\n".encode()]

    return answer


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """A scrape is no news."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, access: MetricsAccess) -> None:
        self._files = access.files
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        try:
            found = socket.getaddrinfo(
                access.host or None, access.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            self.address_family, address = found[0][0], found[0][4]
            super().__init__((str(address[0]), int(address[1])), _Handler)
        except OSError as error:
            raise ListenError(f"metrics can't be served on {access.host}:{access.port}: {error.strerror}") from None

    def server_bind(self) -> None:
        """The standard library would ask a name server for the name of this host."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def get_request(self) -> tuple[socket.socket, Any]:
        """A connection, whose caller has not proved anything yet."""
        connection, address = super().get_request()
        connection.settimeout(SILENT_S)
        return connection, address

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether one more connection is allowed."""
        return self._free.acquire(blocking=False)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts the call's thread, if the process may have one more."""
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Runs in the call's thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """The TLS handshake happens here, where a slow caller keeps nobody waiting."""
        if self._files is None:
            with _limited(request):
                super().finish_request(request, client_address)
            return
        context = self._files.context()
        connection = context.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        with connection, _limited(connection):
            connection.do_handshake()
            super().finish_request(connection, client_address)
            connection.unwrap()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """An error ends its own call only."""
        level = logging.DEBUG if isinstance(sys.exception(), OSError) else logging.ERROR
        _log.log(level, "the call of a reader of metrics at %s failed", client_address, exc_info=True)


@contextmanager
def _limited(connection: socket.socket) -> Iterator[None]:
    """End the connection if the body takes longer than a call may."""
    end = threading.Timer(CALL_S, _shut, (connection,))
    end.daemon = True
    end.start()
    try:
        yield
    finally:
        end.cancel()


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
