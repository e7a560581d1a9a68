"""Whose shard a rank starts from, if another number of ranks wrote the version."""


def source_rank(rank: int, written_ranks: int) -> int:
    """The rank whose shard `rank` starts from: its own, or that of a rank with the same replicated state.

    Args:
        rank: a rank of the generation that starts.
        written_ranks: how many ranks wrote the version; 0: as many as there are now, or more.

    A further rank is spread over those that wrote: none of them has to serve many others.
    """
    return rank % written_ranks if 0 < written_ranks <= rank else rank
