"""The end mark: the term and position of the journal's newest record, kept in a file beside the journal.

SQLite takes a damaged write-ahead log for one that ends before the damaged page, and continues as if nothing had been
written since. The end mark shows that records are missing. It is not synced: it survives the death of the process, not
a power cut. After a power cut the mark may be behind the journal, never ahead of it.
"""

from __future__ import annotations

import os
from pathlib import Path

_BYTES = 41


class EndMark:
    """The end mark in the file `path`, which is created if it does not exist."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def read(self) -> tuple[int, int]:
        """Term and position; zeros if nothing was written, or a power cut has damaged the mark."""
        words = os.pread(self._handle, _BYTES, 0).split()
        if len(words) != 2 or not all(word.isdigit() for word in words):
            return 0, 0
        return int(words[0]), int(words[1])

    def write(self, term: int, position: int) -> None:
        """Write the mark in place, in one write: a later process sees the whole mark or the one before."""
        os.pwrite(self._handle, b"%020d %020d" % (term, position), 0)

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)
