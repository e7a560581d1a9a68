"""Which rank's file publishes which item, in a checkpoint that torch.distributed.checkpoint can read.

Every rank describes what it holds, and rank 0 merges that (`merged_plans`): a minute's work for a thousand ranks with
three thousand tensors each. So a shard keeps what was agreed. Ranks that have restored their shards, and hold the same
as before, agree by a few bytes.
"""

import functools
import hashlib
import importlib.util
import logging
import os
import pickle
import time
import zlib
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.planner import WriteItem

from muster.checkpoint.format import layout
from muster.checkpoint.format.errors import CheckpointError
from muster.checkpoint.training.merged_plans import Held, HeldItems, Merged, Paths, RankNumbers, TensorPart, merge
from muster.checkpoint.training.states.inner_tensors import stand_in
from muster.checkpoint.training.states.training_state import StateLeaf

log = logging.getLogger(__name__)

_FASTEST = 1
"""The level of compression. What a rank holds is mostly names: a tenth is left."""


@dataclass(frozen=True)
class Publication:
    """What this rank publishes.

    `numbers`: for the name of each item in this rank's file, its number in the metadata.
    `metadata`: the metadata of the durable format on rank 0; empty on other ranks.
    `sharded`: the ranks hold different parts of one state: DTensors, or other items.
    `held`: a digest of what this rank holds. `agreed`: a digest of the metadata, on all ranks.
    """

    rank: int
    world_size: int
    numbers: dict[str, int]
    metadata: bytes
    sharded: bool
    held: bytes
    agreed: bytes

    def without_metadata(self) -> dict[str, Any]:
        """All fields but the metadata, which a shard keeps in a part of its own."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "metadata"}

    @classmethod
    def of_shard(cls, shard: memoryview) -> "Publication | None":
        """What was agreed when this rank's shard was written; None: another version of Muster has written it."""
        kept: dict[str, Any] = pickle.loads(layout.read_leaf_directory(shard)).get("publication", {})
        if kept.keys() != {field.name for field in fields(cls)} - {"metadata"}:
            return None
        return cls(**kept, metadata=layout.read_durable_metadata(shard))


def rank_and_world_size() -> tuple[int, int]:
    """This process's rank and the world size.

    Raises:
        CheckpointError: there are other ranks, and no process group or no numpy to communicate with them.
    """
    if dist.is_available() and dist.is_initialized():
        if dist.get_world_size() > 1 and not _has_numpy():
            raise CheckpointError("numpy is missing: PyTorch needs it when ranks exchange objects; pip install numpy")
        return dist.get_rank(), dist.get_world_size()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        raise CheckpointError(
            f"WORLD_SIZE is {world} and torch.distributed is not initialised: "
            "call init_process_group before the first step"
        )
    return 0, 1


@functools.cache
def _has_numpy() -> bool:
    return importlib.util.find_spec("numpy") is not None


def plan_publication(leaves: list[StateLeaf], earlier: Publication | None = None) -> Publication:
    """Agree with all ranks of the default process group on what each publishes. A collective call.

    Args:
        leaves: the state that this rank holds.
        earlier: what was agreed last, in this run or when the restored shard was written; None: nothing.

    Raises:
        CheckpointError: the ranks' states don't make one checkpoint.
    """
    rank, world_size = rank_and_world_size()
    held = _held(leaves, rank)
    digest, shared_digest = _digest([held, torch.__version__]), _digest(held.shared)
    if earlier is not None and (earlier.rank, earlier.world_size, earlier.held) == (rank, world_size, digest):
        agreed = earlier.agreed
    else:
        agreed = b""
    told = _all_gathered((agreed, shared_digest), world_size)
    if earlier is not None and {agreed for agreed, _ in told} == {earlier.agreed}:
        return earlier
    if [digest for _, digest in told].index(shared_digest) < rank:
        held = held._replace(shared=None)
    numbers, metadata, sharded, agreed = _agreed_numbers(held, rank, world_size)
    return Publication(rank, world_size, numbers.by_name(held), metadata, sharded, digest, agreed)


def _held(leaves: list[StateLeaf], rank: int) -> Held:
    """What this rank holds.

    Raises:
        CheckpointError: two values have one name.
    """
    paths: Paths = {}
    for leaf in leaves:
        if leaf.name in paths:
            raise CheckpointError(
                f"two values have the name {leaf.name}: a key contains a dot, or both 1 and '1' are keys"
            )
        paths[leaf.name] = leaf.path
    described = {leaf.name: _describe(leaf.value) for leaf in leaves}
    equal_properties: dict[str, TensorProperties] = {}
    shared, own = HeldItems([], {}), HeldItems([], {})
    for name, path in paths.items():
        (own if _is_own(name) else shared).paths[name] = path
    for item in create_default_local_save_plan(described, is_coordinator=rank == 0).items:
        name, part = item.index.fqn, _part(item, equal_properties)
        (own if _is_own(name) else shared).parts.append((name, part))
    return Held(shared, own, any(hasattr(leaf.value, "placements") for leaf in leaves))


def _is_own(name: str) -> bool:
    return name.startswith("ranks.")


def _describe(value: Any) -> Any:
    # A planner only needs to know that an object is no tensor.
    return stand_in(value) if isinstance(value, torch.Tensor) else None


def _part(item: WriteItem, equal_properties: dict[str, TensorProperties]) -> TensorPart | None:
    """The part of a tensor that is to be written; None: an object. Equal properties become one object, which pickle
    writes once."""
    tensor = item.tensor_data
    if tensor is None or tensor.chunk is None:
        return None
    properties = equal_properties.setdefault(repr(tensor.properties), tensor.properties)
    return TensorPart(tuple(tensor.chunk.offsets), tuple(tensor.chunk.sizes), tuple(tensor.size), properties)


def _agreed_numbers(held: Held, rank: int, world_size: int) -> tuple[RankNumbers, bytes, bool, bytes]:
    """The numbers of this rank's items, the metadata on rank 0, whether the state is sharded, and the metadata's
    digest. A collective call.

    Raises:
        CheckpointError: the ranks' states don't make one checkpoint.
    """
    packed = zlib.compress(pickle.dumps(held), _FASTEST)
    gathered: list[Any] = [packed] * world_size
    if world_size > 1:
        dist.gather_object(packed, gathered if rank == 0 else None)
    metadata = b""
    outcome: list[Any] = [None]
    if rank == 0:
        began = time.monotonic()
        merged = merge([pickle.loads(zlib.decompress(one)) for one in gathered])
        log.info("rank 0 has merged what %d ranks hold in %.1f s", world_size, time.monotonic() - began)
        if isinstance(merged, Merged):
            metadata = merged.metadata
            outcome = [(merged.numbers, merged.sharded, hashlib.blake2b(metadata, digest_size=16).digest())]
        else:
            outcome = [merged]
    if world_size > 1:
        dist.broadcast_object_list(outcome)
    if isinstance(outcome[0], str):
        raise CheckpointError(f"the ranks' states don't make one checkpoint: {outcome[0]}")
    numbers, sharded, agreed = outcome[0]
    return numbers[rank], metadata, sharded, agreed


def _all_gathered(value: Any, world_size: int) -> list[Any]:
    gathered: list[Any] = [value] * world_size
    if world_size > 1:
        dist.all_gather_object(gathered, value)
    return gathered


def _digest(of: Any) -> bytes:
    """Of what a value's text says: pickles of equal values may differ."""
    return hashlib.blake2b(repr(of).encode(), digest_size=16).digest()
