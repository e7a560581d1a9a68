"""Undone growth: ranks crash again and again after nodes have come, so the gang goes back to those that it had before.

The gang trained well before the growth, and nothing else has changed since. Perhaps a node came back broken in a way
that no sensor sees; perhaps the script does not work with so many ranks. Both look the same, so nobody is blamed: the
nodes leave the gang in service. A node comes back to this gang only if it is repaired once more. The next growth, with
whatever node, waits twice as long as the one before. The crashes still count: if the ranks crash with the former nodes,
too, the software ends the job as usual.

The same holds where a node of the shared pool gave way to a repaired one.
"""

from itertools import pairwise
from typing import Literal

from muster.daemon.coordinator.core.detection import attribution
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.generations import Recovery, RecoveryState
from muster.daemon.coordinator.core.state.slurm_jobs import Growth
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.turn.turn import GangTurn

GROWTH, GIVES_WAY = "more replicas", "pool node gives way"
"""What a recovery calls itself that is no recovery from a fault."""
FAILURES = 2
"""Failures of the software since the growth after which it is undone. One may be an accident; the third ends a job."""
PROVEN_S = 600.0
"""Seconds of training in one generation after which no later crash is held against a growth."""
PAUSE_S = 300.0
"""Seconds between two plans to grow, or to leave a node of the pool for one that is back, whatever came of the first:
each stops all ranks for some seconds."""
MOST_DOUBLINGS = 6
"""Growths undone after which that time becomes no longer: five hours."""


def suspected(gang: Gang) -> Recovery | None:
    """The growth that seems to be why the ranks have failed, while no rank runs; None: there is none."""
    if gang.phase is not Phase.RECOVERING or is_undone(gang) or gang.recovery.recoveries[-1].hardware:
        return None
    return _unproven_growth(gang.recovery, min(FAILURES, gang.spec.max_failures))


def go_back(gang_turn: GangTurn, growth: Recovery, pool_has_room: bool) -> None:
    """Remove the nodes that `growth` has brought, if the gang can go on without them.

    `pool_has_room`: a node of the shared pool may be requested for a seat that gets empty.
    """
    gang = gang_turn.gang
    new = [node for node in growth.nodes_in if node in gang_turn.index.present]
    if attribution.node_to_swap(gang_turn) not in ("", *new):
        return  # ranks crash on a node that was there before, and a spare can take its place
    left = [member.node for member in gang_turn.usable() if member.node not in new]
    if len(left) < gang.spec.fewest and not (pool_has_room and growth.action == GIVES_WAY):
        return
    words = f"ranks have failed since {' and '.join(new)} came, and the gang trained well before"
    seats: Literal["fewer seats", "same seats"] = "fewer seats" if growth.action == GROWTH else "same seats"
    for node in new:
        gang_turn.turn.record(facts.MemberRemoved(gang.id, node, words, alive=True, undoes_growth=seats))


def is_undone(gang: Gang) -> bool:
    """This recovery undoes a growth: the software has not failed on the nodes that are left."""
    return gang.phase is Phase.RECOVERING and bool(gang.recovery.recoveries[-1].nodes_undone)


def grows_later(growth: Growth, recovery: RecoveryState, now: float) -> bool:
    """A growth was undone, and the next one has to wait: a node that comes now for a seat would stand idle."""
    return _times_undone(recovery) > 0 and now < next_at(growth, recovery)


def next_at(growth: Growth, recovery: RecoveryState) -> float:
    """Before that (seconds) the gang neither grows nor leaves a node of the pool; 0: it has not grown yet."""
    pause_s = PAUSE_S * 2 ** min(_times_undone(recovery), MOST_DOUBLINGS)
    return growth.last_growth_at and growth.last_growth_at + pause_s


def _times_undone(recovery: RecoveryState) -> int:
    """How many growths of the gang were undone."""
    return sum(bool(one.nodes_undone) for one in recovery.recoveries)


def _unproven_growth(so_far: RecoveryState, least_failures: int) -> Recovery | None:
    """The growth that is the last change of the gang's nodes, if the software has failed so often since, and no
    generation has trained for long; else None."""
    failures = 0
    newest_first = so_far.recoveries[::-1]
    for recovery, started in pairwise(newest_first):
        ended_at = recovery.suspected_at if recovery.hung else recovery.detected_at
        if recovery.generation != started.generation + 1:
            return None  # the job was started again in between
        if recovery.nodes_out or (started.first_step_at and ended_at - started.first_step_at >= PROVEN_S):
            return None
        failures += not recovery.hardware
        if started.action in (GROWTH, GIVES_WAY):
            return started if failures >= least_failures else None
        if started.nodes_in:
            return None
    return None
