"""Bytes of each GPU's memory, by what they hold. Pure.

State: stages 1, 2 and 3 of ZeRO (Rajbhandari and others, 2020, section 3.1) divide the optimizer's state, the
gradients and the parameters by the number of data-parallel ranks.

Activations: Korthikanti and others, "Reducing Activation Recomputation in Large Transformer Models" (2022), sections
4 and 5: sbh(34 + 5as/h) bytes a layer in 16 bit; tensor parallelism t divides 24 of the 34 and the attention's term,
sequence parallelism all. Their 34 is kept for all models: models with gated or wider feed-forward layers need more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from muster.fabric.cost.model import Checkpointing, Model, Offload
from muster.fabric.cost.state_bytes import state_bytes
from muster.fabric.estimate.schedule import Schedule
from muster.fabric.groups.axes import Axes

RESERVED = 0.06
"""Share of the memory that no tensor gets: CUDA context, NCCL's buffers, gaps between blocks. An assumption."""
MOST_REPLICAS = 2**20
"""Replicas up to which a fitting number is sought. With so many, the divided state is nothing."""
_FP32 = 4


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the GPU that needs most, and what it has moved to its host."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    working: float
    """Layers that are gathered (sharded parameters) or brought back (offload), two at a time."""
    host: float = 0.0

    @property
    def state(self) -> float:
        """Parameters, gradients and optimizer."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """All that is on the GPU."""
        return self.state + self.activations + self.working

    def fits(self, gpu_memory: float) -> bool:
        """Whether a GPU with so many bytes holds it, with what is reserved."""
        return self.total <= gpu_memory * (1 - RESERVED)


def memory(model: Model, axes: Axes, schedule: Schedule) -> Memory:
    """Bytes on the GPU that needs most: a rank of the first pipeline stage, which keeps most micro-batches."""
    each, stage = state_bytes(model), model.sharding.stage
    largest = math.ceil(model.layers / axes.pipeline) / model.layers  # share of the layers on the largest stage
    dense = model.dense_parameters / axes.tensor * largest
    expert = model.expert_parameters / (axes.tensor * axes.expert) * largest
    divided = dense / (axes.data * axes.context) + expert / axes.expert_data

    def held(bytes_each: float, from_stage: int) -> float:
        return bytes_each * (divided if stage >= from_stage else dense + expert)

    parameters, gradients, optimizer = held(each.parameter, 3), held(each.gradient, 2), held(each.optimizer, 1)
    layer = (dense + expert) / (model.layers * largest) * each.parameter
    moved = model.offload is Offload.PARAMETERS
    host = (optimizer if model.offload is not Offload.NONE else 0.0) + (parameters + gradients if moved else 0.0)
    return Memory(
        parameters=0.0 if moved else parameters,
        gradients=0.0 if moved else gradients,
        optimizer=0.0 if model.offload is not Offload.NONE else optimizer,
        activations=activations(model, axes, schedule),
        working=2 * layer if stage == 3 or moved else 0.0,
        host=host,
    )


def layer_activations(model: Model, axes: Axes, schedule: Schedule) -> float:
    """Bytes that one layer keeps of one micro-batch for the backward pass."""
    if model.activation_checkpointing is not Checkpointing.FULL:
        return layer_intermediates(model, axes, schedule, scores=model.keeps_scores)
    return 2 * _elements(model, axes, schedule) / (axes.tensor if schedule.sequence else 1)


def layer_intermediates(model: Model, axes: Axes, schedule: Schedule, *, scores: bool) -> float:
    """Bytes of all that one layer computes on the way to its output and needs in the backward pass."""
    split, whole = 24.0, 10.0  # of what tensor ranks divide, and of what only `sequence` divides
    if model.experts > 1:
        # Each token's input stands at each of its experts, and two results of their width w: 2 + 4w/h for the 2 + 16 of
        # a feed-forward layer of width 4h.
        split += model.experts_per_token * 4 * model.expert_width / model.hidden_size - 16
        whole += 2.0 * (model.experts_per_token - 1)
    if scores:  # each query has a score for each key, of the other context ranks too
        split += 5 * model.head_count * model.sequence_length / model.hidden_size
    per_element = split / axes.tensor + whole / (axes.tensor if schedule.sequence else 1)
    return _elements(model, axes, schedule) * per_element


def _elements(model: Model, axes: Axes, schedule: Schedule) -> float:
    """Elements of a layer's input, b·s·h/c; twice as many for activations in 32 bit."""
    tokens = schedule.micro_batch * model.sequence_length / axes.context
    return tokens * model.hidden_size * model.element_bytes / 2


def activations(model: Model, axes: Axes, schedule: Schedule) -> float:
    """Bytes of activations on a rank of the first stage.

    One forward, one backward: the first of p stages keeps p micro-batches of its L/p layers, which is L layers. The
    interleaved schedule keeps 1 + (p−1)/(pv) times that. With fewer micro-batches than stages it keeps all of them.
    """
    stages, virtual = axes.pipeline, schedule.virtual_stages
    kept = 1 + (stages - 1) / (stages * virtual) if virtual > 1 else 1.0
    kept = min(kept, schedule.micro_batches / stages)
    each = layer_activations(model, axes, schedule)
    total = math.ceil(model.layers / stages) * stages * kept * each
    if model.activation_checkpointing is Checkpointing.FULL:  # the layer that is computed again
        total += layer_intermediates(model, axes, schedule, scores=not model.fused_attention)
    if stages == 1:  # the logits in fp32 stand on the last stage, which keeps one micro-batch
        tokens = schedule.micro_batch * model.sequence_length / axes.context
        total += _FP32 * tokens * model.vocabulary / axes.tensor
    return total


def fewest_gpus(model: Model, axes: Axes, schedule: Schedule, gpu_memory: float) -> int | None:
    """The smallest number of GPUs that holds the model with this tensor, context and pipeline split.

    More data-parallel ranks help sharded state only. The micro-batches of a replica stay as they are. None: no number
    of GPUs is enough, because one GPU's activations and its undivided state are too much.
    """
    unit = axes.expert // math.gcd(axes.expert, axes.context)  # expert groups are cut out of data and context

    def holds(units: int) -> bool:
        return memory(model, replace(axes, data=units * unit), schedule).fits(gpu_memory)

    low, high = 1, MOST_REPLICAS
    if not holds(high):
        return None
    while low < high:  # more replicas never need more memory each
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return axes.tensor * axes.context * axes.pipeline * unit * low


def fitting_split(model: Model, axes: Axes, schedule: Schedule, gpu_memory: float, widest: int) -> Axes | None:
    """The smallest tensor and pipeline split of the same GPUs that fits, tensor first. None: no such split does.

    Args:
        model: what is trained.
        axes: the split that does not fit. Its context and expert degrees stay.
        schedule: its micro-batch stays, and the number of micro-batches follows from the global batch.
        gpu_memory: bytes.
        widest: ranks of the largest tensor group to try, for example the GPUs of a node.
    """
    ranks = axes.world_size // axes.context
    wide = [2**power for power in range(widest.bit_length()) if 2**power <= widest and not model.head_count % 2**power]
    deep = [stages for stages in range(1, min(model.layers, ranks) + 1) if not model.layers % stages]
    splits = sorted(
        (tensor * stages, stages, tensor) for tensor in wide for stages in deep if not ranks % (tensor * stages)
    )
    for product, stages, tensor in splits:
        data = ranks // product
        number, rest = divmod(model.global_batch, data * schedule.micro_batch)
        if rest or not number or data * axes.context % axes.expert:
            continue
        found = replace(axes, tensor=tensor, pipeline=stages, data=data)
        changed = replace(schedule, micro_batches=number, virtual_stages=1, sequence=schedule.sequence and tensor > 1)
        if memory(model, found, changed).fits(gpu_memory):
            return found
    return None
