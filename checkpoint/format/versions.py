"""The version of a checkpoint: which generation wrote it, after which step. Versions are ordered."""

from typing import NamedTuple

from muster.v1.common_pb2 import Version


class Stamp(NamedTuple):
    """A version, ordered by (generation, step)."""

    generation: int
    step: int

    @classmethod
    def of(cls, version: Version) -> "Stamp":
        """From the wire."""
        return cls(version.generation, version.step)

    def version(self) -> Version:
        """For the wire."""
        return Version(generation=self.generation, step=self.step)

    def __str__(self) -> str:
        return f"step {self.step} of generation {self.generation}"


NOTHING = Stamp(0, 0)
"""Before every version."""
