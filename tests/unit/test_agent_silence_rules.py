"""Whom an agent accuses, whom it pings, when it kills its ranks: every limit."""

import pytest

from muster.daemon.agent.failure_detector.silence_rules import (
    SUSPECT_AFTER_S,
    Decision,
    LastContacts,
    PeerGroup,
    evaluate,
)
from muster.daemon.transport.fencing_timeouts import ACCUSE_AFTER_S, SELF_FENCE_AFTER_S

EDGE = 0.001
NEVER = float("-inf")


def peer_group(size: int, watched_peers: int = 2) -> PeerGroup:
    """Node n0 of a gang of `size`, which pings n1, n2, ..."""
    nodes = [f"n{i}" for i in range(size)]
    return PeerGroup("n0", frozenset(nodes), frozenset(nodes[1 : 1 + watched_peers]))


def last_contacts(now: float, ages: dict[str, float], coordinator: float = 0.0, **more: float) -> LastContacts:
    return LastContacts({node: now - age for node, age in ages.items()}, now - coordinator, **more)


def test_all_is_well() -> None:
    assert evaluate(100, peer_group(10), last_contacts(100, {"n1": 0.1, "n2": 0.6})) == Decision()


def test_alone_there_is_nobody_to_lose() -> None:
    assert evaluate(100, PeerGroup("n0", frozenset({"n0"})), LastContacts()) == Decision()
    assert evaluate(100, PeerGroup("n0"), LastContacts()) == Decision()


def test_a_watched_peer_whose_link_is_not_open_yet_is_not_silent() -> None:
    assert evaluate(100, peer_group(3), LastContacts(coordinator=100)) == Decision()


@pytest.mark.parametrize(
    ("age", "suspicion_since"), [(SUSPECT_AFTER_S - EDGE, None), (SUSPECT_AFTER_S, 100 - SUSPECT_AFTER_S)]
)
def test_silence_begins_a_suspicion(age: float, suspicion_since: float | None) -> None:
    assert evaluate(100, peer_group(10), last_contacts(100, {"n1": age, "n2": 0})).suspicion_since == suspicion_since


def test_a_suspicion_keeps_its_beginning_and_ends_when_all_watched_peers_answer() -> None:
    assert (
        evaluate(100, peer_group(10), last_contacts(100, {"n1": 1.0, "n2": 0.9}, suspicion_since=95.0)).suspicion_since
        == 95.0
    )
    assert (
        evaluate(100, peer_group(10), last_contacts(100, {"n1": 0.1, "n2": 0.2}, suspicion_since=95.0)).suspicion_since
        is None
    )


@pytest.mark.parametrize(("age", "accused"), [(ACCUSE_AFTER_S - EDGE, set()), (ACCUSE_AFTER_S + EDGE, {"n1"})])
def test_accusation(age: float, accused: set[str]) -> None:
    assert set(evaluate(100, peer_group(10), last_contacts(100, {"n1": age, "n2": 0})).accuse) == accused


def test_an_agent_that_stood_still_accuses_nobody_for_it() -> None:
    long_ago = last_contacts(100, {"n1": 5.0, "n2": 5.0}, awake_since=99.9)
    assert evaluate(100, peer_group(10), long_ago).accuse == {}
    later = last_contacts(101.3, {"n1": 6.3, "n2": 0.1}, awake_since=99.9)
    assert set(evaluate(101.3, peer_group(10), later).accuse) == {"n1"}


@pytest.mark.parametrize(
    ("coordinator", "killed"), [(SELF_FENCE_AFTER_S - EDGE, False), (SELF_FENCE_AFTER_S + EDGE, True)]
)
def test_all_lost(coordinator: float, killed: bool) -> None:
    ages = {f"n{i}": 2.5 for i in range(1, 10)}
    assert (
        bool(
            evaluate(100, peer_group(10), last_contacts(100, ages, coordinator, suspicion_since=97.5)).self_fence_reason
        )
        is killed
    )


@pytest.mark.parametrize(
    ("size", "near", "killed"),
    [
        (2, 0, True),  # 1 of 2: exactly half, the coordinator decides
        (2, 1, False),
        (3, 0, True),  # 1 of 3
        (3, 1, False),  # 2 of 3
        (4, 1, True),  # 2 of 4: exactly half
        (4, 2, False),  # 3 of 4
        (10, 4, True),  # 5 of 10: exactly half
        (10, 5, False),
    ],
)
def test_the_majority_counts_this_node(size: int, near: int, killed: bool) -> None:
    ages = {f"n{i}": 0.1 if size - i <= near else 3.0 for i in range(1, size)}
    ages["n1"] = max(ages["n1"], SUSPECT_AFTER_S)  # one watched peer is silent, otherwise there is no suspicion
    found = evaluate(
        100, peer_group(size, watched_peers=1), last_contacts(100, ages, coordinator=3.0, suspicion_since=97.0)
    )
    assert bool(found.self_fence_reason) is killed


@pytest.mark.parametrize("size", [2, 4, 10])
def test_the_coordinators_answer_keeps_a_minority_alive(size: int) -> None:
    ages = {f"n{i}": 60.0 for i in range(1, size)}
    found = evaluate(100, peer_group(size), last_contacts(100, ages, coordinator=0.2, suspicion_since=40.0))
    assert not found.self_fence_reason


def test_a_member_that_is_pinged_only_during_a_suspicion_counts_as_heard_until_its_beginning() -> None:
    # The coordinator was pinged 4 s ago (it is pinged rarely without a suspicion), the members never.
    gang = peer_group(10)
    fresh = last_contacts(100, {"n1": SUSPECT_AFTER_S, "n2": 0.1}, coordinator=4.0)
    assert not evaluate(100, gang, fresh).self_fence_reason
    suspicion_since = 100 - SUSPECT_AFTER_S
    still = LastContacts({"n1": suspicion_since, "n2": suspicion_since}, 96.0, suspicion_since)
    assert not evaluate(suspicion_since + SELF_FENCE_AFTER_S - EDGE, gang, still).self_fence_reason
    assert evaluate(suspicion_since + SELF_FENCE_AFTER_S + EDGE, gang, still).self_fence_reason


def test_an_agent_that_stood_still_for_long_kills_at_once() -> None:
    # Without exception: the other agents may have continued without this one.
    stopped = last_contacts(100, {"n1": 10.0, "n2": 10.0}, coordinator=12.0, awake_since=100.0)
    assert evaluate(100, peer_group(10), stopped).self_fence_reason


def test_one_dead_watched_peer_and_no_coordinator_kill_nobody() -> None:
    ages = {"n1": 30.0, "n2": 0.1} | {f"n{i}": 0.2 for i in range(3, 10)}
    found = evaluate(100, peer_group(10), last_contacts(100, ages, coordinator=60.0, suspicion_since=70.0))
    assert set(found.accuse) == {"n1"}
    assert not found.self_fence_reason


def test_the_reason_counts_the_heard() -> None:
    found = evaluate(
        100, peer_group(4), last_contacts(100, {"n1": 3.0, "n2": 3.0, "n3": 0.1}, coordinator=3.0, suspicion_since=97.0)
    )
    assert "2 of 4 heard" in found.self_fence_reason
