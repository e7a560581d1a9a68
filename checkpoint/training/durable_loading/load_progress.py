"""How far this rank is with a durable checkpoint, told now and then."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from muster.checkpoint.durable import locations
from muster.checkpoint.format.durable_folders import parse_folder_name
from muster.checkpoint.format.versions import NO_VERSION, Version

_INTERVAL_S = 0.5
"""Seconds between two reports: agents report four times a second, and people look less often."""


@dataclass(frozen=True)
class Loaded:
    """What is loaded, and how far. `size`: of what this rank needs, in bytes, as far as it is known. `damage`: why it
    is not the newest checkpoint."""

    folder: str = ""
    version: Version = NO_VERSION
    size: int = 0
    loaded: int = 0
    done: bool = False
    damage: str = ""


class LoadProgress:
    """Used by the thread that loads. `report`: called with each news, at most twice a second but for the end."""

    def __init__(self, report: Callable[[Loaded], None] = lambda _: None) -> None:
        self._report = report
        self._now = Loaded()
        self._reported_at = 0.0

    def begin(self, folder: str, damage: str) -> None:
        """A checkpoint is loaded. `damage`: of a newer one; empty: this is the first one."""
        label = parse_folder_name(locations.split(folder)[1])
        self._now = Loaded(folder, label.version if label is not None else NO_VERSION, damage=damage)
        self._tell()

    def expect(self, size: int) -> None:
        """So many bytes more are needed."""
        self._now = replace(self._now, size=self._now.size + size)

    def add(self, size: int) -> None:
        """So many bytes are read."""
        loaded = min(self._now.size, self._now.loaded + size)  # the directory of an item is read twice
        self._now = replace(self._now, loaded=loaded)
        if time.monotonic() >= self._reported_at + _INTERVAL_S:
            self._tell()

    def end(self) -> None:
        """The whole state is loaded."""
        self._now = replace(self._now, loaded=self._now.size, done=True)
        self._tell()

    def _tell(self) -> None:
        self._reported_at = time.monotonic()
        self._report(self._now)
