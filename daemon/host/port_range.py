"""A range of ports in a site's settings, in the form of Slurm's SrunPortRange: "61000-61999"."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

LOWEST_PORT, HIGHEST_PORT = 1024, 65535
"""An agent is a user's process, and the ports below are root's."""

_FORM = re.compile(r"([0-9]{1,5})-([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class PortRange:
    """The ports from `first` to `last`. At least two: an agent listens on one for calls and one for streams."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: object) -> PortRange:
        """The range that `text` ("61000-61999") names.

        Raises:
            ValueError: it names none; the message says what would be right.
        """
        found = _FORM.fullmatch(text) if isinstance(text, str) else None
        first, last = map(int, found.groups()) if found else (0, 0)
        if not LOWEST_PORT <= first < last <= HIGHEST_PORT:
            raise ValueError(
                f'must be "FIRST-LAST", at least two ports from {LOWEST_PORT} to {HIGHEST_PORT}, for example '
                '"61000-61999"'
            )
        return cls(first, last)

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"

    def __contains__(self, port: int) -> bool:
        return self.first <= port <= self.last

    def from_random_place(self) -> Iterator[int]:
        """Each port once, in ascending order from a random one. So processes that start together rarely try the same
        port."""
        count = self.last - self.first + 1
        start = secrets.randbelow(count)
        return (self.first + (start + place) % count for place in range(count))
