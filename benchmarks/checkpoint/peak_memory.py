"""The most memory that agents and ranks hold at one moment: their own, and the memfds of slots and copies."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_INTERVAL_S = 0.02


def held_bytes(pids: Sequence[int]) -> int:
    """Private memory of the processes, and each of Muster's memfds among their descriptors once."""
    memfds: dict[int, int] = {}
    own = 0
    for pid in pids:
        with suppress(OSError):  # it has ended meanwhile
            own += _private_kib(Path(f"/proc/{pid}/status").read_text()) * 1024
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    if os.readlink(descriptor).startswith("/memfd:muster-"):
                        stat = descriptor.stat()
                        memfds[stat.st_ino] = stat.st_blocks * 512
    return own + sum(memfds.values())


def _private_kib(status: str) -> int:
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon:"))


class PeakMemory:
    """Samples `held_bytes` in a thread while its `with` block runs. `peak_bytes`: the most that was seen."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.peak_bytes = 0

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(_INTERVAL_S):
            self.peak_bytes = max(self.peak_bytes, held_bytes(self._pids))
