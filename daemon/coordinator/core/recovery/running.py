"""While ranks start or run: what they report, and what ends their generation.

If replicas disagree, the gang goes back to the last version on which all of them agreed. The generation is fenced, and
the next one starts from the newest version that is committed: a version on which replicas disagree never is. A node
that is named leaves the gang if a spare is ready for its seat, and if the limits allow it. Its health stays, Slurm
drains nothing, and the job is not started there again for a time, as with every node that it has left. Otherwise the
ranks restart where they are.
"""

from muster.daemon.coordinator.core.detection import (
    attribution,
    circuit_breaker,
    corruption_detector,
    fencing,
    hang_detector,
    straggler_detector,
)
from muster.daemon.coordinator.core.recovery import (
    completion,
    failures,
    flushing,
    gang_end,
    planned_growth,
    planned_stop,
    planned_swap,
    restore_plan,
)
from muster.daemon.coordinator.core.recovery.growth import shared_pool
from muster.daemon.coordinator.core.recovery.losses import loss_findings
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.observed_state import ObservedGang
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.turn.turn import GangTurn

RELEASE_AFTER_S = 30.0
"""Seconds after RUNNING until removed nodes are released if no step is declared: a script without the library."""


def supervise(gang_turn: GangTurn) -> None:
    """Record how far the ranks have come, and end their generation if something has ended it, or is to end it."""
    gang = gang_turn.gang
    if failures.fence_if_ranks_crashed(gang_turn):
        return
    index = gang_turn.index
    whole = index.reported == gang.ranks
    # A step needs every rank, though one of them may be out of the coordinator's reach.
    if (whole or index.progressed) and gang.phase is Phase.STARTING:
        gang_turn.turn.record(facts.PhaseChanged(gang.id, Phase.RUNNING, ""))
    if index.progressed and not gang.newest.has_finished_step:
        watched = gang_turn.turn.observed.observing_since <= gang.newest.started_at
        gang_turn.turn.record(
            facts.FirstStep(gang.id, gang.newest.generation, _first_step(gang, gang_turn.observed), watched)
        )
    attribution.attribute_to_node(gang_turn)
    if loss_findings.respond(gang_turn):
        return
    corruption_detector.note_corrupt_copies(gang_turn)
    restore_plan.note_restored(gang_turn)
    if _fence_if_replicas_disagree(gang_turn):
        return
    swap = gang.plans.swap if gang.plans.stop is None else None
    if (
        whole
        and swap is not None
        and planned_swap.have_ranks_stopped(index, gang_turn.observed, gang.newest.generation)
    ):
        (planned_growth if swap.nodes else planned_swap).fence_stopped(gang_turn)
    elif whole and index.exited_cleanly == index.reported:
        completion.complete(gang_turn)
    elif not planned_stop.fence_if_overdue(gang_turn) and not hang_detector.detect_hang(gang_turn):
        _release_removed(gang_turn)
        straggler_detector.detect_stragglers(gang_turn)
        planned_swap.respond(gang_turn)
        planned_growth.request_and_plan_growth(gang_turn)
        flushing.start_requested_flush(gang_turn)
        flushing.start_due_flush(gang_turn)


def _first_step(gang: Gang, seen: ObservedGang) -> int:
    ranks = (rank for seat in gang.roster.seats for rank in seen.status(seat.node).ranks_of(gang.newest.generation))
    return min(rank.step for rank in ranks if rank.progressed)


def _fence_if_replicas_disagree(gang_turn: GangTurn) -> bool:
    """End a generation whose replicas disagree. True: it was fenced."""
    found = corruption_detector.detect_corruption(gang_turn)
    if found is None or found.comparison_ends or gang_turn.gang.plans.stop is not None:
        return False  # a planned stop saves the last version on which all agreed
    if found.node and _may_leave(gang_turn):
        member = gang_turn.gang.roster.members[found.node]
        fencing.remove_member(gang_turn, member, found.reason, alive=True)
    else:
        fencing.fence_generation(gang_turn, found.reason, hardware=True, suspected_at=gang_turn.now)
    return True


def _may_leave(gang_turn: GangTurn) -> bool:
    """A spare is ready, and no limit forbids that the gang leaves a node."""
    spare = (
        planned_swap.free_spares(gang_turn) > 0
        and circuit_breaker.swaps_left(gang_turn.turn, gang_turn.gang.recovery) > 0
    )
    return spare and not circuit_breaker.reason_to_withhold(gang_turn.turn)


def _release_removed(gang_turn: GangTurn) -> None:
    """Release live nodes that carry no ranks again. The batch host can't be released, nor any node once it is dead.

    A node that may be the cause of crashes stays until that is decided: Slurm drains it only while the job has it.
    """
    gang = gang_turn.gang
    undecided = {gang.recovery.unattributed_node} if gang.newest.has_finished_step else set()
    leaving = [gang.roster.members[node] for node in sorted(gang_turn.index.to_release - undecided)]
    if not leaving or gang.phase is not Phase.RUNNING or gang_turn.turn.limits.observe:
        return
    if not gang.newest.has_finished_step and gang_turn.now - gang.phase_at < RELEASE_AFTER_S:
        gang_turn.turn.tick_at(gang.phase_at + RELEASE_AFTER_S + 0.01)
        return
    for member in leaving:
        if member.job != gang.slurm.job:
            shared_pool.release_member(gang_turn, member)
        elif not gang_end.is_batch_host_dead(gang.roster, gang.slurm):
            gang_turn.turn.owe("let_go", gang.id, gang.slurm.job, f"muster: {member.removal_reason}", node=member.node)
