"""An estimate as JSON for scripts. SI units throughout: seconds, bytes, FLOP. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from muster.launcher.plan.node_memory import node_memory
from muster.launcher.plan.prepare import PreparedPlan


def to_dict(prepared: PreparedPlan) -> dict[str, Any]:
    """The estimate. Keys that end in _s are seconds, in _bytes are bytes."""
    plan, found = prepared.plan, prepared.estimate
    worst = found.misplacement
    host = node_memory(prepared.job, plan.model, plan.schedule)
    return {
        "job": prepared.job.name,
        "nodes": prepared.job.nodes,
        "spares": prepared.job.spares,
        "gpus": plan.axes.world_size,
        "accelerator": prepared.accelerator,
        "accelerator_source": prepared.entry.source,
        "network": prepared.fabric,
        "calibrated": prepared.calibrated,
        "efficiency": plan.chip.efficiency,
        "traffic": [
            {
                "group": one.traffic.group.value,
                "level": found.levels[one.traffic.group].word,
                "collective": one.traffic.kind.value,
                "ranks": one.traffic.ranks,
                "bytes": one.traffic.size,
                "calls": one.traffic.times,
                "algorithm": one.algorithm.value,
                "time_s": one.seconds,
                "exposed_s": one.exposed,
                "hidden_by": one.traffic.hidden.value,
                "why": one.traffic.why,
            }
            for one in found.step.traffic
        ],
        "crossing_bytes": found.crossing,
        "bisection_bytes_per_s": found.bisection,
        "step_s": found.step.total,
        "compute_s": found.step.compute,
        "exposed_s": found.step.exposed,
        "bubble_s": found.step.bubble,
        "update_s": found.step.optimizer,
        "mfu": found.step.utilization,
        "memory_bytes": {**asdict(found.memory), "total": found.memory.total, "gpu": plan.chip.memory},
        "node_memory_bytes": {**host.named, "total": host.total},
        "fits": found.fits,
        "fitting_split": found.fitting_split
        and {"tensor": found.fitting_split.tensor, "pipeline": found.fitting_split.pipeline},
        "fewest_gpus": found.fewest_gpus,
        "fewest_gpus_for_state": found.fewest_for_state,
        "operations": [
            {"name": one.name, "flop_per_byte": one.intensity, "flop_per_s": one.attained, "bound": one.bound.value}
            for one in found.operations
        ],
        "widest_compute_bound_tensor": found.widest_compute_bound,
        "fewest_compute_bound_tokens": found.fewest_compute_bound_tokens,
        "bubble_share": found.bubble_share,
        "stage_imbalance": found.imbalance,
        "failures": {
            "mtbf_s": found.outlook.mtbf,
            "checkpoint_s": found.outlook.checkpoint,
            "interval_s": found.outlook.interval,
            "recovery_s": found.outlook.recovery,
            "spare_there": found.outlook.spare_there,
            "goodput": found.outlook.goodput,
            "goodput_without_spares": found.outlook.goodput_without_spares,
        },
        "tokens_a_day": found.tokens_a_day,
        "days": found.days or None,
        "cost": found.cost or None,
        "worst_misplacement": worst and {"group": worst.group.value, "step_s": worst.step, "factor": worst.factor},
        "defaults": [asdict(one) for one in prepared.defaults],
    }
