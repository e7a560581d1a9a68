"""A target: what must hold for every input of one parser.

A parser may raise the exceptions that its docstring names. Its work must be in proportion to its input: `bounded_work`
counts lines of Python, not seconds, so a busy machine changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

CORPUS = Path(__file__).resolve().parent / "corpus"

BASE_LINES = 300_000
"""Lines of Python that any input may cost. To read the shipped policy.toml costs 140,000 (measured)."""
LINES_PER_BYTE = 150
"""Lines of Python that one more byte may cost. The kept inputs cost up to 40 (measured)."""


@dataclass(frozen=True, slots=True)
class Target:
    """What must hold for every input.

    `check` raises AssertionError, or the exception that the parser should not have raised.
    """

    name: str
    check: Callable[[bytes], None]

    def corpus(self) -> list[bytes]:
        """The kept inputs, by name."""
        return [path.read_bytes() for path in sorted((CORPUS / self.name).iterdir())]


class TooMuchWork(BaseException):
    """The work is out of proportion to the input. No parser catches this exception."""


@contextmanager
def bounded_work(size: int, *, interrupts: bool = True) -> Iterator[None]:
    """Ends the `with` block with TooMuchWork if it executes more lines of Python than an input of `size` bytes may
    cost.

    Without `interrupts` the block is executed to its end: an exception in the middle of gRPC's own code would leave
    callers without an answer.
    """
    left = BASE_LINES + LINES_PER_BYTE * size

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        left -= 1
        if left < 0 and interrupts:
            raise TooMuchWork(f"more than {BASE_LINES + LINES_PER_BYTE * size} lines of Python for {size} bytes")
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)
    if left < 0:
        raise TooMuchWork(f"more than {BASE_LINES + LINES_PER_BYTE * size} lines of Python for {size} bytes")
