"""Records of a gang: its nodes, and the seats that they have."""

from dataclasses import dataclass, field

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.events import NodeCheck
from muster.daemon.coordinator.core.state.stored_names import keeps_stored_names
from muster.fabric.model.record import FabricRecord


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
    newcomer: bool = False
    """It joined while one other node carried all ranks, and that node is not known to have heard of it."""
    program_error: str = ""
    """The error of a program because of which it was removed; empty: none is known."""

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
