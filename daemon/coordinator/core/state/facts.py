"""What the core has decided: the journal's records. The durable state is the fold of these and of nothing else.

Each fact carries its reason in words where there is one to give. `FACTS` names them for the journal's codec; a
fact's fields may grow defaults, never lose a name.
"""

from dataclasses import dataclass
from typing import Literal

from pydantic import TypeAdapter

from muster.daemon.coordinator.core.state.events import GangSpec, Version
from muster.daemon.coordinator.core.state.state_tables import NodeHealth, Phase
from muster.daemon.coordinator.core.state.stored_names import keeps_stored_names, stored_class


@dataclass(frozen=True, slots=True)
class Seat:
    """A node that carries ranks in a generation, at position `group_rank`."""

    node: str
    group_rank: int
    buddy: str
    neighbours: tuple[str, ...]


@keeps_stored_names
@dataclass(frozen=True, slots=True)
class ShardSource:
    """Where one rank's shard is taken from."""

    rank: int
    node: str
    primary: bool
    digest: str


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


@keeps_stored_names
@dataclass(frozen=True, slots=True)
class MemberRemoved:
    """The node carries no rank of this gang again. `alive`: its processes can be told to leave; `attributed`: it is to
    blame, else it may be the software."""

    gang: str
    node: str
    reason: str
    alive: bool
    attributed: bool = True


@keeps_stored_names
@dataclass(frozen=True, slots=True)
class PhaseChanged:
    gang: str
    phase: Phase
    reason: str
    next_phase: Phase | None = None
    """With DRAINING: what follows once the checkpoint is durable."""


@dataclass(frozen=True, slots=True)
class GenerationFenced:
    """Every rank up to `generation` shall end. `store_node` opens the next generation's rendezvous store; on
    `crashed_on` a rank has ended by itself."""

    gang: str
    generation: int
    cause: str
    hardware: bool
    store_node: str
    step_before: int
    suspected_at: float
    crashed_on: str = ""


@dataclass(frozen=True, slots=True)
class HangDetected:
    """`generation` hangs: the stacks of its ranks are kept, then it is fenced. On `node`, where one is named, ranks are
    a step behind all others."""

    gang: str
    generation: int
    reason: str
    suspected_at: float
    node: str = ""


@dataclass(frozen=True, slots=True)
class StoreMoved:
    """The node that should have opened the store is out of the gang, or carries no ranks; `missed`: it is there, and
    has opened none in its time."""

    gang: str
    store_node: str
    missed: bool = False


@dataclass(frozen=True, slots=True)
class GenerationStarted:
    """`crashed_on`: where ranks had ended the generation before by themselves, now that all have told how theirs ended;
    None: as its fence says."""

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


@keeps_stored_names
@dataclass(frozen=True, slots=True)
class FirstStep:
    """A rank of this generation has finished its first optimizer step.

    `observed_live`: the coordinator has run since the start of the generation, so the time of this fact is the time
    of the step. False where a restarted coordinator hears of an older step.
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
    """A flush ended: `path` is its folder, or `error` says why there is none."""

    gang: str
    serial: int
    path: str
    error: str


@dataclass(frozen=True, slots=True)
class GangEnded:
    gang: str
    phase: Phase
    exit_code: int
    reason: str


@keeps_stored_names
@dataclass(frozen=True, slots=True)
class StopPlanned:
    """The job is about to be ended: the ranks are asked to stop, their state is saved, then `next_phase` follows."""

    gang: str
    reason: str
    next_phase: Phase


@dataclass(frozen=True, slots=True)
class JobRestarted:
    """Slurm started the job again: members and fences of the run before are void."""

    gang: str
    job: int
    restart_count: int


@dataclass(frozen=True, slots=True)
class JobChanged:
    """The nodes that Slurm says the job holds."""

    gang: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class JobEnded:
    """Slurm has ended the job, with its own word for how."""

    gang: str
    state: str


@keeps_stored_names
@dataclass(frozen=True, slots=True)
class PoolNodeRequested:
    """The agent on `requesting_node` shall ask Slurm for a node of the shared pool, with these options of sbatch."""

    gang: str
    serial: int
    requesting_node: str
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PoolJobQueued:
    """Slurm has taken the request: `job` is the small job whose node will join."""

    gang: str
    serial: int
    job: int


@dataclass(frozen=True, slots=True)
class PoolRequestClosed:
    """The request is over, and the node that came of it is wanted no more. `refused`: the recovery goes on without."""

    gang: str
    serial: int
    reason: str
    refused: bool = False


@dataclass(frozen=True, slots=True)
class GangForgotten:
    """The gang is over, with its job: it leaves the durable state, its history stays."""

    gang: str


@dataclass(frozen=True, slots=True)
class NodeRegistered:
    node: str
    boot_id: str
    probe_address: str


@keeps_stored_names
@dataclass(frozen=True, slots=True)
class NodeJudged:
    node: str
    health: NodeHealth
    reason: str


@dataclass(frozen=True, slots=True)
class CorrelatedFaultSuspected:
    """A signal that may be the echo of a peer's loss, which is waited for; `reason`: why it is fatal if it is none."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class CorrelatedFaultResolved:
    """It is waited for no more: `peer` is the node whose loss explains it; empty: it is the node's own."""

    node: str
    peer: str = ""


SlurmVerb = Literal["drain", "down", "let_go", "requeue", "admit", "requeue_off", "complete", "cancel"]


@dataclass(frozen=True, slots=True)
class SlurmCallOwed:
    """A call to Slurm that has to be made; owed until SlurmCallSettled. `call` is its number in the durable state. A
    requeued job starts on none of `exclude`, and may start again on `admit`, which were excluded before."""

    gang: str
    call: int
    verb: SlurmVerb
    job: int
    node: str
    text: str
    exclude: tuple[str, ...] = ()
    exit_code: int = 0
    admit: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SlurmCallSettled:
    gang: str
    call: int
    error: str


@dataclass(frozen=True, slots=True)
class ActionWithheld:
    """What was not done, for a limit or in observe mode: a call to Slurm for `node`."""

    gang: str
    node: str
    verb: SlurmVerb
    reason: str


Fact = (
    GangRegistered | MemberJoined | MemberRemoved | PhaseChanged | GenerationFenced | StoreMoved | GenerationStarted
    | FirstStep | FlushOrdered | FlushEnded | GangEnded | StopPlanned | JobRestarted | JobChanged | JobEnded
    | GangForgotten | PoolNodeRequested | PoolJobQueued | PoolRequestClosed | NodeRegistered | NodeJudged
    | SlurmCallOwed | SlurmCallSettled | ActionWithheld | HangDetected | CorrelatedFaultSuspected
    | CorrelatedFaultResolved
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
