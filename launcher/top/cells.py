"""Lines of a screen as cells with colours, cut to a width. Pure.

The tables of `muster status` put what does not fit on further lines. Here each record has one line, and what is cut is
shown whole below the list, for the record under the cursor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from muster.daemon.host.plain_text import plain
from muster.launcher.output.table import Cell, Coloured, Row

T = TypeVar("T")
Line = tuple[Coloured, ...]
EMPTY: Line = ()
BOLD, MARKED = "bold", "reverse"
_GAP = "  "
_LEAST_PROSE = 6
"""Columns that the last cell of a record keeps. Columns before it are left out for that."""


def line(*cells: Cell) -> Line:
    """A line of these cells. A text may hold what a process of a user wrote: nothing else makes a line."""
    return tuple(
        Coloured(plain(cell), "") if isinstance(cell, str) else Coloured(plain(cell.text), cell.colour)
        for cell in cells
    )


def text_of(one: Line) -> str:
    """The text without its colours."""
    return "".join(cell.text for cell in one)


def fit(one: Line, width: int) -> Line:
    """The line, cut to `width`; … stands for what is cut."""
    if sum(len(cell.text) for cell in one) <= width:
        return one
    cut, left = [], max(0, width - 1)
    for cell in one:
        cut.append(Coloured(cell.text[:left], cell.colour))
        left -= len(cut[-1].text)
    return tuple(cell for cell in (*cut, Coloured("…"[:width], "")) if cell.text)


def spread(left: Line, right: Line, width: int) -> Line:
    """`left` and `right` at the two ends of a line. If there is no room for both, `left` is cut."""
    room = width - len(text_of(right)) - len(_GAP)
    first = fit(left, max(0, room))
    gap = " " * max(0, width - len(text_of(first)) - len(text_of(right)))
    return fit((*first, Coloured(gap, ""), *right), width)


def wrapped(text: str, width: int, most: int) -> list[Line]:
    """Prose on `most` lines at most."""
    import textwrap

    lines = textwrap.wrap(plain(text), max(width, 1))
    shown = [line(words) for words in lines[:most]]
    return shown if len(lines) <= most else [*shown[:-1], fit(line(" ".join(lines[most - 1 :])), width)]


def marked(one: Line, width: int) -> Line:
    """The line under the cursor."""
    padded = (*one, Coloured(" " * (width - len(text_of(one))), ""))
    return tuple(Coloured(cell.text, f"{cell.colour} {MARKED}".strip()) for cell in padded)


@dataclass(frozen=True)
class Listing(Generic[T]):
    """Records, one on each line, of which one may be under the cursor. Only what is shown is made into cells."""

    titles: Sequence[str]
    items: Sequence[T]
    key: Callable[[T], str]
    """What the cursor holds on to when records come, go or change places."""
    cells: Callable[[T], Row]
    detail: Callable[[T], str]
    """All that is to be said of a record, for the lines below the list."""
    nothing: str = ""
    """Is shown in place of a list without records."""

    def draw(self, cursor: str | None, width: int, height: int) -> list[Line]:
        """The titles and as many records as fit on `height` lines, with the one under the cursor. None: no cursor."""
        if not self.items:
            return [line(self.nothing)][:height]
        at, room = self._at(cursor), max(1, height - 1)
        first = max(0, min(at - room // 2, len(self.items) - room)) if cursor is not None else 0
        shown = self.items[first : first + room]
        mark = "> ", "  "
        lines = _grid(self.titles, [self.cells(one) for one in shown], width - 2 * (cursor is not None))
        if cursor is None:
            return lines[:height]
        rows = [(Coloured(mark[first + row != at], ""), *one) for row, one in enumerate(lines[1:])]
        rows[at - first] = marked(rows[at - first], width)
        return [(Coloured(mark[1], ""), *lines[0]), *rows][:height]

    def move(self, cursor: str, across: int, down: int) -> str:
        """Where the cursor is after so many steps."""
        if not self.items:
            return cursor
        return self.key(self.items[min(max(self._at(cursor) + down, 0), len(self.items) - 1)])

    def words(self, cursor: str) -> str:
        """All that is to be said of the record under the cursor."""
        return self.detail(self.items[self._at(cursor)]) if self.items else ""

    def matching(self, wanted: str) -> Listing[T]:
        """The records in which `wanted` occurs."""
        if not wanted:
            return self
        found = [one for one in self.items if wanted.casefold() in self._text(one)]
        return Listing(self.titles, found, self.key, self.cells, self.detail, f"nothing matches {wanted!r}")

    def _text(self, one: T) -> str:
        cells = (cell if isinstance(cell, str) else cell.text for cell in self.cells(one))
        return f"{' '.join(cells)} {self.detail(one)}".casefold()

    def _at(self, cursor: str | None) -> int:
        return next((at for at, one in enumerate(self.items) if self.key(one) == cursor), 0) if cursor else 0


def _grid(titles: Sequence[str], rows: Sequence[Row], width: int) -> list[Line]:
    """The titles and the rows in columns. Columns without a value are left out, and those before the last one that
    leave it no room."""
    lines = [line(*row) for row in rows]
    kept = [at for at in range(len(titles)) if not at or any(row[at].text for row in lines)]
    widths = {at: max(len(titles[at]), *(len(row[at].text) for row in lines)) for at in kept}

    def needed() -> int:
        return sum(widths[at] + len(_GAP) for at in kept[:-1]) + min(widths[kept[-1]], _LEAST_PROSE)

    while len(kept) > 2 and needed() > width:
        del kept[-2]
    return [
        fit(_in_columns([row[at] for at in kept], [widths[at] for at in kept]), width)
        for row in ([Coloured(title, BOLD) for title in titles], *lines)
    ]


def _in_columns(cells: Sequence[Coloured], widths: Sequence[int]) -> Line:
    columns = [
        part
        for cell, width in zip(cells, widths, strict=True)
        for part in (cell, Coloured(" " * (width - len(cell.text)) + _GAP, ""))
    ]
    return tuple(part for part in columns[:-1] if part.text)
