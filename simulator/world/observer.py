"""What the simulated cluster reports to the invariants, and the exception of one that is violated.

The world knows this Protocol alone, so that `simulator/world` imports no invariant.
`simulator/invariants/invariants.py` implements it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.events import AgentStatus, Version
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.journal.journal import Journal
from muster.daemon.node.kept_memory.retention import KeptEntry

if TYPE_CHECKING:
    from muster.simulator.world.agent import Agent, Rank
    from muster.slurm.client.types import Job, Node
    from muster.v1 import agent_pb2 as pb


class Observer(Protocol):
    """Every method may raise if what it is told must not happen. `journal`: every journaled fact with its time."""

    journal: list[tuple[float, facts.Fact]]

    def journaled(self, core: Core, facts: Sequence[facts.Fact], at: float) -> None:
        """The journal holds these facts from now on."""

    def order_sent(self, gang: Gang, order: pb.Order) -> None:
        """The coordinator sends an order."""

    def slurm_call_started(self, call: facts.SlurmCallOwed) -> None:
        """The coordinator starts a call to Slurm."""

    def drain_lifted(self, before: Node) -> None:
        """Muster has resumed the node, which was drained like this before."""

    def node_checked(self, node: str, outcome: str) -> None:
        """The daemon of a node has checked the node."""

    def snapshot_taken(self, state: DurableState, journal: Journal) -> None:
        """The journal holds a new snapshot."""

    def status_received(self, gang: str, status: AgentStatus) -> None:
        """The coordinator receives an agent's status."""

    def agent_attached(self, gang: str, status: AgentStatus) -> None:
        """The coordinator admits an agent that attaches with this status."""

    def coordinator_crashed(self, core: Core, written: bool) -> None:
        """The coordinator ends with this core. `written`: the journal holds all of its durable state."""

    def coordinator_restarted(self, core: Core, journal: Journal) -> None:
        """A new coordinator has replayed the journal."""

    def core_bug_reported(self, bug: str) -> None:
        """The core has found a bug in itself."""

    def topology_changed(self) -> None:
        """Links, kernels or processes have changed."""

    def node_resumed(self, node: str) -> None:
        """Processes on `node` that were stopped run again."""

    def rank_started(self, gang: str, rank: Rank) -> None:
        """A rank's process was started."""

    def generation_joined(self, gang: str, generation: int, nodes: Collection[str]) -> None:
        """All ranks of a generation, which run on these nodes, have joined the rendezvous."""

    def version_committed(self, leader: Agent, order: pb.Order, version: Version) -> None:
        """The commit leader commits a version."""

    def rank_crashed(self, gang: str, generation: int, node: str, exit_code: int, of_reset: bool) -> None:
        """A rank has exited with an error and was not killed. `of_reset`: it exited because a peer had ended."""

    def batch_read(self, gang: str, batch: int) -> None:
        """A step has read a batch. Only gangs that report their losses say it."""

    def rank_hung(self, gang: str, generation: int) -> None:
        """A rank hangs. The cause need not be a node: the rank may only be slow."""

    def shards_handed_over(self, agent: Agent) -> None:
        """An agent hands its shards to its node's daemon."""

    def prolog_finished(self, node: str, job: int, kept: KeptEntry[Any] | None) -> None:
        """A job's first process is about to start on a node that keeps this memory."""

    def kept_memory_checked(self, node: str, now: float, kept: KeptEntry[Any] | None) -> None:
        """A node keeps this memory at this time."""

    def batch_script_ended(self, gang: Gang, job: Job) -> None:
        """A batch script ends, and its job with it."""

    def run_settled(self) -> None:
        """The run is over and everything has settled."""


class InvariantViolation(Exception):
    """An invariant was violated."""


def require(holds: object, message: str) -> None:
    """Check a condition. `message` says how the invariant is violated if the condition does not hold.

    Raises:
        InvariantViolation: the condition does not hold.
    """
    if not holds:
        raise InvariantViolation(message)
