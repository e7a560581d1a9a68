"""Numbers, times and lists of names in sentences. Every room may import it. Pure."""

from __future__ import annotations

from collections.abc import Iterable

NAMES_SHOWN = 8
"""Names in one sentence. Each of them, and what stands between two, is short."""
NAME_CHARS = 80
"""Of one name in a list: a file of the site or a job may have made it."""
_PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def counted(count: float, one: str, several: str = "", form: str = "") -> str:
    """The count with its noun, and with a verb where `one` has it: "1 node", "3 nodes", "1 node was", "2 leaves".

    Args:
        several: the words for any other number; empty: `one` with an s.
        form: how the number is written, as in an f-string.
    """
    return f"{count:{form}} {one if count == 1 else several or f'{one}s'}"


def listed(names: Iterable[str], between: str = " ", most: int = NAMES_SHOWN) -> str:
    """The first names, and how many more there are."""
    every = list(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return between.join(name[:NAME_CHARS] for name in every[:most]) + more


def duration(seconds: float) -> str:
    """Seconds in words, with three digits: 12.3 µs, 45.6 ms, 90 s, 12.3 min, 4.5 h, 6.7 days."""
    for size, unit in ((86_400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= size * (2 if unit != "h" else 1):
            return f"{_three_digits(seconds / size)} {unit}"
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs" if seconds else "0 s"


def scaled(value: float, unit: str) -> str:
    """Three digits and a decimal prefix: 1.23 GB."""
    for size, prefix in _PREFIXES:
        if abs(value) >= size:
            return f"{_three_digits(value / size)} {prefix}{unit}"
    return f"{_three_digits(value)} {unit}".rstrip()


def gigabytes(value: float) -> str:
    """Bytes in GB, so that the parts of one sum have one unit."""
    return f"{value / 1e9:,.1f} GB"


def percent(share: float) -> str:
    """A share: 99.87 %, 43.2 %."""
    digits = 2 if 0.99 <= share < 1 else 1
    return f"{100 * share:.{digits}f} %"


def _three_digits(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
