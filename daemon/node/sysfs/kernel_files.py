"""Small files of /sys and /proc. One that is missing, too long, half written or garbage is `Unreadable`, never a value.

The kernel ends every attribute with a line end. A value without one is half written.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

MAX_BYTES = 4096
"""Bytes of an attribute, at most: the kernel gives it one page."""
_CHUNK_BYTES = 4096
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EOPNOTSUPP, errno.ENOSYS})
"""Errors of what a host or a device does not have."""
MAX_COUNT = 2**64 - 1
_COUNT = re.compile(r"[0-9]{1,20}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,63}")


class Unreadable(Exception):
    """A file has no value to believe. `missing`: there is no such file, or the device does not support it."""

    def __init__(self, words: str, *, missing: bool = False) -> None:
        super().__init__(words)
        self.missing = missing


def read_text(path: Path, limit: int = MAX_BYTES) -> str:
    """The text of a file of at most `limit` bytes, without its last line end.

    Raises:
        Unreadable: see above.
    """
    try:
        # Without O_NONBLOCK, a FIFO in the file's place would hold the reader for ever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            data = _read(fd, limit)
        finally:
            os.close(fd)
    except OSError as error:
        raise Unreadable(error.strerror or "unreadable", missing=error.errno in _ABSENT) from None
    if len(data) > limit:
        raise Unreadable("too long")
    if not data.endswith(b"\n"):
        raise Unreadable("half written")
    try:
        return data.decode().removesuffix("\n")
    except UnicodeDecodeError:
        raise Unreadable("not text") from None


def _read(fd: int, limit: int) -> bytes:
    """At most one chunk more than `limit` bytes. A buffer of the limit's size would be allocated for each read."""
    data = bytearray()
    while len(data) <= limit and (chunk := os.read(fd, _CHUNK_BYTES)):
        data += chunk
    return bytes(data)


def read_count(path: Path) -> int:
    """A whole number of 0 to 2**64 - 1.

    Raises:
        Unreadable: see above.
    """
    text = read_text(path)
    if text.startswith("N/A"):  # drivers say so of a counter that the port lacks
        raise Unreadable(text[:40], missing=True)
    if not _COUNT.fullmatch(text) or int(text) > MAX_COUNT:
        raise Unreadable(f"not a count: {text[:40]!r}")
    return int(text)


def names(folder: Path, pattern: str, limit: int) -> list[str]:
    """The names in a folder that match the regular expression `pattern`, in order, at most `limit`.

    Raises:
        Unreadable: there is no such folder.
    """
    try:
        found = os.listdir(folder)
    except OSError as error:
        raise Unreadable(error.strerror or "unreadable", missing=isinstance(error, FileNotFoundError)) from None
    return sorted(name for name in found if _NAME.fullmatch(name) and re.fullmatch(pattern, name))[:limit]
