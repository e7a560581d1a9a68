"""A gang: one training job, as records by subject."""

from dataclasses import dataclass, field

from muster.daemon.coordinator.core.state.account import Account
from muster.daemon.coordinator.core.state.checkpoint import Checkpoint, Restore
from muster.daemon.coordinator.core.state.events import GangSpec, Version
from muster.daemon.coordinator.core.state.generations import Findings, NewestGeneration, Plans, RecoveryState
from muster.daemon.coordinator.core.state.roster import Member, Roster
from muster.daemon.coordinator.core.state.slurm_jobs import Growth, SlurmJob
from muster.daemon.coordinator.core.state.state_tables import FINAL, Phase


@dataclass(slots=True)
class Gang:
    """One training job, as records by subject. A rule takes the record that it reads, or the gang if it reads several.

    Snapshots hold the fields of all records side by side, so no two records have a field of the same name.
    """

    id: str
    spec: GangSpec
    account: Account
    slurm: SlurmJob
    phase: Phase = Phase.SUBMITTED
    phase_at: float = 0.0
    reason: str = ""
    exit_code: int = 0
    order_serial: int = 0
    roster: Roster = field(default_factory=Roster)
    newest: NewestGeneration = field(default_factory=NewestGeneration)
    restore: Restore = field(default_factory=Restore)
    recovery: RecoveryState = field(default_factory=RecoveryState)
    findings: Findings = field(default_factory=Findings)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    growth: Growth = field(default_factory=Growth)
    plans: Plans = field(default_factory=Plans)

    @property
    def final(self) -> bool:
        """The gang is over: no phase follows."""
        return self.phase in FINAL

    def jobs(self) -> set[int]:
        """The gang's job, and the pool jobs of the nodes that carry ranks."""
        carriers = {seat.node for seat in self.roster.seats}
        return {self.slurm.job, *(member.job for member in self.roster.present() if member.node in carriers)}

    def own_members(self) -> list[Member]:
        """Members that may carry ranks and are none of the shared pool, by name."""
        return [member for member in self.roster.present() if not self.is_of_pool(member)]

    def pool_members(self) -> list[Member]:
        """Members that may carry ranks and came from the shared pool, by name."""
        return [member for member in self.roster.present() if self.is_of_pool(member)]

    def is_of_pool(self, member: Member) -> bool:
        """The member came from the shared pool."""
        return member.job != self.slurm.job and not member.returned

    def seats_to_fill(self) -> list[str]:
        """The nodes of the newest generation; in a recovery that undoes a growth, without the seats of that growth."""
        undone = self.recovery.recoveries[-1].seats_undone if self.phase is Phase.RECOVERING else []
        return [seat.node for seat in self.roster.seats if seat.node not in undone]

    def needs_memory_of(self, node: str) -> bool:
        """The memory of a removed node is still a source of the running generation's state."""
        started = self.recovery.last is not None and self.recovery.last.first_step_at > 0
        others = (source for source in self.restore.other_sources if source.combined_ranks or source.digest)
        needed = (*self.restore.restore_sources, *others)
        return not started and any(source.node == node for source in needed)

    @property
    def trains_undisturbed(self) -> bool:
        """It trains, its ranks are asked to stop for nothing, and they do not hang."""
        return self.phase is Phase.RUNNING and self.plans.are_none and self.findings.hang is None

    @property
    def ranks(self) -> int:
        """Number of ranks of the newest generation."""
        return len(self.roster.seats) * self.spec.ranks_per_node

    def ranks_of(self, version: Version) -> int:
        """Number of ranks that wrote `version`."""
        whole = self.spec.nodes * self.spec.ranks_per_node
        counts = self.checkpoint.rank_counts.items()
        return max(((g, size) for g, size in counts if g <= version.generation), default=(0, whole))[1]
