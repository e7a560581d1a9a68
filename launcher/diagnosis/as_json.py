"""A diagnosis as JSON for scripts. SI units throughout: seconds, bytes, bytes a second. Shares are from 0 on. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from muster.fabric.groups.rank_groups import GroupKind
from muster.launcher.diagnosis.advice import advice
from muster.launcher.diagnosis.diagnosis import Diagnosis, Prediction
from muster.launcher.diagnosis.groups import PlacedKind, TornGroup
from muster.launcher.diagnosis.links import MeasuredLink, SlowLink
from muster.launcher.diagnosis.steps import wait_of


def to_dict(found: Diagnosis) -> dict[str, Any]:
    """The diagnosis. What is not known is null, and `unknown` says why."""
    gang = found.measured.gang
    return {
        "job": list(gang.slurm_job_ids),
        "gang": gang.gang_id,
        "name": gang.name,
        "phase": gang.phase,
        "generation": gang.generation,
        "step": gang.step,
        "last_words": found.last_words,
        "not_finite": gang.not_finite or None,
        "last_loss": gang.last_loss or None,
        "network": found.network.source,
        "groups": [_kind(one) for one in found.kinds],
        "torn_groups": [_torn(one) for one in found.torn],
        "links": [_link(one) for one in found.links],
        "slow_links": [_slow(one, kinds) for one, kinds in zip(found.slow, found.passing, strict=True)],
        "slow_uplinks_bytes_per_s": found.slow_uplinks,
        "nodes": [{"node": one.node, "health": one.verdict, "reason": one.reason} for one in found.reports],
        "step_s": found.measured.step_s or None,
        "compute_s": found.parts and found.parts.compute,
        "wait_s": found.parts and found.parts.wait,
        "fetch_s": found.parts and found.parts.fetch,
        "slowest_rank": found.slowest and asdict(found.slowest),
        "predicted": found.prediction and _prediction(found.prediction),
        "earlier": found.earlier and asdict(found.earlier),
        "past": [
            {
                "job": one.slurm_job_id,
                "generation": one.generation,
                "ended_s": one.ended_s,
                "steps": one.steps,
                "step_s": one.step_s,
                "best_step_s": one.best_step_s,
                "same_settings": one.same_settings,
                "nodes": list(one.nodes),
            }
            for one in found.measured.past
        ],
        "tier": found.prediction.tier.word if found.prediction and found.prediction.tier is not None else None,
        "unknown": found.unknown,
        "change": advice(found),
    }


def _kind(one: PlacedKind) -> dict[str, Any]:
    return {
        "group": one.kind.value,
        "groups": one.count,
        "ranks": one.size,
        "asked": one.asked.word,
        "required": one.required,
        "loosest": one.loosest.word,
        "wider": one.torn,
    }


def _torn(one: TornGroup) -> dict[str, Any]:
    return {
        "group": one.kind.value,
        "number": one.number,
        "ranks": list(one.ranks),
        "nodes": list(one.nodes),
        "asked": one.asked.word,
        "found": one.found.word,
        "switches": list(one.switches),
        "extra_s": one.extra_s,
        "factor": one.factor,
    }


def _link(one: MeasuredLink) -> dict[str, Any]:
    return {
        "from": one.sender,
        "to": one.receiver,
        "level": one.level.word,
        "bytes_per_s": one.rate,
        "usual_bytes_per_s": one.usual or None,
        "rated_bytes_per_s": one.rated or None,
        "slow": one.slow,
        "requested": one.requested,
        "ago_s": one.ago_s,
    }


def _slow(one: SlowLink, kinds: tuple[GroupKind, ...]) -> dict[str, Any]:
    return {
        "nodes": list(one.nodes),
        "side": one.side.value,
        "bytes_per_s": one.rate,
        "usual_bytes_per_s": one.usual,
        "transfers": one.transfers,
        "passed_by": [kind.value for kind in kinds],
    }


def _prediction(one: Prediction) -> dict[str, Any]:
    return {
        "step_s": one.here.total,
        "compute_s": one.here.compute,
        "exposed_s": one.here.exposed,
        "wait_s": wait_of(one.here),
        "planned_step_s": one.planned.total,
        "wait_over_slow_link_s": one.over_slow or None,
        "wait_by_tier_s": {level.word: wait for level, wait in one.by_tier.items()},
    }
