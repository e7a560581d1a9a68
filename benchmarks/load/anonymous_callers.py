"""Anonymous callers that send as much as they can to one gRPC server, in a process of their own: measures its limits.

    python -m benchmarks.load.anonymous_callers HOST:PORT CALLERS SECONDS

A quarter of the callers each: unary calls with bodies of 30 MB; streams without end; many small calls with a credential
of nobody; bytes that are no HTTP/2, or only its beginning. The last line of the output is a JSON object: how often each
status came back. The method is musterd's Ping. None of the callers has a valid credential.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import grpc.aio

from muster.daemon.transport.credential_check import CREDENTIAL_KEY
from muster.daemon.transport.site_config import split_address
from muster.v1.common_pb2 import PingRequest

METHOD = "/muster.v1.ProbeService/Ping"
BODY_BYTES = 30_000_000
STREAM_MESSAGE_BYTES = 256 * 1024
CALLS_AT_ONCE = 32
"""Small calls that one caller has under way."""
RETRY_S = 0.05
"""Seconds between two attempts of a caller whose connection was closed."""

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
OPEN_HEADERS = b"\x00\x00\x01\x01\x00\x00\x00\x00\x01\x82"
"""HEADERS of stream 1 without END_HEADERS: frames of CONTINUATION may follow without end."""
CONTINUATION = b"\x00\x40\x00\x09\x00\x00\x00\x00\x01" + b"\x00\x01a\x7f\x80\x01" + b"x" * (16384 - 6)
BEGINNINGS = (b"", PREFACE, PREFACE + SETTINGS, PREFACE + SETTINGS + OPEN_HEADERS)

Counts = Counter[str]
Caller = Callable[[str, Counts], Awaitable[None]]


async def send_large_bodies(address: str, counts: Counts) -> None:
    """Call Ping with a body of 30 MB, again and again."""
    body = PingRequest(nonce="x" * BODY_BYTES).SerializeToString()
    async with _channel(address) as channel:
        call = channel.unary_unary(METHOD)
        while True:
            await _count(call(body), counts)


async def send_streams(address: str, counts: Counts) -> None:
    """Stream messages to Ping without end."""
    message = PingRequest(nonce="x" * STREAM_MESSAGE_BYTES).SerializeToString()

    async def messages() -> AsyncIterator[bytes]:
        while True:
            yield message

    async with _channel(address) as channel:
        call = channel.stream_unary(METHOD)
        while True:
            await _count(call(messages()), counts)


async def send_small_calls(address: str, counts: Counts) -> None:
    """Call Ping with a credential that proves nothing, many calls at once."""
    metadata = grpc.aio.Metadata((CREDENTIAL_KEY, "nobody." + "0" * 64))
    async with _channel(address) as channel:
        call = channel.unary_unary(METHOD)

        async def repeat() -> None:
            while True:
                await _count(call(b"", metadata=metadata), counts)

        await asyncio.gather(*(repeat() for _ in range(CALLS_AT_ONCE)))


async def send_other_bytes(address: str, counts: Counts) -> None:
    """Open connections that never become a call: nothing, a beginning, headers without end, or random bytes."""
    host, port = split_address(address)
    number = 0
    while True:
        number += 1
        beginning = BEGINNINGS[number % len(BEGINNINGS)]
        filler = CONTINUATION if beginning.endswith(OPEN_HEADERS) else os.urandom(16384)
        try:
            _, writer = await asyncio.open_connection(host, port)
            writer.write(beginning)
            for _ in range(1000):
                writer.write(filler)
                await writer.drain()
            counts["bytes taken"] += 1
        except OSError:
            counts["connection closed"] += 1
            await asyncio.sleep(RETRY_S)


def _channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(
        address,
        options=[
            ("grpc.max_send_message_length", -1),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_retries", 0),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 100),
        ],
    )


async def _count(call: Awaitable[object], counts: Counts) -> None:
    try:
        await call
        counts["OK"] += 1
    except grpc.aio.AioRpcError as error:
        counts[error.code().name] += 1
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            await asyncio.sleep(RETRY_S)


KINDS: tuple[Caller, ...] = (send_large_bodies, send_streams, send_small_calls, send_other_bytes)


async def call_for(address: str, callers: int, seconds: float) -> dict[str, Counts]:
    """Run the callers for so long. Returns what they met, by kind."""
    counts = {kind.__name__: Counter[str]() for kind in KINDS}
    running = [
        asyncio.create_task(kind(address, counts[kind.__name__]))  # type: ignore[arg-type]
        for kind, _ in zip(KINDS * callers, range(callers), strict=False)
    ]
    await asyncio.wait(running, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in running:
        if task.done():
            await task  # a bug of this module
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return counts


if __name__ == "__main__":
    found = asyncio.run(call_for(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
    print(json.dumps(found), flush=True)
