"""A roll back: the gang goes back to a durable checkpoint from before a loss that went wrong, and skips the batches
from there to past it.

The checkpoint is the newest durable one of a step that lies `margin_steps` or more before the last ordinary loss.
Memory holds the newest steps alone, which are too new; all of it is void from then on. The ranks are fenced and start
from that checkpoint. Their samplers count batches by steps (`sharded_sampler`), so to skip some is to count steps that
nobody has made. Nothing is rolled back for a script that keeps no such sampler.
"""

from dataclasses import dataclass

from muster.daemon.coordinator.core.detection import fencing
from muster.daemon.coordinator.core.losses.loss_rule import LossRule
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.checkpoint import DurableCheckpoint
from muster.daemon.coordinator.core.state.events import Version
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.turn.turn import GangTurn
from muster.wording import counted


@dataclass(frozen=True, slots=True)
class Trouble:
    """A loss that went wrong on `node` from `step` on. `ordinary_step`: of the newest loss before that was not.
    `newest_step`: of the newest one that is wrong."""

    node: str
    step: int
    ordinary_step: int
    newest_step: int


def too_many(gang: Gang, rule: LossRule, trouble: Trouble) -> str:
    """Why the gang is stopped instead of another roll back; empty: it is not."""
    recent = [one for one in gang.restore.roll_backs if abs(trouble.step - one.step) <= rule.within_steps]
    if len(recent) < rule.roll_backs:
        return ""
    return f"{counted(len(recent), 'roll back')} within {counted(rule.within_steps, 'step')}, and no more may be"


def why_impossible(gang_turn: GangTurn, rule: LossRule, trouble: Trouble) -> str:
    """Why the gang can't go back; empty: it can."""
    training = gang_turn.observed.status(trouble.node).training
    if training is None or not training.skips_batches:
        return "no roll back: the script gives its Checkpoint no ShardedSampler, so no batch can be skipped"
    if not gang_turn.gang.plans.are_none:
        return "no roll back: the ranks are asked to stop already"
    if _target(gang_turn, rule, trouble) is None:
        return f"no roll back: no durable checkpoint of step {_latest_step(rule, trouble)} or earlier is known"
    return ""


def carry_out(gang_turn: GangTurn, rule: LossRule, trouble: Trouble, reason: str) -> None:
    """Record the roll back, and fence the ranks."""
    gang, target = gang_turn.gang, _target(gang_turn, rule, trouble)
    assert target is not None
    batch = trouble.newest_step + rule.margin_steps + gang.restore.skipped_before(gang.newest.generation)
    gang_turn.turn.record(
        facts.RolledBack(gang.id, gang.newest.generation, trouble.step, target.version, target.path, batch, reason)
    )
    fencing.fence_generation(gang_turn, reason, hardware=True, suspected_at=gang_turn.now)


def _latest_step(rule: LossRule, trouble: Trouble) -> int:
    return max(0, trouble.ordinary_step - rule.margin_steps)


def _target(gang_turn: GangTurn, rule: LossRule, trouble: Trouble) -> DurableCheckpoint | None:
    """The newest durable checkpoint that is old enough and was not removed; None: there is none."""
    latest = _latest_step(rule, trouble)
    gang = gang_turn.gang
    kept = (one for one in _kept(gang, gang_turn.now) if not gang.restore.is_void(one.version))
    found = [one for one in kept if 0 < one.version.step <= latest]
    return max(found, key=lambda one: one.version, default=None)


def _kept(gang: Gang, now: float) -> list[DurableCheckpoint]:
    """The known durable checkpoints that the job keeps, the newest one first. The agents count as places what was
    rolled back, too, and what a flush writes now."""
    checkpoint, spec = gang.checkpoint, gang.spec
    newest = DurableCheckpoint(
        checkpoint.durable_path, checkpoint.durable_version or Version(0, 0), checkpoint.durable_at
    )
    known = [newest, *checkpoint.earlier_durable] if checkpoint.durable_path else []
    known.sort(key=lambda one: one.version, reverse=True)
    if not spec.durable_keep and not spec.durable_keep_s:
        return known
    fewest = max(1, spec.durable_keep) - checkpoint.is_flushing
    return [one for place, one in enumerate(known) if place < fewest or now - one.at < spec.durable_keep_s]
