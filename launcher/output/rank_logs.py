"""Reads the files that agents and ranks write, `FOLDER/gG/rankR.log` or `FOLDER/gG/rankR.stacks`, as they grow."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from muster.daemon.host import rank_log_files
from muster.daemon.host.plain_text import plain_but_coloured

_GENERATION = re.compile(r"g(\d+)")
_RANK = re.compile(r"rank(\d+)\.log")
_STACKS = re.compile(r"rank(\d+)\.stacks")
_CHUNK_BYTES = 1 << 20
"""Bytes in one read. A longer line is split."""


def generations(folder: Path) -> list[int]:
    """The generations that have logs in the gang's folder (muster.daemon.host.rank_log_files), ascending."""
    return sorted(_numbered(folder, _GENERATION))


def _numbered(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    try:
        entries = list(folder.iterdir())
    except OSError:
        return {}
    return {int(match[1]): entry for entry in entries if (match := pattern.fullmatch(entry.name))}


class RankLogReader:
    """Reads the new lines of a gang's log folder.

    Args:
        rank: read only this rank, without prefixes. None: all ranks; each line has a prefix with generation and rank.
        first: the first generation to read.
        only: read only this generation.
        stacks: read the stacks of ranks that hung instead of the logs.
    """

    def __init__(
        self, folder: Path, rank: int | None, first: int, only: int | None = None, *, stacks: bool = False
    ) -> None:
        self._folder = folder
        self._names = _STACKS if stacks else _RANK
        self._rank, self._first, self._only = rank, first, only
        self._read: dict[Path, int] = {}

    def lines(self, *, to_end: bool = False) -> Iterator[str]:
        """Yields the new lines with their line ends, by generation and rank.

        Only tabs and colours are passed on of control characters.

        An incomplete last line is yielded later; with `to_end`, it is yielded now, with a line end.
        """
        for generation, folder in sorted(_numbered(self._folder, _GENERATION).items()):
            if generation < self._first or (self._only is not None and generation != self._only):
                continue
            for rank, path in sorted(_numbered(folder, self._names).items()):
                if self._rank is None:
                    yield from (f"g{generation} rank {rank}: {line}" for line in self._new(path, to_end))
                elif self._rank == rank:
                    yield from self._new(path, to_end)

    def _new(self, path: Path, to_end: bool) -> Iterator[str]:
        with rank_log_files.open_to_read(path) as file:
            file.seek(self._read.get(path, 0))
            while data := file.read(_CHUNK_BYTES):
                # A line that is longer than a chunk is split.
                whole = data.rfind(b"\n") + 1 or (len(data) if to_end or len(data) == _CHUNK_BYTES else 0)
                if not whole:
                    return
                self._read[path] = self._read.get(path, 0) + whole
                file.seek(self._read[path])
                # A progress bar goes back to the start of its line. Here, each of its states has a line.
                for line in re.split("[\r\n]", data[:whole].decode(errors="replace")):
                    if line:
                        yield f"{plain_but_coloured(line)}\n"
