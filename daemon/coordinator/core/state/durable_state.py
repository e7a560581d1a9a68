"""The durable state: what the core knows and must not lose. `state_updates.apply` changes it, and nothing else does.

A snapshot of the journal is this state as JSON. A gang's records stand there side by side, as fields of the gang.
"""

from dataclasses import dataclass, field, fields, make_dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, GetCoreSchemaHandler, PlainSerializer, TypeAdapter, with_config

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.account import Account, JournalUse
from muster.daemon.coordinator.core.state.checkpoint import Checkpoint, Restore
from muster.daemon.coordinator.core.state.events import NodeCheck
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.generations import Findings, NewestGeneration, Plans, RecoveryState
from muster.daemon.coordinator.core.state.roster import Roster
from muster.daemon.coordinator.core.state.slurm_jobs import Growth, SlurmJob
from muster.daemon.coordinator.core.state.state_tables import Response
from muster.daemon.coordinator.core.state.stored_names import NUMBERS_AS_WRITTEN, keeps_stored_names, stored_field
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
    program_error: str = ""
    """The error of a program that has led to its newest verdict; empty: none is known."""


@dataclass(slots=True)
class CorrelatedFault:
    """An undecided signal that the loss of a peer may explain (see CorrelatedFaultSuspected). `at`: when it came."""

    reason: str
    at: float
    program_error: str = ""


@dataclass(slots=True)
class ReportedDrain:
    """A drain for which only the agents of one gang have reported a reason. `at`: when it was owed (seconds)."""

    gang: str
    owner_uid: int
    at: float


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


class _GangAsStored:
    """How snapshots hold a gang."""

    @classmethod
    def __get_pydantic_core_schema__(cls, _: object, handler: GetCoreSchemaHandler) -> Any:
        written = PlainSerializer(_to_stored, return_type=_StoredGang)
        return handler.generate_schema(Annotated[_StoredGang, AfterValidator(_from_stored), written])


@keeps_stored_names
@dataclass(slots=True)
class DurableState:
    """All that survives a restart."""

    nodes: dict[str, Node] = field(default_factory=dict)
    gangs: dict[str, Annotated[Gang, _GangAsStored]] = field(default_factory=dict)
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

    def owes(self, verb: facts.SlurmVerb, gang: str) -> bool:
        """Slurm is owed that call for the gang."""
        return any((call.verb, call.gang) == (verb, gang) for call in self.owed.values())

    def owes_for_node(self, node: str) -> bool:
        """Slurm is owed a call about the node: what Slurm says of it may be older than the call."""
        return any(call.node == node for call in self.owed.values())

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
