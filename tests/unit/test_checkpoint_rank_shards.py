"""Whose shard a rank starts from."""

from muster.checkpoint.format.versions import source_rank


def test_ranks_that_wrote_the_version_start_from_their_own_shard() -> None:
    assert [source_rank(rank, 4) for rank in range(4)] == [0, 1, 2, 3]


def test_further_ranks_are_spread_over_those_that_wrote_it() -> None:
    assert [source_rank(rank, 3) for rank in range(3, 8)] == [0, 1, 2, 0, 1]


def test_where_nobody_says_how_many_wrote_it_each_rank_has_its_own() -> None:
    assert [source_rank(rank, 0) for rank in range(3)] == [0, 1, 2]
