"""The simulator finds bugs: each planted bug is found within 300 seeds, one that shows seldom within more. The seed
that has found it last is tried first."""

import pytest

from muster.simulator.planted_bugs.catalogue import PLANTED_BUGS
from muster.simulator.planted_bugs.known_seeds import first_seed_that_finds, in_order, known_seeds

SEEDS = 300
MORE_SEEDS = {
    "blame-a-late-order": 600,  # ranks must still run when an agent that came late has just had its order
    "detached-counts-as-fenced": 600,  # an agent is detached at the moment of a fence, and its ranks live on
    "exit-with-the-requeue-flag": 600,  # the batch script ends while Slurm has not answered
    "stop-without-what-can-be-rebuilt": 600,  # a node is lost, there is no spare, and what it is rebuilt from is whole
    "name-one-part": 800,  # a lost node has no copy, and a spare is there
    "hang-after-any-idleness": 600,  # few seeds measure idleness, and a hang ends soon after it began
    "shrink-without-a-shard": 900,  # a sharded gang must shrink, and another copy must be lost as well
    "go-back-too-little": 600,  # few gangs report losses, and a flush must end between a bad batch and its finding
    "stay-small": 900,  # a gang that could grow must be left alone for half a minute
    "trust-a-newcomer": 600,  # one node must carry all ranks, and be cut off before it hears of a node that joins
    "trust-the-coordinator-alone": 600,  # a node is cut off from the coordinator alone, and for long enough
    "blame-a-second-node-for-a-slow-rank": 1200,  # a rank is slow on two nodes in turn
    "restore-what-replicas-disagree-on": 1200,  # a bit flips shortly before the leader of the commits is lost
    "name-whoever-attaches-first": 900,  # a rank crashes while nobody coordinates, and a peer dies of the reset
    "name-a-rank-too-soon": 1200,  # one rank alone is silent, and comes back between the two times
    "blame-nodes-for-storage": 1500,  # ranks on many nodes can't be killed, and stay so for long
}
"""Bugs that show only if several faults meet, and how many seeds that takes."""


@pytest.mark.parametrize("name", PLANTED_BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    assert first_seed_that_finds(name, MORE_SEEDS.get(name, SEEDS)) is not None


def test_the_known_seed_is_tried_first_and_then_all_others() -> None:
    name, known = max(known_seeds().items(), key=lambda item: item[1])
    assert list(in_order(name, known + 2)) == [known, *range(known), known + 1]
    assert list(in_order(name, known)) == list(range(known))
    assert list(in_order("a new bug", 3)) == [0, 1, 2]


def test_known_seeds_are_those_of_planted_bugs() -> None:
    assert known_seeds().keys() == PLANTED_BUGS.keys(), "python -m muster.simulator.planted_bugs NAME"
