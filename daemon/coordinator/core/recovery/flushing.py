"""Flushes to durable storage: which version, who writes it, and when it is written."""

from math import inf

from muster.daemon.coordinator.core.detection import circuit_breaker
from muster.daemon.coordinator.core.recovery import restore_plan, shard_sources
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.checkpoint import Flush
from muster.daemon.coordinator.core.state.events import Version
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.observed_state import ObservedGang
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.turn.turn import GangTurn
from muster.fabric.cost.reliability import daly_interval
from muster.wording import counted

RETRY_S = 60.0
"""Seconds between a failed flush and the next one that the job's policy asks for."""
MEMORY_LOST_SHARE = 0.1
"""Share of the failures after which no memory holds the state: several nodes at once, or a requeue. An assumption."""
LEAST_COST = 0.01
"""Part of its time that a flush costs the training at least: less can't be told from the length of a step."""
UNMEASURED_INTERVAL_S = 600.0
"""Seconds to the first flush with durable_every = auto: nothing is known of its cost before."""


def start_final_flush(gang_turn: GangTurn, reason: str, after: Phase) -> bool:
    """Order the last checkpoint, to be written before `after`. False: nothing is newer than the durable checkpoint."""
    gang, version = gang_turn.gang, unsaved_version(gang_turn)
    if version is None:
        return False
    gang_turn.turn.record(facts.PhaseChanged(gang.id, Phase.DRAINING, reason, after))
    _order_flush(gang_turn, version, reason)
    return True


def flush_before_start(gang_turn: GangTurn, version: Version | None) -> bool:
    """Order a flush of what can be rebuilt and not be restored, because the next generation has another
    number of ranks and reads parts of whole shards: it starts from the durable checkpoint then.

    `version`: in memory, from which it would start. True: the flush runs. Each recovery tries it once.
    """
    gang, newest = gang_turn.gang, unsaved_version(gang_turn)
    if not gang.spec.redundancy.rebuilds or newest is None or (version is not None and version >= newest):
        return False
    if gang.checkpoint.is_flushing:
        return True  # one that was ordered before ends first
    if (
        gang.checkpoint.flush is not None
        and gang.checkpoint.flush.error
        and gang.checkpoint.flush.asked_at >= gang.phase_at
    ):
        return False
    if circuit_breaker.too_many_records(gang_turn.turn.state, gang.account, gang_turn.turn.limits, gang_turn.now):
        return False
    _order_flush(gang_turn, newest, "another number of ranks goes on, and a lost state can only be rebuilt whole")
    return True


def flush_newer_version(gang_turn: GangTurn) -> bool:
    """Order another flush if a newer version has become whole since the last one. True: it was ordered."""
    gang, version = gang_turn.gang, unsaved_version(gang_turn)
    if version is None or gang.checkpoint.flush is None or not gang.checkpoint.flush.path:
        return False
    if circuit_breaker.too_many_records(gang_turn.turn.state, gang.account, gang_turn.turn.limits, gang_turn.now):
        return False  # agents whose owner lies could report newer versions without end
    _order_flush(gang_turn, version, gang.checkpoint.flush.reason)
    return True


def unsaved_version(gang_turn: GangTurn) -> Version | None:
    """The newest whole version, if it can be written and is newer than the durable one; else None."""
    gang = gang_turn.gang
    if not gang.spec.durable_dir:
        return None
    version, _ = restore_plan.newest_left(gang_turn, gang.ranks_of, restore_plan.with_rebuilt(gang_turn)[0])
    return (
        version
        if version is not None
        and (gang.checkpoint.durable_version is None or version > gang.checkpoint.durable_version)
        else None
    )


def _order_flush(gang_turn: GangTurn, version: Version, reason: str) -> None:
    serial = gang_turn.gang.checkpoint.flush.serial + 1 if gang_turn.gang.checkpoint.flush else 1
    held, _ = restore_plan.with_rebuilt(gang_turn)
    _, warning = restore_plan.newest_left(gang_turn, gang_turn.gang.ranks_of, held)
    if warning and warning not in reason:
        reason = f"{reason}; {warning}"
    observed = gang_turn.observed
    observed.flush_costs.begin(serial, observed.last_step, gang_turn.now)
    observed.flush_pace.begin(serial)
    sources = _sources(gang_turn, version)
    gang_turn.turn.record(facts.FlushOrdered(gang_turn.gang.id, serial, version, sources, reason))


def _sources(gang_turn: GangTurn, version: Version) -> tuple[facts.ShardSource, ...]:
    """The node that writes each rank's shard: one that has reported it, or else, of a version that the running
    generation has committed, the rank's own node. A shard that no node holds is rebuilt by one of those nodes that hold
    what it is rebuilt from."""
    gang, held = gang_turn.gang, gang_turn.shards_in_memory()
    home = {s.rank: n for n, shards in held.items() for s in shards if s.primary and s.version == version}
    leaving = frozenset(m.node for m in gang.roster.members.values() if m.removed)
    ranks = gang.ranks_of(version)
    chosen = shard_sources.choose_sources(held, version, ranks, home, leaving)
    if len(chosen) == ranks:
        return chosen
    lost = set(range(ranks)) - {source.rank for source in chosen}
    rebuilt = tuple(shard_sources.sources_of(restore_plan.with_rebuilt(gang_turn)[1], version, lost))
    if {source.rank for source in rebuilt} == lost and not _all_train(gang_turn):
        return (*chosen, *rebuilt)
    per_node = gang.spec.ranks_per_node
    own = ((seat.group_rank * per_node + local, seat.node) for seat in gang.roster.seats for local in range(per_node))
    return tuple(facts.ShardSource(rank, node, True, "") for rank, node in sorted(own))


def _committed_version(gang_turn: GangTurn) -> Version | None:
    """The newest version that the running generation has committed, as the commit leader says; None: there is none, or
    the agent of a node with ranks is not attached.

    Each rank's own node holds this version, or knows of a newer one that is committed, and the agents agree which one
    they write (checkpoint/store/flush/flush_version.py). So it can be flushed although no two agents have reported
    shards of one version: agents report four times a second, and a step may take less.
    """
    gang, observed = gang_turn.gang, gang_turn.observed
    leader = next((seat.node for seat in gang.roster.seats if seat.group_rank == 0), "")
    committed = observed.status(leader).committed
    if committed is None or committed.generation != gang.newest.generation:
        return None
    return committed if _all_train(gang_turn) else None


def _all_train(gang_turn: GangTurn) -> bool:
    """The generation runs, and the agents of all its nodes are attached."""
    gang = gang_turn.gang
    return gang.phase is Phase.RUNNING and all(gang_turn.observed.is_attached(seat.node) for seat in gang.roster.seats)


def _newest_version(gang_turn: GangTurn) -> Version | None:
    """The newest version that can be flushed while the gang trains."""
    if (committed := _committed_version(gang_turn)) is not None:
        return committed
    return restore_plan.newest_restorable(gang_turn, gang_turn.gang.ranks_of)


def start_requested_flush(gang_turn: GangTurn) -> None:
    """Order the flush that a user has requested, once no other flush runs. A request beyond the limits is dropped: the
    API has told the user why."""
    gang = gang_turn.gang
    if not gang_turn.observed.flush_requested_by or gang.phase is not Phase.RUNNING or gang.checkpoint.is_flushing:
        return
    version = _newest_version(gang_turn)
    asked_by, gang_turn.observed.flush_requested_by = gang_turn.observed.flush_requested_by, ""
    if version is None or not gang.spec.durable_dir:
        return
    if not circuit_breaker.why_no_request(gang_turn.turn.state, gang.account, gang_turn.turn.limits, gang_turn.now):
        _order_flush(gang_turn, version, f"asked for by {asked_by}")


def start_due_flush(gang_turn: GangTurn) -> None:
    """Order the flush that is due by the job's policy (`durable_every`), once no other flush runs.

    After a failed flush the policy asks again as often as before, but not within RETRY_S: storage that is full or dead
    stays so for some time. Training goes on meanwhile.
    """
    gang = gang_turn.gang
    words = _policy_words(gang_turn)
    if not words or gang.phase is not Phase.RUNNING or gang.checkpoint.is_flushing:
        return
    version = _newest_version(gang_turn)
    if version is None or not gang.spec.durable_dir:
        return
    if gang.checkpoint.durable_version is not None and version <= gang.checkpoint.durable_version:
        return
    due_at = _due_at(gang_turn, version)
    if gang_turn.now < due_at:
        if due_at < inf:
            gang_turn.turn.tick_at(due_at)
    elif circuit_breaker.why_no_request(gang_turn.turn.state, gang.account, gang_turn.turn.limits, gang_turn.now):
        gang_turn.turn.tick_at(gang_turn.now + RETRY_S)
    else:
        _order_flush(gang_turn, version, words)


def _due_at(gang_turn: GangTurn, version: Version) -> float:
    """When `version` shall be written by the job's policy (seconds); infinite: a later version."""
    gang = gang_turn.gang
    retry_at = (
        gang.checkpoint.flush.asked_at + RETRY_S if gang.checkpoint.flush and gang.checkpoint.flush.error else 0.0
    )
    if (every_steps := gang.spec.durable_every_steps) > 0:
        saved = gang.checkpoint.durable_version.step if gang.checkpoint.durable_version is not None else 0
        return retry_at if version.step - saved >= every_steps else inf
    before = gang.checkpoint.flush.asked_at if gang.checkpoint.flush else gang.account.registered_at
    return max(before + durable_interval_s(gang, gang_turn.observed), retry_at)


def durable_interval_s(gang: Gang, observed: ObservedGang) -> float:
    """Seconds between two durable checkpoints by the job's policy; 0: the policy does not count seconds.

    With "auto" it is Daly's interval for what a flush costs the training. Only failures that take all memory count: one
    in 1 / MEMORY_LOST_SHARE. Storage is shared, so it rests for at least as long as a flush takes.
    """
    spec = gang.spec
    if not spec.durable_auto:
        return spec.durable_every_s
    took_s, stall_s = observed.flush_costs.took_s, observed.flush_costs.stall_s
    if not took_s or not gang.newest.mtbf_s:
        return UNMEASURED_INTERVAL_S
    cost_s = max(stall_s, LEAST_COST * took_s)
    return max(daly_interval(gang.newest.mtbf_s / MEMORY_LOST_SHARE, cost_s), 2 * took_s)


def _policy_words(gang_turn: GangTurn) -> str:
    """The job's policy as the reason of a flush; empty: it has none."""
    spec = gang_turn.gang.spec
    if spec.durable_every_steps:
        return f"durable_every = {spec.durable_every_steps} steps"
    if spec.durable_auto:
        return f"durable_every = auto, now {durable_interval_s(gang_turn.gang, gang_turn.observed) / 60:.1f} minutes"
    return f"durable_every = {counted(spec.durable_every_s / 60, 'minute', form='g')}" if spec.durable_every_s else ""


def check_flush(gang_turn: GangTurn) -> None:
    """Record the end of the flush: every writer has reported its part, one has failed, or storage takes no more."""
    gang = gang_turn.gang
    flush = gang.checkpoint.flush
    if flush is None or flush.is_over:
        return
    index = gang_turn.index
    if lost := sorted(
        node for node in index.flush_pending if (member := gang.roster.members.get(node)) is None or member.gone
    ):
        _order_again(gang_turn, flush, f"{', '.join(lost)} went while it was written")
        return
    error = _flush_error(gang_turn, flush) if index.flush_failed else ""
    pace = gang_turn.observed.flush_pace
    if not error and index.flush_pending and gang_turn.now > pace.check_at:
        pace.begin(flush.serial)
        # After a restart the writers report again.
        start = max(flush.asked_at, gang_turn.turn.observed.observing_since)
        late_at, node = pace.late_at(index.flush_pending, start)
        if gang_turn.now > late_at:
            error = pace.words(node, flush.asked_at, gang_turn.now)
    if error:
        gang_turn.turn.record(facts.FlushEnded(gang.id, flush.serial, "", error))
    elif not index.flush_pending:
        observed = gang_turn.observed
        observed.flush_costs.end(flush.serial, observed.last_step, observed.pace.median_step_s, gang_turn.now)
        version = _written_version(gang_turn, flush)
        if version.generation <= gang.restore.void_generation:
            error = "the gang has gone back to an earlier checkpoint meanwhile"
            gang_turn.turn.record(facts.FlushEnded(gang.id, flush.serial, "", error, version))
            return
        path = durable_path(gang, version, flush.serial)
        gang_turn.turn.record(facts.FlushEnded(gang.id, flush.serial, path, "", version))
    else:
        gang_turn.turn.tick_at(pace.check_at + 0.01)


def _written_version(gang_turn: GangTurn, flush: Flush) -> Version:
    """The version that the agents have written: the ordered one, or a newer one that was committed meanwhile."""
    statuses = (gang_turn.observed.status(source.node) for source in flush.sources)
    written = (status.flushed_version for status in statuses if status.flushed_serial == flush.serial)
    return max((version for version in written if version is not None), default=flush.version)


def _order_again(gang_turn: GangTurn, flush: Flush, why: str) -> None:
    """Writers are gone: have the nodes write that hold the last checkpoint now. If no node can, the flush has
    failed."""
    gang = gang_turn.gang
    version = unsaved_version(gang_turn) if gang.phase is Phase.DRAINING else None
    if version is None:
        gang_turn.turn.record(facts.FlushEnded(gang.id, flush.serial, "", why))
    else:
        _order_flush(gang_turn, version, f"{flush.reason}; {why}")


def _flush_error(gang_turn: GangTurn, flush: Flush) -> str:
    node = next(source.node for source in flush.sources if source.node in gang_turn.index.flush_failed)
    return f"{node}: {gang_turn.observed.status(node).flush_error}"


def durable_path(gang: Gang, version: Version, serial: int) -> str:
    """Folder of a durable checkpoint, as muster.checkpoint.format.durable_folders names it. In a store of objects each
    flush has a folder of its own."""
    of_flush = f".flush{serial}" if "://" in gang.spec.durable_dir else ""
    return f"{gang.spec.durable_dir}/step_{version.step:08d}_g{version.generation}_{gang.id}{of_flush}"
