"""Makes text harmless that a process of a user wrote, before it is shown or kept: one line, without terminal escapes.

Two boundaries use it: what the coordinator takes from a message (services/conversion.py), and what is written for
people (launcher/output, the logs of the daemons). Pure.
"""

from __future__ import annotations

import logging
import re
from datetime import datetime
from functools import cache
from typing import Final

_COLOUR: Final = re.compile(r"\x1b\[[0-9;:]*m")
# Control characters, the line ends of Unicode, and what changes the direction of writing.
_CONTROL: Final = (
    *range(0x20), *range(0x7F, 0xA0), 0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A),
)  # fmt: skip
_RESET: Final = "\x1b[0m"


def plain(text: str, *, keep: str = "") -> str:
    r"""`text` without colours, and with every control character written out ("\x1b", "\n"), except those in `keep`."""
    if text.isprintable():
        return text  # nearly every text, and much faster
    return _COLOUR.sub("", text).translate(_written_out(keep))


def plain_but_coloured(line: str) -> str:
    """One line of a program's output, without its line end: tabs and colours stay, and no colour lasts beyond it."""
    pieces = _COLOUR.split(line)
    colours = _COLOUR.findall(line)
    text = "".join(plain(piece, keep="\t") + colour for piece, colour in zip(pieces, [*colours, ""], strict=True))
    return text + _RESET if colours else text


def cut(text: str, most_chars: int, *, keep: str = "") -> str:
    """`plain` of the first `most_chars` characters of `text`, and "..." if there were more."""
    # Only as much as can be kept is made plain: the rest of a long text costs nothing.
    shown = plain(text[:most_chars], keep=keep)
    return shown if len(text) <= most_chars and len(shown) <= most_chars else f"{shown[:most_chars]}..."


@cache
def _written_out(keep: str) -> dict[int, str]:
    return {code: chr(code).encode("unicode_escape").decode() for code in _CONTROL if chr(code) not in keep}


class PlainFormatter(logging.Formatter):
    """Formats each message of a log as one line, whatever texts it quotes. A traceback keeps its lines.

    The time is that of ISO 8601, with the zone: logs of several hosts and days are read side by side.
    """

    def __init__(self, form: str = "%(asctime)s %(levelname)-7s %(name)s: %(message)s", *, node: str = "") -> None:
        """`node`: stands before each line, where the lines of several nodes go into one file."""
        super().__init__(f"{node.replace('%', '%%')} {form}" if node else form)

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """See logging.Formatter."""
        return datetime.fromtimestamp(record.created).astimezone().isoformat(" ", "milliseconds")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        record.message = plain(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: logging._SysExcInfoType) -> str:
        """See logging.Formatter. The lines are indented, so none looks like a message."""
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        """See logging.Formatter."""
        return _indented(super().formatStack(stack_info))


def _indented(text: str) -> str:
    return "\n".join("  " + plain(line, keep="\t") for line in text.split("\n"))
