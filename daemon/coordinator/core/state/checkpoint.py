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
    skip_to_step: int = 0
    """The samplers of the running generation go on with the batch after that of this step; 0: they skip none."""
    skipped: dict[int, int] = field(default_factory=dict)
    """By how many batches those of a generation are ahead of its steps, by the first generation of which that is so."""
    roll_backs: tuple[facts.RolledBack, ...] = ()
    """The newest ones, the last one last."""

    def skipped_before(self, generation: int) -> int:
        """By how many batches those of `generation` are ahead of its steps."""
        return max(((known, count) for known, count in self.skipped.items() if known <= generation), default=(0, 0))[1]

    def skip_to(self, origin: Version) -> int:
        """To which step's batch a generation skips that starts from `origin`; 0: it skips none."""
        wanted = max((one.skip_to for one in self.roll_backs if origin.generation <= one.generation), default=0)
        step = wanted - self.skipped_before(origin.generation)
        return step if step > origin.step else 0

    def is_void(self, version: Version) -> bool:
        """The gang has gone back from it."""
        return any(one.version < version and version.generation <= one.generation for one in self.roll_backs)

    @property
    def void_generation(self) -> int:
        """What this generation and earlier ones hold in memory is void; 0: nothing is."""
        return max((one.generation for one in self.roll_backs), default=0)


@dataclass(frozen=True, slots=True)
class DurableCheckpoint:
    """One that a flush has written, or that the job has started from. `at`: when its flush was ordered (seconds)."""

    path: str
    version: Version
    at: float


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
    earlier_durable: tuple[DurableCheckpoint, ...] = ()
    """The others, the newest ones, those that were rolled back among them: their folders stay."""
    flush: Flush | None = None
    rank_counts: dict[int, int] = field(default_factory=dict)
    """Number of ranks, by the first generation that had another number than those before. At first all nodes carry
    ranks."""

    @property
    def is_flushing(self) -> bool:
        """A flush runs."""
        return self.flush is not None and not self.flush.is_over
