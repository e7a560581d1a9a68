"""Which rank's file publishes which item, in a checkpoint that torch.distributed.checkpoint can read.

Every rank describes what it holds, and rank 0 merges that (`merged_plans`): a minute's work for a thousand ranks with
three thousand tensors each. So a shard keeps what was agreed. Ranks that have restored their shards, and hold the same
as before, only compare digests of it.
"""

import hashlib
import logging
import pickle
import time
import zlib
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.planner import WriteItem

from muster.checkpoint.format import layout
from muster.checkpoint.format.errors import CheckpointError
from muster.checkpoint.training.agreements.process_group import (
    all_gathered,
    gathered_on_first,
    rank_and_world_size,
    sent_by,
)
from muster.checkpoint.training.planning.merged_plans import (
    Held,
    HeldItems,
    Merged,
    Paths,
    RankNumbers,
    TensorPart,
    merge,
)
from muster.checkpoint.training.states.inner_tensors import stand_in
from muster.checkpoint.training.states.training_state import StateLeaf

log = logging.getLogger(__name__)

_FASTEST = 1
"""The level of compression. What a rank holds is mostly names: a tenth is left."""

_DIGEST_BYTES = 16


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
    def of_shard(cls, shard: memoryview, directory: dict[str, Any]) -> "Publication | None":
        """What was agreed when this rank's shard was written; None: another version of Muster has written it.

        `directory`: the shard's own (`shard_plan.leaf_directory`).
        """
        kept: dict[str, Any] = directory.get("publication", {})
        if kept.keys() != {field.name for field in fields(cls)} - {"metadata"}:
            return None
        return cls(**kept, metadata=layout.read_durable_metadata(shard))


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
    shared_digest = _digest(held.shared)
    digest = _digest([shared_digest, held.own, held.has_dtensors, torch.__version__])
    if earlier is not None and (earlier.rank, earlier.world_size, earlier.held) == (rank, world_size, digest):
        agreed = earlier.agreed
    else:
        agreed = b""
    told = all_gathered((agreed, shared_digest))
    if earlier is not None and {agreed for agreed, _ in told} == {earlier.agreed}:
        return earlier
    if [digest for _, digest in told].index(shared_digest) < rank:
        held = held._replace(shared=None)
    numbers, metadata, sharded, agreed = _agreed_numbers(held)
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


def _agreed_numbers(held: Held) -> tuple[RankNumbers, bytes, bool, bytes]:
    """The numbers of this rank's items, the metadata on rank 0, whether the state is sharded, and the metadata's
    digest. A collective call.

    Raises:
        CheckpointError: the ranks' states don't make one checkpoint.
    """
    rank, _ = rank_and_world_size()
    gathered = gathered_on_first(zlib.compress(pickle.dumps(held), _FASTEST))
    metadata = b""
    told: Any = None
    if rank == 0:
        began = time.monotonic()
        merged = merge([pickle.loads(zlib.decompress(packed)) for packed in gathered])
        log.info("rank 0 has merged what %d ranks hold in %.1f s", len(gathered), time.monotonic() - began)
        told = merged
        if isinstance(merged, Merged):
            metadata = merged.metadata  # no other rank needs it
            digest = hashlib.blake2b(metadata, digest_size=_DIGEST_BYTES).digest()
            told = merged.numbers, merged.sharded, digest
    told = sent_by(0, told)
    if isinstance(told, str):
        raise CheckpointError(f"the ranks' states don't make one checkpoint: {told}")
    numbers, sharded, digest = told
    return numbers[rank], metadata, sharded, digest


def _digest(of: Any) -> bytes:
    """Of what a value's text says: pickles of equal values may differ."""
    return hashlib.blake2b(repr(of).encode(), digest_size=_DIGEST_BYTES).digest()
