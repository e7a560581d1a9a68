"""A client of HTTP/2 that does what no client of gRPC does: it sends half messages, and reads no answer."""

from __future__ import annotations

import asyncio
import re
import ssl
import struct
from collections.abc import Iterable

from muster.daemon.transport.call_binding import CREDENTIAL_KEY
from muster.daemon.transport.site_config import split_address

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _PING, _WINDOW = 0, 1, 4, 6, 8
_ACK, _END_HEADERS = 1, 4
_TABLE_SIZE, _FIRST_WINDOW = 1, 4
_FRAME_BYTES = 16384


class HalfCaller:
    """One connection, which may have no more calls at the same time than the server allows.

    `statuses`: gRPC's status of each call that has ended. `sent`: bytes of messages that the server
    had room for."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.statuses: dict[int, int] = {}
        self.sent = 0
        self._reader, self._writer = reader, writer
        self._streams = 0
        self._window, self._first_window = 65535, 65535
        self._windows: dict[int, int] = {}
        self._bodies: dict[int, bytearray] = {}
        self._answered: set[int] = set()
        self._changed = asyncio.Condition()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, address: str, *, tls: ssl.SSLContext | None = None, reads: bool = True) -> HalfCaller:
        """Connect to "host:port". Without `reads` the server has no room for any answer."""
        host, port = split_address(address)
        reader, writer = await asyncio.open_connection(host, port, ssl=tls)
        caller = cls(reader, writer)
        settings = {_TABLE_SIZE: 0} | ({} if reads else {_FIRST_WINDOW: 0})
        writer.write(_PREFACE + _frame(_SETTINGS, 0, 0, b"".join(struct.pack(">HI", *one) for one in settings.items())))
        return caller

    async def close(self) -> None:
        """Close the connection."""
        self._writer.transport.abort()
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    def call(self, method: str, token: str, message: bytes | None = None, size: int | None = None) -> int:
        """Begin a call with a credential. `message`: what is sent of its first message, None: nothing. `size`: what the
        message is said to have; None: what it has, so the call is a whole one. Returns the number of the call."""
        stream, self._streams = 2 * self._streams + 1, self._streams + 1
        pairs = (
            *((":method", "POST"), (":scheme", "http"), (":path", method), (":authority", "server")),
            *(("te", "trailers"), ("content-type", "application/grpc"), (CREDENTIAL_KEY, token)),
        )
        self._writer.write(_frame(_HEADERS, _END_HEADERS, stream, b"".join(_literal(*pair) for pair in pairs)))
        self._windows[stream] = self._first_window
        if message is not None:
            said = len(message) if size is None else size
            self._bodies[stream] = bytearray(b"\x00" + struct.pack(">I", said) + message)
            self._send(stream)
        return stream

    def read(self, call: int) -> None:
        """Have room for the answers of a call."""
        for stream in (0, call):
            self._writer.write(_frame(_WINDOW, 0, stream, struct.pack(">I", 1 << 20)))

    async def ended(self, calls: Iterable[int]) -> list[int]:
        """Wait until these calls have ended. Returns their statuses."""
        wanted = list(calls)
        async with self._changed:
            await self._changed.wait_for(lambda: self.statuses.keys() >= set(wanted))
        return [self.statuses[call] for call in wanted]

    async def answered(self, call: int) -> None:
        """Wait until the server has begun to answer a call. It sends the headers although there is no room for more."""
        async with self._changed:
            await self._changed.wait_for(lambda: call in self._answered)

    def _send(self, stream: int) -> None:
        body = self._bodies[stream]
        while body and stream not in self.statuses:
            size = min(len(body), self._window, self._windows[stream], _FRAME_BYTES)
            if size <= 0:
                return
            self._writer.write(_frame(_DATA, 0, stream, bytes(body[:size])))
            del body[:size]
            self._window -= size
            self._windows[stream] -= size
            self.sent += size

    async def _read(self) -> None:
        while True:
            head = await self._reader.readexactly(9)
            stream = int.from_bytes(head[5:], "big") & 0x7FFFFFFF
            payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
            async with self._changed:
                self._take(head[3], head[4], stream, payload)
                self._changed.notify_all()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _WINDOW:
            self._grow(stream, int.from_bytes(payload, "big"))
        elif kind == _SETTINGS and not flags & _ACK:
            self._set(dict(struct.iter_unpack(">HI", payload)))
            self._writer.write(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            self._writer.write(_frame(_PING, _ACK, 0, payload))
        elif kind == _DATA and payload:
            more = struct.pack(">I", len(payload))
            self._writer.write(_frame(_WINDOW, 0, 0, more))
        elif kind == _HEADERS:
            self._answered.add(stream)
            if found := re.search(rb"grpc-status.(\d+)", payload, re.DOTALL):
                self.statuses.setdefault(stream, int(found[1]))

    def _grow(self, stream: int, size: int) -> None:
        if stream:
            self._windows[stream] = self._windows.get(stream, 0) + size
        else:
            self._window += size
        for waiting in list(self._bodies):
            self._send(waiting)

    def _set(self, settings: dict[int, int]) -> None:
        if _FIRST_WINDOW in settings:
            more, self._first_window = settings[_FIRST_WINDOW] - self._first_window, settings[_FIRST_WINDOW]
            for stream in list(self._windows):
                self._grow(stream, more)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _literal(name: str, value: str) -> bytes:
    """A header as HPACK writes it without any table."""
    return b"\x00" + _text(name) + _text(value)


def _text(text: str) -> bytes:
    data, rest = text.encode(), len(text) - 127
    if rest < 0:
        return bytes([len(data)]) + data
    length = [127]
    while rest >= 128:
        length.append(rest % 128 + 128)
        rest //= 128
    return bytes([*length, rest]) + data
