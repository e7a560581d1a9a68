"""Terminal output as a picture. Pure."""

from __future__ import annotations

import io
from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

_MOST_CHARS = 240
"""Characters of a line. A longer one is wrapped."""


def paint(word: str, colour: str) -> str:
    """A coloured word for `svg_of`."""
    console = _console(len(word) + 1)
    with console.capture() as captured:
        console.print(word, style=colour, end="")
    return captured.get()


def svg_of(lines: Iterable[str], title: str) -> str:
    """The lines, with the colours of `paint`, as a terminal window."""
    texts = [Text.from_ansi(line) for line in lines]
    console = _console(min(max((text.cell_len for text in texts), default=0) + 1, _MOST_CHARS))
    for text in texts:
        console.print(text)
    return console.export_svg(title=title)


def _console(width: int) -> Console:
    return Console(
        record=True,
        width=max(width, 20),
        file=io.StringIO(),
        force_terminal=True,
        color_system="standard",
        highlight=False,
        markup=False,
    )
