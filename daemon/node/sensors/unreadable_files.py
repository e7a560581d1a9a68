"""Says in the log which files can't be read: errors as long as they last, and once what the host does not have."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping

from muster.daemon.host.lasting_problem import LastingProblem

_log = logging.getLogger(__name__)


class UnreadableFiles:
    """The files of one sensor. `now`: monotonic seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._problems: dict[str, LastingProblem] = {}
        self._absent: set[str] = set()

    def note(self, failed: Mapping[str, Mapping[str, str]], absent: Collection[str] = ()) -> None:
        """Take in one reading. failed: for each device, why its files could not be read. absent: files that no device
        of the kind must have."""
        for device in self._problems.keys() - failed.keys():
            self._problems.pop(device).end()
        for device, files in failed.items():
            words = ", ".join(f"{file} ({why})" for file, why in files.items())
            self._problem(device).meet(f"{device} can't be read: {words}")
        if missing := set(absent) - self._absent:
            self._absent |= missing
            _log.info("this host does not report %s", ", ".join(sorted(missing)))

    def _problem(self, device: str) -> LastingProblem:
        return self._problems.setdefault(device, LastingProblem(_log, f"{device} is read again", self._now))
