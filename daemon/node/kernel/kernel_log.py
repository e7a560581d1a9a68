"""Reads the kernel log: records as they appear, without polling.

`/dev/kmsg` is a device with one record per read; the event loop wakes up when a record is there. Any other path is a
file that grows: a container's substitute for the device. Each line of it is a record, with the device's prefix or
without one (`kernel_record.parse_line`). inotify wakes the loop up for it, through two functions of libc: no library in
Debian stable does that for asyncio, and polling every 20 ms would cost an idle node as much as the rest of the daemon.

Whoever writes a line of the log can take the node out of service. Hence a file is read only if nobody but root and the
user of this process can write to it, and a device only if it is the kernel's own. A file of syslog is no substitute:
its lines begin with a time, so none of them is taken for a message of a driver, and programs write to it, too.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import os
import re
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Protocol

from muster.daemon.node.kernel.kernel_record import KernelRecord, parse_line, parse_record

_RECORD_BYTES = 8192  # CONSOLE_EXT_LOG_MAX: a shorter buffer makes read fail
_CHUNK_BYTES = 65536
_IN_MODIFY = 0x2
_KERNEL_LOG_DEVICE = os.makedev(1, 11)
_TAIL_BYTES = 4096
"""Bytes at the end of a file that are enough to recognize a time in front of each line."""
_TIME = re.compile(
    rb"(<[0-9]+>)?([A-Z][a-z]{2} [ 0-9][0-9] [0-9]{2}:|[0-9]{4}-[0-9]{2}-[0-9]{2}[T ]|\[ *[0-9]+\.[0-9]+\] )"
)
"""How syslog, journalctl and dmesg begin a line."""
_log = logging.getLogger(__name__)

_libc = ctypes.CDLL(None, use_errno=True)


class UntrustedLogError(Exception):
    """The log is not the kernel's, or another user can write to it. The site has to correct that."""


class KernelLog(Protocol):
    """An open kernel log; a context manager that closes it."""

    def existing_records(self) -> list[KernelRecord]:
        """The records that were in the log when it was opened, or have come since. Call it before `follow`."""
        ...

    def follow(self) -> AsyncIterator[KernelRecord]:
        """The records that `existing_records` did not return, then each new record, for ever."""
        ...

    def __enter__(self) -> KernelLog: ...

    def __exit__(self, *_: object) -> None: ...


def open_kernel_log(path: Path) -> KernelLog | None:
    """Open the log at `path`; None, with a warning, if it does not exist, can't be read or must not be believed."""
    try:
        device = stat.S_ISCHR(path.stat().st_mode)
        return Device(path) if device else GrowingFile(path)
    except UntrustedLogError as error:
        _log.warning("the kernel log %s is not read: %s; GPU errors go unseen", path, error)
    except OSError as error:
        hint = ": reading it takes CAP_SYSLOG" if error.errno in (errno.EPERM, errno.EACCES) else ""
        _log.warning("the kernel log %s can't be read (%s)%s; GPU errors go unseen", path, error.strerror, hint)
    return None


def reason_for_distrust(status: os.stat_result, user: int) -> str:
    """Why a program of `user` must not believe a file with this status, in words; "" if it may."""
    if not stat.S_ISREG(status.st_mode):
        return "it is neither /dev/kmsg nor a regular file"
    if status.st_uid not in (0, user):
        return f"it belongs to uid {status.st_uid}; it must belong to root or to uid {user}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others can write to it (mode {stat.S_IMODE(status.st_mode):04o}): chmod go-w"
    return ""


class Device:
    """/dev/kmsg."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = self._open()
        os.lseek(self._fd, 0, os.SEEK_END)

    def _open(self) -> int:
        fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if os.fstat(fd).st_rdev != _KERNEL_LOG_DEVICE:
            os.close(fd)
            raise UntrustedLogError("this device is not the kernel's log (1:11)")
        return fd

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def existing_records(self) -> list[KernelRecord]:
        """See KernelLog.existing_records."""
        os.lseek(self._fd, 0, os.SEEK_SET)  # the first record that the kernel still has
        return list(_records(self._fd))

    async def follow(self) -> AsyncIterator[KernelRecord]:
        """See KernelLog.follow."""
        with _ReadableEvent(self._fd) as wake:
            while True:
                for record in _records(self._fd):
                    yield record
                await wake.wait()


def _records(fd: int) -> Iterator[KernelRecord]:
    """The device's records, up to its end."""
    while (data := _read_record(fd)) is not None:
        record = parse_record(data)
        if record is None:
            _log.warning("the kernel log has a record of an unknown format: %r", data[:100])
        else:
            yield record


def _read_record(fd: int) -> bytes | None:
    """The next record; None: there is none yet."""
    while True:
        try:
            return os.read(fd, _RECORD_BYTES)
        except BlockingIOError:
            return None
        except BrokenPipeError:
            _log.warning("the kernel overwrote lines of its log before they were read")  # the next read goes on


class GrowingFile:
    """A file to which other processes append lines. When the file shrinks, it is read from the start."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if distrust := reason_for_distrust(os.fstat(self._fd), os.geteuid()):
                raise UntrustedLogError(distrust)
            self._notify = _watch_writes(path)
        except (OSError, UntrustedLogError):
            os.close(self._fd)
            raise
        self._first_offset = self._offset = os.fstat(self._fd).st_size
        self._partial_line = b""
        self._warn_of_syslog(path)

    def __enter__(self) -> GrowingFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._notify)
        os.close(self._fd)

    def existing_records(self) -> list[KernelRecord]:
        """See KernelLog.existing_records."""
        return [parse_line(line) for line in os.pread(self._fd, self._first_offset, 0).split(b"\n") if line]

    async def follow(self) -> AsyncIterator[KernelRecord]:
        """See KernelLog.follow."""
        with _ReadableEvent(self._notify) as wake:
            while True:
                for line in self._read_lines():
                    yield parse_line(line)
                await wake.wait()
                self._discard_notifications()

    def _warn_of_syslog(self, path: Path) -> None:
        tail = os.pread(self._fd, _TAIL_BYTES, max(0, self._first_offset - _TAIL_BYTES))
        if any(_TIME.match(line) for line in tail.split(b"\n")):
            _log.warning("%s looks like a file of syslog or dmesg: GPU errors in such lines go unseen", path)

    def _read_lines(self) -> list[bytes]:
        if os.fstat(self._fd).st_size < self._offset:
            self._offset, self._partial_line = 0, b""
        data = self._partial_line
        while chunk := os.pread(self._fd, _CHUNK_BYTES, self._offset):
            self._offset += len(chunk)
            data += chunk
        *lines, self._partial_line = data.split(b"\n")
        return lines

    def _discard_notifications(self) -> None:
        """Read the notifications away: they only say that the file has changed."""
        try:
            while os.read(self._notify, _CHUNK_BYTES):
                pass
        except BlockingIOError:
            pass


def _watch_writes(path: Path) -> int:
    """An inotify descriptor that becomes readable when `path` is written to."""
    fd = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0 or _libc.inotify_add_watch(fd, os.fsencode(path), _IN_MODIFY) < 0:
        number = ctypes.get_errno()
        if fd >= 0:
            os.close(fd)
        raise OSError(number, os.strerror(number), str(path))
    return int(fd)


class _ReadableEvent:
    """Waits until a descriptor is readable."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._readable = asyncio.Event()

    def __enter__(self) -> _ReadableEvent:
        asyncio.get_running_loop().add_reader(self._fd, self._readable.set)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)

    async def wait(self) -> None:
        self._readable.clear()
        await self._readable.wait()
