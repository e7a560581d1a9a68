"""Planting a bug: a change of one module's source text when that module is imported."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from muster.simulator.seeds import Result


@dataclass(frozen=True, slots=True)
class PlantedBug:
    """A bug in words, and the change of the source that makes it.

    `code` occurs exactly once in the source of `module`. Planting replaces it with `bug`.
    """

    words: str
    module: str
    code: str
    bug: str

    def plant(self, source: str) -> str:
        """The source with the bug.

        Raises:
            ValueError: `code` does not occur exactly once, so the planted bug is out of date.
        """
        if source.count(self.code) != 1:
            raise ValueError(f"{self.module} has {source.count(self.code)} times: {self.code}")
        return source.replace(self.code, self.bug)


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module with a planted bug. It never uses a compiled file."""

    def __init__(self, name: str, path: str, planted_bug: PlantedBug) -> None:
        super().__init__(name, path)
        self._planted_bug = planted_bug

    def get_code(self, fullname: str) -> CodeType:
        """The changed source, compiled."""
        code: CodeType = compile(self._planted_bug.plant(Path(self.path).read_text()), self.path, "exec")
        return code


class _Finder:
    """Comes before all other finders, and finds one module only."""

    def __init__(self, planted_bug: PlantedBug) -> None:
        self._planted_bug = planted_bug

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of the module with the bug. None for every other module."""
        if fullname != self._planted_bug.module:
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path)
        if found is None or found.origin is None:
            return None
        return importlib.util.spec_from_loader(fullname, _Loader(fullname, found.origin, self._planted_bug))


def plant(planted_bug: PlantedBug) -> None:
    """Plants the bug in this process: its module will be imported with it.

    Raises:
        RuntimeError: the module was imported before, so the bug can't be planted in this process.
    """
    if planted_bug.module in sys.modules:
        raise RuntimeError(f"{planted_bug.module} is imported already: plant the bug in a new process")
    sys.meta_path.insert(0, _Finder(planted_bug))


def first_seed_that_finds(planted_bug: PlantedBug, numbers: Iterable[int]) -> Result | None:
    """The result of the first of these seeds that violates an invariant. None: no seed does.

    Raises:
        RuntimeError: as `plant`.
    """
    plant(planted_bug)
    logging.disable(logging.CRITICAL)
    seeds = importlib.import_module("muster.simulator.seeds")
    return next((result for seed in numbers if (result := seeds.run(seed)).violation), None)
