"""Records of a gang: the newest generation, what is wrong with it, what its ranks are asked to stop for, and the
recoveries so far."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.events import Version
from muster.daemon.coordinator.core.state.state_tables import Phase, Response
from muster.daemon.coordinator.core.state.stored_names import keeps_stored_names
from muster.recovery_phases import RecoveryPhase, phase_seconds


@dataclass(slots=True)
class NewestGeneration:
    """The newest generation that was started, and how far the generations have come."""

    generation: int = 0
    started_at: float = 0.0
    current_store_node: str = ""
    current_store_port: int = 0
    mtbf_s: float = 0.0
    """Seconds between two failures of the nodes that carry ranks, as known when the generation started; 0: unknown."""
    agreed_groups: tuple[int, ...] = ()
    """The replica groups that agree at the version from which the running generation started."""
    stepped_generation: int = 0
    """The newest generation that has finished a step; 0: none has."""
    first_step_s: float = 0.0
    """The longest time (seconds) that a generation was observed to take to its first step."""
    progress: facts.Progress = field(default_factory=facts.Progress)
    """How far the gang had come when its ranks were last ended, or its phase changed. Journals of earlier versions may
    lack it."""

    @property
    def has_finished_step(self) -> bool:
        """It has finished a step."""
        return self.stepped_generation == self.generation


@dataclass(slots=True)
class Hang:
    """The running generation hangs (see HangDetected). `at`: when that was detected."""

    reason: str
    suspected_at: float
    node: str
    at: float


@dataclass(slots=True)
class Straggler:
    """A rank that the others wait for (see StragglerDetected). `at`: when that was recorded last."""

    generation: int
    rank: int
    node: str
    reason: str
    response: Response | None
    at: float


@dataclass(slots=True)
class Disagreement:
    """The newest time in this run of the job at which replicas disagreed (see ReplicasDisagreed), or at which such a
    version was restored. `count`: how often that was so far."""

    version: Version
    node: str
    reason: str
    comparison_ends: bool
    count: int


@dataclass(slots=True)
class Findings:
    """What is wrong with the ranks or their states, as far as it was seen in this run of the job."""

    hang: Hang | None = None
    stragglers: tuple[Straggler, ...] = ()
    """The newest ones, the last one last."""
    disagreement: Disagreement | None = None
    not_finite: str = ""
    """The first loss or gradient norm of the running generation that is NaN or infinite, in words; empty: none."""
    losses_noted: int = 0
    """Spikes and plateaus of the loss that were recorded of the running generation."""
    last_loss: str = ""
    """The newest one of this run of the job, in words; empty: none."""
    unsupervised: str = ""
    """The first launch of the job's own script that is not supervised, and why, in words; empty: none."""
    corrupt_copies: tuple[facts.CorruptCopyFound, ...] = ()
    """The first ones."""


@keeps_stored_names
@dataclass(slots=True)
class Stop:
    """A planned stop: why, which phase follows, and when it was planned."""

    reason: str
    next_phase: Phase
    at: float


@dataclass(slots=True)
class Swap:
    """A planned swap of the running generation: which node is left, why, and when that was planned. `requested_by`: the
    user who asked for it; empty: the policy does. `gives_way_to` as in SwapPlanned.

    Or a planned growth: no node is left, and `nodes` nodes carry ranks afterwards.
    """

    node: str
    reason: str
    at: float
    requested_by: str = ""
    gives_way_to: str = ""
    nodes: int = 0


@dataclass(slots=True)
class Plans:
    """What the ranks are asked to stop for. `stop`: no rank starts again in this run of the job."""

    stop: Stop | None = None
    swap: Swap | None = None
    phase_after_drain: Phase | None = None

    @property
    def are_none(self) -> bool:
        """The ranks are asked to stop for nothing."""
        return self.stop is None and self.swap is None


@dataclass(slots=True)
class Recovery:
    """How one generation came to be. Times are seconds of the coordinator's wall clock; 0 if not reached."""

    generation: int
    cause: str
    hardware: bool
    action: str = ""
    nodes_out: list[str] = field(default_factory=list)
    nodes_in: list[str] = field(default_factory=list)
    suspected_at: float = 0.0
    detected_at: float = 0.0
    fenced_at: float = 0.0
    started_at: float = 0.0
    running_at: float = 0.0
    restored_at: float = 0.0
    first_step_at: float = 0.0
    step_before: int = 0
    step_restored: int = 0
    crashed_on: str = ""
    """The node whose rank crashed and ended the generation before; empty if no single node can be named."""
    hung: bool = False
    """The generation before was ended because it hung."""
    nodes_requested: list[str] = field(default_factory=list)
    """Those of `nodes_out` that were left because a user asked for it."""
    nodes_undone: list[str] = field(default_factory=list)
    """Those of `nodes_out` that were left because ranks crashed once they had come (see MemberRemoved)."""
    seats_undone: list[str] = field(default_factory=list)
    """Those of `nodes_undone` whose seats are gone, too."""

    def phase_seconds(self) -> Iterator[tuple[RecoveryPhase, float]]:
        """The phases that are over, and how long each took."""
        known = (self.detected_at, self.fenced_at, self.started_at, self.running_at, self.restored_at)
        return phase_seconds(self.suspected_at or self.detected_at, (*known, self.first_step_at))


@dataclass(slots=True)
class RecoveryState:
    """The fence that was ordered last, the store that opens behind it, and the recoveries so far."""

    fenced_generation: int = -1
    next_store_node: str = ""
    store_at: float = 0.0
    stores_missed: int = 0
    """Nodes in a row that have not opened a store for the next generation in time."""
    recoveries: list[Recovery] = field(default_factory=list)
    """The newest recoveries, the last one last."""
    failures_in_a_row: int = 0
    """Generations in a row that the software ended without progress."""
    furthest_step: int = 0
    """The newest step that any generation of this run of the job had finished when it was fenced."""
    unattributed_node: str = ""
    """A node that was removed because ranks crashed on it twice in a row; not known yet whether it is the cause."""
    group_ranks_swapped_once: tuple[int, ...] = ()
    """Group ranks whose node was swapped for crashes once. Another crash there is not the fault of a node."""

    @property
    def last(self) -> Recovery | None:
        """The newest recovery, which goes on while the gang recovers; None: there was none."""
        return self.recoveries[-1] if self.recoveries else None
