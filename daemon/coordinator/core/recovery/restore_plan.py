"""The restore plan: which version a generation starts from. Where its shards are is in `shard_sources`.

The version is the newest of which a surviving node holds every rank's shard. Versions are never mixed: if one rank
lacks the newest, the whole gang takes the one before. A generation with fewer ranks than wrote the version needs only
as many shards as it has ranks if the ranks hold replicas of one state, and with more ranks no others than there are
(`ranks_needed`). If they hold different parts of it (sharded state), it needs all shards, and each rank puts its state
together from them (`is_resharded`).

A version on which replicas disagree that agreed before is no source. The commit leader makes such a version void; it
may fail before all agents know. If neither memory nor durable storage has another version, it is restored with a
warning: the user can still start afresh, and could not get lost work back.

A version is complete for durable storage only with all ranks that wrote it. So between a shrink of replicas and the
first commit after it, a lost shard leaves nothing newer to write than the newest durable checkpoint.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from muster.checkpoint.format.replica_agreement import ReplicaAgreement, ReplicaDigest, ReplicaDigests
from muster.checkpoint.redundancy.schemes import source_words
from muster.daemon.coordinator.core.detection import failure_detector
from muster.daemon.coordinator.core.recovery import shard_sources
from muster.daemon.coordinator.core.recovery.shard_sources import Held, Rebuildable
from muster.daemon.coordinator.core.state.events import Version
from muster.daemon.coordinator.core.state.facts import StateRestored
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.turn.turn import GangTurn

MOST_NAMED = 8
"""Nodes that the record of a restore names."""
DISAGREEMENT_WARNING = (
    "its replicas disagree, so the numbers of some ranks are wrong, but neither memory nor durable storage has another "
    "version"
)


def newest_restorable(
    gang_turn: GangTurn, ranks_of: Callable[[Version], int], held: Held | None = None
) -> Version | None:
    """The newest version in the memory of the gang's agents that may be restored or flushed; None if there is none.

    The commit leader has compared what it has committed, so only newer versions are compared here.

    `held`: the shards to choose from; None: those in memory.
    """
    held, gang = gang_turn.shards_in_memory() if held is None else held, gang_turn.gang
    held = _without_rolled_back(held, gang.restore.void_generation)
    differ = gang.findings.disagreement
    if differ is not None and differ.comparison_ends:
        return newest_complete_version(held, ranks_of)
    statuses = [gang_turn.observed.status(node) for node in held]
    committed = (status.committed for status in statuses)
    newest_committed = max((version for version in committed if version is not None), default=Version(0, 0))
    found = [status.disagreement.version for status in statuses if status.disagreement is not None]
    found += [differ.version] if differ is not None else []
    void = [version for version in found if version > newest_committed]
    held = _without_unknown_replicas(held, void)
    # An earlier run may have ended comparing.
    agreed = gang.newest.agreed_groups if gang.restore.restored_version is not None else ()
    differing = _groups_that_differ(held, void, _complete_versions(held, ranks_of))
    return newest_complete_version(held, ranks_of, newest_committed, {*agreed, *differing})


def _without_rolled_back(held: Held, void_generation: int) -> Held:
    """`held` without what generations before a roll back have written."""
    if not void_generation:
        return held
    return {
        node: [shard for shard in shards if shard.version.generation > void_generation] for node, shards in held.items()
    }


def _without_unknown_replicas(held: Held, void: Sequence[Version]) -> Held:
    """`held` without shards of void versions that nobody can compare: what is rebuilt says nothing of replicas."""
    return {
        node: [shard for shard in shards if shard.replica_group or not _is_void(shard.version, void)]
        for node, shards in held.items()
    }


def _groups_that_differ(held: Held, void: Sequence[Version], complete: Sequence[Version]) -> set[int]:
    """The replica groups that differ at a void version. They have agreed before, although no version may be left that
    shows it. A group that differs at each older complete version, too, has a reason of its own."""
    if not void:
        return set()
    versions = {shard.version for shards in held.values() for shard in shards if _is_void(shard.version, void)}
    found = {group for version in versions for group in _differing(held, version)}
    older = [_differing(held, version) for version in complete if version < max(void) and version not in versions]
    return found - older[0].intersection(*older) if older else found


def _differing(held: Held, version: Version) -> set[int]:
    """The replica groups whose ranks have written different states of a version."""
    seen = {replica for replica in _digests(held, version).values() if replica.group}
    return {group for group, count in Counter(replica.group for replica in seen).items() if count > 1}


def _is_void(version: Version, void: Sequence[Version]) -> bool:
    """A commit leader has found that replicas disagree at a version of `void`. Later versions of its generation are
    void, too: what differs once goes on differing."""
    return any(version.generation == one.generation and version >= one for one in void)


def newest_left(
    gang_turn: GangTurn, ranks_of: Callable[[Version], int], held: Held | None = None
) -> tuple[Version | None, str]:
    """The version in memory to go on from, and a warning if its replicas disagree. Such a version counts only if the
    gang would have to start afresh otherwise. `held` as in `newest_restorable`."""
    version = newest_restorable(gang_turn, ranks_of, held)
    if version is not None or gang_turn.gang.checkpoint.durable_version is not None:
        return version, ""
    version = newest_complete_version(gang_turn.shards_in_memory() if held is None else held, ranks_of)
    return version, DISAGREEMENT_WARNING if version is not None else ""


def with_rebuilt(gang_turn: GangTurn, count: int | None = None) -> tuple[Held, list[Rebuildable]]:
    """The shards in memory, with those that can be rebuilt; and the latter alone.

    `count`: of the ranks of a generation that starts. Ranks that put their states together from the shards of another
    number of ranks need whole shards, so nothing is rebuilt for them. None: for a flush, whose sources are the ranks
    that wrote a version. What combines further ranks, which have started from it after a growth, is of no use there.
    """
    ranks_of = gang_turn.gang.ranks_of
    held = gang_turn.shards_in_memory()
    leaving = [member.node for member in gang_turn.gang.roster.members.values() if member.removed]
    found = [
        one
        for one in shard_sources.rebuildable(
            gang_turn.gang.spec.redundancy, held, gang_turn.combined_in_memory(), leaving
        )
        if (
            not is_resharded(gang_turn, count, one.shard.version)
            if count is not None
            else max(one.ranks) < ranks_of(one.shard.version)
        )
    ]
    return shard_sources.added(held, found), found


def is_resharded(gang_turn: GangTurn, count: int, version: Version) -> bool:
    """Whether a generation of `count` ranks puts its states together from the shards of all ranks that wrote `version`,
    and no rank has a shard of its own."""
    return count != gang_turn.gang.ranks_of(version) and _is_sharded(gang_turn.shards_in_memory(), version)


def ranks_needed(gang_turn: GangTurn, count: int, version: Version) -> int:
    """How many ranks' shards a generation of `count` ranks needs to start from `version`: those of ranks 0 and up.

    Of replicated state, with fewer ranks than wrote the version it needs its own only. With more, each further rank
    starts from the state that it shares with the rank of `versions.source_rank`.
    """
    written = gang_turn.gang.ranks_of(version)
    return written if is_resharded(gang_turn, count, version) else min(count, written)


def memory_may_return(gang_turn: GangTurn) -> bool:
    """An agent that holds the only copy of what is not durable yet may be about to attach again: its stream has just
    ended, or the coordinator has just started. A recovery waits for its own nodes; this is about nodes that were left
    before, too."""
    gang, observed, agents = gang_turn.gang, gang_turn.turn.observed, gang_turn.observed.agents
    away = [m.node for m in gang.roster.members.values() if m.alive and not gang_turn.observed.is_attached(m.node)]
    saved = gang.checkpoint.durable_version or Version(0, 0)
    known = {node: agents[node] for node in away if node in agents}
    empty = {
        node
        for node, agent in known.items()
        if all(shard.version <= saved for shard in agent.status.shards)
        and all(part.version <= saved for part in agent.status.combined)
    }
    gone_at = (known[node].gone_at if node in known else 0.0 for node in away if node not in empty)
    until = [max(observed.observing_since, at) + failure_detector.REATTACH_S for at in gone_at]
    pending = [at for at in until if at > gang_turn.now]
    if not gang.newest.stepped_generation or not pending:
        return False
    gang_turn.turn.tick_at(min(pending))
    return True


def _is_sharded(held: Held, version: Version) -> bool:
    """Whether the ranks that wrote a version hold different parts of one state. Each of their shards says so."""
    return any(shard.sharded for shards in held.values() for shard in shards if shard.version == version)


def newest_complete_version(
    held: Held,
    ranks_of: Callable[[Version], int],
    compared_after: Version | None = None,
    agreed: Iterable[int] = (),
) -> Version | None:
    """The newest version of which the shards of ranks 0 to `ranks_of(version)` - 1 are all held; None if there is
    none.

    `compared_after`: a later version does not count if its replicas disagree, and agreed before: at an older version
    that is whole, or because their group is in `agreed`. It does count if the ranks in the minority are not needed.
    """
    complete = _complete_versions(held, ranks_of)
    if compared_after is not None:
        first_wrong = _first_wrong_ranks(held, complete, agreed)
        complete = [v for v in complete if v <= compared_after or first_wrong.get(v, ranks_of(v)) >= ranks_of(v)]
    return max(complete, default=None)


def _complete_versions(held: Held, ranks_of: Callable[[Version], int]) -> list[Version]:
    ranks: dict[Version, set[int]] = {}
    for shards in held.values():
        for shard in shards:
            ranks.setdefault(shard.version, set()).add(shard.rank)
    return [version for version, have in ranks.items() if have.issuperset(range(ranks_of(version)))]


def agreed_groups(held: Held, version: Version | None) -> tuple[int, ...]:
    """The replica groups of several ranks that agree at a version."""
    agreement = ReplicaAgreement()
    if version is not None:
        agreement.judge(_digests(held, version))
    return tuple(sorted(agreement.agreed))


def _first_wrong_ranks(held: Held, complete: Sequence[Version], agreed_groups: Iterable[int]) -> dict[Version, int]:
    """For each version on which replicas disagree that agreed before: the first rank that may be wrong."""
    agreement = ReplicaAgreement(set(agreed_groups))
    found = {version: agreement.judge(_digests(held, version)) for version in sorted(complete)}
    return {version: disagreement.ranks[0] for version, disagreement in found.items() if disagreement is not None}


def _digests(held: Held, version: Version) -> ReplicaDigests:
    """What the ranks have written of the state that they share with others."""
    shards = (shard for of_node in held.values() for shard in of_node if shard.version == version)
    return {shard.rank: ReplicaDigest(shard.replica_group, shard.replica_digest) for shard in shards}


def memory_is_obsolete(gang: Gang | None, generation: int) -> bool:
    """Whether the memory that nodes keep of an earlier run is of no more use. `generation`: the newest one of that run.

    It is obsolete when a newer generation has started, or the gang is over. Nothing is known of an unknown gang, so its
    memory is kept.
    """
    return gang is not None and (gang.final or gang.newest.generation > generation)


def shares(gang: Gang) -> dict[str, tuple[int, list[str]]]:
    """How many ranks of the running generation get their states from where, and from which other nodes: from the "own
    memory" of their nodes, a "former node" that still has the shard, or as `schemes.source_words` says it."""
    per_node = gang.spec.ranks_per_node
    home = {seat.group_rank: seat.node for seat in gang.roster.seats}
    found: dict[str, tuple[int, list[str]]] = {}
    for source in gang.restore.restore_sources:
        here = home.get(source.rank // per_node) == source.node
        kind = "own memory" if here else "former node" if source.primary else ""
        kind = kind if kind and not source.combined_ranks else source_words(bool(source.combined_ranks))
        ranks, nodes = found.get(kind, (0, []))
        if kind != "own memory" and source.node not in nodes:
            nodes.append(source.node)
        found[kind] = ranks + 1, nodes
    return found


def note_restored(gang_turn: GangTurn) -> None:
    """Record that all ranks of the running generation have their states, once."""
    gang, done = gang_turn.gang, gang_turn.index.restored
    if gang.restore.restored_generation == gang.newest.generation or len(done) < len(gang.roster.seats):
        return
    reports = [report for node in done if (report := gang_turn.observed.status(node).restore) is not None]
    loaded = next((report for report in reports if report.folder), None)
    version = loaded.version if loaded is not None else gang.restore.restored_version
    if version is None:
        return
    fetched: Counter[str] = Counter()
    for report in reports:
        fetched.update(report.fetched)
    gang_turn.turn.record(
        StateRestored(
            gang.id,
            gang.newest.generation,
            version,
            own_bytes=sum(report.own for report in reports),
            copied_bytes=sum(report.copied for report in reports),
            fetched_bytes=fetched.total(),
            fetched=tuple(sorted(fetched.items(), key=lambda item: (-item[1], item[0]))[:MOST_NAMED]),
            seconds=max((report.seconds for report in reports), default=0.0),
            folder=loaded.folder if loaded is not None else "",
            loaded_bytes=sum(report.loaded for report in reports),
            damage=loaded.damage if loaded is not None else "",
        )
    )
