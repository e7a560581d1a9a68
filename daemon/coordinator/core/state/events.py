"""Events: what the core is told. Events are plain data. Times are seconds on the coordinator's own clock.

The journal stores an event as the cause of a decision, under the names of `stored_names`.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum

from pydantic import TypeAdapter

from muster.checkpoint.redundancy.scheme import Redundancy
from muster.checkpoint.redundancy.schemes import redundancy_of
from muster.daemon.coordinator.core.losses.loss_rule import LossChoice
from muster.daemon.coordinator.core.state.state_tables import Response
from muster.daemon.coordinator.core.state.stored_names import keeps_stored_names, stored_class
from muster.fabric.model.fabric import Fabric
from muster.fabric.sources.node_reports import NodeReport


class Silence(StrEnum):
    """How a node failed to answer one witness."""

    NO_ANSWER = "no answer"  # nothing came back: power, network or kernel is gone
    KERNEL_ONLY = "kernel only"  # the kernel accepts a connection, the process does not answer
    CLOSED = "closed"  # the kernel refuses or resets the connection: the process has ended


@dataclass(frozen=True, slots=True)
class GroupTraffic:
    """What one group of a kind sends over each link of its ring in one step, and where it is packed. `kind` and
    `packed_in` as in common.proto. `size`: bytes."""

    kind: str
    messages: float
    size: float
    packed_in: str = "any"
    required: bool = False


class IfWorse(StrEnum):
    """What a gang does before it starts on nodes where its groups would lie wider than asked."""

    START = ""
    WAIT = "wait"
    SHRINK = "shrink"


@keeps_stored_names
@dataclass(frozen=True, slots=True)
class GangSpec:
    """The part of a job spec that the core needs; `muster.v1.JobSpec` is the whole."""

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
    """Nodes of the shared pool that the gang may hold at the same time."""
    hang_after_s: float = 0.0
    """Seconds without a step before a generation may hang; 0: hangs are not looked for."""
    preflight: bool = False
    """Agents check their nodes, and nodes that fail are left out."""
    hang_after_idle_s: float = 0.0
    """Seconds for which all ranks may be idle before a generation hangs; 0: agents don't measure it."""
    tensor: int = 1
    context: int = 1
    expert: int = 1
    pipeline: int = 1
    """Degrees of parallelism. The data axis has the remaining factor."""
    axis_order: str = ""
    """The axes, the one that varies fastest first: "tp-cp-ep-dp-pp", which is the default."""
    traffic: tuple[GroupTraffic, ...] = ()
    """What groups of ranks send; empty: what is usual."""
    if_worse: IfWorse = IfWorse.START
    retries: int = 0
    """How often in a row the gang gives back nodes on which its groups would lie wider than asked."""
    smaller: tuple[int, ...] = ()
    """Numbers of nodes with fewer data-parallel replicas, ascending: SHRINK takes one of them."""
    spread_replicas: tuple[str, ...] = ("power", "rack", "leaf")
    """What nodes that hold the same state shall not share, as in Spreading (common.proto)."""
    spread_spares: tuple[str, ...] = ()
    """What two spares shall not share, likewise."""
    node_mtbf_s: float = 0.0
    """Seconds between two failures of one node; 0: what the coordinator has observed."""
    durable_every_steps: int = 0
    durable_every_s: float = 0.0
    durable_auto: bool = False
    """When a version is written to `durable_dir` while the gang trains, as in JobSpec (common.proto)."""
    more_holders: int = 0
    group_nodes: int = 0
    """What outlives the loss of a node, and where, as `schemes.redundancy_of` understands it."""
    identity: str = ""
    """Equal for all runs of a job of one owner (gang_ids.job_identity); empty: the job has no durable folder."""
    resume_from: str = ""
    """A durable checkpoint of another gang that the first generation starts from; empty: step 0."""
    readers: tuple[str, ...] = ()
    """Who may read it beside its owner and operators: login names, and Unix groups as "group:NAME"."""
    own_nodes: tuple[str, ...] = ()
    """Nodes that the job's script knows as its own: they have the first seats, in this order. Empty: any nodes, and the
    script is Muster's."""
    script_goes_on: bool = False
    """A script of the user's own has commands behind its launch."""
    array_task: str = ""
    """The name that Slurm shows of a task of an array job: "42_1". Empty: no such task."""
    awaits_launch: bool = False
    """A user's own script, which has launched nothing yet. The first agent brings the whole spec."""
    unsupervised: str = ""
    """Why nothing of such a script can be supervised, in words; empty: it can."""
    durable_keep: int = 0
    durable_keep_s: float = 0.0
    """How many of its own durable checkpoints it keeps, and for how long older ones, as in JobSpec (common.proto)."""
    loss: LossChoice = field(default_factory=LossChoice)
    """What counts as a spike of its loss, and what follows, as far as the job says it."""

    @property
    def fewest(self) -> int:
        """The fewest nodes that the gang trains on."""
        return self.min_nodes or self.nodes

    @property
    def redundancy(self) -> Redundancy:
        """How its shards outlive the loss of nodes."""
        return redundancy_of(self.more_holders, self.group_nodes)


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """The state after `step` finished steps, written by `generation`. Versions are ordered."""

    generation: int
    step: int


@keeps_stored_names
@dataclass(frozen=True, slots=True)
class Shard:
    """One whole, checksummed shard in the memory of a node. `primary`: its own rank wrote it there; otherwise it is a
    replica. `replica_group` and `replica_digest` as in ShardStatus (agent.proto). `size`: bytes.
    `sharded`: another number of ranks needs the shards of all ranks that wrote the version."""

    rank: int
    version: Version
    primary: bool
    digest: str
    replica_group: int = 0
    replica_digest: int = 0
    size: int = 0
    sharded: bool = False


@dataclass(frozen=True, slots=True)
class CombinedShards:
    """A whole part in the memory of a node that combines the shards of `ranks` (`scheme.CombinedShards`).

    `digests`, `sizes`: of the shards that it combines, in the order of `ranks`; empty and 0 at place `part`.
    """

    ranks: tuple[int, ...]
    version: Version
    part: int
    digests: tuple[str, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NotFinite:
    """The first value of a rank in its generation that is NaN or infinite: "loss = nan"."""

    step: int
    words: str


@dataclass(frozen=True, slots=True)
class ReplicaDisagreement:
    """Ranks that hold replicas of one state have written different bytes at `version`, which is void therefore.

    `ranks`: those that differ from the majority; without a majority all ranks of the group, 64 at most. `replicas`: the
    number of ranks in the group.
    """

    version: Version
    ranks: tuple[int, ...]
    majority: bool
    replicas: int


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """Medians of the step times of one rank over blocks of steps (BlockTimes in agent.proto), in microseconds. Both
    tuples have one entry for each block from `first_block` on."""

    first_block: int
    compute_us: tuple[int, ...]
    wait_us: tuple[int, ...]
    fetch_us: tuple[int, ...] = ()
    """The parts of `compute_us` in which the script waited for its next batch; empty if it declares none."""


@dataclass(frozen=True, slots=True)
class HangPlace:
    """Where a rank of a generation that hangs was. `waits`: in a call that waits for other ranks. `where`: in words."""

    waits: bool
    where: str


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank as its agent reports it. `exit_code`: None while the rank runs; negative for a signal."""

    rank: int
    generation: int
    running: bool
    exit_code: int | None = None
    stderr_tail: str = ""
    step: int = 0
    progressed: bool = False
    declared: str = ""
    """The phase that the rank has declared, in which it finishes no step; empty: none."""
    stopped_step: int = 0
    """The rank was asked to stop, and this is its last step; 0 before."""

    block_times: BlockTimes | None = None
    not_finite: NotFinite | None = None
    silent_s: int | None = None
    """Seconds without a sign of life, rounded down (RankStatus in agent.proto); None: the rank sends no signs."""
    hang_place: HangPlace | None = None
    """Where the rank was when its stacks were written; None: they are not, or don't show it."""
    idle_quarters: int | None = None
    """Quarters of the gang's `hang_after_idle_s`, in a row, in which the rank was idle; None: it is not measured."""
    entered_collectives: int | None = None
    """How many collectives the rank had entered when its generation hung; None: nobody counts them."""
    gpu: int | None = None
    """The GPU that LOCAL_RANK selects, as nvidia-smi counts; None: it is not known, or the rank has several."""
    ended_s_ago: float | None = None
    """Seconds from the end of the rank to the status; None: it has not ended, or its agent does not say."""


@dataclass(frozen=True, slots=True)
class PoolAnswer:
    """Slurm's answer to the agent that requested a node of the pool: the number of the job, or an error."""

    serial: int
    job: int
    error: str = ""


class CheckOutcome(StrEnum):
    """What a node check has found (CheckOutcome in common.proto)."""

    RUNNING = "running"
    PASSED = "passed"
    SLOW = "slow"
    WRONG = "wrong"
    FAILED = "failed"
    SILENT = "silent"

    @property
    def is_bad(self) -> bool:
        """No rank shall start on the node while another node is there."""
        return self in (CheckOutcome.WRONG, CheckOutcome.FAILED, CheckOutcome.SILENT)


@dataclass(frozen=True, slots=True)
class NodeCheck:
    """What the node check of a node has found (NodeCheck in common.proto). Rates are 0 if they were not measured."""

    outcome: CheckOutcome
    reason: str = ""
    hardware: str = ""
    gflops: float = 0.0
    memory_gb_s: float = 0.0
    host_to_device_gb_s: float = 0.0
    cores_shared: bool = False
    counters: str = ""


@dataclass(frozen=True, slots=True)
class SnapshotCost:
    """What snapshots cost (SnapshotCost in agent.proto). Times are seconds; 0: not measured."""

    every: int
    auto: bool
    stall_s: float
    step_s: float
    slots_s: float = 0.0
    delay_s: float = 0.0

    @property
    def share(self) -> float:
        """The share of the training time that snapshots and their copies take; 0: no step was measured yet."""
        cost_s = self.stall_s + self.delay_s
        return cost_s / (self.every * self.step_s + cost_s) if self.every * self.step_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class CorruptCopy:
    """A copy of a shard that is used no more (CorruptCopy in agent.proto). `primary`: it was in a slot, or was to go
    there; otherwise it is a replica. `from_node`: the bytes came damaged from there; empty: they have changed
    in the memory of the node that reports."""

    rank: int
    version: Version
    primary: bool
    pieces: int
    of_pieces: int
    from_node: str = ""


@dataclass(frozen=True, slots=True)
class RestoreProgress:
    """The states that the ranks of one node get (RestoreProgress in agent.proto). Sizes are bytes. `folder`: empty if
    they come from memory; otherwise they are of version `version`, and `loaded` is read."""

    generation: int
    ranks: int
    ranks_done: int
    size: int
    own: int
    copied: int
    fetched: dict[str, int]
    seconds: float
    folder: str = ""
    version: Version | None = None
    loaded: int = 0
    damage: str = ""


@dataclass(frozen=True, slots=True)
class FlushProgress:
    """What a node has given to storage of flush `serial`, and how much there is, in bytes (FlushProgress in
    agent.proto). `holds_slots`: its ranks lack a slot each meanwhile."""

    serial: int
    written: int
    total: int
    version: Version | None = None
    holds_slots: bool = False


@dataclass(frozen=True, slots=True)
class NodeNumber:
    """A number that ranks of one node report of a step (RankNumber in common.proto). All values are finite."""

    name: str
    step: int
    ranks: int
    least: float
    median: float
    greatest: float
    least_rank: int
    greatest_rank: int


@dataclass(frozen=True, slots=True)
class NodeTraining:
    """How the training goes on one node (NodeTraining in agent.proto). 0: not known."""

    generation: int
    numbers: tuple[NodeNumber, ...] = ()
    last_step: int = 0
    step_s: float = 0.0
    flops: float = 0.0
    step: int = 0
    first_step: int = 0
    first_at_s: float = 0.0
    skips_batches: bool = False


@dataclass(frozen=True, slots=True)
class NodeUse:
    """How much of a node is used (NodeUse in agent.proto). A limit of 0: not known."""

    memory: int
    memory_limit: int
    gpu_memory: int = 0
    gpu_memory_limit: int = 0
    gpu_busy: float = 0.0


@keeps_stored_names
@dataclass(frozen=True, slots=True)
class AgentStatus:
    """The whole status of an agent (AgentStatus in agent.proto).

    `heard_s`: node → seconds since that node last answered this agent. `answered_s`: removed node → seconds since this
    agent last answered it as a member.
    """

    fenced_generation: int = 0
    ranks: tuple[RankState, ...] = ()
    shards: tuple[Shard, ...] = ()
    combined: tuple[CombinedShards, ...] = ()
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
    """The agent only keeps the port free: rank 0 opens the store itself, and must run on this node."""
    stacks_generation: int = 0
    """The newest generation whose ranks' stacks are written."""
    disagreement: ReplicaDisagreement | None = None
    """From the commit leader: the first version of its generation on which replicas disagree."""
    node_check: NodeCheck | None = None
    snapshot_cost: SnapshotCost | None = None
    """From the commit leader: what snapshots cost in its generation; None: nothing was measured."""
    no_slots: str = ""
    """Why ranks of the node have no slots, so that no version can be committed; empty: they have."""
    flushed_version: Version | None = None
    """From the flush leader of flush `flushed_serial`: what was written, which may be newer than what was ordered."""
    corrupt_copies: tuple[CorruptCopy, ...] = ()
    """The newest ones."""
    restore: RestoreProgress | None = None
    """Of the newest generation that ranks of the node were ordered to run from memory."""
    flush_progress: FlushProgress | None = None
    """Of the newest flush; None: it has not begun on this node."""
    training: NodeTraining | None = None
    """For people: the journal does not keep it, and nothing is decided by it but what `loss_watch` finds."""
    use: NodeUse | None = None
    """For people, too, and nothing is decided by it."""
    copies_wait: str = ""
    """Which node has taken no copies of this node's states for some seconds, and why; empty: none. For people, too."""

    def ranks_of(self, generation: int) -> list[RankState]:
        """The ranks that belong to `generation`."""
        return [rank for rank in self.ranks if rank.generation == generation]


@dataclass(frozen=True, slots=True)
class GangSubmitted:
    """A job was registered by `muster submit`, or by its first agent. `spec_json`: the whole JobSpec, opaque to the
    core."""

    gang: str
    job: int
    owner_uid: int
    name: str
    spec: GangSpec
    spec_json: str


@dataclass(frozen=True, slots=True)
class AgentAttached:
    """An agent opened its stream. The shell has authenticated it.

    `pool`: the request for a node of the shared pool from which the agent comes, in a job of its own; 0: it comes from
    the gang's job.
    """

    gang: str
    node: str
    job: int
    restart_count: int
    incarnation: str
    peer_address: str
    batch_host: bool
    leaf: str
    """The name of its leaf switch, as Slurm says when it attaches; empty: there is none, or it is not known."""
    status: AgentStatus
    pool: int = 0
    nvlink_domain: str = ""
    """The NVLink domain of several nodes that the node's GPUs are in; empty: there is none, or nobody knows."""
    adapter_bandwidth: float = 0.0
    """Of the slowest adapter that is nearest to a GPU, in bytes a second; 0: not known."""
    own_nodes: tuple[str, ...] = ()
    """As `GangSpec.own_nodes`, in the run of the job that the agent belongs to."""


@dataclass(frozen=True, slots=True)
class AgentDisconnected:
    """The stream of an agent ended: the node's kernel closed it, or the agent left."""

    gang: str
    node: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class AgentHeartbeat:
    """An agent sent a heartbeat."""

    gang: str
    node: str


@dataclass(frozen=True, slots=True)
class BatchHeartbeat:
    """The batch process of a run of the job has asked the coordinator about its gang. `unlaunched`: nodes on which srun
    could start nothing, and which it has given up. `failed`: nodes on which what it has launched has failed, and the
    exit code. `unsupervised`: a launch of the job's own script that runs as it is written, and why; empty: none.
    `interrupted`: the signal with which the user has ended the launch, and not Slurm the job; empty: none.
    `split_segments`: which of the segments that it asked Slurm for its nodes split, in words; empty: none is known."""

    gang: str
    job: int
    restart_count: int
    unlaunched: tuple[str, ...] = ()
    failed: tuple[tuple[str, int], ...] = ()
    unsupervised: str = ""
    interrupted: str = ""
    split_segments: str = ""


@dataclass(frozen=True, slots=True)
class AgentReported:
    """An agent sent a new status."""

    gang: str
    node: str
    incarnation: str
    status: AgentStatus


@dataclass(frozen=True, slots=True)
class PeerAccused:
    """The agent `witness` gets no answer from `node`."""

    gang: str
    witness: str
    node: str
    silence: Silence


@dataclass(frozen=True, slots=True)
class ProbeAnswered:
    """The answer of one witness to a ProbeRequest.

    `witness`: a node, or "agent" or "musterd" for the coordinator's own probes of those processes on `node`. `silence`:
    None if the node answered.
    """

    gang: str
    probe: int
    witness: str
    node: str
    silence: Silence | None
    step: int = 0


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """An authorised user wants the gang to end."""

    gang: str
    by: str


@dataclass(frozen=True, slots=True)
class FlushRequested:
    """An authorised user wants a durable checkpoint now."""

    gang: str
    by: str


@dataclass(frozen=True, slots=True)
class SwapRequested:
    """An authorised user wants a spare to take the place of `node` at the end of a step. `reason`: the user's words, or
    empty."""

    gang: str
    node: str
    by: str
    reason: str


@keeps_stored_names
@dataclass(frozen=True, slots=True)
class SlurmJobChanged:
    """What Slurm says about a job has changed.

    `ended`: Slurm's word for how the job ended; None while the job has not ended. `limit_at`: when the time limit of
    `limit_s` seconds ends the job; None while the job does not run, or has no limit. `pending_reason`: Slurm's word for
    why the job does not start. `partition`: that of the job; a running job has one. `suspended`: Slurm has stopped all
    processes of the job, and will let them go on. `end_words`: what is known beside `ended` of a job that could
    not start. `batch_host`: the node of the batch script, also after the job has lost it. `completing`: nodes on which
    the last run of a job that waits has not ended. `start_at`: when this run of the job started; while the job waits,
    when Slurm expects it to start. None: Slurm does not say.
    """

    gang: str
    job: int
    nodes: tuple[str, ...]
    restart_count: int
    ended: str | None
    limit_at: float | None = None
    limit_s: float = 0.0
    pending_reason: str = ""
    partition: str = ""
    suspended: bool = False
    end_words: str = ""
    batch_host: str = ""
    completing: tuple[str, ...] = ()
    start_at: float | None = None


@dataclass(frozen=True, slots=True)
class PoolJobChanged:
    """What Slurm says about a pool job of a gang has changed. `nodes`: the nodes that the job has; none once it has
    ended. `suspended` as in SlurmJobChanged."""

    gang: str
    job: int
    nodes: tuple[str, ...]
    suspended: bool = False


@dataclass(frozen=True, slots=True)
class SlurmAnswered:
    """Slurm carried out an owed call (`error` is None), or refused it for good."""

    gang: str
    call: int
    error: str | None


@dataclass(frozen=True, slots=True)
class NodeAttached:
    """A node's daemon opened its stream. `addresses`: the IP addresses from which processes of the node call; empty:
    the daemon did not say."""

    node: str
    boot_id: str
    incarnation: str
    probe_address: str
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeDisconnected:
    """The stream of a node's daemon ended."""

    node: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class NodeHeartbeat:
    """A node's daemon sent a heartbeat."""

    node: str


@dataclass(frozen=True, slots=True)
class NodeHardwareReported:
    """A node's daemon says what the node has: when it attaches, and when that has changed."""

    node: str
    report: NodeReport


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """An operator wants the node to be drained. `reason`: the operator's words."""

    node: str
    by: str
    reason: str


@keeps_stored_names
@dataclass(frozen=True, slots=True)
class NodeSignalled:
    """A node's hardware reported a signal.

    `signal_action` is what the policy says: "unfit", "unfit_unless_explained", "degraded", "rank" or "ignore"; or
    "over": `signal` has ended. `response`: what follows when the node is DEGRADED. `signal`: its kind, code and device;
    a node can report several. `program_error`: the error of a program that has led to it; empty: none is known.
    """

    node: str
    signal_action: str
    reason: str
    text: str
    response: Response = Response.RECORD
    signal: str = ""
    program_error: str = ""


@dataclass(frozen=True, slots=True)
class SlurmDrain:
    """Slurm starts nothing more on a node. `reason`: as Slurm shows it. `idle`: nothing of a job is left there.
    `fails`: an administrator expects the node to fail (state FAIL)."""

    reason: str
    idle: bool
    fails: bool = False


@dataclass(frozen=True, slots=True)
class SlurmNodeChanged:
    """What Slurm says about a node has changed. `in_service`: the node is usable (it answers, and is not drained).
    `down`: Slurm has the node DOWN and has ended what ran there. `drain`: Slurm starts nothing on the node; None: it is
    not drained."""

    node: str
    in_service: bool
    text: str
    down: bool = False
    drain: SlurmDrain | None = None


@dataclass(frozen=True, slots=True)
class NodeCheckReported:
    """A node's daemon has made the check that the coordinator asked for (`resuming.wanted_check`)."""

    node: str
    request: str
    check: NodeCheck


@dataclass(frozen=True, slots=True)
class TopologySeen:
    """One topology of Slurm with what the site's file adds: the fabric of all its nodes.

    `default`: partitions that name no topology use it. `partitions`: those that name it. `warnings`: what could not be
    understood.
    """

    fabric: Fabric = field(repr=False)
    default: bool = True
    partitions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FabricSeen:
    """What Slurm and the site say of the network has changed, or is first read. It holds the whole site's fabric: the
    journal gets each gang's own part only (FabricNoted).

    `problem`: why nothing could be read yet, in words; then there are no topologies.
    """

    topologies: tuple[TopologySeen, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: a deadline that the core named has come."""


GangEvent = (
    GangSubmitted | AgentAttached | AgentDisconnected | AgentHeartbeat | AgentReported | BatchHeartbeat
    | PeerAccused | ProbeAnswered | CancelRequested | FlushRequested | SlurmJobChanged | PoolJobChanged
    | SlurmAnswered | SwapRequested
)  # fmt: skip
NodeEvent = (
    NodeAttached | NodeDisconnected | NodeHeartbeat | NodeSignalled | SlurmNodeChanged | DrainRequested
    | NodeCheckReported | NodeHardwareReported
)  # fmt: skip
Event = GangEvent | NodeEvent | FabricSeen | Tick

_ADAPTERS: dict[type[Event], TypeAdapter[Event]] = {
    kind: TypeAdapter(keeps_stored_names(kind)) for kind in Event.__args__
}


MAX_CAUSE_BYTES = 4096
"""Bytes of a cause that the journal keeps. The status of an agent can be a thousand times as long."""


def stored_text(event: Event) -> str:
    """Stored name and JSON of an event, cut to MAX_CAUSE_BYTES. The journal stores this text as the cause of a
    decision; no code reads it. It has no `spec_json`, because the fact GangRegistered has it, no topologies, because
    they have all nodes of the site, and no numbers of a training, which decide nothing."""
    if isinstance(event, GangSubmitted):
        event = replace(event, spec_json="")
    elif isinstance(event, FabricSeen):
        event = replace(event, topologies=())
    elif isinstance(event, AgentReported | AgentAttached):
        event = replace(event, status=replace(event.status, training=None, use=None))
    kind = type(event)
    text = f"{stored_class(kind)} {_ADAPTERS[kind].dump_json(event, by_alias=True).decode()}"
    stored = text.encode()
    return text if len(stored) <= MAX_CAUSE_BYTES else f"{stored[:MAX_CAUSE_BYTES].decode(errors='ignore')}..."
