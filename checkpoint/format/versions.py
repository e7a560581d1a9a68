"""The version of a checkpoint: the generation that wrote it, and the number of finished steps. Versions are ordered."""

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
