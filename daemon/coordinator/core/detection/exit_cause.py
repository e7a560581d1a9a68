"""Which line of what a rank has written last says why it ended.

It is seldom the last one. PyTorch's message of a CUDA error goes on for five lines. After an uncaught exception its
process group warns that nobody has destroyed it. A C++ exception is followed by its stack. Python draws a frame around
the exceptions of a group, and libraries around the mistakes of a command line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")
"""PyTorch writes it before each line of an uncaught exception."""
_LIBRARY_LOG = re.compile(r"^(\[rank\d+\]:)?\[?[IW]\d{4} \d\d:\d\d:\d\d")
"""A line of glog's form at the level of information or of a warning."""
_FRAME = re.compile(r"^(Traceback \(most recent call last\):$|\s+File \"(?P<file>.*)\", line (?P<line>\d+)(?:, in |$))")
_NOT_PYTHON = ("SyntaxError: ", "IndentationError: ", "TabError: ")
"""Errors of which only the frame says where they are: no line of the script has run."""
_LEFT_SIDE, _RIGHT_SIDE = re.compile(r"^(\[rank\d+\]: ?)?\s*[|│] "), "│"
"""Of a drawn frame, after the prefix of the rank. Its other lines hold no word."""
_FATAL = re.compile(r"^(?:Fatal Python error: |\s*what\(\):\s+)(?P<words>.*)")
_LONG_MESSAGES = re.compile(r"CUDA|NCCL|cuDNN|HIP|Triton")
"""Errors of these libraries have messages of several lines, of which the first says what has happened."""


def cause_in(text: str) -> str:
    """The line that says why a rank ended, without the prefix that PyTorch gives it.

    Args:
        text: the last lines of what it has written, also cut in the middle of a line.

    Returns:
        "": there is no line.
    """
    written = [_LEFT_SIDE.sub(r"\1", line.rstrip().removesuffix(_RIGHT_SIDE).rstrip()) for line in text.splitlines()]
    written = [line for line in written if _RANK_PREFIX.sub("", line).strip()]
    lines = [line for line in written if re.search(r"\w", _RANK_PREFIX.sub("", line))] or written[-1:]
    lines = [line for line in lines if not _LIBRARY_LOG.match(line)] or lines[-1:]
    for number in range(len(lines) - 1, -1, -1):
        line = _RANK_PREFIX.sub("", lines[number])
        if fatal := _FATAL.match(line):
            return fatal["words"].strip()
        if _FRAME.match(line):
            return _of_traceback(lines[number], lines[number + 1 :])
    return _RANK_PREFIX.sub("", lines[-1]).strip() if lines else ""


def _of_traceback(frame: str, following: Sequence[str]) -> str:
    """The exception, unless the program wrote on after it: then it had been caught, and the last line says more."""
    uncaught = bool(_RANK_PREFIX.match(frame))
    lines = [_RANK_PREFIX.sub("", line) for line in following]
    error = next((number for number, line in enumerate(lines) if not line[0].isspace()), None)
    if error is None:
        return (lines or [frame])[-1].strip()
    goes_on = len(lines) > error + 1 and not lines[-1][0].isspace()
    if goes_on and not uncaught and not _LONG_MESSAGES.search(lines[error]):
        return lines[-1].strip()
    return _whole(frame, lines[error:])


def _whole(frame: str, lines: Sequence[str]) -> str:
    """The first line of an exception, with its second one if it ends with a colon, and with the place of an error that
    no traceback tells."""
    place = _FRAME.match(_RANK_PREFIX.sub("", frame))
    if lines[0].startswith(_NOT_PYTHON) and place and place["file"]:
        return f"{lines[0].strip()} ({place['file']}, line {place['line']})"
    return " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])
