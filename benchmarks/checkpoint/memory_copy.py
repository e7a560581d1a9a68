"""A plain copy of memory by several threads: what a snapshot is compared with."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

CHUNK_BYTES = 4 << 20
"""Bytes that one thread copies at a time."""


class MemoryCopy:
    """The C library's memcpy, by `threads` threads. Regions are (source address, target address, bytes)."""

    def __init__(self, regions: Iterable[tuple[int, int, int]], threads: int) -> None:
        self._parts: list[list[tuple[int, int, int]]] = [[] for _ in range(threads)]
        number = 0
        for source, target, size in regions:
            for start in range(0, size, CHUNK_BYTES):
                part = (target + start, source + start, min(CHUNK_BYTES, size - start))
                self._parts[number % threads].append(part)
                number += 1
        self._pool = ThreadPoolExecutor(threads)

    def run(self) -> None:
        """Copy everything."""
        list(self._pool.map(_copy, self._parts))


def _copy(parts: list[tuple[int, int, int]]) -> None:
    for target, source, size in parts:
        ctypes.memmove(target, source, size)  # without Python's lock
