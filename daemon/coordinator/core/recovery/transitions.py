"""The next transition of a gang: for each phase, what must hold before the gang moves on.

Every rule is level-triggered. A rule looks at durable and observed state, never at the last event, so lost, doubled and
reordered events change nothing but the moment.

A gang that recovers with an empty seat has three ways on, in this order: a node of the site's shared pool, fewer ranks
if the job is elastic, and a requeue after the newest version is written.

Nothing but its end is decided about a gang whose job Slurm has suspended. All processes of the job are stopped, so
their silence is no evidence. Once resumed, every agent has its whole time to be heard again.
"""

from collections.abc import Callable, Mapping
from functools import partial

from muster.checkpoint.redundancy.scheme import Protection
from muster.daemon.coordinator.core.detection import (
    attribution,
    circuit_breaker,
    corruption_detector,
    departure,
    failure_detector,
    failure_rate,
    hang_detector,
    node_checks,
    progress_timeouts,
    straggler_detector,
    time_fencing,
)
from muster.daemon.coordinator.core.recovery import (
    completion,
    flushing,
    gang_end,
    gathering,
    planned_growth,
    planned_stop,
    planned_swap,
    requeueing,
    restore_plan,
    return_to_agreement,
    second_moves,
    shared_pool,
    worse_allocation,
)
from muster.daemon.coordinator.core.recovery.growth import undone_growth
from muster.daemon.coordinator.core.recovery.restore import lost_shards
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.events import RankState, Version
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.state_tables import ACTIVE, MONITORED, Phase
from muster.daemon.coordinator.core.turn import placement
from muster.daemon.coordinator.core.turn.communication import (
    closer_than_required,
    communicating_seats,
    communication_times,
    failure_domains_of,
    note_fabric,
    wider_than_asked,
)
from muster.daemon.coordinator.core.turn.gang_index import ranks_of_generation
from muster.daemon.coordinator.core.turn.turn import GangTurn
from muster.wording import counted, listed

STORE_TIMEOUT_S = 45.0
"""Seconds that a node has to open the rendezvous store, its first imports included."""
STORE_TRIES = 14
"""Nodes in a row that may fail to open a store. That takes ten minutes, because a file system that is new to all nodes
may deliver modules slowly. After that, another node would not help."""
SLURM_ANSWER_S = 5.0
"""Seconds within which Slurm's end of a job is known. Slurm's view of a job is read every 2 s."""
RELEASE_AFTER_S = 30.0
"""Seconds after RUNNING until removed nodes are released if no step is declared: a script without the library."""
REASON_LENGTH = 200
"""Characters of what a rank has written that a reason quotes."""
_SIGNALS_OF_LIMITS = {
    24: " (SIGXCPU: its limit of processor time, ulimit -t of the shell that submitted)",
    25: " (SIGXFSZ: its limit of a file's size, ulimit -f of the shell that submitted)",
}
"""Slurm passes the limits of the submitting shell on to all processes of a job. Login nodes have such limits."""


ROUNDS = 12
"""Rounds of decisions for one gang in one turn, at most. Rules without a bug need three, of which the last decides
nothing (measured: 150 seeds of the simulator)."""
UNSETTLED_PAUSE_S = 1.0
"""Seconds until a gang whose rules came to no end is looked at again. At each look such rules write ROUNDS decisions or
more to the journal. One look a second leaves the coordinator free for other gangs, and does not fill the disk."""


def _apply_rules(gang_turn: GangTurn) -> None:
    gang = gang_turn.gang
    if gang.final:
        gang_end.complete_job(gang_turn)
        return
    suspended = gang_turn.observed.suspended_jobs
    if gang_end.end_if_cancelled_or_ended(gang_turn) or gang.slurm.job in suspended:
        return
    planned_stop.plan_stop(gang_turn)
    if suspended and gang.plans.stop is None and not suspended.isdisjoint(gang.jobs()):
        return  # a node of the shared pool is waited for, but not while Slurm is about to end the gang's own job
    if _agents_failing(gang_turn):
        return
    if gang.phase in MONITORED | {Phase.GATHERING}:
        departure.remove_departed(gang_turn)
    node_checks.record_results(gang_turn)
    if gang.phase in ACTIVE:
        _remove_unfit(gang_turn)
        node_checks.leave_out_failed(gang_turn)
    failure_detector.examine(gang_turn)
    shared_pool.follow_requests(gang_turn, bool(gang.growth.pool) and planned_swap.waits_for_spare(gang_turn))
    flushing.check_flush(gang_turn)
    match gang.phase:
        case Phase.SUBMITTED:
            requeueing.release_after_failed_launch(gang_turn)
            gathering.look_for_job(gang_turn)
        case Phase.REQUEUED:
            requeueing.release_after_failed_launch(gang_turn)
            requeueing.readmit_nodes(gang_turn)
            gathering.look_for_job(gang_turn)
        case Phase.GATHERING:
            gathering.gather(gang_turn)
        case Phase.PREFLIGHT | Phase.RECOVERING:
            _recover(gang_turn)
        case Phase.STARTING | Phase.RUNNING:
            _supervise_running(gang_turn)
        case Phase.DRAINING:
            completion.continue_drain(gang_turn)
        case _:
            pass


def advance(gang_turn: GangTurn, decide: Callable[[GangTurn], None] = _apply_rules) -> None:
    """Call `decide`, one round of the rules, until it decides nothing more: the observed state allows no further
    transition.

    Rules that still decide something after ROUNDS rounds contradict each other, which is a bug. The outcome reports the
    bug, and the gang is examined again after UNSETTLED_PAUSE_S. The decisions of this turn stand. Other gangs go on.
    """
    decided = gang_turn.turn.outcome.facts
    for _ in range(ROUNDS):
        before = len(decided)
        decide(gang_turn)
        if len(decided) == before:
            return
    newest = ", ".join(type(fact).__name__ for fact in decided[before:])
    gang_turn.turn.outcome.bugs.append(
        f"gang {gang_turn.gang.id} in phase {gang_turn.gang.phase}: the rules came to no end in {ROUNDS} rounds, "
        f"the last of which decided {newest}; the gang is looked at again in {UNSETTLED_PAUSE_S:g} s"
    )
    gang_turn.turn.tick_at(gang_turn.now + UNSETTLED_PAUSE_S)


# -- recovery --


def _recover(gang_turn: GangTurn) -> None:
    gang = gang_turn.gang
    if not all(failure_detector.ranks_ended(gang_turn, gang.roster.members[node]) for node in gang_turn.index.unfenced):
        return  # `failure_detector.examine` probes the members that do not answer
    clear_at = time_fencing.ranks_ended_at(gang_turn)
    if gang_turn.now < clear_at:
        gang_turn.turn.tick_at(clear_at)
        return
    if gang.plans.stop is not None:
        completion.save_and_leave(gang_turn)
        return
    observed = gang_turn.turn.limits.observe and gang.roster.seats
    if (growth := undone_growth.suspected(gang)) is not None:
        undone_growth.go_back(gang_turn, growth, shared_pool.has_room(gang_turn))
    if _software_fails(gang) and not observed:
        gang_end.end_gang(gang_turn, Phase.FAILED, gang_end.EXIT_NO_REQUEUE, _failure_reason(gang_turn))
        return
    if not undone_growth.is_undone(gang):
        attribution.swap_crashing_node(gang_turn)
    if gang.roster.seats and planned_swap.leave_nodes(gang_turn):
        return  # the nodes are out of service now, and the next round removes them
    if observed:
        gang_end.end_gang(
            gang_turn,
            Phase.FAILED,
            gang_end.EXIT_OBSERVED,
            f"observe mode: {_describe_withheld(gang_turn)}; {gang.recovery.recoveries[-1].cause}",
        )
        return
    if words := circuit_breaker.reason_to_stop(gang_turn):
        saves = gang.phase is Phase.RECOVERING and flushing.start_final_flush(gang_turn, words, Phase.FAILED)
        if not saves:
            gang_end.end_gang(gang_turn, Phase.FAILED, gang_end.EXIT_STOPPED, words)
        return
    if node_checks.are_awaited(gang_turn) or shared_pool.await_nodes(gang_turn):
        return
    if len(gang_turn.index.present) - len(gang_turn.index.out_of_service) < min(
        len(gang.roster.seats) or gang.spec.nodes, gang.spec.fewest
    ):
        requeueing.requeue_or_end(gang_turn, requeueing.too_few_nodes_reason(gang_turn))
    elif not gang.roster.seats and worse_allocation.respond(gang_turn):
        return
    elif _store_opens(gang_turn):
        return  # seats are assigned once the store is open, not with each report until then
    elif ranked := _next_seats(gang_turn):
        _start_where_store_listens(gang_turn, ranked)


def _describe_withheld(gang_turn: GangTurn) -> str:
    """What would follow without observe mode, in words."""
    gang = gang_turn.gang
    if _software_fails(gang):
        return f"the job would fail with exit code {gang_end.EXIT_NO_REQUEUE}: {_failure_reason(gang_turn)}"
    ranked = _next_seats(gang_turn)
    if ranked is None and gang_turn.turn.limits.pool.options and gang.spec.pool_nodes:
        return "nodes of the shared pool would be asked for"
    if ranked is None:
        return "the job would be requeued" if gang.spec.requeue else "no node would be left to go on with"
    before = [seat.node for seat in gang.roster.seats]
    if len(ranked) < len(before):
        return f"the job would go on with {counted(len(ranked), 'node')}"
    swaps = [f"{new} would take the place of {old}" for old, new in zip(before, ranked, strict=True) if old != new]
    return ", ".join(swaps) or "the ranks would be restarted in place"


def _remove_unfit(gang_turn: GangTurn) -> None:
    """Remove the members whose node is out of service. If one carries running ranks, they are fenced."""
    for node in sorted(gang_turn.index.out_of_service):
        failure_detector.remove_member(
            gang_turn, gang_turn.gang.roster.members[node], gang_turn.turn.state.node(node).reason, alive=True
        )


def _next_seats(gang_turn: GangTurn) -> list[str] | None:
    gang, fabric, last_choices = gang_turn.gang, gang_turn.fabric, node_checks.last_choices(gang_turn)
    usable = [member.node for member in gang_turn.usable()]
    groups = communicating_seats(gang.spec)
    if not gang.roster.seats:
        return placement.first_seats(fabric, usable, gang.spec.nodes, last_choices, groups, gang.spec.spread_spares)
    before = gang.seats_to_fill()
    if len(before) < gang.spec.nodes:
        groups = ()  # fewer replicas, and replicas alone can be fewer
    fewest = min(len(before), gang.spec.fewest)
    price = second_moves.price(gang_turn) if groups and not set(before).issubset(usable) else None
    # A pool node without ranks comes after the job's own spares, and before any that is hardly fit.
    last_choices = {**planned_growth.seated_last(gang_turn), **{node: 1 + last for node, last in last_choices.items()}}
    refilled = placement.refill_seats(fabric, before, usable, fewest, last_choices, groups, price)
    return refilled and planned_growth.grown_seats(gang_turn, refilled)


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
        _start_generation(gang_turn, ranked)
    elif gang_turn.now - (asked_at := max(gang.phase_at, gang.recovery.store_at)) < STORE_TIMEOUT_S:
        gang_turn.turn.tick_at(asked_at + STORE_TIMEOUT_S)
    elif gang.recovery.stores_missed + 1 >= STORE_TRIES:
        minutes = STORE_TRIES * STORE_TIMEOUT_S / 60
        words = f"no node has opened a rendezvous store within {minutes:.0f} min, though their agents answer"
        gang_end.end_gang(
            gang_turn,
            Phase.FAILED,
            gang_end.EXIT_AGENT,
            f"{words}; the last one asked is {gang.recovery.next_store_node}: see its agent's log",
        )
    else:  # the agent answers but opens no store: take the next node
        after = ranked[(ranked.index(gang.recovery.next_store_node) + 1) % len(ranked)]
        gang_turn.turn.record(facts.StoreMoved(gang.id, after, missed=True))


def _start_generation(gang_turn: GangTurn, ranked: list[str]) -> None:
    gang = gang_turn.gang
    version, sources, others, warning = _choose_state(gang_turn, ranked)
    if version is None and restore_plan.memory_may_return(gang_turn):
        return
    if flushing.flush_before_start(gang_turn, version):
        return
    fabric = gang_turn.fabric
    if (noted := note_fabric(gang, gang_turn.turn.observed, fabric)) is not None:
        gang_turn.turn.record(noted)
    usable = [member.node for member in gang_turn.usable()]
    protection = _protection(gang_turn, ranked)
    seats, spares = placement.assign_seats(fabric, ranked, usable, protection)
    close = closer_than_required(gang.spec, seats, spares, fabric, protection.groups)
    if close and not gang.roster.seats:
        words = f"[placement] requires other nodes than Slurm gave: {close}"
        gang_end.end_gang(gang_turn, Phase.FAILED, gang_end.EXIT_NO_NODES, words)
        return
    wider, extra_s = wider_than_asked(gang.spec, ranked, fabric), 0.0
    if wider:
        times = communication_times(gang.spec, ranked, fabric)
        wider, extra_s = f"{wider}; {times.words}", times.extra
    gang_turn.turn.record(
        facts.GenerationStarted(
            gang=gang.id,
            generation=gang.recovery.fenced_generation + 1,
            seats=seats,
            spares=spares,
            master_node=gang.recovery.next_store_node,
            master_port=gang_turn.observed.status(gang.recovery.next_store_node).store_port,
            version=version,
            sources=sources,
            other_sources=others,
            protection_groups=protection.groups,
            durable_path="" if version else gang.checkpoint.durable_path,
            fenced_at=gang_turn.now,
            action=_action(gang, ranked),
            crashed_on=attribution.find_crashed_node(gang_turn) if gang.recovery.recoveries else None,
            agreed_groups=restore_plan.agreed_groups(gang_turn.shards_in_memory(), version),
            warning=warning,
            resharded=version is not None
            and restore_plan.is_resharded(gang_turn, len(ranked) * gang.spec.ranks_per_node, version),
            close_copies=close,
            wider_groups=wider,
            extra_communication_s=extra_s,
            mtbf_s=failure_rate.job_mtbf_s(
                gang_turn.turn.state, gang_turn.turn.limits, gang.spec, len(seats), gang_turn.now
            ),
        )
    )


def _protection(gang_turn: GangTurn, ranked: list[str]) -> Protection:
    """Who holds what in the generation that starts."""
    gang = gang_turn.gang
    nodes = [seat.node for seat in gang.roster.seats]
    moved = dict(zip(nodes, ranked, strict=True)) if len(nodes) == len(ranked) else None
    apart = failure_domains_of(gang_turn.fabric, gang.spec.spread_replicas)
    return gang.spec.redundancy.protect(ranked, apart, gang.restore.protection_groups, moved)


def _action(gang: Gang, ranked: list[str]) -> str:
    before = [seat.node for seat in gang.roster.seats]
    if not before:
        return "requeue" if gang.recovery.recoveries else "start"
    if len(ranked) < len(before):
        return "fewer replicas"
    if before == ranked:
        return "restart in place"
    return planned_growth.action(gang, before, ranked) or (
        "planned swap" if gang.plans.swap and gang.plans.swap.node else "swap"
    )


def _choose_state(
    gang_turn: GangTurn, ranked: list[str]
) -> tuple[Version | None, tuple[facts.ShardSource, ...], tuple[facts.ShardSource, ...], str]:
    """The version in memory to restore, where its shards are, where else, and what is wrong with it, in words."""
    spec = gang_turn.gang.spec
    count = len(ranked) * spec.ranks_per_node
    with_rebuilt, rebuilt = restore_plan.with_rebuilt(gang_turn, count)
    ranks_needed = partial(restore_plan.ranks_needed, gang_turn, count)
    version, warning = restore_plan.newest_left(gang_turn, ranks_needed, with_rebuilt)
    durable = gang_turn.gang.checkpoint.durable_version
    if version is None or (durable is not None and durable > version):
        return None, (), (), ""
    home = {
        position * spec.ranks_per_node + local: node
        for position, node in enumerate(ranked)
        for local in range(spec.ranks_per_node)
    }
    leaving = frozenset(m.node for m in gang_turn.gang.roster.members.values() if m.removed)
    needed = ranks_needed(version)
    held = gang_turn.shards_in_memory()
    sources = restore_plan.choose_sources(held, version, needed, home, leaving)
    others = restore_plan.other_sources(held, version, sources, leaving)
    lost = set(range(needed)) - {source.rank for source in sources}
    rebuilt_from = list(lost_shards.sources_of(rebuilt, version, lost))
    others = (*others, *restore_plan.combined_sources(held, version, rebuilt_from, needed, leaving))
    sources = tuple(sorted((*sources, *(one for one in rebuilt_from if one.digest)), key=lambda source: source.rank))
    return version, sources, (*others, *(one for one in rebuilt_from if not one.digest)), warning


def _software_fails(gang: Gang) -> bool:
    """The software ends the gang again and again. On the nodes before an undone growth it may still work."""
    return not undone_growth.is_undone(gang) and gang.recovery.failures_in_a_row >= gang.spec.max_failures


def _failure_reason(gang_turn: GangTurn) -> str:
    gang = gang_turn.gang
    last = gang.recovery.recoveries[-1].cause if gang.recovery.recoveries else ""
    count = gang.recovery.failures_in_a_row
    generations = counted(count, "generation", "consecutive generations")
    return f"{generations} ended without progress; last: {last}"


# -- running --


def _ranks_on(gang_turn: GangTurn, node: str) -> list[RankState]:
    """Ranks of the running generation, as the node's agent reports them."""
    return ranks_of_generation(gang_turn.observed.status(node).ranks, gang_turn.gang.newest.generation)


def _agents_failing(gang_turn: GangTurn) -> bool:
    """Handle agents that report an error which no order mends. True: nothing else may be decided now.

    If most agents have failed, the job is the cause, and the gang ends. A few are removed as any node that can't carry
    ranks. An agent that got SIGTERM will end as well; if most agents got SIGTERM, a stop is planned. So Slurm's word is
    awaited first.
    """
    failing, seen = gang_turn.index.agent_failed | gang_turn.index.sigterm_received, gang_turn.observed
    if not failing or gang_turn.gang.plans.stop is not None or gang_turn.gang.phase not in ACTIVE | {Phase.GATHERING}:
        seen.agent_failure_since = 0.0
        return False
    seen.agent_failure_since = seen.agent_failure_since or gang_turn.now
    if gang_turn.now - seen.agent_failure_since < SLURM_ANSWER_S:
        gang_turn.turn.tick_at(seen.agent_failure_since + SLURM_ANSWER_S)
        return True
    words = {node: seen.status(node).failure or seen.status(node).sigterm_notice for node in sorted(failing)}
    if _too_many(gang_turn, len(words)):
        gang_end.end_gang(gang_turn, Phase.FAILED, gang_end.EXIT_AGENT, _first_failure(gang_turn.gang, words))
        return True
    for node, reason in words.items():
        failure_detector.remove_member(gang_turn, gang_turn.gang.roster.members[node], f"{node}: {reason}", alive=True)
    return False


def _first_failure(gang: Gang, words: Mapping[str, str]) -> str:
    """The first error, with all nodes that have reported it, those that were removed for it too."""
    first = next(iter(words.values()))
    nodes = {node for node, reason in words.items() if reason == first}
    nodes |= {m.node for m in gang.roster.members.values() if m.removed and m.removal_reason == f"{m.node}: {first}"}
    return f"{listed(sorted(nodes, key=lambda node: (len(node), node)), ', ')}: {first}"


def _too_many(gang_turn: GangTurn, failing: int) -> bool:
    """So many failing agents are most of the gang, or leave too few nodes to begin with. While the gang gathers, nodes
    that have not attached count as nodes, and members that were removed for the same cause count as failing."""
    gang = gang_turn.gang
    if gang.phase is not Phase.GATHERING:
        return 2 * failing > len(gang_turn.index.present)
    nodes = max(len(gang.roster.members), len(gang.slurm.job_nodes) or gang.spec.nodes + gang.spec.spares)
    failing += sum(member.removed for member in gang.roster.members.values())
    return 2 * failing > nodes or nodes - failing < gang.spec.fewest


def _supervise_running(gang_turn: GangTurn) -> None:
    gang = gang_turn.gang
    if _fence_crashed(gang_turn):
        return
    index = gang_turn.index
    whole = index.reported == gang.ranks
    # A step needs every rank, though one of them may be out of the coordinator's reach.
    if (whole or index.progressed) and gang.phase is Phase.STARTING:
        gang_turn.turn.record(facts.PhaseChanged(gang.id, Phase.RUNNING, ""))
    if index.progressed and not progress_timeouts.has_finished_step(gang_turn):
        watched = gang_turn.turn.observed.observing_since <= gang.newest.started_at
        gang_turn.turn.record(facts.FirstStep(gang.id, gang.newest.generation, _first_step(gang_turn), watched))
    attribution.attribute_to_node(gang_turn)
    corruption_detector.note_not_finite(gang_turn)
    corruption_detector.note_corrupt_copies(gang_turn)
    restore_plan.note_restored(gang_turn)
    if return_to_agreement.fence_if_replicas_disagree(gang_turn):
        return
    if whole and gang.plans.swap is not None and gang.plans.stop is None and planned_swap.have_ranks_stopped(gang_turn):
        (planned_growth if gang.plans.swap.nodes else planned_swap).fence_stopped(gang_turn)
    elif whole and index.exited_cleanly == index.reported:
        completion.complete(gang_turn)
    elif not planned_stop.fence_if_overdue(gang_turn) and not hang_detector.detect_hang(gang_turn):
        _release_removed(gang_turn)
        straggler_detector.detect_stragglers(gang_turn)
        planned_swap.respond(gang_turn)
        planned_growth.request_and_plan_growth(gang_turn)
        flushing.start_requested_flush(gang_turn)
        flushing.start_due_flush(gang_turn)


def _first_step(gang_turn: GangTurn) -> int:
    return min(
        rank.step for seat in gang_turn.gang.roster.seats for rank in _ranks_on(gang_turn, seat.node) if rank.progressed
    )


def _fence_crashed(gang_turn: GangTurn) -> bool:
    index = gang_turn.index
    if not index.crashed:
        return False
    nodes = sorted(index.crashed, key=lambda node: index.seats[node].group_rank)
    exits = [attribution.exit_of(gang_turn, node, rank) for node in nodes for rank in _ranks_on(gang_turn, node)]
    failed = [one for one in exits if one.failed]
    if attribution.may_have_failed_earlier_elsewhere(gang_turn, failed):
        return True  # `failure_detector.examine` suspects the agents that do not come
    # An agent that has fenced the running generation by itself was cut off: not a fault of the software, unless a rank
    # of it had crashed.
    crashed = [
        one
        for one in failed
        if one.by_fault_of_its_own
        or gang_turn.observed.status(one.node).fenced_generation < gang_turn.gang.newest.generation
    ]
    if crashed:
        # A script that fails during a planned stop is not at fault.
        first = attribution.first_to_fail(crashed)
        stops = gang_turn.gang.plans.stop is not None
        failure_detector.fence_generation(
            gang_turn,
            _exit_reason(first.node, first.rank),
            hardware=stops,
            suspected_at=gang_turn.now,
            crashed_on=first.node,
        )
    else:
        words = f"{failed[0].node} was cut off from the coordinator and most of its gang, and has ended its ranks"
        failure_detector.fence_generation(gang_turn, words, hardware=True, suspected_at=gang_turn.now)
    return True


def _exit_reason(node: str, rank: RankState) -> str:
    code = rank.exit_code or 0
    how = f"was ended by signal {-code}{_SIGNALS_OF_LIMITS.get(-code, '')}" if code < 0 else f"exited with {code}"
    cause = attribution.cause_in(rank.stderr_tail)
    shown = cause if len(cause) <= REASON_LENGTH else f"{cause[: REASON_LENGTH - 3]}..."
    return f"rank {rank.rank} on {node} {how}" + (f": {shown}" if shown else "")


def _release_removed(gang_turn: GangTurn) -> None:
    """Release live nodes that carry no ranks again. The batch host can't be released, nor any node once it is dead.

    A node that may be the cause of crashes stays until that is decided: Slurm drains it only while the job has it.
    """
    gang = gang_turn.gang
    undecided = {gang.recovery.unattributed_node} if progress_timeouts.has_finished_step(gang_turn) else set()
    leaving = [gang.roster.members[node] for node in sorted(gang_turn.index.to_release - undecided)]
    if not leaving or gang.phase is not Phase.RUNNING or gang_turn.turn.limits.observe:
        return
    if not progress_timeouts.has_finished_step(gang_turn) and gang_turn.now - gang.phase_at < RELEASE_AFTER_S:
        gang_turn.turn.tick_at(gang.phase_at + RELEASE_AFTER_S + 0.01)
        return
    for member in leaving:
        if member.job != gang.slurm.job:
            shared_pool.release_member(gang_turn, member)
        elif not gang_end.batch_host_dead(gang):
            gang_turn.turn.owe("let_go", gang.id, gang.slurm.job, f"muster: {member.removal_reason}", node=member.node)
