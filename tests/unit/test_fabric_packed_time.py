"""What groups that lie wider than asked cost in each step."""

from __future__ import annotations

import pytest

from muster.fabric.groups.rank_groups import GroupKind
from muster.fabric.model.level import Level
from muster.fabric.placement.node_groups import NodeGroup
from muster.fabric.placement.packed_time import StepTimes, step_times
from muster.fabric.sources.tiers import Tiers
from muster.fabric.testing.generators import fat_tree, torus

FOUR_TO_ONE = fat_tree(4, 2, tiers=Tiers(oversubscription={Level.POD: 4.0, Level.ANY: 4.0}))
"""n0 to n3 and n4 to n7."""
TENSOR = NodeGroup(GroupKind.TENSOR, (0, 1, 2, 3), 0.0, 12.5e9, preferred=Level.LEAF)
DATA = NodeGroup(GroupKind.DATA, (0, 1), 0.0, 12.5e9)
PACKED, TORN = ("n0", "n1", "n2", "n3"), ("n0", "n4", "n1", "n5")


def test_packed_groups_cost_nothing_more() -> None:
    assert step_times(FOUR_TO_ONE, [TENSOR, DATA], PACKED) == StepTimes(2.0, 2.0)


def test_a_torn_group_shares_the_uplinks_of_its_leaves() -> None:
    """Both nodes of each leaf send out over uplinks for one in four."""
    found = step_times(FOUR_TO_ONE, [TENSOR], TORN)
    assert found == StepTimes(4.0, 1.0)
    assert found.words == "predicted communication of a step: 4 s instead of 1 s (300 % more)"


def test_groups_of_which_nothing_is_asked_cost_what_they_cost() -> None:
    found = step_times(FOUR_TO_ONE, [TENSOR, DATA], TORN)
    assert (found.actual, found.packed) == (6.0, 3.0)


def test_a_ring_has_no_leaves_and_no_cost() -> None:
    times = step_times(torus(8), [TENSOR], PACKED)
    assert times.extra == pytest.approx(0.0)


def test_small_numbers_in_words() -> None:
    assert StepTimes(0.080_08, 0.08).words.endswith("80.1 ms instead of 80 ms (less than 1 % more)")
    assert StepTimes(0.0, 0.0).words.endswith("0 s instead of 0 s (less than 1 % more)")
