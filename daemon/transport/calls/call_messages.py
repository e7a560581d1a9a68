"""The messages of one call, each with an end: the first ones must come in seconds, and each answer must be read.

gRPC reads the message of a call with one request before the handler runs, and waits for it without an end. So a server
of Muster gives gRPC one kind of handler for all kinds of calls, that of a stream of requests and a stream of answers,
and reads and writes the messages itself. On the wire all kinds look the same.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc.aio import EOF  # type: ignore[attr-defined]  # not in grpc-stubs

from muster.daemon.transport.calls.call_places import CallPlace, current_place
from muster.daemon.transport.calls.call_refused import CallRefused, late

_Context = grpc.aio.ServicerContext[Any, Any]
_Handler = Callable[[Any, _Context], Any]


@dataclass(frozen=True, slots=True)
class Unreadable:
    """In place of a message that no handler gets: the status that ends the call, and why."""

    code: grpc.StatusCode
    details: str


_UNREADABLE = Unreadable(grpc.StatusCode.INVALID_ARGUMENT, "this is no message of this method: it can't be read")


class _Reader:
    """Parses the messages of one call. `most`: bytes of the first one; 0: any.

    A message takes up to 75 times its bytes once it is parsed. So one that is too large is not, and gRPC, which would
    parse each at once, parses none.
    """

    def __init__(self, deserialize: Callable[[bytes], Any], most: int) -> None:
        self._deserialize, self._most = deserialize, most

    def parse(self, message: bytes) -> Any:
        """The message. Raises CallRefused: it is too large, or can't be parsed."""
        most, self._most = self._most, 0
        if most and len(message) > most:
            details = f"the message has {len(message)} bytes: {most} are the most for this method"
            raise CallRefused(grpc.StatusCode.INVALID_ARGUMENT, details)
        parsed = self._deserialize(message)
        if isinstance(parsed, Unreadable):
            raise CallRefused(parsed.code, parsed.details)
        return parsed


def read_message(deserialize: Callable[[bytes], Any], message: bytes) -> Any:
    """The message; in its place Unreadable, if it can't be read. gRPC itself would log a traceback."""
    try:
        return deserialize(message)
    except DecodeError:
        return _UNREADABLE


async def write_message(context: _Context, message: Any, unread_s: float) -> None:
    """Send `message`. All that a server answers goes through here. gRPC accepts a message only while the client reads.

    Raises:
        CallRefused: the client has read nothing for `unread_s`, or its user leaves too much unread.
    """
    place = current_place()
    if place:
        await place.begin_answers(context)
        if place.share.unread_answer_bytes:
            place.take_unread(_size(message))
    try:
        async with asyncio.timeout(unread_s):
            await context.write(message)
    except TimeoutError:
        raise late(f"no message was read for {unread_s:g} s: open another stream") from None
    if place:
        place.give_back_unread()


def timed_handler(
    handler: Any, deserialize: Callable[[bytes], Any], place: CallPlace, begin: Callable[[_Context], None] | None = None
) -> Any:
    """The handler of the call that holds `place`, within the limits of its share. `begin`: runs first."""
    kind = f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
    function = getattr(handler, kind)
    if inspect.isasyncgenfunction(function):
        answer: _Answer = partial(_write_all, function, place.share.unread_s)
    elif not inspect.iscoroutinefunction(function):
        answer = _refuse_unwritten
    elif handler.response_streaming:
        answer = function  # a coroutine that answers with a stream writes it itself
    else:
        answer = partial(_write_one, function, place.share.unread_s)
    reader = _Reader(deserialize, place.share.first_message_bytes)
    run = partial(_run, answer, place, reader, begin, handler.request_streaming)
    return grpc.stream_stream_rpc_method_handler(run, None, handler.response_serializer)


_Answer = Callable[[Any, _Context], Awaitable[None]]


async def _run(
    answer: _Answer,
    place: CallPlace,
    reader: _Reader,
    begin: Callable[[_Context], None] | None,
    streams: bool,
    _: object,
    context: _Context,
) -> None:
    if begin:
        begin(context)
    try:
        await _answer_or_refuse(answer, _requests(context, place, reader), streams, context)
    except grpc.aio.AbortError as error:
        # The call and this error refer to each other until the garbage collector runs. Its frames hold the messages of
        # the call, which take 16 MiB for 1 MiB on the wire.
        error.__context__ = None
        raise error.with_traceback(None)  # noqa: B904  # it is the same error


async def _answer_or_refuse(answer: _Answer, requests: AsyncIterator[Any], streams: bool, context: _Context) -> None:
    try:
        await answer(requests if streams else await _only(requests), context)
    except CallRefused as error:
        await error.end_call(context)


async def _refuse_unwritten(_: object, __: _Context) -> None:
    """What generated code has in place of a method that a service leaves out is no coroutine, and all others are."""
    raise CallRefused(grpc.StatusCode.UNIMPLEMENTED, "this server does not have this method")


async def _write_one(handler: _Handler, unread_s: float, request: Any, context: _Context) -> None:
    await write_message(context, await handler(request, context), unread_s)


async def _write_all(handler: _Handler, unread_s: float, request: Any, context: _Context) -> None:
    answers: AsyncIterator[Any] = handler(request, context)
    async with aclosing(answers):  # type: ignore[type-var]
        async for answer in answers:
            await write_message(context, answer, unread_s)


async def _only(requests: AsyncIterator[Any]) -> Any:
    async for request in requests:
        return request
    raise CallRefused(grpc.StatusCode.INVALID_ARGUMENT, "the call has no message, or one that is too large")


async def _requests(context: _Context, place: CallPlace, reader: _Reader) -> AsyncIterator[Any]:
    """The messages of a call. Raises CallRefused: one can't be taken, or one of the first ones is late."""
    first = place.share.first_messages
    for _ in range(first) if first else repeat(None):
        async with place.reading():
            message = await _read_within(context, place.share.first_message_s)
            if message is EOF:
                return
            await place.hold(len(message))
        message = reader.parse(message)
        yield message
        del message  # the service may have dropped it, to make room for others while it waits for the next one
    while (message := await context.read()) is not EOF:
        message = reader.parse(message)
        yield message


async def _read_within(context: _Context, seconds: float) -> Any:
    # A task, so that a message counts that came while this process was suspended.
    reading = asyncio.ensure_future(context.read())
    try:
        await asyncio.wait({reading}, timeout=seconds)
        if reading.done():
            return reading.result()
    finally:
        reading.cancel()
    raise late(f"the first message of a call must come within {seconds:g} s")


def _size(message: Any) -> int:
    """The bytes of a message: of protobuf, or bytes already."""
    return len(message) if isinstance(message, bytes) else int(message.ByteSize())
