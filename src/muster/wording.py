"""Numbers, times and lists of names in sentences. Every room may import it. Pure."""

from __future__ import annotations

from collections.abc import Iterable

NAMES_SHOWN = 8
"""Names in one sentence. Each of them, and what stands between two, is short."""
NAME_CHARS = 80
"""Of one name in a list: a file of the site or a job may have made it."""


def counted(count: float, one: str, several: str = "", form: str = "") -> str:
    """The count with its noun, and with a verb where `one` has it: "1 node", "3 nodes", "1 node was", "2 leaves".

    Args:
        several: the words for any other number; empty: `one` with an s.
        form: how the number is written, as in an f-string.
    """
    return f"{count:{form}} {one if count == 1 else several or f'{one}s'}"


def listed(names: Iterable[str], between: str = " ") -> str:
    """The first names, and how many more there are."""
    every = list(names)
    more = f" and {len(every) - NAMES_SHOWN} more" if len(every) > NAMES_SHOWN else ""
    return between.join(name[:NAME_CHARS] for name in every[:NAMES_SHOWN]) + more


def duration(seconds: float) -> str:
    """Seconds in words, with three digits: 12.3 µs, 45.6 ms, 90 s, 12.3 min, 4.5 h, 6.7 days."""
    for size, unit in ((86_400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= size * (2 if unit != "h" else 1):
            count = seconds / size
            return f"{count:.3g} {unit}" if count < 1000 else f"{count:,.0f} {unit}"
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs" if seconds else "0 s"
