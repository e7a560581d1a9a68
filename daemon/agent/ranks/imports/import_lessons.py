"""What one zygote learns from its rank, and imports for the next one.

The rank's imports are told to the agent once no import runs. What the agent then asks for is tried in a forked child
(`trial`), one module after the other, and imported if that does no harm. Standard library and syntax of Python 3.9.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from muster.daemon.agent.ranks.imports.seen_imports import SeenImports, find_targets
from muster.daemon.agent.ranks.imports.trial import may_be_tried
from muster.daemon.host import process_tree

_PERIOD_S = 0.5
_QUIET_S = 2.0
"""Seconds without an import after which a rank has imported what it needs for now."""
_TRIAL_S = 60.0


class ImportLessons:
    """The lessons of one zygote.

    Args:
        say: sends a message to the agent.
        now: monotonic seconds.
    """

    def __init__(self, say: Callable[..., None], now: Callable[[], float] = time.monotonic) -> None:
        find_targets(os.environ.get("PYTHONPATH", ""))
        self._say, self._now = say, now
        self._seen: SeenImports | None = None
        self._told = self._count = 0
        self._quiet_since = 0.0
        self._words: list[str] | None = None  # None: no lesson goes on
        self._imported: list[str] = []
        self._left: set[str] = set()
        self._trial, self._trial_started = 0, 0.0
        self.name = ""
        self.variables: set[str] = set()

    @property
    def pids(self) -> set[int]:
        """The process of the trial that runs."""
        return {self._trial} if self._trial else set()

    @property
    def period(self) -> float | None:
        """Seconds after which `turn` is due; None: there is nothing to see or to import."""
        return None if self._seen is None and not self._trial else _PERIOD_S

    def watch_rank(self) -> SeenImports:
        """A rank is to be forked: the memory for what it imports."""
        self._seen, self._told, self._count = SeenImports(), 0, 0
        return self._seen

    def learn(self, words: Sequence[str]) -> None:
        """Import these modules. Earlier words that are among them count no more."""
        self._words, self._imported, self.variables = list(words), [], set()

    def turn(self) -> bool:
        """Tell what the rank has imported. Return whether `name` is to be tried in a child now."""
        self._tell()
        if self._trial:
            if self._now() - self._trial_started > _TRIAL_S:
                process_tree.kill(self._trial)
            return False
        return self._advance()

    def trying(self, pid: int) -> None:
        """A child tries `name`."""
        self._trial, self._trial_started = pid, self._now()

    def check_trial(self) -> None:
        """A child has ended: if it is that of the trial, and all is well, import what it has tried."""
        if not self._trial:
            return
        pid, status = os.waitpid(self._trial, os.WNOHANG)
        if not pid:
            return
        self._trial = 0
        code = process_tree.exit_status(status)
        if code:
            self._left.add(self.name)
        if code < 0:
            self._say("left", "", name=self.name, why=f"its import ends by signal {-code}")
        if code == 0:
            with _no_output():
                importlib.import_module(self.name)
            self._imported.append(self.name)

    def _tell(self) -> None:
        if self._seen is None:
            return
        count = self._seen.count()
        if count != self._count:
            self._count, self._quiet_since = count, self._now()
        elif self._now() - self._quiet_since >= _QUIET_S and len(words := self._seen.words()) > self._told:
            self._told = len(words)
            self._say("imported", "", words=words)

    def _advance(self) -> bool:
        """Go on to the next module that is to be tried; False: there is none."""
        if self._words is None:
            return False
        while self._words:
            word = self._words.pop(0)
            if word.endswith("="):
                self.variables.add(word[:-1])
            elif word not in sys.modules and word not in self._left and may_be_tried(word):
                self.name = word
                return True
        self._words = None
        self._say("learned", "", modules=self._imported)
        return False


@contextmanager
def _no_output() -> Iterator[None]:
    """What is printed goes nowhere: the rank's own import would have printed it into its log."""
    kept: dict[int, Any] = {number: os.dup(number) for number in (1, 2)}
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in kept:
            os.dup2(nowhere, number)
        yield
    finally:
        for number, descriptor in kept.items():
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.close(nowhere)
