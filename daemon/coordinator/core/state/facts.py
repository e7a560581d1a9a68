"""Facts: what the core has decided. Facts are the records of the journal. Only facts change the
durable state (`state_updates`).

A fact carries its reason in words if there is one. `FACTS` has each kind under its stored name. A fact may get new
fields with defaults; it never loses a stored name (`stored_names`).
"""

from dataclasses import dataclass
from typing import Literal

from pydantic import TypeAdapter

from muster.daemon.coordinator.core.losses.loss_rule import LossResponse
from muster.daemon.coordinator.core.losses.loss_watch import LossKind
from muster.daemon.coordinator.core.state.events import CorruptCopy, GangSpec, NodeCheck, Version
from muster.daemon.coordinator.core.state.state_tables import Phase, Response
from muster.daemon.coordinator.core.state.stored_names import keeps_stored_names, stored_class
from muster.fabric.model.record import FabricRecord
from muster.node_health import NodeHealth


@keeps_stored_names
@dataclass(frozen=True, slots=True)
class Seat:
    """A node that carries ranks in a generation, with its group rank; a spare has group rank -1."""

    node: str
    group_rank: int
    holder: str
    """Holds a whole copy of each of its shards; empty: no node does."""
    watched_peers: tuple[str, ...]
    more_holders: tuple[str, ...] = ()
    """Further nodes that do, if the job asks for more than one."""

    @property
    def holders(self) -> tuple[str, ...]:
        """All nodes that hold whole copies of this node's shards."""
        return ((self.holder,) if self.holder else ()) + self.more_holders


@keeps_stored_names
@dataclass(frozen=True, slots=True)
class ShardSource:
    """Where one rank's shard is read from: the memory of `node`. `primary` as in Shard.

    `combined_ranks`: the node holds a part that combines these ranks' shards, from which the shard is rebuilt. All
    parts that the shard is in are named, in their order (`wire.mark_combined`). Empty: the node holds the shard.
    """

    rank: int
    node: str
    primary: bool
    digest: str
    combined_ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a gang has come, as its agents have reported.

    `step`: the newest finished step of the newest generation that has finished one. `committed`: the newest committed
    version. None: there is none.
    """

    step: Version | None = None
    committed: Version | None = None


@dataclass(frozen=True, slots=True)
class GangRegistered:
    gang: str
    job: int
    owner_uid: int
    name: str
    spec: GangSpec
    spec_json: str


@dataclass(frozen=True, slots=True)
class MemberJoined:
    gang: str
    node: str
    job: int
    incarnation: str
    peer_address: str
    batch_host: bool
    leaf: str
    nvlink_domain: str = ""
    adapter_bandwidth: float = 0.0


@dataclass(frozen=True, slots=True)
class FabricNoted:
    """The part of the fabric that the gang's nodes are on: seats, holders and witnesses follow it from now on.

    `changes`: what has changed for its nodes since the fact before, in words; empty for the first one, and where only
    names or members differ. `warnings`: what of the network could not be understood. `wider_groups`: with changes,
    which groups of the running generation lie wider now than the job asks, as in GenerationStarted.
    """

    gang: str
    fabric: FabricRecord
    changes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    wider_groups: str = ""


@keeps_stored_names
@dataclass(frozen=True, slots=True)
class MemberRemoved:
    """The node carries no rank of this gang again.

    `alive`: its processes can still be told to leave. `attributed`: the node is known to be the cause; otherwise the
    software may be. `left_job`: Slurm's job no longer has the node. `requested`: a user asked that the node is left, so
    nothing is held against it. Nor is with the others: `undoes_growth`: ranks have crashed since the node came, and the
    gang goes back to the nodes before it, without its seat or with another node in it. `surplus`: it came with a job of
    its own, carries no rank, and is not wanted as a spare. `program_error`: that of the verdict on the node which is
    the reason.
    """

    gang: str
    node: str
    reason: str
    alive: bool
    attributed: bool = True
    left_job: bool = False
    requested: bool = False
    undoes_growth: Literal["", "fewer seats", "same seats"] = ""
    surplus: bool = False
    program_error: str = ""


@dataclass(frozen=True, slots=True)
class NodeChecked:
    """The agent on `node` has checked the node before ranks start on it; or musterd has, because the coordinator asked
    for the check `request`. Then there is no gang, and no job (0)."""

    gang: str
    node: str
    job: int
    check: NodeCheck
    request: str = ""


@keeps_stored_names
@dataclass(frozen=True, slots=True)
class PhaseChanged:
    gang: str
    phase: Phase
    reason: str
    next_phase: Phase | None = None
    """With DRAINING: the phase that follows once the checkpoint is durable."""
    given_back: bool = False
    """With REQUEUED: the run never started, because its groups would have lain wider than asked."""
    progress: Progress | None = None
    """What was reported since the newest fact with a progress; None: nothing."""


PREFLIGHT_CAUSE = "start"
"""The `cause` of the fence that begins a preflight. Journals contain this word, so it must not change."""


@dataclass(frozen=True, slots=True)
class GenerationFenced:
    """Every rank up to `generation` must end. `store_node` opens the rendezvous store of the next generation.

    `crashed_on`: the node where a rank ended by itself; empty if none did. `progress` as in PhaseChanged.
    """

    gang: str
    generation: int
    cause: str
    hardware: bool
    store_node: str
    step_before: int
    suspected_at: float
    crashed_on: str = ""
    progress: Progress | None = None


@dataclass(frozen=True, slots=True)
class HangDetected:
    """`generation` hangs: the stacks of its ranks are written, then it is fenced. `node`: the only node whose ranks are
    a step behind all others; empty if no single node is."""

    gang: str
    generation: int
    reason: str
    suspected_at: float
    node: str = ""


@dataclass(frozen=True, slots=True)
class StragglerDetected:
    """`rank` on `node` computes longer than the other ranks of `generation`, which wait for it in each step.

    `response`: None when this is first seen; what follows when it has lasted.
    """

    gang: str
    generation: int
    rank: int
    node: str
    reason: str
    response: Response | None = None


@dataclass(frozen=True, slots=True)
class ReplicasDisagreed:
    """Replicas that have been equal differ at `version`: silent data corruption, or a script that lets them differ.

    `ranks`, `nodes`: those that differ from the majority, or all suspects (at most 64). `node`: the only node whose
    ranks differ from the majority; empty if no single node is named. `comparison_ends`: replicas are no longer compared
    in this run of the job.
    """

    gang: str
    generation: int
    version: Version
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    node: str
    reason: str
    comparison_ends: bool = False


@dataclass(frozen=True, slots=True)
class NotFiniteReported:
    """A loss or a gradient norm is NaN or infinite. That says nothing of a node. `response`, `why` as in LossNoted."""

    gang: str
    generation: int
    rank: int
    node: str
    step: int
    words: str
    response: LossResponse = LossResponse.RECORD
    why: str = ""


@dataclass(frozen=True, slots=True)
class LossNoted:
    """The loss on `node` has a spike that began at `step`, or is on a plateau. That says nothing of the node.

    `value`: the loss; `usual`: the median before. `response`: what follows. `why`: why that is not what the policy or
    the job asks for; empty: it is.
    """

    gang: str
    generation: int
    kind: LossKind
    node: str
    step: int
    value: float
    usual: float
    response: LossResponse = LossResponse.RECORD
    why: str = ""


@dataclass(frozen=True, slots=True)
class RolledBack:
    """The gang goes back to the durable checkpoint `path` of `version`, and does not read again what led to the loss at
    `step`. What `generation` and earlier ones hold in memory is void.

    `skip_to`: the batch after which the samplers go on. Batches are counted by the steps that have read them, those
    that were skipped included.
    """

    gang: str
    generation: int
    step: int
    version: Version
    path: str
    skip_to: int
    reason: str


@dataclass(frozen=True, slots=True)
class CorruptCopyFound:
    """A copy of a shard on `node` does not match its digests, and is used no more. The fields are those of CorruptCopy.
    This says nothing about the node's health: only the user's own processes report it."""

    gang: str
    node: str
    copy: CorruptCopy


@dataclass(frozen=True, slots=True)
class StateRestored:
    """All ranks of the generation have their states, verified. Sizes are bytes.

    `own_bytes`: were in slots of the ranks' own nodes. `copied_bytes`: were in other memory of these nodes.
    `fetched_bytes`: have come from other nodes; `fetched`: from which, those with the most.
    `seconds`: of the node that took longest, from its order on. `folder`: the durable checkpoint that the ranks have
    loaded instead, of `loaded_bytes`; empty: the states come from memory. `damage`: why it is not the newest one.
    """

    gang: str
    generation: int
    version: Version
    own_bytes: int
    copied_bytes: int
    fetched_bytes: int
    fetched: tuple[tuple[str, int], ...]
    seconds: float
    folder: str = ""
    loaded_bytes: int = 0
    damage: str = ""


@dataclass(frozen=True, slots=True)
class StoreMoved:
    """Another node opens the rendezvous store. The former one is removed or carries no ranks; or (`missed`) it has not
    opened a store in time."""

    gang: str
    store_node: str
    missed: bool = False


@keeps_stored_names
@dataclass(frozen=True, slots=True)
class GenerationStarted:
    """The agents are ordered to run this generation. `agreed_groups`: replica groups that agree at `version`.

    `fenced_at`: when all ranks of the generation before had ended (seconds). Nodes and the store were awaited since.
    Earlier versions have written the time of this fact.
    `crashed_on`: the node where ranks crashed the generation before, known now that all ranks have reported their end;
    None: the node that the fence names. `warning`: why the state may be wrong; empty if nothing speaks against it.
    `wider_groups`: which groups lie in more leaves or pods than the job asks, in words; empty: none.
    `extra_communication_s`: what that costs in each step, in predicted seconds.
    `close_copies`: which holders or spares share what the job requires them not to share, in words; empty: none.
    `mtbf_s`: seconds between two failures of the nodes that carry ranks, as far as that is known then.
    `other_sources`: further nodes that hold the shards of `sources`; their digests are empty, because they are equal.
    Those with a digest hold shards of other ranks, which are combined with a lost one.
    `protection_groups`: nodes that hold combined shards for each other (`scheme.Protection`).
    `resharded`: another number of ranks wrote `version`, and each rank needs the shards of all of them: `sources`.
    `skip_to_step`: as in RestorePlan (agent.proto); 0: no batch is skipped.
    """

    gang: str
    generation: int
    seats: tuple[Seat, ...]
    spares: tuple[Seat, ...]
    master_node: str
    master_port: int
    version: Version | None
    sources: tuple[ShardSource, ...]
    durable_path: str
    fenced_at: float
    action: str
    crashed_on: str | None = None
    agreed_groups: tuple[int, ...] = ()
    warning: str = ""
    wider_groups: str = ""
    extra_communication_s: float = 0.0
    close_copies: str = ""
    mtbf_s: float = 0.0
    other_sources: tuple[ShardSource, ...] = ()
    resharded: bool = False
    protection_groups: tuple[tuple[str, ...], ...] = ()
    skip_to_step: int = 0


@keeps_stored_names
@dataclass(frozen=True, slots=True)
class FirstStep:
    """A rank of this generation has finished its first optimizer step.

    `observed_live`: the coordinator has run since the start of the generation, so the time of this fact is the time
    of the step. False if a restarted coordinator hears of an older step.
    """

    gang: str
    generation: int
    step: int
    observed_live: bool = True


@dataclass(frozen=True, slots=True)
class FlushOrdered:
    """The named version shall be written to durable storage."""

    gang: str
    serial: int
    version: Version
    sources: tuple[ShardSource, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class FlushEnded:
    """A flush ended. `path`: its folder; or `error`: why there is none. `version`: what was written; None: the version
    that was ordered, or nothing. With an `error`, it was written, and the gang has gone back from it meanwhile."""

    gang: str
    serial: int
    path: str
    error: str
    version: Version | None = None


@dataclass(frozen=True, slots=True)
class GangEnded:
    """The gang is over. `progress` as in PhaseChanged."""

    gang: str
    phase: Phase
    exit_code: int
    reason: str
    progress: Progress | None = None


@dataclass(frozen=True, slots=True)
class GangShrunk:
    """The gang goes on with fewer nodes that carry ranks, and as many more spares. No generation has started yet."""

    gang: str
    nodes: int
    reason: str


@keeps_stored_names
@dataclass(frozen=True, slots=True)
class StopPlanned:
    """The job is about to end: the ranks are asked to stop, their state is saved, and then `next_phase` follows."""

    gang: str
    reason: str
    next_phase: Phase


@dataclass(frozen=True, slots=True)
class SwapPlanned:
    """The ranks of `generation` are asked to finish a step, keep it and exit. Then a spare takes the seat of `node`.

    `requested_by`: the user who asked for the swap; empty: the policy does. `gives_way_to`: a node of the job's own
    that is back, if `node` is one of the shared pool that is needed no more; else empty.
    """

    gang: str
    node: str
    generation: int
    reason: str
    requested_by: str = ""
    gives_way_to: str = ""


@dataclass(frozen=True, slots=True)
class GrowthPlanned:
    """The ranks of `generation` are asked to finish a step, keep it and exit. Then the gang goes on with `nodes` nodes
    that carry ranks, which are more than before."""

    gang: str
    generation: int
    nodes: int
    reason: str


@dataclass(frozen=True, slots=True)
class JobRestarted:
    """Slurm started the job again: members and fences of the earlier run are void."""

    gang: str
    job: int
    restart_count: int


@dataclass(frozen=True, slots=True)
class JobChanged:
    """The nodes that the job holds, as Slurm says."""

    gang: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class JobEnded:
    """Slurm has ended the job. `state`: Slurm's own word for how."""

    gang: str
    state: str


@keeps_stored_names
@dataclass(frozen=True, slots=True)
class PoolNodeRequested:
    """The agent on `requesting_node` shall ask Slurm for a node of the shared pool, with these options of sbatch.

    `wanted_node`: a node that the job has lost and that was repaired, which is asked for instead; empty: one of the
    pool. `until`: when (seconds) the request is given up while the gang trains; 0: the recovery decides that.
    """

    gang: str
    serial: int
    requesting_node: str
    options: tuple[str, ...]
    wanted_node: str = ""
    until: float = 0.0


@dataclass(frozen=True, slots=True)
class NewcomerKnown:
    """The node that carries all ranks has carried out an order that lists `node`, which joined after its ranks had
    started."""

    gang: str
    node: str


@dataclass(frozen=True, slots=True)
class PoolJobQueued:
    """Slurm has accepted the request. `job`: the pool job whose node will join."""

    gang: str
    serial: int
    job: int


@dataclass(frozen=True, slots=True)
class PoolRequestClosed:
    """The request is over, and a node that came from it is no longer wanted. `refused`: this recovery requests no
    more."""

    gang: str
    serial: int
    reason: str
    refused: bool = False


@dataclass(frozen=True, slots=True)
class GangForgotten:
    """The gang and its job are over: the gang leaves the durable state. Its history stays in the journal."""

    gang: str


@dataclass(frozen=True, slots=True)
class NodeRegistered:
    """A node's daemon has attached. `addresses`: the IP addresses from which processes of the node call."""

    node: str
    boot_id: str
    probe_address: str
    addresses: tuple[str, ...] = ()


@keeps_stored_names
@dataclass(frozen=True, slots=True)
class NodeJudged:
    """The health of the node has changed. `response`: with DEGRADED, what follows. `signal`: with DEGRADED, the signal
    that announces a fault (NodeSignalled).

    `failure`: which failure of the node this is, within 30 days; 0: the verdict does not count as one. `lemon`: the
    site calls a node with so many failures a lemon. `program_error`: as in NodeSignalled.
    """

    node: str
    health: NodeHealth
    reason: str
    response: Response = Response.RECORD
    failure: int = 0
    lemon: bool = False
    signal: str = ""
    program_error: str = ""


@dataclass(frozen=True, slots=True)
class PrecursorEnded:
    """A signal that made the node DEGRADED is over. The node stays DEGRADED while another one is not."""

    node: str
    signal: str
    reason: str


@dataclass(frozen=True, slots=True)
class CorrelatedFaultSuspected:
    """A node reported a signal that the loss of a peer may explain. The core waits for that loss. `reason`: why the
    signal is fatal if no peer is lost. `program_error`: as in NodeSignalled."""

    node: str
    reason: str
    program_error: str = ""


@dataclass(frozen=True, slots=True)
class CorrelatedFaultResolved:
    """The wait is over. `peer`: the node whose loss explains the signal; empty: the signal is the node's own."""

    node: str
    peer: str = ""


@dataclass(frozen=True, slots=True)
class NodeDrainRequested:
    """An operator wants that nothing more starts on the node, and that ranks leave it for spares. `requested_by`: the
    operator. `reason`: in words."""

    node: str
    requested_by: str
    reason: str


@dataclass(frozen=True, slots=True)
class NodeDrainEnded:
    """The request for a drain is over: Slurm has the node in service again, or has refused to drain it."""

    node: str
    reason: str


SlurmVerb = Literal["drain", "down", "resume", "let_go", "requeue", "admit", "requeue_off", "complete", "cancel"]


@dataclass(frozen=True, slots=True)
class SlurmCallOwed:
    """A call to Slurm that must be made. It is owed until SlurmCallSettled.

    `call`: its number in the durable state. `exclude`: nodes on which the requeued job may not start. `admit`: nodes
    that were excluded before, and on which it may start again. `if_run_has_node`: Slurm's restart count of a run of
    `job`; the call is made only while that run has `node`, and is refused otherwise. None: no condition.
    `requested_by`: with drain, the operator who asked for it; empty: nobody did. `resumable`: with drain and down,
    nobody else had drained the node before, so Muster may resume it. With resume, `text` is the reason that Slurm must
    still show.
    """

    gang: str
    call: int
    verb: SlurmVerb
    job: int
    node: str
    text: str
    exclude: tuple[str, ...] = ()
    exit_code: int = 0
    admit: tuple[str, ...] = ()
    if_run_has_node: int | None = None
    requested_by: str = ""
    resumable: bool = False


@dataclass(frozen=True, slots=True)
class SlurmCallSettled:
    gang: str
    call: int
    error: str


@dataclass(frozen=True, slots=True)
class LaunchUnsupervised:
    """A launch of the job's own script runs as it is written: which one, and why. The first one of a run is kept."""

    gang: str
    words: str


@dataclass(frozen=True, slots=True)
class ActionWithheld:
    """A call to Slurm for `node` that was not made, because of a limit or of observe mode."""

    gang: str
    node: str
    verb: SlurmVerb
    reason: str


Fact = (
    GangRegistered | MemberJoined | MemberRemoved | PhaseChanged | GenerationFenced | StoreMoved | GenerationStarted
    | FirstStep | FlushOrdered | FlushEnded | GangEnded | GangShrunk | StopPlanned | SwapPlanned | JobRestarted
    | JobChanged | JobEnded | GangForgotten | PoolNodeRequested | PoolJobQueued | PoolRequestClosed | NodeRegistered
    | NodeJudged | SlurmCallOwed | SlurmCallSettled | ActionWithheld | HangDetected | CorrelatedFaultSuspected
    | CorrelatedFaultResolved | StragglerDetected | NodeDrainRequested | NodeDrainEnded
    | PrecursorEnded | ReplicasDisagreed | NotFiniteReported | NodeChecked | FabricNoted
    | CorruptCopyFound | StateRestored | GrowthPlanned | NewcomerKnown | LossNoted | RolledBack
    | LaunchUnsupervised
)  # fmt: skip

FACTS: dict[str, type[Fact]] = {stored_class(kind): kind for kind in Fact.__args__}
"""Every kind of fact, by its stored name."""
_ADAPTERS: dict[str, TypeAdapter[Fact]] = {name: TypeAdapter(keeps_stored_names(kind)) for name, kind in FACTS.items()}


def encode(fact: Fact) -> tuple[str, str]:
    """Stored name and JSON of a fact, for the journal."""
    name = stored_class(type(fact))
    return name, _ADAPTERS[name].dump_json(fact, by_alias=True).decode()


def decode(name: str, text: str) -> Fact:
    """The fact that `encode` made.

    Raises:
        KeyError: no such fact (a journal of a newer version).
        pydantic.ValidationError: the record is damaged.
    """
    return _ADAPTERS[name].validate_json(text)
