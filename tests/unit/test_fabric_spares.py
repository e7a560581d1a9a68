"""Spares in different racks and on different power feeds, where that costs no communication or is required."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from muster.fabric.groups.axes import Axes
from muster.fabric.model.fabric import Fabric
from muster.fabric.model.node import Node
from muster.fabric.placement.failure_domains import FailureDomains, spread_over
from muster.fabric.placement.maps.assignment import Assignment
from muster.fabric.placement.maps.node_classes import NodeClasses
from muster.fabric.placement.maps.spares import spread_spares
from muster.fabric.placement.node_groups import NodeGroup, node_groups
from muster.fabric.placement.weights import usual_weights
from muster.fabric.sources.nesting import NodeSet, fabric_of
from muster.fabric.sources.tiers import Tiers

PAIRS = node_groups(Axes(tensor=2, data=2), 1, usual_weights(Axes(tensor=2, data=2)))
NONE: tuple[NodeGroup, ...] = ()


def site(leaves: str, racks: str) -> Fabric:
    """A letter for each node n0, n1, ...: its leaf and its rack."""
    names = [f"n{number}" for number in range(len(leaves))]
    sets = [NodeSet(frozenset(n for n, at in zip(names, leaves, strict=True) if at == leaf), leaf) for leaf in leaves]
    details = [Node(name, rack=rack.strip()) for name, rack in zip(names, racks, strict=True)]
    return fabric_of(sets, names, Tiers(), details)


def spread(
    fabric: Fabric, groups: tuple[NodeGroup, ...], seats: str, *words: str, last: Mapping[str, int] | None = None
) -> tuple[list[str], list[str]]:
    """Seats and spares afterwards. `seats`: "n0 n1"."""
    before = seats.split()
    spares = sorted(fabric.nodes.difference(before))
    after = spread_spares(fabric, groups, before, spares, FailureDomains(fabric, *spread_over(words)), last or {})
    return list(after), sorted(fabric.nodes.difference(after))


def test_two_spares_of_one_rack_become_two_of_two_racks() -> None:
    fabric = site("aaaa", "1122")
    assert spread(fabric, NONE, "n0 n1", "rack") == (["n3", "n1"], ["n0", "n2"])


def test_what_is_preferred_must_cost_no_communication() -> None:
    """The leaves are the racks, and each pair has a leaf for itself."""
    fabric = site("aabbcc", "112233")
    assert spread(fabric, PAIRS, "n0 n1 n2 n3", "rack")[1] == ["n4", "n5"]
    assert spread(fabric, NONE, "n0 n1 n2 n3", "rack")[1] != ["n4", "n5"]


def test_what_is_required_may_cost_some() -> None:
    fabric = site("aabbcc", "112233")
    seats, spares = spread(fabric, PAIRS, "n0 n1 n2 n3", "require rack")
    assert len({fabric.node(spare).rack for spare in spares}) == 2
    assert len(set(seats)) == 4


def test_a_node_that_is_a_last_choice_stays_a_spare() -> None:
    fabric = site("aaaa", "1122")
    assert spread(fabric, NONE, "n0 n1", "rack", last={"n2": 1, "n3": 1})[1] == ["n2", "n3"]


def test_racks_that_nobody_knows_move_nothing() -> None:
    assert spread(site("aaaa", "    "), NONE, "n0 n1", "rack")[0] == ["n0", "n1"]


@pytest.mark.parametrize("words", [["rack"], ["require rack", "power"]])
def test_words_are_kinds_and_requirements(words: list[str]) -> None:
    kinds, required = spread_over(words)
    assert [kind.value for kind in kinds] == [word.removeprefix("require ") for word in words]
    assert {kind.value for kind in required} == {word.split()[1] for word in words if " " in word}


@pytest.mark.parametrize("word", ["node2", "require", "prefer rack", "require  rack", ""])
def test_other_words_are_refused(word: str) -> None:
    with pytest.raises(ValueError, match=r"is not a valid|names no"):
        spread_over([word])


@given(st.lists(st.sampled_from(["a1", "a2", "a3", "b1", "b2", "b3"]), min_size=6, max_size=9))
@example(["b1", "a2", "b1", "b1", "a1", "b1", "a2", "a2"])
@example(["b3", "b3", "a1", "a3", "a3", "a1", "a2", "a2", "b3"])
def test_spares_share_no_more_than_before_and_seats_cost_no_more(places: list[str]) -> None:
    fabric = site("".join(leaf for leaf, _ in places), "".join(rack for _, rack in places))
    apart, classes = FailureDomains(fabric, *spread_over(["rack"])), NodeClasses(fabric, fabric.nodes)
    before = [f"n{number}" for number in range(4)]
    after, spares = spread(fabric, PAIRS, " ".join(before), "rack")

    def cost(seats: list[str]) -> float:
        return Assignment(PAIRS, classes, [classes.of(node) for node in seats]).cost

    def shared(nodes: list[str]) -> int:
        return sum(apart.shared(one, other) for one in nodes for other in nodes if one != other)

    assert len(set(after)) == 4
    assert cost(after) <= cost(before) * (1 + 1e-6)
    assert shared(spares) <= shared(sorted(fabric.nodes.difference(before)))
