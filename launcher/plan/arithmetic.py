"""What one step of a job computes, and what its GPUs could: for the utilization of a job that runs. Nothing is guessed:
0 stands for what job.toml does not say."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from muster.fabric.cost import throughput
from muster.fabric.cost.accelerators import AcceleratorError, fitting
from muster.launcher.errors import SiteFault, WrongInput
from muster.launcher.plan.assumptions import Defaults
from muster.launcher.plan.hardware import TYPED_GRES, load_table
from muster.launcher.plan.model_of_job import model_of
from muster.launcher.spec.spec import Job
from muster.slurm.client.types import Node


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


def peak_on_nodes(job: Job, nodes: Iterable[Node]) -> float:
    """The peak of the GPUs of the job's partitions, by their type in Slurm. 0: they have no type, or several."""
    wanted = {name for name in (job.slurm.partition or "").split(",") if name}
    found = {
        typed[1]
        for node in nodes
        if not wanted or wanted & {*node.partitions}
        for typed in TYPED_GRES.finditer(node.gres)
    }
    return _peak_of(found.pop(), job) if len(found) == 1 else 0.0


def _peak(job: Job) -> float:
    """Of the accelerator that GRES names, as `muster plan` takes it."""
    typed = TYPED_GRES.search(job.slurm.gres or "")
    return _peak_of(typed[1], job) if typed else 0.0


def _peak_of(name: str, job: Job) -> float:
    try:
        table = load_table()
        return next((table[one].peak(job.model.precision) for one in fitting(name, table)), 0.0)
    except (SiteFault, AcceleratorError):
        return 0.0
