"""Where a command prints: on a terminal of some width, or into a pipe or a file.

A pipe gets records: one a line, whole, without padding, its cells separated by tabs, and each time with its zone. A
terminal gets lines that fit, broken between words, and the zone of all times once, in the heading. Pure, except for
`open_screen`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, tzinfo
from functools import cache
from typing import TYPE_CHECKING, TextIO

from muster.daemon.host import clock
from muster.launcher.output.terminal_width import columns

if TYPE_CHECKING:
    from rich.console import Console

Paint = Callable[[str, str], str]
"""Converts a word and its colour to terminal output."""
NARROWEST = 20
"""Columns of the narrowest terminal that is served. On a narrower one, lines are folded by the terminal."""
INDENT = "    "
"""Before the further lines of a record or a sentence."""


def unpainted(word: str, colour: str) -> str:
    """No colour."""
    return word


def local_zone() -> tzinfo:
    """The offset that is in force here now. Times of another season are shown with the same one."""
    return datetime.fromtimestamp(clock.wall()).astimezone().tzinfo or UTC


@dataclass(frozen=True, slots=True)
class Screen:
    """What output must fit. `width`: the terminal's columns; None: a pipe or a file."""

    width: int | None = None
    paint: Paint = unpainted
    zone: tzinfo = field(default_factory=local_zone)

    def time(self, at_s: float, timespec: str = "seconds") -> str:
        """Date and time as in ISO 8601, in a pipe with the zone; empty: `at_s` is 0."""
        if not at_s:
            return ""
        moment = datetime.fromtimestamp(at_s, self.zone)
        return (moment if self.width is None else moment.replace(tzinfo=None)).isoformat(" ", timespec)

    def titled(self, title: str) -> str:
        """The heading of a column of times: on a terminal with the zone."""
        return title if self.width is None else f"{title} ({zone_words(self.zone)})"

    def sentence(self, text: str, first: str = "", rest: str = INDENT) -> list[str]:
        """`text` in lines that fit, the first after `first`, the others after `rest`. A word that is longer than a line
        stays whole, so that it can be copied."""
        if self.width is None or len(first) + len(text) <= self.width:
            return [first + text]
        width = max(self.width, NARROWEST)
        wrapped = textwrap.wrap(
            text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
        )
        return wrapped or [first]


def zone_words(zone: tzinfo) -> str:
    """ "UTC+01:00"."""
    offset = datetime.fromtimestamp(clock.wall(), zone).isoformat()[-6:]
    return "UTC" if offset == "+00:00" else f"UTC{offset}"


def time_with_zone(at_s: float, zone: tzinfo | None = None) -> str:
    """A time within a sentence: "2026-11-27 06:29 UTC+01:00"."""
    zone = zone or local_zone()
    return f"{datetime.fromtimestamp(at_s, zone).strftime('%Y-%m-%d %H:%M')} {zone_words(zone)}"


def open_screen(target: TextIO, *, utc: bool = False) -> Screen:
    """The screen that `target` is. `utc`: show times in UTC, not in local time."""
    zone = UTC if utc else local_zone()
    return Screen(columns(), _painted, zone) if target.isatty() else Screen(zone=zone)


@cache
def _painted(word: str, colour: str) -> str:
    console = _console()
    with console.capture() as captured:
        console.print(word, style=colour, end="", soft_wrap=True)
    return captured.get()


@cache
def _console() -> Console:
    from rich.console import Console  # only here: not every output has colours

    return Console(highlight=False, markup=False)
