"""Lays out tables: a line for each record where it fits, and what does not fit on lines below its record. Pure.

The columns of a table are ordered by use, and the last one is prose: the reason. On a terminal:

- Columns without a value are left out.
- If a whole record does not fit on a line, the reason is broken between words, beside the other columns if half a
  terminal is left there.
- Otherwise the last columns move to lines below each record, as "title: value", as many as must.

In a pipe, each record is one line with all columns, separated by tabs, whatever its length.

rich's tables break words when columns are many, and take 15 s for 12,500 nodes; these take less than a second.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

from muster.daemon.host.plain_text import plain
from muster.launcher.output.screen import INDENT, Screen

_GAP = "  "
_LEAST_PROSE = 40
"""Columns below which prose beside other columns would be a strip."""
_LEAST_HEADING = 8
"""Columns in which a title of short words is not broken into more than two lines."""


class Coloured(NamedTuple):
    """A cell with a colour."""

    text: str
    colour: str


Cell = str | Coloured
Row = Sequence[Cell]


def table(screen: Screen, titles: Sequence[str], rows: Iterable[Row]) -> Iterator[str]:
    """The lines of a table, its heading first."""
    texts = [_plain(row) for row in rows]
    if screen.width is None:
        yield "\t".join(titles)
        yield from ("\t".join(cell.text for cell in row) for row in texts)
        return
    used = [at for at in range(len(titles)) if not at or any(row[at].text for row in texts)]
    titles, texts = [titles[at] for at in used], [[row[at] for at in used] for row in texts]
    widths = [max(_heading_width(title), *(len(row[at].text) for row in texts), 0) for at, title in enumerate(titles)]
    beside = _columns_beside(widths, screen.width)
    yield from _heading(titles[:beside], widths)
    for row in texts:
        yield from _record(screen, titles, row, widths, beside)


def labelled(screen: Screen, rows: Iterable[tuple[str, Cell]], width: int = 0) -> Iterator[str]:
    """Lines of prose, each after its label. A label that repeats the one before is not shown again on a terminal.
    `width`: that of the labels at least."""
    texts = [_plain(row) for row in rows]
    if screen.width is None:
        yield from ("\t".join(cell.text for cell in row) for row in texts)
        return
    width, before = max([width, *(len(label.text) for label, _ in texts)]), ""
    for label, prose in texts:
        first = ("" if label.text == before else label.text).ljust(width) + _GAP
        yield from _painted(screen, prose, screen.sentence(prose.text, first, " " * len(first)), len(first))
        before = label.text


def _plain(row: Row) -> list[Coloured]:
    """A text reaches a table in no other way: it may hold what a process of a user wrote."""
    return [
        Coloured(plain(cell), "") if isinstance(cell, str) else Coloured(plain(cell.text), cell.colour) for cell in row
    ]


def _columns_beside(widths: Sequence[int], width: int) -> int:
    """How many columns stand beside each other: all, or as many as fit."""
    ends = [sum(widths[:count]) + len(_GAP) * (count - 1) for count in range(1, len(widths) + 1)]
    others = ends[-2] if len(ends) > 1 else 0
    if ends[-1] <= width or width - others - len(_GAP) >= _LEAST_PROSE:
        return len(widths)
    return max(1, sum(end <= width for end in ends[:-1]))


def _heading_width(title: str) -> int:
    """The least width of a title that may be broken between its words."""
    return max(min(len(title), _LEAST_HEADING), *map(len, title.split()))


def _heading(titles: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    """The titles, broken between words where the values are shorter."""
    broken = [textwrap.wrap(title, width) for title, width in zip(titles, widths, strict=False)]
    for words in zip_longest(*broken, fillvalue=""):
        yield _GAP.join(word.ljust(width) for word, width in zip(words, widths, strict=False)).rstrip()


def _record(
    screen: Screen, titles: Sequence[str], row: Sequence[Coloured], widths: Sequence[int], beside: int
) -> Iterator[str]:
    cells = list(zip(row[:beside], widths, strict=False))
    shown = [screen.paint(*cell) + " " * (width - len(cell.text)) for cell, width in cells]
    if beside == len(row) > 1:
        at = sum(width + len(_GAP) for _, width in cells[:-1])
        first, *more = screen.sentence(row[-1].text, " " * at, " " * at)
        yield _GAP.join([*shown[:-1], screen.paint(first[at:], row[-1].colour)]).rstrip()
        yield from more
        return
    if beside == 1:
        yield from _painted(screen, row[0], screen.sentence(row[0].text), 0)
    else:
        yield _GAP.join(shown).rstrip()
    below = [f"{title}: {cell.text}" for title, cell in zip(titles, row, strict=True)][beside:]
    given = [words for words, cell in zip(below, row[beside:], strict=True) if cell.text]
    prose = given.pop() if given and row[-1].text else ""
    for text in (", ".join(given), prose):
        if text:
            yield from screen.sentence(text, INDENT, INDENT)


def _painted(screen: Screen, cell: Coloured, lines: Iterable[str], at: int) -> Iterator[str]:
    """The lines of a cell that begins at column `at`, with its colour."""
    for line in lines:
        yield line[:at] + screen.paint(line[at:], cell.colour) if cell.colour else line
