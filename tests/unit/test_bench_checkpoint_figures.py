"""What the benchmark of checkpoints makes of its measurements, without measuring anything."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "checkpoint" / "figures.py"


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    """The module, which is no part of the distribution."""
    spec = importlib.util.spec_from_file_location("checkpoint_figures", FILE)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["checkpoint_figures"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_worst_of_times_is_the_largest_and_of_rates_the_smallest(figures: ModuleType) -> None:
    times, rates = (figures.Row("x", unit, [3.0, 1.0, 2.0]) for unit in (figures.SECONDS, figures.RATE))
    assert (times.median, times.worst, times.best) == (2.0, 3.0, 1.0)
    assert (rates.median, rates.worst, rates.best) == (2.0, 1.0, 3.0)


def test_the_table_says_why_a_row_has_no_value(figures: ModuleType) -> None:
    rows = figures.Rows()
    rows.add("a", figures.SECONDS, 1.0)
    rows.add("a", figures.SECONDS, 2.0)
    rows.leave_out("b", "pip refuses it")
    text = figures.table("title", rows.all())
    assert [line.split() for line in text.splitlines()[2:]] == [
        ["a", "1.500", "2.000", "1.000", "s", "2"],
        ["b", "not", "measured:", "pip", "refuses", "it"],
    ]


def test_a_time_that_grows_with_the_bytes_is_linear(figures: ModuleType) -> None:
    small, large = figures.Rows(), figures.Rows()
    small.add("time", figures.SECONDS, 1.0)
    large.add("time", figures.SECONDS, 4.0)
    small.add("rate", figures.RATE, 1.0)
    large.add("rate", figures.RATE, 0.5)
    lines = figures.linearity({0.5: small, 2.0: large}).splitlines()
    assert [line.split() for line in lines[2:]] == [["time", "1.00"], ["rate", "0.50"]]
    assert figures.linearity({2.0: large}) == ""


def test_what_was_not_measured_is_null_in_the_last_line(figures: ModuleType) -> None:
    rows = figures.Rows()
    rows.add("a", figures.SECONDS, 1.0)
    found = {"a": figures.ratio(rows.median("a"), 3.0), "b": figures.ratio(rows.median("a"), rows.median("b"))}
    assert json.loads(figures.last_line(found)) == {"a": 0.333, "b": None}
