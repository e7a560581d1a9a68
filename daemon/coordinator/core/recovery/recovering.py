"""From a fence to the next generation: what must hold before ranks start again, in order.

`recover` asks its questions in this order. The first one that is not settled ends the round:

1. Have all ranks of the generation before ended, also those of silent nodes?
2. Is a stop planned? Then the newest version is written, and the job ends or is requeued.
3. Does the software fail again and again? Then the gang ends.
4. Must a node be left, because ranks crash on it or a swap is planned? Then it is taken out of service.
5. Does observe mode forbid a restart, or has the circuit breaker opened? Then the gang ends.
6. Is the result of a node check, or a node of the shared pool, awaited?
7. Are there enough nodes, and do they lie well enough? If not, the job may be requeued, or end.
8. Is the rendezvous store open? Then ranks get their seats, and the next generation starts.

A gang that recovers with an empty seat has three ways on, in this order: a node of the site's shared pool, fewer ranks
if the job is elastic, and a requeue after the newest version is written.
"""

from muster.daemon.coordinator.core.detection import (
    attribution,
    circuit_breaker,
    fencing,
    node_checks,
)
from muster.daemon.coordinator.core.recovery import (
    completion,
    flushing,
    gang_end,
    generation_start,
    planned_swap,
    requeueing,
    worse_allocation,
)
from muster.daemon.coordinator.core.recovery.growth import shared_pool, undone_growth
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.generations import RecoveryState
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.turn.turn import GangTurn
from muster.exit_codes import EXIT_AGENT, EXIT_FAILED_AGAIN, EXIT_OBSERVED, EXIT_STOPPED
from muster.wording import counted

STORE_TIMEOUT_S = 45.0
"""Seconds that a node has to open the rendezvous store, its first imports included."""
STORE_TRIES = 14
"""Nodes in a row that may fail to open a store. That takes ten minutes, because a file system that is new to all nodes
may deliver modules slowly. After that, another node would not help."""


def recover(gang_turn: GangTurn) -> None:
    """No rank may run: start the next generation once all ranks have ended. Requeue or end a gang that can't go on."""
    gang = gang_turn.gang
    if not all(fencing.ranks_ended(gang_turn, gang.roster.members[node]) for node in gang_turn.index.unfenced):
        return  # `failure_detector.examine` probes the members that do not answer
    clear_at = fencing.ranks_ended_at(gang_turn)
    if gang_turn.now < clear_at:
        gang_turn.turn.tick_at(clear_at)
        return
    _note_ranks_ended(gang_turn)
    if gang.plans.stop is not None:
        completion.save_and_leave(gang_turn)
        return
    only_observes = gang_turn.turn.limits.observe and gang.roster.seats
    if (growth := undone_growth.suspected(gang)) is not None:
        undone_growth.go_back(gang_turn, growth, shared_pool.has_room(gang, gang_turn.turn.limits.pool))
    if _software_fails(gang) and not only_observes:
        gang_end.end_gang(gang_turn, Phase.FAILED, EXIT_FAILED_AGAIN, _failure_reason(gang.recovery))
        return
    if not undone_growth.is_undone(gang):
        attribution.swap_crashing_node(gang_turn)
    if gang.roster.seats and planned_swap.leave_nodes(gang_turn):
        return  # the nodes are out of service now, and the next round removes them
    if only_observes:
        gang_end.end_gang(
            gang_turn,
            Phase.FAILED,
            EXIT_OBSERVED,
            f"observe mode: {_describe_withheld(gang_turn)}; {gang.recovery.recoveries[-1].cause}",
        )
        return
    if words := circuit_breaker.reason_to_stop(gang_turn):
        saves = gang.phase is Phase.RECOVERING and flushing.start_final_flush(gang_turn, words, Phase.FAILED)
        if not saves:
            gang_end.end_gang(gang_turn, Phase.FAILED, EXIT_STOPPED, words)
        return
    if node_checks.are_awaited(gang_turn) or shared_pool.await_nodes(gang_turn):
        return
    if len(gang_turn.index.present) - len(gang_turn.index.out_of_service) < min(
        len(gang.roster.seats) or gang.spec.nodes, gang.spec.fewest
    ):
        requeueing.requeue_or_end(gang_turn, requeueing.too_few_nodes_reason(gang.roster, gang.slurm))
    elif not gang.roster.seats and worse_allocation.respond(gang_turn):
        return
    elif _store_opens(gang_turn):
        return  # seats are assigned once the store is open, not with each report until then
    elif ranked := generation_start.next_seats(gang_turn):
        _start_where_store_listens(gang_turn, ranked)


def _note_ranks_ended(gang_turn: GangTurn) -> None:
    """Since when no rank lives, for those who ask later what the recovery waited for. Reports that come late may move
    the moment at which the ranks of a silent node have ended."""
    seen = gang_turn.observed
    first = seen.ranks_ended_at if seen.ranks_ended_at >= gang_turn.gang.phase_at else gang_turn.now
    seen.ranks_ended_at = max(first, gang_turn.index.time_fenced_at)


def _software_fails(gang: Gang) -> bool:
    """The software ends the gang again and again. On the nodes before an undone growth it may still work."""
    return not undone_growth.is_undone(gang) and gang.recovery.failures_in_a_row >= gang.spec.max_failures


def _failure_reason(recovery: RecoveryState) -> str:
    generations = counted(recovery.failures_in_a_row, "generation", "consecutive generations")
    last = recovery.recoveries[-1].cause if recovery.recoveries else ""
    return f"{generations} ended without progress; last: {last}"


def _describe_withheld(gang_turn: GangTurn) -> str:
    """What would follow without observe mode, in words."""
    gang = gang_turn.gang
    if _software_fails(gang):
        return f"the job would fail with exit code {EXIT_FAILED_AGAIN}: {_failure_reason(gang.recovery)}"
    ranked = generation_start.next_seats(gang_turn)
    if ranked is None and gang_turn.turn.limits.pool.options and gang.spec.pool_nodes:
        return "nodes of the shared pool would be asked for"
    if ranked is None:
        return "the job would be requeued" if gang.spec.requeue else "no node would be left to go on with"
    before = [seat.node for seat in gang.roster.seats]
    if len(ranked) < len(before):
        return f"the job would go on with {counted(len(ranked), 'node')}"
    swaps = [f"{new} would take the place of {old}" for old, new in zip(before, ranked, strict=True) if old != new]
    return ", ".join(swaps) or "the ranks would be restarted in place"


def _store_opens(gang_turn: GangTurn) -> bool:
    """A node that will carry ranks is opening the store, and has time left."""
    gang = gang_turn.gang
    until = max(gang.phase_at, gang.recovery.store_at) + STORE_TIMEOUT_S
    if (
        gang_turn.store_listens()
        or gang_turn.now >= until
        or gang.recovery.next_store_node not in gang_turn.index.present
        or gang_turn.is_out_of_service(gang.recovery.next_store_node)
    ):
        return False
    if gang.recovery.next_store_node not in {seat.node for seat in gang.roster.seats}:
        return False
    gang_turn.turn.tick_at(until)
    return True


def _start_where_store_listens(gang_turn: GangTurn, ranked: list[str]) -> None:
    """Start the generation if the store is open on a node that will carry ranks; otherwise have such a node open it.
    The store of a spare would end with the start, or end unnoticed."""
    gang = gang_turn.gang
    if gang.recovery.next_store_node not in ranked:
        gang_turn.turn.record(
            facts.StoreMoved(gang.id, next((n for n in ranked if gang_turn.observed.is_attached(n)), ranked[0]))
        )
    elif (
        gang_turn.store_listens()
        and gang_turn.observed.status(gang.recovery.next_store_node).store_reserved
        and gang.recovery.next_store_node != ranked[0]
    ):
        gang_turn.turn.record(facts.StoreMoved(gang.id, ranked[0]))  # only rank 0 would open it
    elif gang_turn.store_listens():
        generation_start.start(gang_turn, ranked)
    elif gang_turn.now - (asked_at := max(gang.phase_at, gang.recovery.store_at)) < STORE_TIMEOUT_S:
        gang_turn.turn.tick_at(asked_at + STORE_TIMEOUT_S)
    elif gang.recovery.stores_missed + 1 >= STORE_TRIES:
        minutes = STORE_TRIES * STORE_TIMEOUT_S / 60
        words = f"no node has opened a rendezvous store within {minutes:.0f} min, though their agents answer"
        gang_end.end_gang(
            gang_turn,
            Phase.FAILED,
            EXIT_AGENT,
            f"{words}; the last one asked is {gang.recovery.next_store_node}: see its agent's log",
        )
    else:  # the agent answers but opens no store: take the next node
        after = ranked[(ranked.index(gang.recovery.next_store_node) + 1) % len(ranked)]
        gang_turn.turn.record(facts.StoreMoved(gang.id, after, missed=True))
