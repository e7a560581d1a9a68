"""The version of a checkpoint: the generation that wrote it, and the number of finished steps. Versions are ordered.

`source_rank`: whose shard of a version a rank starts from, if another number of ranks wrote it.
"""

from typing import NamedTuple

from muster.v1 import common_pb2


class Version(NamedTuple):
    """A version, ordered by (generation, step)."""

    generation: int
    step: int

    @classmethod
    def from_wire(cls, version: common_pb2.Version) -> "Version":
        """Convert from the message."""
        return cls(version.generation, version.step)

    def to_wire(self) -> common_pb2.Version:
        """Convert to the message."""
        return common_pb2.Version(generation=self.generation, step=self.step)

    def __str__(self) -> str:
        return f"step {self.step} of generation {self.generation}"


NO_VERSION = Version(0, 0)
"""No version: older than every version."""


def source_rank(rank: int, written_ranks: int) -> int:
    """The rank whose shard `rank` starts from: its own, or that of a rank with the same replicated state.

    Args:
        rank: a rank of the generation that starts.
        written_ranks: how many ranks wrote the version; 0: as many as there are now, or more.

    A further rank is spread over those that wrote: none of them has to serve many others.
    """
    return rank % written_ranks if 0 < written_ranks <= rank else rank
