"""A DEGRADED node that no gang has is drained at once, if the policy's response is a swap: nobody has to leave it."""

from muster.daemon.coordinator.core.detection import circuit_breaker
from muster.daemon.coordinator.core.state.state_tables import Response
from muster.daemon.coordinator.core.turn.turn import Turn
from muster.node_health import NodeHealth


def drain_degraded(turn: Turn) -> None:
    """Take the DEGRADED nodes out of service that no gang has, as far as the limits allow, by name.

    A gang leaves such a node by a planned swap. A gang without a spare keeps it, and so does a gang whose job holds the
    node and whose agent has not attached yet.
    """
    for node in sorted(turn.index.degraded):
        known = turn.state.node(node)
        if (
            known.response is Response.SWAP
            and not _is_held(turn, node)
            and not circuit_breaker.reason_to_withhold(turn)
        ):
            circuit_breaker.take_out_of_service(turn, None, node, NodeHealth.UNFIT, known.reason)


def _is_held(turn: Turn, node: str) -> bool:
    """The node is a member of a gang that is not over, or the job of such a gang has it."""
    live = (gang for gang in turn.state.gangs.values() if not gang.final)
    return any(node in gang.roster.members or node in gang.slurm.job_nodes for gang in live)
