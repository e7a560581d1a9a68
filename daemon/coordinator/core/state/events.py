"""What the world tells the core. Events are plain data; times are seconds on the coordinator's own clock."""

from dataclasses import dataclass, field
from enum import StrEnum

from pydantic import TypeAdapter

from muster.daemon.coordinator.core.state.stored_names import keeps_stored_names, stored_class


class Silence(StrEnum):
    """How a node failed to answer one witness."""

    NO_ANSWER = "no answer"  # nothing came back: power, network or kernel gone
    KERNEL_ONLY = "kernel only"  # the kernel accepts a connection, the process is mute
    CLOSED = "closed"  # the kernel refuses or reset the connection: the process has ended


@dataclass(frozen=True, slots=True)
class GangSpec:
    """What the core needs of a job spec; `muster.v1.JobSpec` has the whole."""

    nodes: int
    spares: int
    ranks_per_node: int = 1
    min_nodes: int = 0
    """The fewest nodes that an elastic job trains on; 0: as many as `nodes`."""
    gather_timeout_s: float = 300.0
    max_failures: int = 3
    requeue: bool = True
    durable_dir: str = ""
    stop_before_s: float = 120.0
    requeue_at_limit: bool = False
    pool_nodes: int = 0
    """So many nodes of the shared pool at once, at most."""
    hang_after_s: float = 0.0
    """A generation that finishes no step hangs no sooner than after so long; 0: it is not looked for."""

    @property
    def fewest(self) -> int:
        """The fewest nodes that it trains on."""
        return self.min_nodes or self.nodes


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """State after `step` finished steps, written by `generation`; ordered."""

    generation: int
    step: int


@keeps_stored_names
@dataclass(frozen=True, slots=True)
class Shard:
    """One whole, checksummed shard in a node's memory. `primary`: written there by its rank; else a buddy's copy."""

    rank: int
    version: Version
    primary: bool
    digest: str


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank as its agent reports it. `exit_code` is None while it runs, negative for a signal."""

    rank: int
    generation: int
    running: bool
    exit_code: int | None = None
    stderr_tail: str = ""
    step: int = 0
    progressed: bool = False
    declared: str = ""
    """The phase that it has declared to be in, in which it finishes no step."""


@dataclass(frozen=True, slots=True)
class PoolAnswer:
    """What Slurm said to the agent that asked for a node of the pool: the number of the job, or an error."""

    serial: int
    job: int
    error: str = ""


@keeps_stored_names
@dataclass(frozen=True, slots=True)
class AgentStatus:
    """An agent's whole status (see AgentStatus in agent.proto). `heard_s`: seconds since each node last answered it;
    `answered_s`: seconds since it last answered each node that is no member any more, as a member."""

    fenced_generation: int = 0
    ranks: tuple[RankState, ...] = ()
    shards: tuple[Shard, ...] = ()
    committed: Version | None = None
    store_port: int = 0
    store_generation: int = 0
    warm: int = 0
    heard_s: dict[str, float] = field(default_factory=dict)
    flushed_serial: int = 0
    flush_error: str = ""
    failure: str = ""
    answered_s: dict[str, float] = field(default_factory=dict)
    order_serial: int = 0
    sigterm_notice: str = ""
    pool: tuple[PoolAnswer, ...] = ()
    store_reserved: bool = False
    """The store's port is only kept free, for rank 0 to open it on this node."""
    stacks_generation: int = 0
    """The newest generation whose ranks' stacks it has written."""


@dataclass(frozen=True, slots=True)
class GangSubmitted:
    """A job was registered, by `muster submit` or by its first agent. `spec_json` is the whole JobSpec, opaque here."""

    gang: str
    job: int
    owner_uid: int
    name: str
    spec: GangSpec
    spec_json: str


@dataclass(frozen=True, slots=True)
class AgentAttached:
    """An agent opened its stream; the shell has checked who it is. `pool`: the request for a node of the shared pool
    that it comes of, in a job of its own; 0: it is of the gang's job."""

    gang: str
    node: str
    job: int
    restart_count: int
    incarnation: str
    peer_address: str
    batch_host: bool
    leaf: str
    status: AgentStatus
    pool: int = 0


@dataclass(frozen=True, slots=True)
class AgentDisconnected:
    """An agent's stream ended (its kernel closed it, or the agent left)."""

    gang: str
    node: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class AgentHeartbeat:
    """A ping of an agent arrived."""

    gang: str
    node: str


@dataclass(frozen=True, slots=True)
class BatchHeartbeat:
    """The batch process of a run of the gang's job has asked after its gang."""

    gang: str
    job: int
    restart_count: int


@dataclass(frozen=True, slots=True)
class AgentReported:
    """An agent's new status."""

    gang: str
    node: str
    incarnation: str
    status: AgentStatus


@dataclass(frozen=True, slots=True)
class NeighbourAccused:
    """Agent `witness` no longer hears `node`."""

    gang: str
    witness: str
    node: str
    silence: Silence


@dataclass(frozen=True, slots=True)
class ProbeAnswered:
    """One witness's answer to an Ask. `witness` is a node, or "agent"/"musterd" for the coordinator's own two probes
    of those processes on `node`. `silence` is None when it answered."""

    gang: str
    probe: int
    witness: str
    node: str
    silence: Silence | None
    step: int = 0


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """Someone entitled wants the gang ended."""

    gang: str
    by: str


@dataclass(frozen=True, slots=True)
class FlushRequested:
    """Someone entitled wants a durable checkpoint now."""

    gang: str
    by: str


@keeps_stored_names
@dataclass(frozen=True, slots=True)
class SlurmJobChanged:
    """What Slurm says about a job has changed.

    `ended`: Slurm's word for how the job ended; None while the job has not ended. `limit_at`: when the time limit of
    `limit_s` seconds ends the job; None while the job does not run, or has no limit. `pending_reason`: Slurm's word for
    why the job does not start.
    """

    gang: str
    job: int
    nodes: tuple[str, ...]
    restart_count: int
    ended: str | None
    limit_at: float | None = None
    limit_s: float = 0.0
    pending_reason: str = ""


@dataclass(frozen=True, slots=True)
class SlurmAnswered:
    """An owed Slurm call was carried out (`error` None), or refused for good."""

    gang: str
    call: int
    error: str | None


@dataclass(frozen=True, slots=True)
class NodeAttached:
    """A node's daemon opened its stream."""

    node: str
    boot_id: str
    incarnation: str
    probe_address: str


@dataclass(frozen=True, slots=True)
class NodeDisconnected:
    """A node daemon's stream ended."""

    node: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class NodeHeartbeat:
    """A heartbeat of a node's daemon arrived."""

    node: str


@dataclass(frozen=True, slots=True)
class NodeSignalled:
    """A hardware signal, already judged by the policy table: "unfit", "echo", "degraded", "rank" or "ignore"."""

    node: str
    judgement: str
    reason: str
    text: str


@dataclass(frozen=True, slots=True)
class SlurmNodeChanged:
    """Slurm's view of a node, when it changed: is it usable again (resumed, answering, not drained)? `down`: Slurm has
    given it up, with what ran there."""

    node: str
    in_service: bool
    text: str
    down: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: a deadline that the core named is due."""


GangEvent = (
    GangSubmitted | AgentAttached | AgentDisconnected | AgentHeartbeat | AgentReported | BatchHeartbeat
    | NeighbourAccused | ProbeAnswered | CancelRequested | FlushRequested | SlurmJobChanged | SlurmAnswered
)  # fmt: skip
NodeEvent = NodeAttached | NodeDisconnected | NodeHeartbeat | NodeSignalled | SlurmNodeChanged
Event = GangEvent | NodeEvent | Tick

_ADAPTERS: dict[type[Event], TypeAdapter[Event]] = {
    kind: TypeAdapter(keeps_stored_names(kind)) for kind in Event.__args__
}


def stored_text(event: Event) -> str:
    """Stored name and JSON of an event. The journal stores this text as the cause of a decision; no code reads it."""
    kind = type(event)
    return f"{stored_class(kind)} {_ADAPTERS[kind].dump_json(event, by_alias=True).decode()}"
