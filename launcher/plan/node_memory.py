"""What memory checkpoints need of each node's own memory, and which nodes have it. Pure.

A rank has two slots, each as large as its state: parameters, the optimizer's state and the fp32 copy. What a node
keeps for others follows from the redundancy that the job asks for (`checkpoint.redundancy`). Where each node has whole
replicas of the model (no pipeline), only the sharded part of the state differs from node to node. A GPU's state is
copied straight into slots, so no other pinned memory is needed. What is offloaded to the host is there besides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from muster.checkpoint.redundancy.scheme import MemoryNeed
from muster.checkpoint.redundancy.schemes import MEMORY_NAMES
from muster.fabric.cost.model import Model, Offload, Sharding
from muster.fabric.estimate.memory import memory
from muster.fabric.estimate.schedule import Schedule
from muster.launcher.errors import WrongInput
from muster.launcher.plan.assumptions import Defaults
from muster.launcher.plan.model_of_job import model_of, schedule_of
from muster.launcher.spec.checkpoint import is_url
from muster.launcher.spec.spec import Job
from muster.slurm.client.types import Node
from muster.wording import gigabytes

SLOTS = 2
"""Of each rank: the committed version, and the next one."""
UPLOADS = 384 << 20
"""Bytes that an agent needs to upload durable checkpoints: four files at a time, three parts of 32 MiB each."""
_MIB = 1 << 20
_UNITS = {"K": 1 << 10, "M": _MIB, "": _MIB, "G": 1 << 30, "T": 1 << 40}
_MEM = re.compile(r"(\d+)([KMGT]?)B?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """Bytes of each node's own memory."""

    slots: float
    kept: MemoryNeed | None
    """For other nodes; None: no state is kept in memory."""
    offloaded: float
    """State that the training itself keeps there."""
    uploads: float = 0.0
    """Parts of durable checkpoints on their way to a store of objects."""

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self.named.values())

    @property
    def named(self) -> dict[str, float]:
        """Its parts, as `muster plan --json` names them."""
        kept = {name: self.kept.bytes if self.kept and self.kept.name == name else 0.0 for name in MEMORY_NAMES}
        return {"slots": self.slots, **kept, "offloaded": self.offloaded, "uploads": self.uploads}

    @property
    def words(self) -> str:
        """The sum and its parts."""
        parts = {
            "slots": self.slots,
            **({self.kept.words: self.kept.bytes} if self.kept else {}),
            "offloaded state": self.offloaded,
            "uploads of durable checkpoints": self.uploads,
        }
        listed = ", ".join(f"{name} {gigabytes(size)}" for name, size in parts.items() if size)
        return f"{gigabytes(self.total)} of each node's memory: {listed}"


def node_memory(job: Job, model: Model, schedule: Schedule) -> NodeMemory:
    """What the ranks of one node need."""
    axes, ranks = job.axes, job.local_ranks
    offloaded = memory(model, axes, schedule).host * ranks
    if not job.checkpoint.memory:
        return NodeMemory(0.0, None, offloaded)
    held = memory(replace(model, offload=Offload.NONE), axes, schedule)  # a snapshot holds it, wherever it is
    state = held.parameters + held.optimizer
    sharded = {Sharding.NONE: 0.0, Sharding.PARAMETERS: state}.get(model.sharding, held.optimizer)
    replica_on_each = axes.pipeline == 1 and ranks % axes.tensor == 0 and axes.data > 1
    own = sharded if replica_on_each else state
    uploads = float(UPLOADS) if is_url(job.durable_dir) else 0.0
    kept = job.checkpoint.redundancy.memory_need(job.nodes, state * ranks, own * ranks)
    return NodeMemory(SLOTS * state * ranks, kept, offloaded, uploads)


def needed_memory(job: Job) -> NodeMemory | None:
    """What the ranks of one node need, if job.toml says how large the model is; else None."""
    if not job.model.parameters:
        return None
    try:
        model = model_of(job, Defaults())
        return node_memory(job, model, schedule_of(job, model, Defaults()))
    except WrongInput:
        return None


def asked_bytes(mem: str) -> int | None:
    """Bytes that --mem asks for on each node; None: the node's whole memory, or nobody knows."""
    found = _MEM.fullmatch(mem)
    return int(found[1]) * _UNITS[found[2].upper()] or None if found else None


def why_too_little(job: Job, usable: Iterable[Node] | None) -> str:
    """Why the job's nodes can't hold its memory checkpoints, in words with numbers; empty: nothing speaks against it.

    `usable`: the nodes in service of the job's partition; None: not known.
    """
    needed = needed_memory(job)
    if needed is None:
        return ""
    if (asked := asked_bytes(job.slurm.mem)) is not None:
        if asked >= needed.total:
            return ""
        return f"slurm.mem = {job.slurm.mem!r} is {gigabytes(asked)}, and memory checkpoints need {needed.words}"
    known = [node.memory_mib * _MIB for node in usable or () if node.memory_mib > 1]  # 1: slurm.conf says nothing
    enough = sum(size >= needed.total for size in known)
    if not known or enough >= job.nodes:
        return ""
    return (
        f"{enough} of {len(known)} nodes in service have the memory (the largest has {gigabytes(max(known))}), and the "
        f"job needs {job.nodes}: memory checkpoints need {needed.words}"
    )
