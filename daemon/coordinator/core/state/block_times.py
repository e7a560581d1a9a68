"""The step times of one gang, as its agents' statuses show them. Nothing of it is journaled: it is measured again.

A block has the same steps on every rank (BlockTimes in agent.proto). It is whole when every rank has reported it.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from muster.daemon.coordinator.core.state.events import AgentStatus, BlockTimes, RankState

BLOCKS_KEPT = 16
"""Newest blocks that may wait for further ranks. Agents report the newest 8."""

BLOCKS_OF_DEVIATION = 64
"""Newest blocks from which it is known how much a rank's times differ from block to block."""

FIRST_UNREST = 0.095
"""The unrest of a generation before its first block: somewhat more than strong noise makes."""


@dataclass(frozen=True, slots=True)
class BlockTime:
    """The time of one rank in the median step of a block, in microseconds."""

    compute_us: int
    wait_us: int


@dataclass(slots=True)
class RankPace:
    """What the blocks of one rank say (the module straggler_evidence).

    `evidence`: that the rank is slow; 0: none. `blocks`: since when there is some, in blocks. `total_evidence`: its sum
    over these blocks. `compute_us`, `usual_us`, `waited_us`: means over these blocks, of the newest 32 of them: of its
    compute time, of the median compute time elsewhere, and of how much longer than this rank the median rank waited.
    `last_excess`: the logarithm of the first over the second in the newest block. `named`: it is a straggler now.
    `named_times`: the newest times (seconds) in which it was one, up to the newest block.
    """

    evidence: float = 0.0
    blocks: int = 0
    total_evidence: float = 0.0
    compute_us: float = 0.0
    usual_us: float = 0.0
    waited_us: float = 0.0
    last_excess: float | None = None
    named: bool = False
    named_times: list[tuple[float, float]] = field(default_factory=list)

    @property
    def slower_by(self) -> float:
        """By how much longer than the median rank it computes, as a share."""
        return (self.compute_us - self.usual_us) / max(self.usual_us, 1.0)


@dataclass(slots=True)
class RankPaces:
    """What the straggler detector knows of a generation.

    `ranks`: by number. `stragglers`: those of them that are stragglers now. `changes`: of each of the newest blocks,
    the median rank's change of `last_excess` since the block before. `unrest`: the mean of the most evidence against a
    rank that is no straggler, over many blocks; it begins with FIRST_UNREST. `blocks`: how many were judged.
    `is_steady`: no rank was slow for a while and then kept pace.
    """

    ranks: dict[int, RankPace] = field(default_factory=dict)
    stragglers: dict[int, RankPace] = field(default_factory=dict)
    changes: deque[float] = field(default_factory=lambda: deque(maxlen=BLOCKS_OF_DEVIATION))
    unrest: float = FIRST_UNREST
    blocks: int = 0
    is_steady: bool = True


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
