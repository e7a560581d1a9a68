"""One turn of the core: a decided fact is applied at once, and collected for the journal."""

from dataclasses import dataclass, field, replace

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.events import AgentStatus, CombinedShards, Shard, Version
from muster.daemon.coordinator.core.state.facts import Fact
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.limits import Limits
from muster.daemon.coordinator.core.state.observed_state import HEARTBEAT_TIMEOUT_S, ObservedGang, ObservedState
from muster.daemon.coordinator.core.state.roster import Member
from muster.daemon.coordinator.core.turn.communication import fabric_of_gang
from muster.daemon.coordinator.core.turn.gang_index import GangIndex
from muster.daemon.coordinator.core.turn.state_index import StateIndex
from muster.daemon.coordinator.core.turn.state_updates import apply
from muster.fabric.model.fabric import Fabric


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """Ask `witnesses` to probe `node` within `deadline_s` seconds.

    A witness is an agent, given by its node's name; "agent" and "musterd" are the coordinator's own probes of the two
    processes (at `peer_address` and `probe_address`).
    """

    probe: int
    gang: str
    node: str
    witnesses: tuple[str, ...]
    peer_address: str
    probe_address: str
    deadline_s: float


@dataclass(slots=True)
class Outcome:
    """What one event has led to.

    `next_tick_at`: when the core needs a Tick (seconds); None if nothing is pending. `bugs`: contradictions among the
    rules, in words for the log.
    """

    facts: list[Fact] = field(default_factory=list)
    probe_requests: list[ProbeRequest] = field(default_factory=list)
    bugs: list[str] = field(default_factory=list)
    next_tick_at: float | None = None


def progress_of(gang: Gang, seen: ObservedGang) -> facts.Progress:
    """How far the gang has come: what is observed of its newest generation, and otherwise what the journal has."""
    of_newest = (agent.status.committed for agent in seen.agents.values())
    committed = [
        version for version in of_newest if version is not None and version.generation == gang.newest.generation
    ]
    generation, step = seen.last_step
    observed = Version(generation, step) if generation and generation == gang.newest.generation else None
    known = gang.newest.progress
    return facts.Progress(
        max(filter(None, (known.step, observed)), default=None),
        max(filter(None, (known.committed, *committed)), default=None),
    )


@dataclass(slots=True)
class Turn:
    """The states that a decision reads, the time at which it is made, and what it leads to.

    `changed_node`: the one node that the event is about; None if everything may have changed.
    """

    state: DurableState
    observed: ObservedState
    index: StateIndex
    now: float
    changed_node: str | None = None
    limits: Limits = field(default_factory=Limits)
    outcome: Outcome = field(default_factory=Outcome)

    def record(self, fact: Fact) -> None:
        """Decide `fact`: apply it, index it and collect it.

        A fact that ends ranks, or may, carries how far they have come: their agents forget it, and so does a restarted
        coordinator.
        """
        if isinstance(fact, facts.PhaseChanged | facts.GenerationFenced | facts.GangEnded):
            gang = self.state.gangs[fact.gang]
            progress = progress_of(gang, self.observed.gangs.get(gang.id, ObservedGang()))
            fact = fact if progress == gang.newest.progress else replace(fact, progress=progress)
        apply(self.state, fact, self.now)
        self.index.note_fact(fact)
        self.outcome.facts.append(fact)
        self.changed_node = None

    def owe(self, verb: facts.SlurmVerb, gang: str, job: int, text: str, node: str = "", **more: object) -> None:
        """Record a call that Slurm is owed."""
        call = self.state.last_call + 1
        self.record(facts.SlurmCallOwed(gang, call, verb, job, node, text, **more))  # type: ignore[arg-type]

    def tick_at(self, at: float) -> None:
        """Request a Tick at `at` (seconds). The earliest request of the turn counts."""
        due = self.outcome.next_tick_at
        self.outcome.next_tick_at = at if due is None else min(due, at)


@dataclass(slots=True)
class GangTurn:
    """One gang within a turn, with short forms for what its rules ask again and again."""

    turn: Turn
    gang: Gang
    observed: ObservedGang = field(init=False)
    """What is observed of the gang."""

    def __post_init__(self) -> None:
        self.observed = self.turn.observed.gang(self.gang.id)

    @property
    def index(self) -> GangIndex:
        """The index of the gang, up to date."""
        return self.turn.index.of(self.gang)

    @property
    def fabric(self) -> Fabric:
        """The fabric of the gang's nodes."""
        index = self.index
        if index.fabric is None:
            index.fabric = fabric_of_gang(self.gang, self.turn.observed)
        return index.fabric

    @property
    def own_nodes(self) -> tuple[str, ...]:
        """The script's own nodes in this run of the job. Each run of the script has its own."""
        seen, spec = self.observed.own_nodes, self.gang.spec
        return seen if len(seen) >= spec.nodes else spec.own_nodes

    @property
    def now(self) -> float:
        """The time of the turn."""
        return self.turn.now

    @property
    def job_requeued(self) -> bool:
        """Slurm has put the job back into its queue, or has started it again."""
        return self.observed.is_requeued_after(self.gang.slurm.restart_count)

    @property
    def job_ended(self) -> str:
        """Slurm's word for how the job ended; empty if it has not ended, or was started again since."""
        return self.observed.end_of_run(self.gang.slurm.restart_count)

    def is_out_of_service(self, node: str) -> bool:
        """The node's health keeps ranks off it."""
        return node in self.turn.index.out_of_service

    def usable(self) -> list[Member]:
        """Members that may carry ranks and whose node is in service."""
        return [m for m in self.gang.roster.present() if not self.is_out_of_service(m.node)]

    def has_fenced(self, node: str) -> bool:
        """The node's agent is attached, and has ended every rank up to the fence."""
        return (
            self.observed.is_attached(node)
            and self.observed.status(node).fenced_generation >= self.gang.recovery.fenced_generation
        )

    def store_listens(self) -> bool:
        """The rendezvous store of the next generation is open."""
        status = self.observed.status(self.gang.recovery.next_store_node)
        return status.store_port > 0 and status.store_generation == self.gang.recovery.fenced_generation + 1

    def shards_in_memory(self) -> dict[str, tuple[Shard, ...]]:
        """Shards in the memory of every attached agent, by node. Members that were removed alive count, too.

        A silent node has an open stream for a while, but is no source. Probes find a silent member, and nobody probes a
        removed one: it is no source once its heartbeats are overdue.
        """
        return {node: status.shards for node, status in self._sources()}

    def combined_in_memory(self) -> dict[str, tuple[CombinedShards, ...]]:
        """Whole parts that combine shards, in the memory of the same agents, by node."""
        return {node: status.combined for node, status in self._sources() if status.combined}

    def _sources(self) -> list[tuple[str, AgentStatus]]:
        members = self.gang.roster.members
        return [
            (node, agent.status)
            for node, agent in self.observed.agents.items()
            if agent.attached
            and node in members
            and members[node].alive
            and members[node].incarnation == agent.incarnation
            and not (members[node].removed and self._heartbeat_overdue(node))
        ]

    def _heartbeat_overdue(self, node: str) -> bool:
        return self.now - self.turn.observed.agent_heard_at(self.gang.id, node) >= HEARTBEAT_TIMEOUT_S
