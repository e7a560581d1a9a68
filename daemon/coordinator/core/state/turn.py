"""One turn of the core: facts are applied the moment they are decided and collected for the journal."""

from dataclasses import dataclass, field

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState, Gang, Member, apply
from muster.daemon.coordinator.core.state.events import Shard
from muster.daemon.coordinator.core.state.facts import Fact
from muster.daemon.coordinator.core.state.gang_index import GangIndex
from muster.daemon.coordinator.core.state.limits import Limits
from muster.daemon.coordinator.core.state.observed_state import ObservedGang, ObservedState
from muster.daemon.coordinator.core.state.state_index import StateIndex


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """Ask `witnesses` after `node` within `deadline_s` seconds: agents of nodes by name; "agent" and "musterd" are the
    coordinator's own probes of the two processes (at `peer_address` and `probe_address`)."""

    probe: int
    gang: str
    node: str
    witnesses: tuple[str, ...]
    peer_address: str
    probe_address: str
    deadline_s: float


@dataclass(slots=True)
class Outcome:
    """What one event led to. `due`: when the core wants a Tick (seconds); None: nothing is pending. `bugs`: faults that
    the core found in its own rules, in words for the log."""

    facts: list[Fact] = field(default_factory=list)
    asks: list[ProbeRequest] = field(default_factory=list)
    bugs: list[str] = field(default_factory=list)
    due: float | None = None


@dataclass(slots=True)
class Turn:
    """The durable state and observed state that a decision reads, the time it is made at, and what it leads to.

    `about`: the one node that the event tells of; None where everything may have changed.
    """

    state: DurableState
    observed: ObservedState
    index: StateIndex
    now: float
    about: str | None = None
    limits: Limits = field(default_factory=Limits)
    outcome: Outcome = field(default_factory=Outcome)

    def record(self, fact: Fact) -> None:
        """Decide `fact`: it holds from here on."""
        apply(self.state, fact, self.now)
        self.index.note_fact(fact)
        self.outcome.facts.append(fact)
        self.about = None

    def owe(self, verb: facts.SlurmVerb, gang: str, job: int, text: str, node: str = "", **more: object) -> None:
        """Owe Slurm a call."""
        call = self.state.calls + 1
        self.record(facts.SlurmOwed(gang, call, verb, job, node, text, **more))  # type: ignore[arg-type]

    def wake(self, at: float) -> None:
        """Ask for a Tick at `at`."""
        due = self.outcome.due
        self.outcome.due = at if due is None else min(due, at)


@dataclass(slots=True)
class GangTurn:
    """One gang within a turn: shorthands for what its decisions ask again and again."""

    turn: Turn
    gang: Gang
    seen: ObservedGang = field(init=False)
    """What is seen of the gang."""

    def __post_init__(self) -> None:
        self.seen = self.turn.observed.gang(self.gang.id)

    @property
    def index(self) -> GangIndex:
        """What is seen of the gang, counted."""
        return self.turn.index.of(self.gang)

    @property
    def now(self) -> float:
        """The time of the turn."""
        return self.turn.now

    @property
    def requeued(self) -> bool:
        """Slurm has put the job back into the queue, or has started it again."""
        return self.seen.job_restarts > self.gang.restart_count and not self.seen.job_ended

    @property
    def job_ended(self) -> str:
        """Slurm's word for how the job has ended; empty where it has not, or has been started again since."""
        known = self.seen.job_restarts >= self.gang.restart_count
        return (self.seen.job_ended or "") if known else ""

    def unfit(self, node: str) -> bool:
        """The node's verdict keeps ranks off it."""
        return node in self.turn.index.out

    def usable(self) -> list[Member]:
        """Members that may carry ranks and whose node is in service."""
        return [m for m in self.gang.present() if not self.unfit(m.node)]

    def fenced(self, node: str) -> bool:
        """The node's agent is in touch and has ended every rank up to the fence."""
        return self.seen.attached(node) and self.seen.status(node).fenced >= self.gang.fenced

    def store_listens(self) -> bool:
        """The next generation's rendezvous store is open."""
        status = self.seen.status(self.gang.store_node)
        return status.store_port > 0 and status.store_generation == self.gang.fenced + 1

    def held(self) -> dict[str, tuple[Shard, ...]]:
        """Shards in the memory of every agent that is in touch, by node; the unfit that still live among them.

        A node that fell silent has an open stream for a while, and is no source all the same.
        """
        members = self.gang.members
        return {
            node: agent.status.shards
            for node, agent in self.seen.agents.items()
            if agent.attached
            and node in members
            and members[node].alive
            and members[node].incarnation == agent.incarnation
        }

    def leaves(self) -> dict[str, str]:
        """Leaf of every member."""
        return {m.node: m.leaf for m in self.gang.members.values()}
