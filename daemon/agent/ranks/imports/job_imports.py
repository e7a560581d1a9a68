"""What the ranks of a job import, on the agent's side: which zygotes of this node are to import it, and the list of it.

The list is a file in the gang's own folder of logs, which only this user writes. So nodes that join later, spares and
a run after a requeue know it, too. It holds names alone: each zygote resolves them as its interpreter does, and tries
each of them in a process of its own before it imports it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol

from muster.daemon.host import rank_log_files
from muster.daemon.host.worker_threads import run_in_own_thread

log = logging.getLogger(__name__)

LOOK_S = 15.0
MOST_WORDS = 400
_FILE = "imports"
_WORD = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*=?")
_MOST_LETTERS = 200


class Pupil(Protocol):
    """A zygote that is ready."""

    def learn(self, words: Sequence[str]) -> None:
        """Import what these words name."""


class JobImports:
    """Words as in seen_imports.py, and who has been told how many of them. `at_once`: zygotes that may import at the
    same time."""

    def __init__(self, at_once: Callable[[], int]) -> None:
        self._at_once = at_once
        self._told: dict[Pupil, int] = {}
        self._learning: set[Pupil] = set()
        self._is_over = False
        self.words: list[str] = []

    def add(self, words: Sequence[str]) -> None:
        """A rank has imported this, or the list says so."""
        known = set(self.words)
        self.words += [word for word in words if word not in known][: MOST_WORDS - len(known)]
        self._teach()

    def join(self, pupil: Pupil) -> None:
        """A zygote is ready."""
        self._told[pupil] = 0
        self._teach()

    def finish(self, pupil: Pupil) -> None:
        """It has imported what it could."""
        self._learning.discard(pupil)
        self._teach()

    def leave(self, pupil: Pupil) -> None:
        """A zygote has ended. If it was learning, its rank went with it: that may happen once."""
        if pupil in self._learning:
            self._is_over = True
            log.warning("a warm process has ended as it imported what the script imports: no other one does that now")
        self._learning.discard(pupil)
        self._told.pop(pupil, None)

    def _teach(self) -> None:
        for pupil, told in self._told.items():
            busy = pupil in self._learning or len(self._learning) >= self._at_once()
            if not busy and told < len(self.words) and not self._is_over:
                self._told[pupil] = len(self.words)
                self._learning.add(pupil)
                pupil.learn(self.words)


class KeptImports:
    """The list of the job in its run folder.

    Args:
        has_rank_0: whether this node runs it: then it writes the list.
        has_ranks: whether this node runs any: then they say what they import, and the list says nothing new.
    """

    def __init__(
        self,
        run_dir: str,
        gang: str,
        imports: JobImports,
        has_rank_0: Callable[[], bool],
        has_ranks: Callable[[], bool],
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._run_dir, self._gang, self._imports = run_dir, gang, imports
        self._has_rank_0, self._has_ranks, self._pause = has_rank_0, has_ranks, pause
        self._kept = 0

    async def run(self) -> None:
        """Read and write until cancelled."""
        while True:
            await self.look()
            await self._pause(LOOK_S)

    async def look(self) -> None:
        """Write the list if it has grown here, or read it."""
        words = list(self._imports.words)
        try:
            if self._has_rank_0() and len(words) > self._kept:
                await run_in_own_thread(partial(_write, self._run_dir, self._gang, words), "muster-imports")
                self._kept = len(words)
            elif not self._has_ranks():
                self._imports.add(await run_in_own_thread(partial(_read, self._run_dir, self._gang), "muster-imports"))
        except OSError as error:
            log.info("the list of what the script imports can't be kept: %s", error)


def _write(run_dir: str, gang: str, words: Sequence[str]) -> None:
    with rank_log_files.hold_log_folder(run_dir, gang, rank_log_files.AGENTS) as folder:
        with os.fdopen(folder.create(f".{_FILE}", 0o600), "w", encoding="utf-8") as file:
            file.writelines(f"{word}\n" for word in words)
        folder.rename(f".{_FILE}", _FILE)


def _read(run_dir: str, gang: str) -> list[str]:
    """The list; empty: there is none."""
    with rank_log_files.hold_log_folder(run_dir, gang, rank_log_files.AGENTS) as folder:
        try:
            with os.fdopen(folder.open_file(_FILE), encoding="utf-8", errors="replace") as file:
                words = file.read(MOST_WORDS * _MOST_LETTERS).splitlines()
        except FileNotFoundError:
            return []
    if bad := next((word for word in words if not _is_word(word)), ""):
        log.warning("%s/%s is not used: %r is no module", folder.path, _FILE, bad[:_MOST_LETTERS])
        return []
    return words


def _is_word(word: str) -> bool:
    return len(word) <= _MOST_LETTERS and _WORD.fullmatch(word) is not None
