"""Measured rows, and the table and the JSON object that they make."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SECONDS, RATE, PERCENT, MEBIBYTES, COUNT = "s", "GB/s", "%", "MiB", ""


@dataclass
class Row:
    """One row of the table. `values` in the unit; of rates the least is the worst, of all others the largest."""

    name: str
    unit: str
    values: list[float] = field(default_factory=list)
    note: str = ""

    @property
    def median(self) -> float:
        """The median."""
        return statistics.median(self.values)

    @property
    def best(self) -> float:
        """The best: on a busy machine, the nearest to what the code itself takes."""
        return max(self.values) if self.unit == RATE else min(self.values)

    @property
    def worst(self) -> float:
        """The worst."""
        return min(self.values) if self.unit == RATE else max(self.values)


class Rows:
    """All rows of one size of state, in the order of their first value."""

    def __init__(self) -> None:
        self._rows: dict[str, Row] = {}

    def add(self, name: str, unit: str, *values: float) -> None:
        """Add values to a row."""
        self._rows.setdefault(name, Row(name, unit)).values.extend(values)

    def leave_out(self, name: str, why: str) -> None:
        """A row without values, and the reason."""
        self._rows[name] = Row(name, "", note=why)

    def median(self, name: str) -> float | None:
        """The median of a row; None if it has no value."""
        row = self._rows.get(name)
        return row.median if row is not None and row.values else None

    def all(self) -> list[Row]:
        """Every row."""
        return list(self._rows.values())


def ratio(above: float | None, below: float | None) -> float | None:
    """The quotient; None if one of both was not measured."""
    return None if above is None or not below else above / below


def table(title: str, rows: Sequence[Row]) -> str:
    """The rows as text, with medians, worst and best values."""
    lines = [title, f"{'':64}{'median':>10}{'worst':>10}{'best':>10}       runs"]
    for row in rows:
        if row.values:
            lines.append(
                f"{row.name:64}{row.median:10.3f}{row.worst:10.3f}{row.best:10.3f} {row.unit:6}{len(row.values):4}"
            )
        else:
            lines.append(f"{row.name:64} not measured: {row.note}")
    return "\n".join(lines)


def linearity(measured: Mapping[float, Rows]) -> str:
    """For each row with a time or a rate in the smallest and in the largest size (GiB): the time of a byte at the
    smallest, over that at the largest. 1: the time is linear in bytes."""
    smallest, largest = min(measured), max(measured)
    lines = [f"\ntime of a byte at {smallest:g} GiB, over that at {largest:g} GiB"]
    for row in measured[smallest].all() if smallest < largest else ():
        there = measured[largest].median(row.name)
        if there and row.values and row.unit == SECONDS:
            lines.append(f"{row.name:64}{row.median / smallest / (there / largest):10.2f}")
        elif row.values and there and row.unit == RATE:
            lines.append(f"{row.name:64}{there / row.median:10.2f}")
    return "\n".join(lines) if len(lines) > 1 else ""


def last_line(figures: dict[str, float | None]) -> str:
    """The JSON object; null for what was not measured."""
    return json.dumps({name: None if value is None else round(value, 3) for name, value in figures.items()})
