"""What a report shows of one job: plain values, without anything of how they are drawn.

Times are seconds since the epoch, durations are seconds, and time of nodes is node-seconds. `assemble.py` and
`series.py` make these values. The pictures take one part each, so a live page can draw a part again as it changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from muster.wording import percent


@dataclass(frozen=True, slots=True)
class Head:
    """What the job is, and how it goes."""

    name: str
    gang: str
    job: int
    user: str
    phase: str
    result: str
    """In words: how it ended, or what it does now."""
    submitted_s: float
    until_s: float
    """When it ended, or when the report was made."""
    is_over: bool
    nodes: int
    ranks: int
    gpus_per_node: int
    generations: int
    step: int


@dataclass(frozen=True, slots=True)
class Band:
    """A stretch of the time line. `kind`: "queue", "start", "training", "recovery" or "end"."""

    kind: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Generation:
    """When a generation ran. `end_s`: when it was fenced, or until when it was seen to run."""

    number: int
    begin_s: float
    end_s: float
    nodes: int


@dataclass(frozen=True, slots=True)
class Fault:
    """What failed, what was done, and what it cost. `number`: its mark in all pictures."""

    number: int
    at_s: float
    generation: int
    cause: str
    action: str
    nodes: tuple[str, ...] = ()
    """The nodes that it was on."""
    nodes_out: tuple[str, ...] = ()
    """The nodes that the job has left because of it."""
    nodes_in: tuple[str, ...] = ()
    lost_s: float = 0.0
    """From the fault to the next step."""
    steps_again: int = 0
    steps_again_s: float = 0.0
    """What these steps took, at the pace of the job; 0: not known."""


@dataclass(frozen=True, slots=True)
class RecoveryParts:
    """A recovery in its phases, in their order. A phase that was not reached is absent."""

    generation: int
    at_s: float
    action: str
    parts: tuple[tuple[str, float], ...]

    @property
    def total_s(self) -> float:
        """The whole recovery."""
        return sum(seconds for _, seconds in self.parts)


@dataclass(frozen=True, slots=True)
class Goodput:
    """Where the allocated time went. `lost`, the largest part first, and `useful` add up to `allocated`, in
    node-seconds. Time in the queue is not allocated. `price`: of one GPU hour; 0: nobody has set one.
    `steps_unknown`: the part of `useful` in which ranks ran of whose script no step is known.
    """

    allocated: float = 0.0
    useful: float = 0.0
    lost: tuple[tuple[str, float], ...] = ()
    queue_s: float = 0.0
    """Seconds in which the job waited for Slurm."""
    gpus_per_node: int = 0
    price: float = 0.0
    steps_unknown: float = 0.0

    @property
    def share(self) -> float:
        """Useful time over allocated time."""
        return self.useful / self.allocated if self.allocated else 0.0

    @property
    def words(self) -> str:
        """The share in words. If no step is known, the script alone knows what was trained while its ranks ran."""
        if not self.allocated:
            return "not known"
        if self.useful > self.steps_unknown or not self.useful:
            return percent(self.share)
        return f"not known without steps; ranks ran for {percent(self.share)}"

    def gpu_hours(self, node_s: float) -> float:
        """The GPU hours of so many node-seconds."""
        return node_s * self.gpus_per_node / 3600.0


@dataclass(frozen=True, slots=True)
class PlainRequeue:
    """What one restart by a plain requeue would have cost this job, from its own figures, and what it did cost."""

    restarts: int
    queue_s: float
    start_s: float
    checkpoint_age_s: float
    """How old the newest durable checkpoint is when a fault comes, on average."""
    checkpoint_words: str
    """How that age was found."""
    actual_s: float
    """What all faults did cost."""
    nodes: int
    gpus_per_node: int
    price: float = 0.0

    @property
    def each_s(self) -> float:
        """One restart."""
        return self.queue_s + self.start_s + self.checkpoint_age_s

    @property
    def saved_s(self) -> float:
        """All restarts, less what the faults did cost."""
        return self.restarts * self.each_s - self.actual_s


@dataclass(frozen=True, slots=True)
class Curve:
    """A number over the steps. `least` and `greatest` are of all ranks, and as long as `median`, or empty."""

    name: str
    unit: str
    steps: tuple[float, ...]
    median: tuple[float, ...]
    least: tuple[float, ...] = ()
    greatest: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class HeatMap:
    """The step time of each rank over time. A row for each rank, or for neighbours, of which the slowest counts;
    NaN: nothing was measured."""

    begin_s: float
    end_s: float
    ranks: int
    ranks_per_row: int
    rows: tuple[tuple[float, ...], ...]
    slowest: tuple[tuple[int, float], ...] = ()
    """The ranks that stand out, and their medians."""
    is_own: bool = True
    """Without the time that a rank waits for others."""


@dataclass(frozen=True, slots=True)
class PlacedNode:
    """A node on the map. `role`: "ranks", "spare" or "out". `faults`: the numbers of its faults."""

    name: str
    role: str
    ranks: tuple[int, int] | None = None
    """The first and the last rank on it."""
    faults: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Leaf:
    """A network domain with the job's nodes in it."""

    name: str
    nodes: tuple[PlacedNode, ...]


@dataclass(frozen=True, slots=True)
class ReportData:
    """All that a report shows."""

    head: Head
    made_s: float
    bands: tuple[Band, ...] = ()
    generations: tuple[Generation, ...] = ()
    faults: tuple[Fault, ...] = ()
    recoveries: tuple[RecoveryParts, ...] = ()
    goodput: Goodput = field(default_factory=Goodput)
    requeue: PlainRequeue | None = None
    curves: tuple[Curve, ...] = ()
    heat: HeatMap | None = None
    leaves: tuple[Leaf, ...] = ()
    notes: tuple[str, ...] = ()
    """What is not shown, and why, in words."""
