"""Reads the files that agents and ranks write, `FOLDER/gG/rankR.log` or `FOLDER/gG/rankR.stacks`, as they grow."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which lines are read. `ranks`: None: of all ranks. `first`: the first generation. `only`: this generation alone.
    `tail`: of each file that is there at first, the last lines; None: all. `words`: lines that contain them, whatever
    their case. `stacks`: the stacks of ranks that hung instead of the logs."""

    ranks: Collection[int] | None = None
    first: int = 0
    only: int | None = None
    tail: int | None = None
    words: str = ""
    stacks: bool = False


class RankLogReader:
    """Reads the new lines of a gang's log folder. Of one rank, they have no prefix; of several, each has one with
    generation and rank."""

    def __init__(self, folder: Path, wanted: Wanted) -> None:
        self._folder, self._wanted = folder, wanted
        self._names = _STACKS if wanted.stacks else _RANK
        self._has_one = wanted.ranks is not None and len(wanted.ranks) == 1
        self._read: dict[Path, int] = {}

    def lines(self, *, to_end: bool = False) -> Iterator[str]:
        """Yields the new lines with their line ends, by generation and rank.

        Only tabs and colours are passed on of control characters.

        An incomplete last line is yielded later; with `to_end`, it is yielded now, with a line end.
        """
        wanted = self._wanted
        for generation, folder in sorted(_numbered(self._folder, _GENERATION).items()):
            if generation < wanted.first or (wanted.only is not None and generation != wanted.only):
                continue
            for rank, path in sorted(_numbered(folder, self._names).items()):
                if wanted.ranks is None or rank in wanted.ranks:
                    prefix = "" if self._has_one else f"g{generation} rank {rank}: "
                    yield from (f"{prefix}{line}" for line in self._chosen(path, to_end))

    def _chosen(self, path: Path, to_end: bool) -> Iterator[str]:
        """The new lines with the words; the last ones of a file that is read for the first time."""
        words, is_new = self._wanted.words.lower(), path not in self._read
        lines = (line for line in self._new(path, to_end) if words in line.lower())
        return iter(deque(lines, self._wanted.tail)) if is_new and self._wanted.tail is not None else lines

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
