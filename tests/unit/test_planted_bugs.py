"""Planted bugs: each has its one place in the product as it is now. tests/simulator finds them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from muster.fabric.cost.bisection import ring_crossing
from muster.simulator.planted_bugs.catalogue import PLANTED_BUGS
from muster.simulator.planted_bugs.planting import PlantedBug, PlantedBugDoesNotFit, planted


def _bugs_of_parsers() -> dict[str, PlantedBug]:
    """fuzzing/ is no part of the distribution."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    try:
        bugs: dict[str, PlantedBug] = importlib.import_module("fuzzing.planted_bugs").PLANTED_BUGS
        return bugs
    finally:
        sys.path.pop(0)


def test_each_planted_bug_has_its_place() -> None:
    misfits = []
    for name, bug in (PLANTED_BUGS | _bugs_of_parsers()).items():
        try:
            bug.function_with_bug()
        except PlantedBugDoesNotFit as error:
            misfits.append(f"{name}: {error}")
    assert not misfits, "\n".join(misfits)


def test_a_bug_is_planted_for_a_while_and_for_who_has_imported_the_function() -> None:
    whole = ring_crossing(4, 8.0)
    with planted(PlantedBug("", "bisection.ring_crossing", "A - 1", "A - 2")):
        assert ring_crossing(4, 8.0) == 2 * 2 / 4 * 8.0
    assert ring_crossing(4, 8.0) == whole


@pytest.mark.parametrize(
    ("function", "code", "words"),
    [
        ("no_such_rule", "A", "no_such_rule is to be the name of one function of Muster. It is of: none"),
        ("_run", "A", r"It is of: muster.*, muster.*"),
        ("bisection.ring_crossing", "A + 1", r"muster.fabric.cost.bisection.ring_crossing has 0 times .* A \+ 1"),
        ("bisection.ring_crossing", "ranks", "ring_crossing has 2 times"),
    ],
)
def test_a_bug_that_has_no_place_or_several_is_refused(function: str, code: str, words: str) -> None:
    with pytest.raises(PlantedBugDoesNotFit, match=words):
        PlantedBug("", function, code, "0").function_with_bug()


@pytest.mark.parametrize("code", ["2 * (ranks - 1) / ranks * size", "A * (B - 1) / B * size", "return A"])
def test_a_letter_stands_for_an_expression_and_twice_for_the_same(code: str) -> None:
    bug = "return 0.0" if code.startswith("return") else "0.0"
    with planted(PlantedBug("", "bisection.ring_crossing", code, bug)):
        assert ring_crossing(4, 8.0) == 0.0
    with pytest.raises(PlantedBugDoesNotFit):
        PlantedBug("", "bisection.ring_crossing", "B * (B - 1) / A * size", "0.0").function_with_bug()


def test_a_name_stands_for_a_field_whatever_has_it() -> None:
    """Of `_hangs`: `daemon.heard_at` is in two places, `kernel_only_since` once."""
    PlantedBug("", "failure_detector._hangs", "kernel_only_since[A]", "0.0").function_with_bug()
    with pytest.raises(PlantedBugDoesNotFit, match="has 2 times"):
        PlantedBug("", "failure_detector._hangs", "heard_at", "0.0").function_with_bug()
