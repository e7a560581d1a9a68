"""What a ledger consists of: intervals of time in which nodes were held, each with one category. docs/GOODPUT.md has
the definition of each category in words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Category(StrEnum):
    """To what the time of a node went. The words are the labels everywhere: in reports, metrics and tables."""

    USEFUL = "useful"  # steps that no rank had finished before
    STEPS_UNKNOWN = "steps_unknown"  # all ranks ran, and their script said no step: it trained as far as is known
    QUEUE = "queue"  # the job waits in Slurm's queue: no node is allocated, so it is in no sum
    START = "start"  # nodes of a run without a generation: until the first one starts, and after the last one
    DETECT = "detect"  # from the first sign of a fault to the fence
    FENCE = "fence"  # until no rank of the old generation lives
    PLACE = "place"  # until the next generation starts: spares, pool nodes, node checks, the rendezvous store
    RENDEZVOUS = "rendezvous"  # until every rank runs
    LOAD = "load"  # until every rank has its state
    FIRST_STEP = "first_step"  # until the first step is finished
    STEPS_AGAIN = "steps_again"  # steps that had been finished before
    CHECKPOINT = "checkpoint"  # training stands still for a checkpoint
    STRAGGLER = "straggler"  # all ranks wait for a slow one
    DATA = "data"  # ranks wait for their next batch
    SPARE = "spare"  # nodes that carry no rank


class FaultKind(StrEnum):
    """What kind of thing a loss is charged with."""

    NODE = "node"  # a node was lost, or is out of service
    CRASH = "crash"  # a rank ended by itself
    HANG = "hang"  # the ranks hung
    CORRUPTION = "corruption"  # replicas disagreed
    LOSS = "loss"  # the loss was not finite or had a spike, and the gang went back
    STRAGGLER = "straggler"  # a rank was too slow
    PRECURSOR = "precursor"  # a signal announced a fault, and the node was left before it
    REQUEST = "request"  # a user or an operator asked for it
    GROWTH = "growth"  # the gang went on with more nodes, or with a repaired one
    STOP = "stop"  # the time limit, a preemption, or an operator ended the run
    PLACEMENT = "placement"  # the nodes were given back, because groups would have lain too wide
    SLURM = "slurm"  # Slurm put the job back into its queue


TRAINED = frozenset({Category.USEFUL, Category.STEPS_UNKNOWN})
"""What counts as trained, in each ratio. All other allocated time is lost."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why time was lost. `node`: the node that is blamed; empty: no single one is. `at`: when it was detected."""

    kind: FaultKind
    node: str
    words: str
    at: float


@dataclass(frozen=True, slots=True)
class Interval:
    """Time of nodes. `share`: the part of this time that is meant, where several categories alternate too fast to be
    told apart. `generation`: the newest one then; 0: there was none yet. `fault`: None: nothing is to blame.

    With QUEUE, `nodes` is empty, and `count` is what the job asks for.
    """

    category: Category
    generation: int
    since: float
    until: float
    nodes: frozenset[str]
    fault: Fault | None = None
    share: float = 1.0
    count: int = 0

    @property
    def node_s(self) -> float:
        """Seconds of nodes."""
        return (self.until - self.since) * self.share * (len(self.nodes) or self.count)


@dataclass(frozen=True, slots=True)
class Wait:
    """How long `nodes` nodes were without a generation: a run of the job in the queue and until its ranks started; or
    (`swap`) a running job until a spare had its seat. `at`: the end of the wait."""

    at: float
    seconds: float
    nodes: int
    swap: bool


@dataclass(frozen=True, slots=True)
class Measured:
    """Which parts of the time of a generation's steps went elsewhere (0 to 1), as was measured while it ran.

    `first_at`: when the numbers of the script first came (seconds; 0: there are none). `first_step`, `step`: the first
    and the newest step that they name.
    """

    checkpoint: float = 0.0
    straggler: float = 0.0
    data: float = 0.0
    first_at: float = 0.0
    first_step: int = 0
    step: int = 0

    def shares(self) -> list[tuple[Category, float]]:
        """Each part that there is. Together they take the whole time at most."""
        left, found = 1.0, []
        for category, wanted in (
            (Category.CHECKPOINT, self.checkpoint),
            (Category.STRAGGLER, self.straggler),
            (Category.DATA, self.data),
        ):
            share = min(max(0.0, wanted), left)
            if share:
                found.append((category, share))
                left -= share
        return found


def sums(intervals: Iterable[Interval]) -> dict[Category, float]:
    """Seconds of nodes by category, without categories of which there is nothing. All but QUEUE add up to the allocated
    time."""
    found: dict[Category, float] = {}
    for one in intervals:
        found[one.category] = found.get(one.category, 0.0) + one.node_s
    return found
