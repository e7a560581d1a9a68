"""The tiers of a fabric, from the tightest to the loosest."""

from __future__ import annotations

from enum import IntEnum


class Level(IntEnum):
    """A tier. A lower one is tighter: `level <= Level.LEAF` means "at least as tight as one leaf"."""

    ACCELERATOR = 0
    """One GPU."""
    NODE = 1
    """The GPUs of one node."""
    NVLINK = 2
    """The nodes of one NVLink domain, for example the 18 nodes of an NVL72 rack."""
    LEAF = 3
    """The nodes of one leaf switch, or of one Slurm block."""
    POD = 4
    """The leaves below one switch of the second tier, an aggregated Slurm block, or a ring or torus."""
    ANY = 5
    """The whole fabric, and all tiers between the pods and the whole."""

    @property
    def word(self) -> str:
        """The word that job.toml and output use: "leaf"."""
        return self.name.lower()

    @staticmethod
    def of(word: str) -> Level:
        """The inverse of `word`. Raises ValueError with all words that there are."""
        for level in Level:
            if level.word == word:
                return level
        raise ValueError(f"{word[:80]!r} is no level: choose one of {', '.join(level.word for level in Level)}")
