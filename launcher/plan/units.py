"""Numbers with their units, short enough for a table. Pure."""

from __future__ import annotations

_STEPS = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def scaled(value: float, unit: str) -> str:
    """Three digits and a decimal prefix: 1.23 GB."""
    for size, prefix in _STEPS:
        if abs(value) >= size:
            return f"{_three_digits(value / size)} {prefix}{unit}"
    return f"{_three_digits(value)} {unit}".rstrip()


def _three_digits(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def gigabytes(value: float) -> str:
    """Bytes in GB, so that the parts of one sum have one unit."""
    return f"{value / 1e9:,.1f} GB"


def percent(share: float) -> str:
    """A share: 99.87 %, 43.2 %."""
    digits = 2 if 0.99 <= share < 1 else 1
    return f"{100 * share:.{digits}f} %"
