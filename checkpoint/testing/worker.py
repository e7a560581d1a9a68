"""A process that serves calls: a node's agent, a training rank, one end of a socket.

Calls and results are pickled over a pipe. A call may carry a descriptor, and a method may return a socket: the
descriptor travels beside the message. Moments are of time.monotonic, which all processes of a machine share.
"""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

ENDED = "the process has ended; its own words are on standard error"


class WorkerFailed(Exception):
    """A call has raised in the worker, or the worker has ended. The message has the traceback of the worker."""


class Worker:
    """The parent's end. `context`: of multiprocessing, which starts the process. `served`: makes the object whose
    methods are called, with `arguments`; both are pickled."""

    def __init__(self, context: Any, served: Callable[..., Any], *arguments: Any) -> None:
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, served, arguments), daemon=True)
        self.process.start()
        theirs.close()

    def start(self, method: str, *arguments: Any, descriptor: int | None = None) -> None:
        """Begin a call. Its result must be fetched with `result` before the next call."""
        self._connection.send((method, arguments, descriptor is not None))
        if descriptor is not None:
            reduction.send_handle(self._connection, descriptor, self.process.pid)

    def result(self) -> Any:
        """The result of the call that was begun. A socket comes as its descriptor, which the caller owns.

        Raises:
            WorkerFailed: the call has raised, or the worker has ended.
        """
        try:
            kind, value = self._connection.recv()
        except (EOFError, ConnectionError):
            raise WorkerFailed(ENDED) from None
        if kind == "raised":
            raise WorkerFailed(value)
        return reduction.recv_handle(self._connection) if kind == "descriptor" else value

    def call(self, method: str, *arguments: Any, descriptor: int | None = None) -> Any:
        """`start`, then `result`."""
        self.start(method, *arguments, descriptor=descriptor)
        return self.result()

    def close(self) -> None:
        """End the process: it is asked to, and killed if it does not."""
        self._connection.close()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _serve(connection: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    served = make(*arguments)
    while True:
        try:
            method, given, has_descriptor = connection.recv()
        except EOFError:
            break
        if has_descriptor:
            given = (*given, reduction.recv_handle(connection))
        try:
            value = getattr(served, method)(*given)
        except Exception:  # noqa: BLE001  # the parent raises it
            connection.send(("raised", traceback.format_exc()))
            continue
        if isinstance(value, socket.socket):
            with value:
                connection.send(("descriptor", None))
                reduction.send_handle(connection, value.fileno(), os.getppid())
        else:
            connection.send(("value", value))
    # Nothing that a library has started may keep the process.
    os._exit(0)
