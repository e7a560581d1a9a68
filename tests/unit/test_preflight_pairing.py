"""Pairs of nodes: who meets whom, and which node or link the rates accuse."""

from itertools import combinations

import pytest

from muster.daemon.preflight.pairing import ROUNDS, PairRate, localise, rounds


@pytest.mark.parametrize("nodes", range(1, 18))
def test_each_round_pairs_every_node_once_and_no_pair_meets_twice(nodes: int) -> None:
    met = [pair for pairs in rounds(nodes) for pair in pairs]
    assert len(met) == len(set(met))
    for pairs in rounds(nodes):
        numbers = [number for pair in pairs for number in pair]
        assert len(numbers) == len(set(numbers)) == nodes - nodes % 2
    assert len(list(rounds(nodes))) == min(ROUNDS, nodes - 1 + nodes % 2)


def measured(nodes: int, slow: set[int] = frozenset(), links: set[tuple[int, int]] = frozenset()) -> list[PairRate]:  # type: ignore[assignment]
    return [
        PairRate(f"n{a}", f"n{b}", 0.1 if {a, b} & slow or (a, b) in links else 1.0 + 0.01 * a)
        for pairs in rounds(nodes)
        for a, b in pairs
    ]


@pytest.mark.parametrize("nodes", range(2, 17))
def test_like_rates_accuse_nobody(nodes: int) -> None:
    assert localise(measured(nodes)) == localise([])


@pytest.mark.parametrize("nodes", range(3, 17))
def test_a_slow_node_is_named_and_no_other(nodes: int) -> None:
    for node in range(nodes):
        found = localise(measured(nodes, slow={node}))
        assert found.nodes == (f"n{node}",), (nodes, node)
        assert found.links == ()


@pytest.mark.parametrize("nodes", range(4, 17))
def test_a_slow_link_is_named_and_no_node(nodes: int) -> None:
    for pair in {pair for pairs in rounds(nodes) for pair in pairs}:
        found = localise(measured(nodes, links={pair}))
        assert found.nodes == ()
        assert [(link.first, link.second) for link in found.links] == [(f"n{pair[0]}", f"n{pair[1]}")]


def test_two_slow_nodes_are_both_named() -> None:
    for slow in combinations(range(8), 2):
        assert set(localise(measured(8, slow=set(slow))).nodes) == {f"n{number}" for number in slow}


def test_a_pair_that_came_to_no_end_is_slow_whatever_the_others_reach() -> None:
    pair = PairRate("n0", "n1", 0.0, "timed out")
    assert localise([pair]).links == (pair,)


def test_shared_cores_excuse_all_but_a_rate_that_is_far_lower() -> None:
    def shared(gb_s: float) -> list[PairRate]:
        others = [PairRate(f"n{a}", f"n{b}", 1.0, cores_shared=True) for a, b in ((0, 1), (2, 3), (0, 2))]
        return [*others, PairRate("n1", "n3", gb_s, cores_shared=True)]

    assert localise(shared(0.3)).links == ()
    assert [link.gb_s for link in localise(shared(0.1)).links] == [0.1]
