"""Flushes: which version goes to durable storage, who writes it, and when that is over."""

from muster.daemon.coordinator.core.recovery import restore_plan
from muster.daemon.coordinator.core.state import facts as f
from muster.daemon.coordinator.core.state.durable_state import Flush, Gang
from muster.daemon.coordinator.core.state.events import Version
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.state.turn import GangTurn

FLUSH_S = 120.0
"""A flush that takes longer is given up."""


def begin(gt: GangTurn, reason: str, after: Phase) -> bool:
    """Order the last checkpoint written before `after`. False: there is nothing newer than what is durable."""
    gang, version = gt.gang, unsaved(gt)
    if version is None:
        return False
    gt.turn.record(f.PhaseChanged(gang.id, Phase.DRAINING, reason, after))
    _order(gt, version, reason)
    return True


def go_on(gt: GangTurn) -> bool:
    """What was written had been the newest, and another copy of a newer one has arrived since: that is written too."""
    gang, version = gt.gang, unsaved(gt)
    if version is None or gang.flush is None or not gang.flush.path:
        return False
    _order(gt, version, gang.flush.reason)
    return True


def unsaved(gt: GangTurn) -> Version | None:
    """The newest version that stands whole, where it can be written and is newer than what is durable."""
    if not gt.gang.spec.durable_dir:
        return None
    version, durable = restore_plan.newest_complete(gt.held(), gt.gang.ranks_of), gt.gang.durable_version
    return version if version is not None and (durable is None or version > durable) else None


def _order(gt: GangTurn, version: Version, reason: str) -> None:
    serial = gt.gang.flush.serial + 1 if gt.gang.flush else 1
    home = {s.rank: n for n, shards in gt.held().items() for s in shards if s.own and s.version == version}
    leaving = frozenset(m.node for m in gt.gang.members.values() if m.out)
    chosen = restore_plan.sources(gt.held(), version, gt.gang.ranks_of(version), home, leaving)
    gt.turn.record(f.Flushing(gt.gang.id, serial, version, chosen, reason))


def on_request(gt: GangTurn) -> None:
    """Order what a user has asked for, once nothing else is being written."""
    gang = gt.gang
    if not gt.seen.flush or gang.phase is not Phase.RUNNING or (gang.flush and not over(gang)):
        return
    version = restore_plan.newest_complete(gt.held(), gang.ranks_of)
    asked_by, gt.seen.flush = gt.seen.flush, ""
    if version is not None and gang.spec.durable_dir:
        _order(gt, version, f"asked for by {asked_by}")


def over(gang: Gang) -> bool:
    """The newest flush is written, or has failed."""
    return gang.flush is not None and bool(gang.flush.path or gang.flush.error)


def progress(gt: GangTurn) -> None:
    """The flush is over when every agent that writes a part of it has said so."""
    gang = gt.gang
    flush = gang.flush
    if flush is None or over(gang):
        return
    tally = gt.tally
    if lost := sorted(node for node in tally.unwritten if (member := gang.members.get(node)) is None or member.gone):
        _anew(gt, flush, f"{', '.join(lost)} went while it was written")
        return
    error = _error(gt, flush) if tally.botched else ""
    late_at = max(flush.asked_at, gt.turn.sight.since) + FLUSH_S  # after a restart its writers have to tell anew
    if not error and gt.now > late_at:
        error = f"not written within {FLUSH_S:.0f} s"
    if error:
        gt.turn.record(f.Flushed(gang.id, flush.serial, "", error))
    elif not tally.unwritten:
        gt.turn.record(f.Flushed(gang.id, flush.serial, durable_path(gang, flush.version), ""))
    else:
        gt.turn.wake(late_at + 0.01)


def _anew(gt: GangTurn, flush: Flush, why: str) -> None:
    """Writers are gone: have those write who hold the last checkpoint now. Nobody may: then it has failed."""
    gang = gt.gang
    version = unsaved(gt) if gang.phase is Phase.DRAINING else None
    if version is None:
        gt.turn.record(f.Flushed(gang.id, flush.serial, "", why))
    else:
        _order(gt, version, f"{flush.reason}; {why}")


def _error(gt: GangTurn, flush: Flush) -> str:
    node = next(source.node for source in flush.sources if source.node in gt.tally.botched)
    return f"{node}: {gt.seen.status(node).flush_error}"


def durable_path(gang: Gang, version: Version) -> str:
    """Folder of a durable checkpoint, as muster.checkpoint.format.durable_folders names it."""
    return f"{gang.spec.durable_dir}/step_{version.step:08d}_g{version.generation}_{gang.id}"
