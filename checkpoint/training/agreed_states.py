"""What the ranks tell each other of their states when they plan their shards.

Whenever they plan, before the first snapshot and when names or shapes have changed: which optimizers are kept by the
names of parameters, and the structure of all ranks' states together. At the first snapshot of a run that does not go on
from memory: whether replicas are equal. All of it is a collective call.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from muster.checkpoint.format.errors import CheckpointError
from muster.checkpoint.training.publication import rank_and_world_size
from muster.checkpoint.training.states import optimizer_states, state_tree
from muster.checkpoint.training.states.inner_tensors import taken_apart
from muster.checkpoint.training.states.training_state import CapturedState, StateLeaf, TrainingState

_SAMPLES = 64
"""Elements of each tensor that ranks compare. Experts differ in nearly all of theirs."""

Samples = Mapping[tuple[Any, ...], bytes]
"""By the name of a tensor, and by which shard of a DTensor it is: a digest of some of its elements."""


def agree_on_optimizers(states: TrainingState) -> None:
    """Keep an optimizer's state by the names of parameters if ranks optimize different ones. A collective call.

    Raises:
        CheckpointError: ranks optimize different parameters, and no kept model names them.
    """
    labels = states.parameter_names()
    own = {
        key: [labels.get(id(p), tuple(p.shape)) for p in optimizer_states.parameters_of(optimizer)]
        for key, optimizer in states.optimizers().items()
    }
    by_rank = _gathered(
        {key: (_digest(repr(found)), all(isinstance(f, str) for f in found)) for key, found in own.items()}
    )
    by_name = set()
    for key in sorted({key for found in by_rank for key in found}):
        found = [each[key] for each in by_rank if key in each]
        if len({digest for digest, _ in found}) == 1:
            continue
        if not all(is_named for _, is_named in found):
            raise CheckpointError(
                f"ranks optimize different parameters in {key}, and not all are of models that Checkpoint keeps: "
                f"give each model, as in Checkpoint(model=model, {key}={key}), or keep the state as each rank's own: "
                f'per_rank=["{key}"]'
            )
        by_name.add(key)
    states.by_name = frozenset(by_name)


def published_structure(states: TrainingState, captured: CapturedState) -> dict[str, Any]:
    """The structure that a durable checkpoint holds: that of all ranks together, on rank 0. A collective call.

    Besides it names the parameters of each optimizer, and the tensors of subclasses.
    """
    own: dict[str, Any] = state_tree.structure(captured.shared)
    labels = states.parameter_names()
    parameters = {
        key: optimizer_states.names_by_group(optimizer, labels)
        for key, optimizer in states.optimizers().items()
        if key not in states.by_name and all(id(p) in labels for p in optimizer_states.parameters_of(optimizer))
    }
    own["muster"] = {"parameters": parameters, "subclasses": _subclasses(captured.leaves)}
    rank, world_size = rank_and_world_size()
    if world_size == 1:
        return own
    digests = _gathered(_digest(repr(own)))
    is_first = digests.index(digests[rank]) == rank  # equal structures are sent once
    gathered: list[Any] = [None] * world_size
    dist.gather_object(own if is_first else None, gathered if rank == 0 else None)
    for other in gathered if rank == 0 else ():
        own = own if other is None else _union(own, other)
    return own


def _subclasses(leaves: list[StateLeaf]) -> dict[str, bool]:
    tensors = (leaf for leaf in leaves if isinstance(leaf.value, torch.Tensor))
    return {leaf.name: True for leaf in tensors if taken_apart(leaf.value, leaf.name)[1] is not None}


def _union(one: Any, other: Any) -> Any:
    """Both structures together. Where they differ in anything but keys, the first one counts."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return one
    both = {key: _union(value, other[key]) if key in other else value for key, value in one.items()}
    return both | {key: value for key, value in other.items() if key not in one}


def refuse_unequal_replicas(states: TrainingState, leaves: list[StateLeaf], step: int) -> None:
    """Compare some bytes of parameters and optimizer states that several ranks hold under one name. A collective call.

    Raises:
        CheckpointError: they are not equal. A durable checkpoint would hold those of one rank only.
    """
    rank, world_size = rank_and_world_size()
    if world_size == 1:
        return
    own = samples(states, leaves)
    gathered: list[Any] = [None] * world_size
    dist.gather_object(own, gathered if rank == 0 else None)
    outcome: list[Any] = [first_unequal(gathered) if rank == 0 else None]
    dist.broadcast_object_list(outcome)
    if outcome[0]:
        name, one, other, count = outcome[0]
        raise CheckpointError(
            f"after step {step}, {name} is not equal on ranks {one} and {other} ({count} such tensors): a durable "
            "checkpoint would keep one of them. If they are different tensors, as experts are, say in which group of "
            f'ranks they differ: Checkpoint(..., differs_in={{"{name}": expert_group}}), or None in place of the group '
            "for all ranks. If they are replicas, make them equal before the first step"
        )


def samples(states: TrainingState, leaves: list[StateLeaf]) -> Samples:
    """What other ranks' parameters and optimizer states are compared with. Buffers may differ."""
    checked = {f"{key}.{name}" for key, model in states.models().items() for name, _ in model.named_parameters()}
    optimizers = states.optimizers().keys()
    return {
        (leaf.name, *_place(leaf.value)): _sample(leaf.value)
        for leaf in leaves
        if isinstance(leaf.value, torch.Tensor)
        and (leaf.name in checked or (leaf.path[0] in optimizers and leaf.path[1] == "state"))
    }


def _place(value: Any) -> tuple[Any, ...]:
    """Which shard of a DTensor this is; empty for other tensors."""
    if not hasattr(value, "placements"):
        return ()
    coordinate = value.device_mesh.get_coordinate() or ()
    pairs = zip(value.placements, coordinate, strict=False)
    return tuple((str(placement), number) for placement, number in pairs if not placement.is_replicate())


def _sample(value: torch.Tensor) -> bytes:
    """A digest of some elements of this rank's part of a tensor, of its dtype and of its shape."""
    digest = hashlib.blake2b(digest_size=8)
    for part in taken_apart(value.detach())[0]:
        flat = part.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES].resolve_conj().resolve_neg()
        chosen = torch.empty(some.numel(), dtype=some.dtype).copy_(some)  # a view of one element may have any stride
        digest.update(f"{part.dtype} {tuple(part.shape)}".encode())
        digest.update(bytes(chosen.view(torch.uint8).tolist()))
    return digest.digest()


def first_unequal(by_rank: list[Samples]) -> tuple[str, int, int, int] | None:
    """The first tensor that is not equal, two ranks that differ in it, and the number of such tensors."""
    first: dict[Any, tuple[int, bytes]] = {}
    found: dict[str, tuple[int, int]] = {}
    for rank, samples in enumerate(by_rank):
        for place, sample in samples.items():
            of, expected = first.setdefault(place, (rank, sample))
            if sample != expected:
                found.setdefault(place[0], (of, rank))
    if not found:
        return None
    name, (one, other) = next(iter(found.items()))
    return name, one, other, len(found)


def _gathered(value: Any) -> list[Any]:
    _, world_size = rank_and_world_size()
    found: list[Any] = [value] * world_size
    if world_size > 1:
        dist.all_gather_object(found, value)
    return found


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
