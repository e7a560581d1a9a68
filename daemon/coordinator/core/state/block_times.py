"""The step times of one gang, as its agents' statuses show them. Nothing of it is journaled: it is measured again.

A block has the same steps on every rank (BlockTimes in agent.proto). It is whole when every rank has reported it.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from muster.daemon.coordinator.core.state.events import AgentStatus, BlockTimes, RankState

BLOCKS_KEPT = 16
"""Newest blocks that may wait for further ranks. Agents report the newest 8."""

BLOCKS_JUDGED = 3
"""Newest blocks that are judged together."""
BLOCKS_OF_MEAN = 8
"""Newest slow blocks of which a rank's times are the mean."""
USUAL_DEVIATION = 0.05
"""The deviation of equal ranks in a block, as a share, before any is measured."""


@dataclass(frozen=True, slots=True)
class BlockTime:
    """The time of one rank in the median step of a block, in microseconds."""

    compute_us: int
    wait_us: int


@dataclass(frozen=True, slots=True)
class JudgedBlock:
    """A whole block: the times of each rank, the median of the compute times and of the waits (microseconds), and by
    how much longer than the median each rank computed (a share)."""

    times: Mapping[int, BlockTime]
    median_us: float
    median_wait_us: float
    excess: Mapping[int, float]


@dataclass(slots=True)
class SlowRank:
    """A rank that is slower than the others, or was.

    `compute_us`, `median_us`: its compute time and that of the median rank, as means over the newest blocks in which it
    was slow. `calm_blocks`: in how many of the newest blocks it kept pace, without a break. `named`: it is a straggler
    now. `named_times`: the newest times (seconds) in which it was one, up to the newest block.
    """

    compute_us: float = 0.0
    median_us: float = 0.0
    calm_blocks: int = 0
    named: bool = False
    named_times: list[tuple[float, float]] = field(default_factory=list)
    _slow_blocks: int = 0

    @property
    def slower_by(self) -> float:
        """By how much longer than the median rank it computes, as a share."""
        return (self.compute_us - self.median_us) / max(self.median_us, 1.0)

    def note_slow(self, compute_us: float, median_us: float) -> None:
        """It was slow in one more block."""
        self._slow_blocks += 1
        weight = 1 / min(self._slow_blocks, BLOCKS_OF_MEAN)
        self.compute_us += weight * (compute_us - self.compute_us)
        self.median_us += weight * (median_us - self.median_us)


@dataclass(slots=True)
class RankPaces:
    """What the straggler detector knows of a generation.

    `recent`: the blocks that were judged last. `deviation`: how much equal ranks differ in a block, as a share.
    `slow_ranks`: by number.
    """

    recent: deque[JudgedBlock] = field(default_factory=lambda: deque(maxlen=BLOCKS_JUDGED))
    deviation: float = USUAL_DEVIATION
    slow_ranks: dict[int, SlowRank] = field(default_factory=dict)


@dataclass(slots=True)
class GangBlocks:
    """The blocks of a gang's newest generation that are not judged yet, and what is known from those that are.

    `last_taken`: the number of the newest block that was judged; -1: none was.
    """

    generation: int = 0
    paces: RankPaces = field(default_factory=RankPaces)
    last_taken: int = -1
    _blocks: dict[int, dict[int, BlockTime]] = field(default_factory=dict)

    def note_status(self, status: AgentStatus) -> None:
        """An agent has reported."""
        for rank in status.ranks:
            if rank.block_times is not None:
                self._note_rank(rank, rank.block_times)

    def _note_rank(self, rank: RankState, times: BlockTimes) -> None:
        if rank.generation < self.generation:
            return
        if rank.generation > self.generation:
            self.generation, self.paces, self._blocks, self.last_taken = rank.generation, RankPaces(), {}, -1
        for number, compute_us, wait_us in zip(
            range(times.first_block, times.first_block + len(times.compute_us)),
            times.compute_us,
            times.wait_us,
            strict=True,
        ):
            if number > self.last_taken:
                self._blocks.setdefault(number, {}).setdefault(rank.rank, BlockTime(compute_us, wait_us))
        while len(self._blocks) > BLOCKS_KEPT:
            del self._blocks[min(self._blocks)]

    def take_whole(self, ranks: int) -> Iterator[dict[int, BlockTime]]:
        """The blocks that all `ranks` ranks have reported, oldest first. Each is taken once, and no older one later."""
        for number in sorted(number for number, block in self._blocks.items() if len(block) == ranks):
            block = self._blocks[number]
            self.last_taken = number
            self._blocks = {later: times for later, times in self._blocks.items() if later > number}
            yield block
