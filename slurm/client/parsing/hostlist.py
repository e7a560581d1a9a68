"""Expands Slurm's short form of node lists, `rack[1-2]n[01-03,7],login`, in Slurm's order.

The existing libraries are GPL, or are whole shells. So Muster has its own code. The cluster tests compare the result
with `scontrol show hostnames`.
"""

from __future__ import annotations

from collections.abc import Iterator


def expand(text: str) -> tuple[str, ...]:
    """Returns all names in `text`, in order. An empty list and Slurm's "(null)" give ().

    Raises:
        ValueError: `text` is malformed.
    """
    if text in ("", "(null)", "N/A", "None assigned"):
        return ()
    return tuple(name for item in _split(text) for name in _expand_item(item))


def _split(text: str) -> Iterator[str]:
    """Splits at the commas outside brackets."""
    depth = start = 0
    for at, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise ValueError(f"node list {text!r}: brackets do not match at character {at}")
        if char == "," and depth == 0:
            yield text[start:at]
            start = at + 1
    if depth:
        raise ValueError(f"node list {text!r}: a bracket is not closed")
    yield text[start:]


def _expand_item(item: str) -> list[str]:
    """Expands one item with any number of bracketed groups. The leftmost group changes slowest, as in Slurm."""
    head, opened, rest = item.partition("[")
    if not opened:
        return [item] if item else []
    group, _, tail = rest.partition("]")
    tails = _expand_item(tail) or [""]
    return [head + number + end for part in group.split(",") for number in _numbers(part) for end in tails]


def _numbers(part: str) -> list[str]:
    """`08-11` gives 08 09 10 11: numbers keep the width of the first one."""
    first, dash, last = part.partition("-")
    if not first.isdigit() or (dash and not last.isdigit()):
        raise ValueError(f"node list: {part!r} is neither a number nor a range of numbers")
    width = len(first)
    return [f"{number:0{width}d}" for number in range(int(first), int(last or first) + 1)]
