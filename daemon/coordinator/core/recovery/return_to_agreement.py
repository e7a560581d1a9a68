"""Going back to the last version on which all replicas agreed.

The generation is fenced, and the next one starts from the newest version that is committed: a version on which replicas
disagree never is. A node that is named leaves the gang if a spare is ready for its seat, and if the limits allow it.
Its health stays, Slurm drains nothing, and the job is not started there again for a time, as with every node that it
has left. Otherwise the ranks restart where they are.
"""

from muster.daemon.coordinator.core.detection import circuit_breaker, corruption_detector, failure_detector
from muster.daemon.coordinator.core.recovery import planned_swap
from muster.daemon.coordinator.core.turn.turn import GangTurn


def fence_if_replicas_disagree(gang_turn: GangTurn) -> bool:
    """End a generation whose replicas disagree. True: it was fenced."""
    found = corruption_detector.detect_corruption(gang_turn)
    if found is None or found.comparison_ends or gang_turn.gang.plans.stop is not None:
        return False  # a planned stop saves the last version on which all agreed
    if found.node and _may_leave(gang_turn):
        member = gang_turn.gang.roster.members[found.node]
        failure_detector.remove_member(gang_turn, member, found.reason, alive=True)
    else:
        failure_detector.fence_generation(gang_turn, found.reason, hardware=True, suspected_at=gang_turn.now)
    return True


def _may_leave(gang_turn: GangTurn) -> bool:
    """A spare is ready, and no limit forbids that the gang leaves a node."""
    spare = planned_swap.free_spares(gang_turn) > 0 and circuit_breaker.swaps_left(gang_turn) > 0
    return spare and not circuit_breaker.reason_to_withhold(gang_turn.turn)
