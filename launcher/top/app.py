"""The terminal of `muster top`: it shows the lines of `pages`, and gives keys to `place`.

Textual, not rich's Live: Live writes the whole screen again at each change, and reads no keys. Textual decodes keys,
gives the terminal back after an exception, writes only what has changed, and has a terminal without a screen for tests.
It is an extra (`pip install 'muster[top]'`), because nothing else needs it.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import replace
from datetime import tzinfo
from functools import cache

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.app import App, ComposeResult
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from muster.launcher.output.job_lines import Moment
from muster.launcher.output.screen import Screen
from muster.launcher.top import pages
from muster.launcher.top.cells import EMPTY, Line
from muster.launcher.top.feed import Feed
from muster.launcher.top.known import Known
from muster.launcher.top.place import Body, Place, press

AGE_PERIOD_S = 1.0
"""Seconds after which the age of what is shown is written again."""
_REDRAW_S = 0.2
"""Seconds, at least, between two drawings of what has come. A coordinator sends ten views a second at most."""


@cache
def _style(words: str) -> Style:
    return Style.parse(words)


class Lines(Widget):
    """The screen: lines, of which only those that differ are written again."""

    DEFAULT_CSS = "Lines { width: 1fr; height: 1fr; background: ansi_default; color: ansi_default; }"

    def __init__(self) -> None:
        super().__init__()
        self._lines: Sequence[Line] = ()

    def put(self, lines: Sequence[Line]) -> list[int]:
        """Show these lines. Returns which of them are written, the others are there already."""
        before, self._lines = self._lines, lines
        old = [*before, *[EMPTY] * (len(lines) - len(before))]
        changed = [at for at, one in enumerate(lines) if one != old[at]]
        if changed:
            self.refresh(*(Region(0, at, self.size.width, 1) for at in changed))
        return changed

    def render_line(self, y: int) -> Strip:
        """A line of the terminal."""
        cells = self._lines[y] if y < len(self._lines) else EMPTY
        strip = Strip([Segment(cell.text, _style(cell.colour)) for cell in cells])
        return strip.adjust_cell_length(self.size.width)


class Top(App[None]):
    """The program on the terminal."""

    ENABLE_COMMAND_PALETTE = False
    BINDINGS = []  # noqa: RUF012  # Textual's own; `place` knows the keys

    def __init__(self, feed: Feed, where: Place, zone: tzinfo) -> None:
        super().__init__(ansi_color=True)
        self.known, self.where = Known(), where
        self._feed, self._zone = feed, zone
        self._is_due = False
        self._body: tuple[object, Body | None] = (None, None)
        self._lines = Lines()

    def compose(self) -> ComposeResult:
        """The only widget."""
        yield self._lines

    def on_mount(self) -> None:
        """Begin."""
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._end, 128 + number)
        self.set_interval(AGE_PERIOD_S, self._draw)
        self._read()

    def on_resize(self, event: events.Resize) -> None:
        """Draw for the new size."""
        self._draw()

    def on_key(self, event: events.Key) -> None:
        """A key."""
        event.stop()
        event.prevent_default()
        before = self.where
        found = press(before, event.key, event.character or "", self._body_now())
        if found is None:
            self._end(0)
            return
        self.where = found
        if found.job != before.job:
            self._read()
        self._draw()

    def _end(self, status: int) -> None:
        self.exit(return_code=status)

    def _read(self) -> None:
        """Read what concerns the place, and nothing else any more."""
        self.run_worker(self._receive(self.where.job), exclusive=True)

    async def _receive(self, gang_id: str) -> None:
        async for message in self._feed.messages(gang_id):
            self.known.receive(message)
            if not self._is_due:
                self._is_due = True
                self.set_timer(_REDRAW_S, self._draw)

    def _draw(self) -> None:
        self._is_due = False
        width, height = self.size
        lines = pages.picture(self.known, self.where, self._body_now(), self._moment(), width, height)
        self._lines.put(lines)

    def _moment(self) -> Moment:
        return Moment(self._feed.now(), Screen(self.size.width, zone=self._zone))

    def _body_now(self) -> Body | None:
        """The list or map of the place, made again only if something has come."""
        where = replace(self.where, cursor="", typing=False, keys_shown=False)
        made_of = self.known.received, where, self.size.width
        if self._body[0] != made_of:
            self._body = made_of, pages.body_of(self.known, where, self._moment(), self.size.width)
        return self._body[1]
