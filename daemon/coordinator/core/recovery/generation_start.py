"""The start of a generation: its seats, and the state that its ranks start from.

After a loss, the ranks of a second, healthy node move, too, if the steps until the next loss save more time than the
transfer of the node's state takes. Such a move costs no committed step: the ranks' shards stand in the memory of their
old node and of its holders, which stay in the gang, and each is a source (`shard_sources.choose_sources`). What it
costs is the time of one more transfer, for which the recovery waits. So no ranks move to a spare that is doubtful, and
none do while nothing is known of the size of the state.
"""

from collections.abc import Sequence
from functools import partial

from muster.checkpoint.redundancy.scheme import Protection
from muster.daemon.coordinator.core.detection import attribution, failure_rate, node_checks
from muster.daemon.coordinator.core.recovery import (
    flushing,
    gang_end,
    planned_growth,
    planned_swap,
    restore_plan,
    shard_sources,
)
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.events import Shard, Version
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.observed_state import ObservedGang
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.turn import placement
from muster.daemon.coordinator.core.turn.communication import (
    closer_than_required,
    communicating_seats,
    communication_times,
    failure_domains_of,
    note_fabric,
    wider_than_asked,
)
from muster.daemon.coordinator.core.turn.turn import GangTurn
from muster.exit_codes import EXIT_NO_NODES
from muster.fabric.placement.maps.refill import STEPS_UNTIL_NEXT_LOSS, MovePrice


def next_seats(gang_turn: GangTurn) -> list[str] | None:
    """The nodes of the next generation, in the order of their seats; None: too few are usable."""
    gang, fabric, last_choices = gang_turn.gang, gang_turn.fabric, node_checks.last_choices(gang_turn)
    usable = [member.node for member in gang_turn.usable()]
    groups = communicating_seats(gang.spec)
    if not gang.roster.seats:
        return placement.first_seats(
            fabric, usable, gang.spec.nodes, last_choices, groups, gang.spec.spread_spares, gang_turn.own_nodes
        )
    before = gang.seats_to_fill()
    if len(before) < gang.spec.nodes:
        groups = ()  # fewer replicas, and replicas alone can be fewer
    fewest = min(len(before), gang.spec.fewest)
    price = price_of_second_move(gang_turn) if groups and not set(before).issubset(usable) else None
    # A pool node without ranks comes after the job's own spares, and before any that is hardly fit.
    last_choices = {**planned_growth.seated_last(gang), **{node: 1 + last for node, last in last_choices.items()}}
    refilled = placement.refill_seats(fabric, before, usable, fewest, last_choices, groups, price)
    return refilled and planned_growth.grown_seats(gang_turn, refilled)


def price_of_second_move(gang_turn: GangTurn) -> MovePrice | None:
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


def start(gang_turn: GangTurn, ranked: list[str]) -> None:
    """Start a generation on the nodes `ranked`, unless its state may still come, or is to be written before."""
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
        gang_end.end_gang(gang_turn, Phase.FAILED, EXIT_NO_NODES, words)
        return
    wider, extra_s = wider_than_asked(gang.spec, ranked, fabric), 0.0
    if wider:
        times = communication_times(gang.spec, ranked, fabric)
        wider, extra_s = f"{wider}; {times.words}", times.extra
    origin = version or (gang.checkpoint.durable_version if gang.checkpoint.durable_path else None)
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
            fenced_at=gang_turn.observed.ranks_ended_at,
            action=_action(gang, ranked),
            crashed_on=_crashed_on(gang, gang_turn.observed),
            agreed_groups=restore_plan.agreed_groups(gang_turn.shards_in_memory(), version),
            warning=warning,
            resharded=version is not None
            and restore_plan.is_resharded(gang_turn, len(ranked) * gang.spec.ranks_per_node, version),
            close_copies=close,
            wider_groups=wider,
            extra_communication_s=extra_s,
            skip_to_step=gang.restore.skip_to(origin) if origin is not None else 0,
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
    planned = "planned swap" if gang.plans.swap is not None and gang.plans.swap.node else "swap"
    return planned_growth.action(gang.plans.swap, before, ranked) or planned


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
    sources, others = shard_sources.sources_to_start(
        gang_turn.shards_in_memory(), rebuilt, version, ranks_needed(version), home, leaving
    )
    return version, sources, others, warning


def _crashed_on(gang: Gang, seen: ObservedGang) -> str | None:
    """The node on which ranks crashed and ended the generation before; None: there was no recovery."""
    if not gang.recovery.recoveries:
        return None
    return attribution.find_crashed_node(gang.recovery.recoveries[-1], gang.roster, gang.newest, seen)
