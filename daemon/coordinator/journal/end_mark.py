"""How far the journal had come, noted beside it: a file that loses its end would not show it by itself.

SQLite takes a garbled log for one that ends before the garbled page, and goes on as if nothing had been written since.
The note is not synced: it survives the death of the process, not a power cut, and after one it may be behind the
journal, never ahead of it.
"""

from __future__ import annotations

import os
from pathlib import Path

_BYTES = 41


class JournalEnd:
    """The note at `path`, made if need be: the term and the position of the newest record."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def read(self) -> tuple[int, int]:
        """Term and position; zeros where nothing was noted, or a power cut took it."""
        words = os.pread(self._handle, _BYTES, 0).split()
        if len(words) != 2 or not all(word.isdigit() for word in words):
            return 0, 0
        return int(words[0]), int(words[1])

    def write(self, term: int, position: int) -> None:
        """Note this end: one write in place, seen whole or not at all by a process that comes after."""
        os.pwrite(self._handle, b"%020d %020d" % (term, position), 0)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._handle)
