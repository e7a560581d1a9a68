"""Whether an operation waits for arithmetic or for memory. Pure.

Source: Williams, Waterman and Patterson, "Roofline: An Insightful Visual Performance Model" (2009). Units: FLOP, bytes,
FLOP/s, bytes/s.
"""

from __future__ import annotations

from enum import StrEnum


class Bound(StrEnum):
    """What an operation waits for."""

    COMPUTE = "compute"
    MEMORY = "memory"


def ridge(peak: float, bandwidth: float) -> float:
    """FLOP for each byte from which on arithmetic decides: peak / bandwidth."""
    return peak / bandwidth


def attainable(intensity: float, peak: float, bandwidth: float) -> float:
    """FLOP/s at `intensity` FLOP for each byte: min(peak, intensity · bandwidth)."""
    return min(peak, intensity * bandwidth)


def product_intensity(rows: float, inner: float, columns: float, element_bytes: float) -> float:
    """FLOP for each byte of a matrix product, each matrix moved once: 2mnk / (e(mk + kn + mn)).

    A matrix by a vector has one column.
    """
    moved = element_bytes * (rows * inner + inner * columns + rows * columns)
    return 2 * rows * inner * columns / moved


def bound(intensity: float, peak: float, bandwidth: float) -> Bound:
    """What an operation of this intensity waits for."""
    return Bound.COMPUTE if intensity >= ridge(peak, bandwidth) else Bound.MEMORY
