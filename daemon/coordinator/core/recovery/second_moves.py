"""When the ranks of a second, healthy node move after a loss: only if the steps until the next loss save more time than
the transfer of the node's state takes.

A second move costs no committed step: the ranks' shards stand in the memory of their old node and of its holder, which
stay in the gang, and each of them is a source (`restore_plan.choose_sources`). What it costs is the time of one more
transfer, for which the recovery waits. So no ranks move to a spare that is doubtful, and none do while nothing is known
of the size of the state.
"""

from collections.abc import Sequence

from muster.daemon.coordinator.core.detection import failure_rate
from muster.daemon.coordinator.core.recovery import planned_swap
from muster.daemon.coordinator.core.state.events import Shard
from muster.daemon.coordinator.core.turn.turn import GangTurn
from muster.fabric.placement.maps.refill import STEPS_UNTIL_NEXT_LOSS, MovePrice


def price(gang_turn: GangTurn) -> MovePrice | None:
    """What a second move costs now; None: none is made."""
    gang, step_s = gang_turn.gang, gang_turn.observed.pace.median_step_s
    size = max(map(_state_size, gang_turn.shards_in_memory().values()), default=0)
    if not size or gang.recovery.unattributed_node:
        return None  # after a second move it would be unknown which of the two nodes has caused the crashes
    seated = {seat.node for seat in gang.roster.seats}
    spares = {member.node for member in gang_turn.usable()} - seated
    unready = frozenset(spares.difference(planned_swap.ready_spares(gang_turn)))
    if not step_s:
        return MovePrice(size, unready=unready)
    turn = gang_turn.turn
    next_loss_s = failure_rate.job_mtbf_s(turn.state, turn.limits, gang.spec, len(gang.roster.seats), turn.now)
    return MovePrice(size, max(STEPS_UNTIL_NEXT_LOSS, next_loss_s / step_s), step_s, unready)


def _state_size(shards: Sequence[Shard]) -> int:
    """Bytes of the newest version that the ranks of one node have written there."""
    own = [shard for shard in shards if shard.primary]
    newest = max((shard.version for shard in own), default=None)
    return sum(shard.size for shard in own if shard.version == newest)
