"""Records of a gang: what the ranks start from, and what is in durable storage."""

from dataclasses import dataclass, field

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.events import Version


@dataclass(slots=True)
class Restore:
    """What the ranks of the newest generation start from, and where it is."""

    restored_version: Version | None = None
    restore_sources: tuple[facts.ShardSource, ...] = ()
    """One for each rank."""
    other_sources: tuple[facts.ShardSource, ...] = ()
    """Further nodes that hold shards of `restore_sources`, without digests; and with digests, the shards of other ranks
    that are combined with a lost one."""
    protection_groups: tuple[tuple[str, ...], ...] = ()
    """Nodes that hold combined shards for each other."""
    resharded: bool = False
    """The running generation started from the shards of another number of ranks: from all of `restore_sources`."""
    restored_generation: int = 0
    """The newest generation whose ranks have all had their states from memory."""


@dataclass(slots=True)
class Flush:
    """The newest flush of a gang. `path` and `error` are empty while it runs."""

    serial: int
    version: Version
    sources: tuple[facts.ShardSource, ...]
    reason: str
    asked_at: float
    path: str = ""
    error: str = ""

    @property
    def is_over(self) -> bool:
        """It is written, or has failed."""
        return bool(self.path or self.error)


@dataclass(slots=True)
class Checkpoint:
    """What of the gang's state is in durable storage, and what is being written there."""

    durable_path: str = ""
    durable_version: Version | None = None
    durable_at: float = 0.0
    """When the flush that wrote it was ordered (seconds). Journals of earlier versions may lack it."""
    flush: Flush | None = None
    rank_counts: dict[int, int] = field(default_factory=dict)
    """Number of ranks, by the first generation that had another number than those before. At first all nodes carry
    ranks."""

    @property
    def is_flushing(self) -> bool:
        """A flush runs."""
        return self.flush is not None and not self.flush.is_over
