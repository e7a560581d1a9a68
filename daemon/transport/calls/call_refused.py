"""The error that ends a call with a status of gRPC and a message."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc
import grpc.aio

from muster.daemon.host.plain_text import cut

MAX_CHARS = 800
"""Characters of a message. It travels in the headers of an answer, nine bytes for a character at most. A client of gRPC
refuses headers of 16 KiB, and by chance those of more than 8: it would show its own error in place of this one."""


class CallRefused(Exception):
    """Ends the call with `code`. The message says what is wrong and what would be right."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code

    async def end_call(self, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
        """End the call of `context` with this error. Of a long message the beginning is sent.

        gRPC sends a status behind the answers that wait. A server can't reset a call, so one whose client reads nothing
        stays here until the client reads, or its connection ends: it keeps its place, which counts for its user.
        """
        await context.abort(self.code, cut(str(self), MAX_CHARS, keep="\n"))
        raise AssertionError("abort raises")


def busy(why: str) -> CallRefused:
    """A limit of the server, or of one user there, is reached."""
    return CallRefused(grpc.StatusCode.RESOURCE_EXHAUSTED, f"busy, try again: {why}")


def late(what: str) -> CallRefused:
    """The caller has not sent or read in time."""
    return CallRefused(grpc.StatusCode.DEADLINE_EXCEEDED, what)
