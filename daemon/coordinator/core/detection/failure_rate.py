"""How often nodes fail: one node, which may be a lemon, and the fleet.

A failure is a verdict that takes a node in service out of it. It does not count if somebody has asked for it, or if
only the agents of one job have reported it: the owner of a job can make agents report anything. Failures of the last 30
days count.

Lemons are nodes that fail again and again. In published field data, a few nodes have most of the failures (3 of 63 made
up half of all exclusions). Muster names a node a lemon from a number of failures on that the site sets. An operator
decides what becomes of it: Muster drains no node for that.

The rate of a fleet is what the job or the site says, else what this coordinator has observed. A node counts from the
moment at which its daemon was first heard. While few nodes were watched for a short time, the published rate counts
most (`failures.node_mtbf`): it stands for one failure in its time.
"""

from muster.daemon.coordinator.core.state.durable_state import DurableState, Node
from muster.daemon.coordinator.core.state.events import GangSpec
from muster.daemon.coordinator.core.state.limits import Limits
from muster.daemon.coordinator.core.turn.state_updates import FAILURES_KEPT_S
from muster.fabric.cost.reliability import fleet_mtbf, observed_mtbf
from muster.fabric.estimate.failures import HOUR, node_mtbf


def job_mtbf_s(state: DurableState, limits: Limits, spec: GangSpec, nodes: int, now: float) -> float:
    """Seconds between two failures of `nodes` nodes that carry ranks of a job, 1 or more."""
    configured = spec.node_mtbf_s or limits.node_mtbf_hours * HOUR
    return fleet_mtbf(configured or observed_node_mtbf_s(state, spec.ranks_per_node, now), nodes)


def observed_node_mtbf_s(state: DurableState, gpus: int, now: float) -> float:
    """Seconds between two failures of one node of the fleet, as far as it was observed.

    Args:
        state: the durable state, whose nodes are watched.
        gpus: those of one node, for the published rate.
        now: the present moment in seconds.
    """
    watched = {node.name: min(now - node.registered_at, FAILURES_KEPT_S) for node in _watched(state)}
    failed = sum(failures(state, name, now) for name in state.failed_at.keys() & watched)
    return observed_mtbf(node_mtbf(gpus), failed, sum(watched.values()))


def _watched(state: DurableState) -> list[Node]:
    return [node for node in state.nodes.values() if node.registered_at]


def failures(state: DurableState, node: str, now: float) -> int:
    """How often the node has failed within 30 days."""
    return sum(now - at < FAILURES_KEPT_S for at in state.failed_at.get(node, ()))


def is_lemon(count: int, lemon_after: int) -> bool:
    """Whether so many failures make a lemon of a node, where the site's number is `lemon_after`; 0: never."""
    return 0 < lemon_after <= count
