"""The durable state: what the core knows and must not lose. `state_updates.apply` changes it, and nothing else does.

A snapshot of the journal is this state as JSON.
"""

from dataclasses import dataclass, field, fields, make_dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, GetCoreSchemaHandler, PlainSerializer, TypeAdapter, with_config

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.events import GangSpec, NodeCheck, Version
from muster.daemon.coordinator.core.state.journal_use import JournalUse
from muster.daemon.coordinator.core.state.state_tables import FINAL, Phase, Response
from muster.daemon.coordinator.core.state.stored_names import NUMBERS_AS_WRITTEN, keeps_stored_names, stored_field
from muster.fabric.model.record import FabricRecord
from muster.node_health import NodeHealth


@dataclass(slots=True)
class DrainRequest:
    """An operator wants the node to be drained (see NodeDrainRequested). `at`: since when (seconds)."""

    requested_by: str
    reason: str
    at: float


@dataclass(slots=True)
class Precursor:
    """A signal that announces a fault, and is not over."""

    reason: str
    response: Response


@keeps_stored_names
@dataclass(slots=True)
class Node:
    """One machine, whatever jobs it carries."""

    name: str
    boot_id: str = ""
    probe_address: str = ""
    addresses: tuple[str, ...] = ()
    """The IP addresses from which processes of the node call; empty: its daemon did not say."""
    health: NodeHealth = NodeHealth.FIT
    reason: str = ""
    judged_at: float = 0.0
    response: Response = Response.RECORD
    """With DEGRADED: what follows."""
    check: NodeCheck | None = None
    """The newest node check. Only agents of the job `checked_in_job` have reported it; 0: the node's daemon has.
    `checked_at`: when (seconds)."""
    checked_in_job: int = 0
    checked_at: float = 0.0

    precursors: dict[str, Precursor] = field(default_factory=dict)
    """With DEGRADED: its precursors by signal, the oldest first. `reason` and `response` are those of the strongest."""
    drain: DrainRequest | None = None
    """The node is drained because an operator wants it. That says nothing about its health."""
    drained_as: str = ""
    """The reason with which Muster has taken the node out of service in Slurm, if Muster may resume it; else empty."""
    check_request: str = ""
    """The newest check that the coordinator asked for and that has ended."""
    resumed_at: float = 0.0
    """When Muster last resumed the node (seconds); 0: never."""
    registered_at: float = 0.0
    """When the node's daemon was first heard (seconds); 0: an earlier version of Muster has not noted it."""
    failed_again: bool = False
    """The node went out of service soon after Muster had resumed it, and nobody has resumed it since."""
    repaired_at: float = 0.0
    """When the node last came back into service, or its drain was over (seconds); 0: never."""


@dataclass(slots=True)
class CorrelatedFault:
    """An undecided signal that the loss of a peer may explain (see CorrelatedFaultSuspected). `at`: when it came."""

    reason: str
    at: float


@keeps_stored_names
@dataclass(slots=True)
class Member:
    """One node as part of one gang.

    `removal_reason`: why the node is out of the gang; empty while it is a member that may carry ranks. `alive`: its
    processes can still be told to leave. `released`: Slurm was asked to take the node out of the job, or to end the
    pool job that the node came with.
    """

    node: str
    job: int
    incarnation: str
    peer_address: str
    batch_host: bool
    leaf: str
    removal_reason: str = ""
    alive: bool = True
    released: bool = False
    check: NodeCheck | None = None
    """What its node check has found; None: it has not ended."""
    nvlink_domain: str = ""
    """The NVLink domain of several nodes that it is in; empty: there is none, or nobody knows."""
    adapter_bandwidth: float = 0.0
    """Of its slowest adapter that is nearest to a GPU, in bytes a second; 0: not known."""
    returned: bool = False
    """The job had lost the node, and got it back in a job of its own."""
    asked_for_at: float = 0.0
    """When the node was last requested, because it was repaired (seconds); 0: never."""
    gave_way: bool = False
    """It came with a job of its own, and was removed because it was needed no more: a node of the job's own was back,
    or it carried no rank."""
    removed_at: float = 0.0
    """When the member was removed (seconds); 0: it was not, or an earlier version of Muster has not noted it."""
    fell_silent: bool = False
    """It was removed because nobody heard it any more. The health of a node without ranks does not change by that."""

    @property
    def failed_check(self) -> bool:
        """Its node check has found that no rank shall start on the node."""
        return self.check is not None and self.check.outcome.is_bad

    @property
    def removed(self) -> bool:
        """The member is out of the gang: it carries no rank of this gang again."""
        return bool(self.removal_reason)

    @property
    def gone(self) -> bool:
        """The member is removed, and its processes can't be told anything."""
        return self.removed and not self.alive

    @property
    def departed_reason(self) -> str:
        """The removal reason if Slurm's job no longer has the node. Journals hold these words."""
        return f"job {self.job} no longer has {self.node}"

    @property
    def agent_ended_reason(self) -> str:
        """The removal reason if the agent has ended and its node answers. Journals hold these words."""
        return f"muster-agent on {self.node} has ended"


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


@dataclass(slots=True)
class Flush:
    """The newest flush of a gang. `path` and `error` are empty while it runs."""

    serial: int
    version: Version
    sources: tuple[facts.ShardSource, ...]
    reason: str
    asked_at: float
    path: str = ""
    error: str = ""


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


@keeps_stored_names
@dataclass(slots=True)
class PoolRequest:
    """A node of the shared pool that the agent on `requesting_node` was asked to request, with these options of sbatch.

    `job`: the pool job that Slurm made of the request; 0 until its number is known. `node`: the node that has joined
    from that job; empty until then. `wanted_node`, `until`: as in PoolNodeRequested.
    """

    serial: int
    requesting_node: str
    options: tuple[str, ...]
    job: int = 0
    node: str = ""
    wanted_node: str = ""
    until: float = 0.0


@dataclass(slots=True)
class Exclusion:
    """Why and since when (seconds) the job may not start on a node."""

    reason: str
    at: float


@dataclass(slots=True)
class Account:
    """Who has submitted the gang, as what, and what the journal holds of it."""

    owner_uid: int
    name: str
    shown_spec: str
    """What views show of the job's spec, as JSON. The whole spec is in the fact GangRegistered."""
    registered_at: float
    spec_chars: int = 0
    """Characters of the whole spec as JSON."""
    journal_use: JournalUse = field(default_factory=JournalUse)
    """The records of the gang, without its registration."""


@dataclass(slots=True)
class SlurmJob:
    """The job that the gang is in Slurm: its runs, and its nodes."""

    job: int
    restart_count: int = 0
    job_nodes: tuple[str, ...] = ()
    most_nodes: int = 0
    """The most nodes that Slurm has reported for the job."""
    excluded: tuple[str, ...] = ()
    """Nodes that the job was ever requeued without. A node stays in the list when it is admitted: the admission may
    come too late for a start, and then changes nothing."""
    admitted: tuple[str, ...] = ()
    """Nodes of `excluded` on which the job may start again since the last requeue."""
    exclusions: dict[str, Exclusion] = field(default_factory=dict)
    """Node of `excluded` → its newest exclusion. Journals of earlier versions may lack it."""
    runs_without_start: int = 0
    """Runs of the job in a row that were given up while the gang gathered."""
    runs_given_back: int = 0
    """Runs of the job in a row that gave their nodes back, because groups would have lain wider than asked."""
    completion_owed: bool = False
    job_over: bool = False

    def run_is_over(self, job: int, restarts: int) -> bool:
        """A later run of `job` is known than the one that Slurm started after `restarts` restarts."""
        return job == self.job and restarts < self.restart_count


@dataclass(slots=True)
class Roster:
    """The nodes of the gang in this run of the job, and the seats that they have in the newest generation."""

    members: dict[str, Member] = field(default_factory=dict)
    seats: tuple[facts.Seat, ...] = ()
    spares: tuple[facts.Seat, ...] = ()
    fabric: FabricRecord | None = None
    """The network of its nodes, as noted last; None: nothing is known but the leaves of members."""
    wider_groups: str = ""
    """Which groups of this generation lie in more leaves or pods than the job asks, in words; empty: none."""
    extra_communication_s: float = 0.0
    """What `wider_groups` costs in each step, in predicted seconds."""

    def present(self) -> list[Member]:
        """Members that may carry ranks, by name."""
        return [m for _, m in sorted(self.members.items()) if not m.removed]

    @property
    def batch_host(self) -> Member | None:
        """The member on whose node the batch script runs, if it has attached in this run of the job."""
        return next((m for m in self.members.values() if m.batch_host), None)


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


@dataclass(slots=True)
class Restore:
    """What the ranks of the newest generation start from, and where it is."""

    restored_version: Version | None = None
    restore_sources: tuple[facts.ShardSource, ...] = ()
    """One for each rank."""
    other_sources: tuple[facts.ShardSource, ...] = ()
    """Further nodes that hold shards of `restore_sources`, without digests; and with digests, the shards of other ranks
    that a parity combines."""
    parity_groups: tuple[tuple[str, ...], ...] = ()
    """Nodes that hold the parity of their states together."""
    resharded: bool = False
    """The running generation started from the shards of another number of ranks: from all of `restore_sources`."""
    restored_generation: int = 0
    """The newest generation whose ranks have all had their states from memory."""


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


@dataclass(slots=True)
class Findings:
    """What is wrong with the ranks or their states, as far as it was seen in this run of the job."""

    hang: Hang | None = None
    stragglers: tuple[Straggler, ...] = ()
    """The newest ones, the last one last."""
    disagreement: Disagreement | None = None
    not_finite: str = ""
    """The first loss or gradient norm of the running generation that is NaN or infinite, in words; empty: none."""
    corrupt_copies: tuple[facts.CorruptCopyFound, ...] = ()
    """The first ones."""


@dataclass(slots=True)
class Checkpoint:
    """What of the gang's state is in durable storage, and what is being written there."""

    durable_path: str = ""
    durable_version: Version | None = None
    flush: Flush | None = None
    rank_counts: dict[int, int] = field(default_factory=dict)
    """Number of ranks, by the first generation that had another number than those before. At first all nodes carry
    ranks."""


@dataclass(slots=True)
class Growth:
    """The nodes that were requested beyond those of the job: of the shared pool, or repaired ones."""

    pool: dict[int, PoolRequest] = field(default_factory=dict)
    """Open requests for nodes of the shared pool, by serial."""
    pool_serial: int = 0
    pool_requested_at: float = 0.0
    """When this recovery first requested a node of the pool, or began with an open request; 0: neither."""
    pool_refused: str = ""
    """Why this recovery requests no more of them."""
    last_request_at: float = 0.0
    """When a node was last requested, of the pool or a repaired one (seconds); 0: never."""
    last_growth_at: float = 0.0
    """When it was last planned that ranks go on on more nodes, or that a node of the pool gives way (seconds)."""
    requests_in_vain: int = 0
    """Requests in a row, made while the gang trained, from which no node has come."""


@dataclass(slots=True)
class Plans:
    """What the ranks are asked to stop for. `stop`: no rank starts again in this run of the job."""

    stop: Stop | None = None
    swap: Swap | None = None
    phase_after_drain: Phase | None = None


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

    def is_of_pool(self, member: Member) -> bool:
        """The member came from the shared pool."""
        return member.job != self.slurm.job and not member.returned

    def seats_to_fill(self) -> list[str]:
        """The nodes of the newest generation; in a recovery that undoes a growth, without the seats of that growth."""
        undone = self.recovery.recoveries[-1].seats_undone if self.phase is Phase.RECOVERING else []
        return [seat.node for seat in self.roster.seats if seat.node not in undone]

    def needs_memory_of(self, node: str) -> bool:
        """The memory of a removed node is still a source of the running generation's state."""
        started = self.recovery.recoveries and self.recovery.recoveries[-1].first_step_at > 0
        others = (source for source in self.restore.other_sources if source.parity_ranks or source.digest)
        needed = (*self.restore.restore_sources, *others)
        return not started and any(source.node == node for source in needed)

    @property
    def ranks(self) -> int:
        """Number of ranks of the newest generation."""
        return len(self.roster.seats) * self.spec.ranks_per_node

    def ranks_of(self, version: Version) -> int:
        """Number of ranks that wrote `version`."""
        whole = self.spec.nodes * self.spec.ranks_per_node
        counts = self.checkpoint.rank_counts.items()
        return max(((g, size) for g, size in counts if g <= version.generation), default=(0, whole))[1]

    @classmethod
    def __get_pydantic_core_schema__(cls, _: object, handler: GetCoreSchemaHandler) -> Any:
        """How snapshots hold a gang."""
        written = PlainSerializer(_to_stored, return_type=_StoredGang)
        return handler.generate_schema(Annotated[_StoredGang, AfterValidator(_from_stored), written])


RECORDS: dict[str, type] = {
    "account": Account,
    "slurm": SlurmJob,
    "roster": Roster,
    "newest": NewestGeneration,
    "restore": Restore,
    "recovery": RecoveryState,
    "findings": Findings,
    "checkpoint": Checkpoint,
    "growth": Growth,
    "plans": Plans,
}
"""The records of a gang, by the field that holds each."""
_PLACES = {
    stored_field(kind, one.name): (record, one)
    for record, kind in {"": Gang, **RECORDS}.items()
    for one in fields(kind)
    if record or one.name not in RECORDS
}
"""Stored name of each field of a gang → its record (empty: the gang itself), and the field."""

_StoredGang = with_config(NUMBERS_AS_WRITTEN)(
    make_dataclass(
        "_StoredGang",
        [
            (name, one.type, field(default=one.default, default_factory=one.default_factory))
            for name, (_, one) in _PLACES.items()
        ],
        kw_only=True,
        slots=True,
    )
)
"""A gang as snapshots hold it: without records, under stored names."""


def _to_stored(gang: Gang) -> object:
    records = {"": gang, **{record: getattr(gang, record) for record in RECORDS}}
    return _StoredGang(**{name: getattr(records[record], one.name) for name, (record, one) in _PLACES.items()})


def _from_stored(stored: object) -> Gang:
    values: dict[str, dict[str, Any]] = {"": {}, **{record: {} for record in RECORDS}}
    for name, (record, one) in _PLACES.items():
        values[record][one.name] = getattr(stored, name)
    records = {record: kind(**values[record]) for record, kind in RECORDS.items()}
    return Gang(**values[""], **records)


@dataclass(slots=True)
class ReportedDrain:
    """A drain for which only the agents of one gang have reported a reason. `at`: when it was owed (seconds)."""

    gang: str
    owner_uid: int
    at: float


@keeps_stored_names
@dataclass(slots=True)
class DurableState:
    """All that survives a restart."""

    nodes: dict[str, Node] = field(default_factory=dict)
    gangs: dict[str, Gang] = field(default_factory=dict)
    owed: dict[int, facts.SlurmCallOwed] = field(default_factory=dict)
    last_call: int = 0
    taken_out_at: dict[str, float] = field(default_factory=dict)
    """Node → when Slurm was told to take it out of service; entries of the hour before the newest one."""
    reported_drains: dict[str, ReportedDrain] = field(default_factory=dict)
    """Node → the newest drain of it for which only agents have reported a reason; entries of the newest day."""
    correlated_faults: dict[str, CorrelatedFault] = field(default_factory=dict)
    """Node → its undecided signal."""
    journal_use: dict[int, JournalUse] = field(default_factory=dict)
    """Uid → the records of all gangs of the user, also of those that have left the durable state."""
    failed_at: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Node → when it failed; entries of the 30 days before the newest one of any node. Journals of earlier versions may
    lack it."""

    def node(self, name: str) -> Node:
        """The node of that name; a node that was never heard of is FIT."""
        return self.nodes.get(name) or Node(name)

    def dump(self) -> str:
        """The durable state as JSON, with stored names."""
        return _STORED_STATE.dump_json(self, by_alias=True).decode()

    @staticmethod
    def load(text: str) -> "DurableState":
        """The durable state that `dump` wrote.

        Raises:
            pydantic.ValidationError: the text is damaged.
        """
        return _STORED_STATE.validate_json(text)


_STORED_STATE: TypeAdapter[DurableState] = TypeAdapter(keeps_stored_names(DurableState))
