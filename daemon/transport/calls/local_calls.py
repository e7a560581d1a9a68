"""The calls of a server on a Unix socket, whose callers have no credential. They are counted, and have times."""

from __future__ import annotations

from functools import partial
from typing import Any

import grpc
import grpc.aio

from muster.daemon.transport.calls.call_messages import read_message, timed_handler
from muster.daemon.transport.calls.call_places import ShareCalls
from muster.daemon.transport.calls.call_refused import CallRefused
from muster.daemon.transport.calls.call_share import CallShare


class LocalCalls(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Passes a call to its handler if `share` has a place for it."""

    def __init__(self, share: CallShare) -> None:
        self._calls = ShareCalls(share)

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # gRPC answers that there is no such method
        try:
            place = self._calls.take(None)
        except CallRefused as refused:
            return grpc.stream_stream_rpc_method_handler(partial(_end, refused.code, str(refused)))
        return timed_handler(handler, partial(read_message, handler.request_deserializer), place)


async def _end(code: grpc.StatusCode, message: str, _: object, context: Any) -> None:
    context.set_code(code)
    context.set_details(message)
