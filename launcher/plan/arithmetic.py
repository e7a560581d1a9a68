"""What one step of a job computes, and what its GPUs could: for the utilization of a job that runs. Nothing is guessed:
0 stands for what job.toml does not say."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from muster.fabric.cost import throughput
from muster.fabric.cost.accelerators import AcceleratorError, fitting
from muster.launcher.errors import SiteFault, WrongInput
from muster.launcher.plan.assumptions import Defaults
from muster.launcher.plan.hardware import TYPED_GRES, load_table
from muster.launcher.plan.model_of_job import model_of
from muster.launcher.spec.spec import Job


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """`flops`, `tokens`: of one step of the whole job; the operations are those that the model itself needs. `peak`: of
    one GPU, in operations a second, in the precision of the job. 0: not known."""

    flops: float = 0.0
    tokens: float = 0.0
    peak: float = 0.0


def arithmetic_of(job: Job) -> Arithmetic:
    """That of a job."""
    given = job.model
    tokens = float((given.sequence_length or 0) * (given.global_batch or 0))
    flops = 0.0
    if tokens and (given.parameters or (given.layers and given.hidden_size)):
        with suppress(WrongInput):  # `muster plan` says what is wrong
            flops = throughput.token_flop(model_of(job, Defaults())) * tokens
    return Arithmetic(flops, tokens, _peak(job))


def _peak(job: Job) -> float:
    """Of the accelerator that GRES names, as `muster plan` takes it."""
    typed = TYPED_GRES.search(job.slurm.gres or "")
    if typed is None:
        return 0.0
    try:
        table = load_table()
        return next((table[name].peak(job.model.precision) for name in fitting(typed[1], table)), 0.0)
    except (SiteFault, AcceleratorError):
        return 0.0
