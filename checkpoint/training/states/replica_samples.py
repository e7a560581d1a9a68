"""A few elements of each parameter and of its optimizer states, by which ranks find out whether replicas are equal.

A rank's samples are rows of two numbers, the tensor's and the elements'. Ranks with equal samples send them once. So
what is sent does not grow with the number of replicas.

Shards that no other rank can hold are not compared by their elements: only the ranks of their mesh are, as long as no
name lies over two meshes.
"""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from muster.checkpoint.training.states.inner_tensors import taken_apart
from muster.checkpoint.training.states.optimizer_states import is_sharded
from muster.checkpoint.training.states.training_state import StateLeaf, TrainingState

_ELEMENTS = 64
"""Elements of each tensor that ranks compare. Experts differ in nearly all of theirs."""

NUMBER_BYTES = 8

Samples = Mapping[tuple[Any, ...], bytes]
"""By the name of a tensor, and by which shard of a DTensor it is: a digest of some of its elements."""


@dataclass(frozen=True)
class Unequal:
    """Tensors that are not equal on all ranks. `rank`: the lowest that differs from another. `others`: for each of its
    tensors, by number, a rank that differs. `count`: all such tensors."""

    rank: int
    others: Mapping[int, int]
    count: int


def samples(states: TrainingState, leaves: list[StateLeaf], *, shards_by_mesh: bool = False) -> Samples:
    """What other ranks' parameters and optimizer states are compared with. Buffers may differ, and each rank of a
    ZeroRedundancyOptimizer has the states of other parameters.

    `shards_by_mesh`: of a shard that has no replica in its mesh, take the ranks of the mesh in place of elements.
    """
    checked = {f"{key}.{name}" for key, model in states.models().items() for name, _ in model.named_parameters()}
    optimizers = {key for key, optimizer in states.optimizers().items() if not is_sharded(optimizer)}
    found: dict[tuple[Any, ...], bytes] = {}
    for leaf in leaves:
        of_optimizer = leaf.path[0] in optimizers and leaf.path[1] == "state"
        if isinstance(leaf.value, torch.Tensor) and (leaf.name in checked or of_optimizer):
            if shards_by_mesh and _has_no_replica(leaf.value):
                found[leaf.name, "mesh"] = _digest(repr(leaf.value.device_mesh.mesh.flatten().tolist()).encode())
            else:
                found[(leaf.name, *_place(leaf.value))] = _sample(leaf.value)
    return found


def rows(samples: Samples) -> bytes:
    """The samples as rows of 16 bytes: the number of a tensor, and its sample."""
    return b"".join(sorted(_number(key) + sample for key, sample in samples.items()))


def names_by_number(samples: Samples) -> dict[int, str]:
    """The name of each tensor in `rows`, in the order of the state."""
    return {int.from_bytes(_number(key), "little", signed=True): key[0] for key in samples}


def first_unequal(by_rank: Mapping[int, bytes]) -> Unequal | None:
    """Which tensors are not equal. `by_rank`: the rows of each rank whose samples are not those of a lower one."""
    ranks = sorted(by_rank)
    tables = [
        torch.frombuffer(bytearray(by_rank[rank]), dtype=torch.int64).view(-1, 2) for rank in ranks if by_rank[rank]
    ]
    owners = [torch.full((len(by_rank[rank]) // (2 * NUMBER_BYTES),), rank) for rank in ranks if by_rank[rank]]
    if not tables:
        return None
    table, owner = torch.cat(tables), torch.cat(owners)
    order = torch.argsort(table[:, 0], stable=True)  # equal tensors follow each other, by rank
    table, owner = table[order], owner[order]
    differ = (table[1:, 0] == table[:-1, 0]) & (table[1:, 1] != table[:-1, 1])
    if not differ.any():
        return None
    at = differ.nonzero().flatten()
    tensors, first, other = table[at, 0], owner[at], owner[at + 1]
    rank = int(first.min())
    chosen = first == rank
    others = dict(zip(tensors[chosen].tolist(), other[chosen].tolist(), strict=True))
    return Unequal(rank, others, len(tensors.unique()))


def _number(key: Collection[Any]) -> bytes:
    return _digest(repr(key).encode())


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=NUMBER_BYTES).digest()


def _has_no_replica(value: Any) -> bool:
    """Whether no other rank of its mesh holds this shard of a DTensor."""
    return hasattr(value, "placements") and all(
        not placement.is_replicate() or size == 1
        for placement, size in zip(value.placements, value.device_mesh.shape, strict=True)
    )


def _place(value: Any) -> tuple[Any, ...]:
    """Which shard of a DTensor this is; empty for other tensors."""
    if not hasattr(value, "placements"):
        return ()
    coordinate = value.device_mesh.get_coordinate() or ()
    pairs = zip(value.placements, coordinate, strict=False)
    return tuple((str(placement), number) for placement, number in pairs if not placement.is_replicate())


def _sample(value: torch.Tensor) -> bytes:
    """A digest of some elements of this rank's part of a tensor, of its dtype and of its shape."""
    digest = hashlib.blake2b(digest_size=NUMBER_BYTES)
    for part in taken_apart(value.detach())[0]:
        flat = part.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // _ELEMENTS)][:_ELEMENTS].resolve_conj().resolve_neg()
        chosen = torch.empty(some.numel(), dtype=some.dtype).copy_(some)  # a view of one element may have any stride
        digest.update(f"{part.dtype} {tuple(part.shape)}".encode())
        digest.update(bytes(chosen.view(torch.uint8).tolist()))
    return digest.digest()
