"""The comparison of replicas: which ranks are named, and what is no evidence."""

import pytest

from muster.checkpoint.format.layout import Footer
from muster.checkpoint.format.replica_agreement import MAX_NAMED_RANKS, Disagreement, ReplicaAgreement, ReplicaDigest
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.commit.commit_tracker import CommitTracker
from muster.checkpoint.store.memory.pieces import Piece, replica_digest


def digests(*of_ranks: int, group: int = 7) -> dict[int, ReplicaDigest]:
    return {rank: ReplicaDigest(group, digest) for rank, digest in enumerate(of_ranks)}


@pytest.mark.parametrize(
    ("of_ranks", "ranks", "majority"),
    [
        ((1, 1, 2), (2,), True),
        ((2, 1, 1, 1), (0,), True),
        ((1, 2, 1, 3, 1), (1, 3), True),
        ((1, 2), (0, 1), False),
        ((1, 1, 2, 2), (0, 1, 2, 3), False),
        ((1, 2, 3), (0, 1, 2), False),
    ],
)
def test_ranks_that_differ_from_more_than_half_are_named(
    of_ranks: tuple[int, ...], ranks: tuple[int, ...], majority: bool
) -> None:
    agreement = ReplicaAgreement({7})
    assert agreement.judge(digests(*of_ranks)) == Disagreement(ranks, majority, len(of_ranks))


def test_ranks_that_have_never_agreed_are_not_judged() -> None:
    agreement = ReplicaAgreement()
    assert agreement.judge(digests(1, 2, 3)) is None
    assert agreement.judge(digests(4, 5, 6)) is None


def test_ranks_that_agreed_in_this_generation_are_judged() -> None:
    agreement = ReplicaAgreement()
    assert agreement.judge(digests(1, 1, 1)) is None
    assert agreement.judge(digests(2, 2, 3)) == Disagreement((2,), True, 3)


def test_each_group_is_judged_for_itself() -> None:
    agreement = ReplicaAgreement({7})
    other = {rank: ReplicaDigest(8, 9 + rank) for rank in (3, 4, 5)}
    assert agreement.judge({**digests(1, 1, 1), **other}) is None
    assert agreement.judge({**digests(1, 1, 2), **other}) == Disagreement((2,), True, 3)


def test_a_rank_alone_agrees_with_nobody() -> None:
    agreement = ReplicaAgreement()
    agreement.judge(digests(1))
    assert agreement.agreed == set()


def test_what_has_no_group_is_not_compared() -> None:
    agreement = ReplicaAgreement({0})
    assert agreement.judge(digests(1, 2, 3, group=0)) is None


def test_a_job_whose_replicas_differ_is_not_judged() -> None:
    assert ReplicaAgreement({7}, enabled=False).judge(digests(1, 1, 2)) is None


def test_few_ranks_of_a_large_group_are_named() -> None:
    found = ReplicaAgreement({7}).judge(digests(*range(1000)))
    assert found is not None
    assert len(found.ranks) == MAX_NAMED_RANKS
    assert found.replicas == 1000


def test_a_version_on_which_replicas_disagree_is_void_and_the_lead_stays() -> None:
    tracker = CommitTracker(1, frozenset({"a", "b"}), ReplicaAgreement({7}))
    for step in range(1, 9):
        replicas = digests(step, step, step + 1)
        assert tracker.record_stored("a", Version(1, step), 0, {0: replicas[0], 1: replicas[1]}) is None
        decision = tracker.record_stored("b", Version(1, step), 0, {2: replicas[2]})
        assert decision is not None
        assert (decision.void, decision.disagreement) == (True, Disagreement((2,), True, 3))
        assert decision.next_step == step + 1, "no rank was late"
    assert tracker.committed == Version(0, 0)


def test_the_digest_covers_the_compared_pieces_and_nothing_else() -> None:
    footer = Footer(300, 400, 0, 0, 0, compared_bytes=200, replica_group=7)

    def of(*contents: bytes) -> ReplicaDigest:
        return replica_digest([Piece(100 * n, 100, data * 16) for n, data in enumerate(contents)], footer)

    assert of(b"a", b"b", b"c", b"d") == of(b"a", b"b", b"x", b"y")
    assert of(b"a", b"b", b"c", b"d") != of(b"a", b"x", b"c", b"d")
    assert of(b"a", b"b").group == 7
    assert replica_digest([Piece(0, 100, bytes(16))], Footer(100, 100, 0, 0, 0)) == ReplicaDigest()
