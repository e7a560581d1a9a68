"""The door to the kernel log: lines as they appear, without polling.

`/dev/kmsg` is a device with one record a read; the event loop wakes up when there is one. Anything else is
taken for a plain file that grows, with one record or bare line each (a syslog file, a container's stand-in
for the device): inotify wakes the loop up, through the two functions of libc, since no library in Debian
stable does it for asyncio and a poll of 20 ms would cost as much on an idle node as everything else that
the daemon does.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import os
import re
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

_RECORD_BYTES = 8192  # CONSOLE_EXT_LOG_MAX: a shorter buffer makes read fail
_CHUNK = 65536
_IN_MODIFY = 0x2
_log = logging.getLogger(__name__)

_libc = ctypes.CDLL(None, use_errno=True)


class KernelLog(Protocol):
    """An open kernel log; a context manager that closes it."""

    def existing_lines(self) -> list[str]:
        """The lines that stood there when it was opened."""
        ...

    def follow(self) -> AsyncIterator[str]:
        """The lines that have come since it was opened, then each as it comes, for ever."""
        ...

    def __enter__(self) -> KernelLog: ...

    def __exit__(self, *_: object) -> None: ...


def open_kernel_log(path: Path) -> KernelLog | None:
    """The log at `path`; None, with a warning, where there is none or it may not be read."""
    try:
        device = stat.S_ISCHR(path.stat().st_mode)
        return Device(path) if device else GrowingFile(path)
    except OSError as error:
        hint = ": reading it takes CAP_SYSLOG" if error.errno in (errno.EPERM, errno.EACCES) else ""
        _log.warning("the kernel log %s can't be read (%s)%s; GPU errors go unseen", path, error.strerror, hint)
        return None


_PREFIX = re.compile(r"\d+,\d+,\d+,[^;]*;")
_ESCAPE = re.compile(r"\\x([0-9a-f]{2})")


def record_message(record: str) -> str:
    """The message of a record ("3,4711,98765,-;words\\n KEY=value"), unescaped; a bare line is its own message."""
    prefix = _PREFIX.match(record)
    if prefix is None:
        return record.rstrip("\n")
    first = record[prefix.end() :].partition("\n")[0]
    return _ESCAPE.sub(lambda found: chr(int(found[1], 16)), first)


class Device:
    """/dev/kmsg."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.lseek(self._fd, 0, os.SEEK_END)

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def existing_lines(self) -> list[str]:
        """See KernelLog.before."""
        fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            lines = []
            while (record := _read_record(fd)) is not None:
                lines.append(record_message(record))
            return lines
        finally:
            os.close(fd)

    async def follow(self) -> AsyncIterator[str]:
        """See KernelLog.follow."""
        with _Wake(self._fd) as wake:
            while True:
                while (record := _read_record(self._fd)) is not None:
                    yield record_message(record)
                await wake.wait()


def _read_record(fd: int) -> str | None:
    """The next record; None: there is none yet."""
    while True:
        try:
            return os.read(fd, _RECORD_BYTES).decode(errors="replace")
        except BlockingIOError:
            return None
        except BrokenPipeError:
            _log.warning("the kernel overwrote lines of its log before they were read")  # the next read goes on


class GrowingFile:
    """A file of lines that others append to. When it shrinks, it is read from its start."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._start = self._at = os.fstat(self._fd).st_size
        try:
            self._notify = _watch(path)
        except OSError:
            os.close(self._fd)
            raise
        self._rest = b""

    def __enter__(self) -> GrowingFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._notify)
        os.close(self._fd)

    def existing_lines(self) -> list[str]:
        """See KernelLog.before."""
        data = os.pread(self._fd, self._start, 0)
        return [record_message(line) for line in data.decode(errors="replace").splitlines()]

    async def follow(self) -> AsyncIterator[str]:
        """See KernelLog.follow."""
        with _Wake(self._notify) as wake:
            while True:
                for line in self._read_lines():
                    yield record_message(line)
                await wake.wait()
                self._drain()

    def _read_lines(self) -> list[str]:
        if os.fstat(self._fd).st_size < self._at:
            self._at, self._rest = 0, b""
        data = self._rest
        while chunk := os.pread(self._fd, _CHUNK, self._at):
            self._at += len(chunk)
            data += chunk
        *lines, self._rest = data.split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def _drain(self) -> None:
        """Take the notices: that something changed is all they say."""
        try:
            while os.read(self._notify, _CHUNK):
                pass
        except BlockingIOError:
            pass


def _watch(path: Path) -> int:
    """An inotify descriptor that becomes readable when `path` is written to."""
    fd = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0 or _libc.inotify_add_watch(fd, os.fsencode(path), _IN_MODIFY) < 0:
        number = ctypes.get_errno()
        if fd >= 0:
            os.close(fd)
        raise OSError(number, os.strerror(number), str(path))
    return int(fd)


class _Wake:
    """Waits until a descriptor is readable."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._readable = asyncio.Event()

    def __enter__(self) -> _Wake:
        asyncio.get_running_loop().add_reader(self._fd, self._readable.set)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)

    async def wait(self) -> None:
        self._readable.clear()
        await self._readable.wait()
