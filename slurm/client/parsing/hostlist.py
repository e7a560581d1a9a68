"""Slurm's short form of node lists, `rack[1-2]n[01-03,7],login`: expands it in Slurm's order, and writes it.

The existing libraries are GPL, or are whole shells. So Muster has its own code. The cluster tests compare the result
with `scontrol show hostnames`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, product
from typing import Final

MAX_NAMES: Final = 65_536
"""Names in one list: as many as a range in brackets may have in Slurm (MAX_RANGE). A longer list is a mistake, or is
meant to exhaust memory and time."""
MAX_NAME_CHARS: Final = 253
"""Characters of a host name, and so of a node's name."""
_LAST_NUMBER: Final = re.compile(r"(.*?)([0-9]*)([^0-9]*)", re.DOTALL)
_MOST_DIGITS: Final = 9
"""Digits of a number that is put into a range. Slurm's own ranges have fewer."""


def expand(text: str) -> tuple[str, ...]:
    """Returns all names in `text`, in order. An empty list and Slurm's "(null)" give ().

    Raises:
        ValueError: `text` is malformed, or has more than MAX_NAMES names.
    """
    if text in ("", "(null)", "N/A", "None assigned"):
        return ()
    names = tuple(islice(chain.from_iterable(map(_expand_item, _split(text))), MAX_NAMES + 1))
    if len(names) > MAX_NAMES:
        raise ValueError(f"node list {text[:80]!r}: more than {MAX_NAMES} names")
    return names


def _split(text: str) -> Iterator[str]:
    """Splits at the commas outside brackets."""
    depth = start = 0
    for at, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise ValueError(f"node list {text[:80]!r}: brackets do not match at character {at}")
        if char == "," and depth == 0:
            yield text[start:at]
            start = at + 1
    if depth:
        raise ValueError(f"node list {text[:80]!r}: a bracket is not closed")
    yield text[start:]


def _expand_item(item: str) -> Iterator[str]:
    """Expands one item with any number of bracketed groups. The leftmost group changes slowest, as in Slurm."""
    head, *groups = item.split("[")
    choices: list[Sequence[str]] = [(head,)]
    for group in groups:
        numbers, _, rest = group.partition("]")
        choices += [tuple(chain.from_iterable(map(_numbers, numbers.split(",")))), (rest,)]
    if math.prod(map(len, choices)) > MAX_NAMES or sum(len(parts[-1]) for parts in choices) > MAX_NAME_CHARS:
        raise ValueError(f"node list: {item[:80]!r} has more than {MAX_NAMES} names, or a longer name than a host has")
    return map("".join, product(*choices)) if item else iter(())


def _numbers(part: str) -> Sequence[str]:
    """`08-11` gives 08 09 10 11: numbers keep the width of the first one."""
    first, dash, last = part.partition("-")
    if not _is_number(first) or (dash and not _is_number(last)):
        raise ValueError(f"node list: {part[:80]!r} is neither a number nor a range of numbers")
    width, numbers = len(first), range(int(first), int(last or first) + 1)
    if numbers.stop <= numbers.start:
        raise ValueError(f"node list: {part[:80]!r} counts down: write the smaller number first")
    if numbers.stop - numbers.start > MAX_NAMES:
        raise ValueError(f"node list: {part[:80]!r} has more than {MAX_NAMES} numbers")
    return [f"{number:0{width}d}" for number in numbers]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= MAX_NAME_CHARS


def collapse(names: Iterable[str]) -> str:
    """The short form of `names`, sorted. Only the last number of a name is put into brackets.

    `expand` gives the names back, if none holds a bracket or a comma.
    """
    plain: list[str] = []
    digits_of: dict[tuple[str, str], list[str]] = {}
    for name in set(names):
        parts = _LAST_NUMBER.fullmatch(name)
        if parts and 0 < len(parts[2]) <= _MOST_DIGITS:
            digits_of.setdefault((parts[1], parts[3]), []).append(parts[2])
        else:
            plain.append(name)
    short = [f"{head}{some}{tail}" for (head, tail), digits in digits_of.items() for some in _ranges(digits)]
    return ",".join(sorted([*plain, *short]))


def _ranges(digits: Iterable[str]) -> Iterator[str]:
    """The numbers as ranges in brackets: one text for each width, for n08 and n8 are two nodes."""
    every = list(digits)
    padded = {len(number) for number in every if number[0] == "0" and len(number) > 1}
    by_width: dict[int, list[int]] = {}
    for number in every:
        by_width.setdefault(len(number) if len(number) in padded else 1, []).append(int(number))
    for width, numbers in by_width.items():
        runs: list[list[int]] = []
        for value in sorted(numbers):
            if runs and value == runs[-1][-1] + 1:
                runs[-1][1:] = [value]
            else:
                runs.append([value])
        text = ",".join("-".join(f"{end:0{width}d}" for end in run) for run in runs)
        yield text if len(numbers) == 1 else f"[{text}]"
